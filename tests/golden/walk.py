"""docs/adding_a_model.md applied in this process: its code blocks, run where their first lines say, and taken back."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import tiny_families
from golden import golden_cases
from golden.variants import VARIANTS

from pyengine.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding_a_model.md"
CASE, ARCHITECTURE = "phi3", "Phi3ForCausalLM"
GOLDEN = Path(__file__).parent / f"walk_{CASE}.npz"  # no tiny_*.npz: the case is in the tree only while applied
TABLES = (FAMILIES, tiny_families.NORMS, tiny_families.FUSED, tiny_families.MAKERS, golden_cases.CONFIGS)


def blocks() -> list[tuple[str, str]]:
    """(file that a block belongs to, its code) of every Python block of the page, in order."""
    found = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found, f"{PAGE}: no code block that begins with the name of its file"
    return found


@contextmanager
def applied() -> Iterator[None]:
    """While it lasts the family is registered, its case defined and its wrong variants listed, as the page says."""
    with ExitStack() as stack:
        for table in TABLES:
            stack.enter_context(patch.dict(table))
        stack.callback(VARIANTS.__setitem__, slice(None), VARIANTS[:])
        for file, code in blocks():
            module = importlib.import_module(file.removeprefix("tests/").removesuffix(".py").replace("/", "."))
            exec(compile(code, f"{PAGE.name}: {file}", "exec"), dict(vars(module)))
        yield
