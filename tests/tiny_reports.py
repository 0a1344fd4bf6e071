"""A profile, a comparison and an account of one tiny model, for tests of what is drawn of them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine.reports.machine import Limits

CONFIG = {**CONFIGS["qwen2"], "vocab_size": 258}
TEXT = "The quick brown fox jumps over the lazy dog. " * 12
NAMES = ("profile", "compare", "account")


@cache
def tiny_results() -> dict[str, Any]:
    """By NAMES. The model is gone when they are there."""
    with tempfile.TemporaryDirectory(prefix="tiny_reports") as folder:
        return _results(Path(folder))


def _results(folder: Path) -> dict[str, Any]:
    model = write_tokenizer(write_tiny_model(folder / "model", CONFIG, seed=3), byte_level())
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    load: dict[str, Any] = {"quant": "int4", "cache": False, "calibration": False, "threads": 2}
    with pyengine.load(model, **load) as engine:
        profile = engine.profile(context=48, steps=4, contexts=[16, 32])
    compare = pyengine.compare(
        model, text=text, tokens=128, window=32, swap=True, prompt="The quick", max_tokens=6, **load
    )
    return {
        "profile": profile,
        "compare": compare,
        "account": pyengine.account(model, quant="int4", limits=Limits(20.0, 500.0, 100.0)),
    }
