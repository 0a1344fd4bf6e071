"""What every refused file has in common: the right error, one line, nothing written or left open, small and quick."""

from __future__ import annotations

import contextlib
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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

    small: also within 50 ms of processor time (best of five) and 16 MiB of memory. Returns the message.
    """
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
