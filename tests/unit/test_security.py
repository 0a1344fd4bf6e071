"""SECURITY.md says what the code holds: the limits of its table, the kinds of files, what is never run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from pyengine import chat_template, config, strict_json

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.+?) \| (\d+) \| `(\w+)\.(MAX_\w+)` \|$", re.MULTILINE)


def test_the_limits_of_the_table_are_those_of_the_code() -> None:
    rows = ROW.findall(TEXT)
    assert len(rows) == TEXT.count("`, where") + TEXT.count(".MAX_") >= 20
    for what, value, module, name in rows:
        assert getattr(importlib.import_module(f"pyengine.{module}"), name) == int(value), f"{what}: {module}.{name}"


def test_one_number_stands_for_limits_of_several_modules() -> None:
    assert chat_template.MAX_DEPTH == strict_json.MAX_DEPTH


def test_no_limit_of_what_strangers_wrote_is_left_out() -> None:
    listed = {(module, name) for _, _, module, name in ROW.findall(TEXT)}
    modules = (
        "safetensors_header", "strict_json", "checkpoint", "gguf_file", "gguf_tokenizer", "tokenizer_file",
        "template_file", "chat_template", "template_limits",
    )  # fmt: skip
    inner = {
        ("safetensors_header", "MAX_OFFSET"), ("gguf_file", "MAX_BYTES"), ("template_limits", "MAX_PADDING"),
        ("chat_template", "MAX_DEPTH"),
    }  # fmt: skip
    for module in modules:
        names = re.findall(r"^(MAX_\w+) = ", (ROOT / "pyengine" / f"{module}.py").read_text(encoding="utf-8"), re.M)
        assert {(module, name) for name in names} - inner <= listed, module


def test_keys_that_name_code_are_listed() -> None:
    for name in ("auto_map", "model_file", "custom_pipelines"):
        assert name in config.NAMES_CODE
        assert f"`{name}`" in TEXT


def test_nothing_here_unpickles_or_evaluates() -> None:
    """No module of the package has a way to run what a file says, but jinja2's own compiler behind the sandbox."""
    wrong = []
    for path in sorted((ROOT / "pyengine").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for way in (
            r"(?m)^\s*(?:import|from) (?:pickle|marshal|shelve|dill|runpy|torch)\b",
            r"\b(?:eval|exec|__import__)\(",
            r"allow_pickle=True",
            r"\bimport_module\((?!f?\"pyengine\.|\"readline\"\))",
        ):
            if re.search(way, source):
                wrong.append(f"{path.relative_to(ROOT)}: {way}")
    assert wrong == []
