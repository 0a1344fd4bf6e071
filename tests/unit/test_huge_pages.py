"""Weights lie in huge pages where the system has them: those of a load and those mapped from the cache's file."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS

import pyengine
from pyengine._core import Backend, Format

HUGE = 2 << 20
ROWS, COLS, TENSORS = 1000, 1000, 6  # float32, 4 MB each: no border of a tensor is one of a huge page
TRIES = 3  # other processes may have all the huge pages there are


def huge_bytes(key: str, begin: int, end: int) -> int:
    """Bytes in huge pages of the mappings that touch [begin, end): `key` of /proc/self/smaps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        heading = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if heading:
            inside = int(heading[1], 16) < end and int(heading[2], 16) > begin
        elif inside and line.startswith(key + ":"):
            total += int(line.split()[1]) * 1024
    return total


def touched(array: np.ndarray) -> tuple[int, int]:
    """Where it is, all its pages read."""
    array[:: mmap.PAGESIZE].sum()
    return array.ctypes.data, array.ctypes.data + array.nbytes


def best(measure: Callable[[], int]) -> int:
    return max(measure() for _ in range(TRIES))


def mapped_huge_bytes(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        try:
            return huge_bytes("FilePmdMapped", *touched(array))
        finally:
            del array


def forget(path: Path) -> None:
    """Its pages leave memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps")
def test_the_file_of_packed_weights_is_kept_in_huge_pages(tmp_path: Path) -> None:
    """As it was written, and as it is read from disk again."""
    backend, path = Backend(1), tmp_path / "weights"
    descs = [(int(Format.ROWS_F32), ROWS, COLS, 0)] * TENSORS
    tensors = [backend.tensor_create(*desc) for desc in descs]

    def control() -> int:
        path.unlink(missing_ok=True)
        with path.open("wb", buffering=0) as file:
            for _ in range(TENSORS * 2):
                file.write(bytes(HUGE))
        return mapped_huge_bytes(path)

    def written() -> int:
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            size = backend.tensors_write(file.fileno(), 4096, tensors)
        assert size == sum(backend.tensor_size(tensor) for tensor in tensors) == path.stat().st_size - 4096
        return mapped_huge_bytes(path)

    def read_again() -> int:
        forget(path)
        with path.open("rb") as file:
            mapped = backend.tensors_map(file.fileno(), 4096, descs)
        try:
            return huge_bytes("FilePmdMapped", 0, 1 << 63)
        finally:
            for tensor in mapped:
                backend.tensor_free(tensor)

    wanted = (TENSORS * ROWS * COLS * 4 // HUGE - 2) * HUGE  # the first and the last are not whole
    if best(control) < wanted:
        pytest.skip("this file system keeps nothing in huge pages")
    assert best(written) >= wanted
    assert best(read_again) >= wanted


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps")
@pytest.mark.skipif("MADV_HUGEPAGE" not in dir(mmap), reason="no MADV_HUGEPAGE")
def test_small_tensors_share_huge_pages_once_gathered() -> None:
    count, size = 64, 256 << 10

    def control() -> int:
        with mmap.mmap(-1, count * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            array = np.frombuffer(memory, np.uint8)
            array[:] = 1
            found = huge_bytes("AnonHugePages", *touched(array))
            del array
            return found

    def ours() -> int:
        backend = Backend(1)
        tensors = [backend.tensor_create(int(Format.ROWS_F32), size // 1024, 256) for _ in range(count)]
        before = own_huge_bytes()
        backend.tensors_gather(tensors)
        return own_huge_bytes() - before

    def own_huge_bytes() -> int:
        return huge_bytes("AnonHugePages", 0, 1 << 63)

    wanted = count * size - 2 * HUGE
    if os.environ.get("ASAN_OPTIONS") or best(control) < wanted:
        pytest.skip("this system gives no huge pages")
    assert best(ours) >= wanted


def test_a_load_gathers_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[list[int]] = []
    gather = Backend.tensors_gather

    def noted(self: Backend, ids: list[int]) -> None:
        gathered.append(ids)
        gather(self, ids)

    monkeypatch.setattr(Backend, "tensors_gather", noted)
    model = write_tiny_model(tmp_path / "model", CONFIGS["llama"])
    with pyengine.load(model, threads=1, log=lambda _: None) as engine:
        assert gathered == [list(engine.weights.tensors)]
