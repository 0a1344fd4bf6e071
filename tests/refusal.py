"""What every refused file has in common: the right error, one line, nothing written or left open, small and quick."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from compare import assert_same_bits

import pyengine
from pyengine.errors import PyEngineError

MAX_SECONDS = 0.05
MAX_BYTES = 16 << 20


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below `folder`: type and mode, size, time of change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else -1


def assert_refused(
    action: Callable[[], Any],
    error: type[PyEngineError],
    texts: tuple[str, ...],
    folder: Path,
    *,
    small: bool = True,
) -> str:
    """`action` raises exactly `error`, its message holds all `texts`, one line, no control characters.

    Nothing below `folder` changes, no file stays open, and a good model gives the bits it gave before. small: also
    within 50 ms of processor time (best of five) and 16 MiB of memory. Returns the message.
    """
    good = good_bits()
    before, files = listing(folder), open_files()
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            action()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {message}"
    for text in texts:
        assert text in message, f"{text!r} is not in {message!r}"
    assert message.isprintable(), f"control characters in {message!r}"
    assert listing(folder) == before, "a file was written, changed or deleted"
    del caught
    assert open_files() == files, "a file was left open"
    assert_same_bits(good_load(), good, "a good load after this one")
    if small:
        assert peak <= MAX_BYTES, f"{peak} bytes of memory to refuse a small file"
        assert best_seconds(action, error) <= MAX_SECONDS
    return message


def best_seconds(action: Callable[[], Any], error: type[PyEngineError]) -> float:
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        with contextlib.suppress(error):
            action()
        best = min(best, time.process_time() - started)
        if best <= MAX_SECONDS:
            break
    return best


GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}


@cache
def good_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pyengine-good-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_tiny_model(folder, GOOD)


def good_load() -> np.ndarray:
    """Logits of a small good model, loaded anew."""
    with pyengine.load(good_folder(), threads=1, calibration=False, cache=False) as engine:
        return engine.logits([1, 2, 3])


@cache
def good_bits() -> np.ndarray:
    """The same, of the first load of this process."""
    return good_load()
