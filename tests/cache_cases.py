"""What tests of packed weights on disk share: a cache of their own, a model to put there, a count of fresh loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import paths, weights_cache

CONFIG = {**CONFIGS["llama"], "vocab_size": 259, "max_position_embeddings": 512}
IDS = np.random.default_rng(0).integers(0, 258, 40).tolist()


def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache into which every load is written, however quick. Not created here."""
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights_cache, "WORTH_SECONDS", -1.0)
    monkeypatch.setattr(weights_cache, "weights_cache_dir", paths.weights_cache_dir)
    return tmp_path / "cache" / "weights"


def calibrated_model(folder: Path) -> Path:
    """A tiny Llama with a tokenizer."""
    write_tokenizer(write_tiny_model(folder, CONFIG, seed=3), byte_level())
    return folder


def count_fresh(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with every load that quantizes."""
    made: list[int] = []
    original = weights_cache.load_weights

    def counted(*args: Any, **keywords: Any) -> Any:
        made.append(len(made))
        return original(*args, **keywords)

    monkeypatch.setattr(weights_cache, "load_weights", counted)
    return made


def run(model: Path, **arguments: Any) -> tuple[np.ndarray, list[str]]:
    """Logits of a load, and the lines it logged."""
    lines: list[str] = []
    with pyengine.load(model, **{"threads": 1, "log": lines.append, **arguments}) as one:
        return one.logits(IDS), lines
