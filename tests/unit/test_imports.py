"""The rules that keep the flow visible: import order by stage, docstrings that open with it, sizes, a quick import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyengine"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")  # the door has no stage
FIRST, LAST = 0, 7
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def stage_of(path: Path) -> int:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    match = re.match(r"Stage (\d+), [a-z_0-9 -]+: \S|Stage (\d+), [a-z_0-9 -]+\. \S", docstring.replace("`", ""))
    assert match, f"{path}: the docstring does not open with 'Stage N, name: ...'"
    return int(match.group(1) or match.group(2))


def module_path(name: str) -> Path | None:
    """The file of a module of this package, or None if `name` is no such module (or has no Python source)."""
    base = ROOT.joinpath(*name.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module of this package that is imported anywhere in the file, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "pyengine")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import; expected the full name"
            if node.module and node.module.split(".")[0] == "pyengine":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield whole if module_path(whole) else node.module


def order_findings(path: Path) -> list[str]:
    own = stage_of(path)
    findings = []
    for name in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
        target = module_path(name)
        if target is None or target == PACKAGE / "__init__.py":
            continue  # the compiled core, or a plain attribute of the package such as __version__
        if stage_of(target) > own:
            findings.append(f"{path.relative_to(ROOT)} (stage {own}) imports {name} (stage {stage_of(target)})")
    return findings


def test_there_is_something_to_check() -> None:
    assert len(MODULES) >= 10


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_docstring_opens_with_the_stage(path: Path) -> None:
    assert FIRST <= stage_of(path) <= LAST


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_from_own_or_earlier_stages(path: Path) -> None:
    assert order_findings(path) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_package_door_is_not_used_inside(path: Path) -> None:
    """`from pyengine import load` would hide a stage; only modules and the version may come through the door."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "pyengine":
            for alias in node.names:
                known = alias.name in ("__version__", "_core") or module_path(f"pyengine.{alias.name}") is not None
                assert known, f"{path}: from pyengine import {alias.name}"


def test_a_wrong_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pyengine"
    package.mkdir()
    (package / "early.py").write_text(
        '"""Stage 1, early: x."""\ndef f():\n    from pyengine import late\n    import pyengine.late\n',
        encoding="utf-8",
    )
    (package / "late.py").write_text('"""Stage 4, late: x."""\nfrom pyengine.early import f\n', encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert len(order_findings(package / "early.py")) == 2
    assert order_findings(package / "late.py") == []


def sources() -> list[Path]:
    folders = [ROOT / name for name in ("csrc", "pyengine", "tests", "tools")]
    suffixes = {".py", ".cc", ".h", ".cu", ".cuh", ".sh"}
    return [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in suffixes]


def test_files_stay_small() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in sources()}
    assert lengths
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_stay_small() -> None:
    long = {}
    for path in sources():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert long == {}


def test_sources_are_ascii() -> None:
    """C++ sources are ASCII, so that every compiler reads the same characters."""
    wrong = [str(p) for p in sources() if p.suffix in {".cc", ".h", ".cu"} and not p.read_bytes().isascii()]
    assert wrong == []


def test_import_is_quick_and_light() -> None:
    script = (
        "import sys, time\n"
        "start = time.perf_counter()\n"
        "import pyengine\n"
        "elapsed = time.perf_counter() - start\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'safetensors', 'gguf', 'cffi', 'huggingface_hub'}\n"
        "print(elapsed, sorted(heavy & set(sys.modules)))\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    assert all(run.stdout.split(" ", 1)[1].strip() == "[]" for run in runs)
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.3


def test_public_names_come_through_the_door() -> None:
    import pyengine

    for name in ("RequestError", "PyEngineError", "errors"):
        assert name in dir(pyengine)
        assert getattr(pyengine, name) is not None
    assert issubclass(pyengine.RequestError, pyengine.PyEngineError)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pyengine.nothing


def test_the_readme_commands_are_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.strip() for line in readme.splitlines() if line.startswith("    python3 -m venv")]
    assert len(commands) == 2, "expected exactly one command that generates text and one that runs the tests"
    assert commands[0].endswith('generate -p "Why is the sky blue?"')
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_module_runs_from_the_checkout() -> None:
    """Where the sources lie in front of the installed package and have no core of their own."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pyengine", "--version"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("pyengine ")
