"""What docs/ says about the tree is so: modules by stage, and every file and name that a page points to."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from tool_scripts import load_tool

from pyengine.reports.account_encoders import BUILDERS
from pyengine.reports.account_families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TREES = ("pyengine", "csrc", "tests", "tools")


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_table_of_stages_is_the_modules() -> None:
    said: dict[int, set[str]] = defaultdict(set)
    for stage, names in re.findall(r"^\| (\d) \| ([\w, /]+) \|", text_of("architecture.md"), re.MULTILINE):
        said[int(stage)] |= set(names.split(", "))
    found: dict[int, set[str]] = defaultdict(set)
    for path in (ROOT / "pyengine").glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if path.name not in ("__init__.py", "__main__.py"):
            found[int(re.match(r"Stage (\d),", docstring).group(1))].add(path.stem)  # type: ignore[union-attr]
    found[6].add("reports/")
    found[7].add("cli/")
    assert said == found


def test_the_table_of_families_is_the_registry() -> None:
    tool = load_tool("families_table")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tool.replaced(text) == text, "run tools/families_table.py --write"
    for name, family in tool.FAMILIES.items():
        assert family.models, f"{name} has no models"
    rows = tool.table().splitlines()[2:]
    assert len(rows) == len(tool.FAMILIES)
    same = [row for row in rows if row.endswith("| - |")]
    assert len(same) == 1, f"only Llama differs in nothing: {same}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"\b(?:pyengine|csrc|tests|tools|docs)/[\w./*<>-]*[\w*>]", text))
    assert names or page.name == "benchmarking.md"
    for name in names:
        pattern = re.sub(r"<\w+>", "*", name)
        assert list(ROOT.glob(pattern)), f"{page.name}: {name}"
    files = {path.name for tree in TREES for path in (ROOT / tree).rglob("*") if path.is_file()}
    for name in re.findall(r"`([\w-]+\.(?:py|cc|h|pyi|md))`", text):
        assert name in files or (ROOT / "docs" / name).is_file(), f"{page.name}: {name}"


def test_the_families_that_account_knows_are_listed() -> None:
    rows = re.findall(
        r"^\| (?:decoders|with experts|with an encoder) \| (.*) \|$", text_of("accounting.md"), re.MULTILINE
    )
    named = set(re.findall(r"\b[a-z][a-z_]*\d?\w*\b", re.sub(r"\(.*?\)", "", " ".join(rows))))
    assert len(rows) == 3
    assert named == {*FAMILIES, *BUILDERS}


@pytest.mark.parametrize("page", ["architecture.md", "adding_a_kernel.md"])
def test_names_that_a_page_quotes_are_in_the_tree(page: str) -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for tree in TREES
        for path in sorted((ROOT / tree).rglob("*"))
        if path.suffix in (".py", ".pyi", ".cc", ".h") and path != Path(__file__)
    )
    sources += (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    for name in re.findall(r"`([A-Za-z_][\w.]*(?:::\w+)?)(?:\([^`]*\))?`", text_of(page)):
        if name.endswith((".py", ".pyi", ".cc", ".h", ".md", ".so")):
            continue  # the test above
        for part in re.split(r"\.|::", name):
            assert re.search(rf"\b{part}\b", sources), f"{page}: {name}"
