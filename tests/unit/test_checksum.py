"""The checksum of packed weights is what docs/packed_formats.md says, and any small change shows."""

from __future__ import annotations

import numpy as np
import pytest

from pyengine import _core
from pyengine.errors import RequestError

BLOCK = 1 << 20
MASK = (1 << 64) - 1
FACTOR = 0x9E3779B97F4A7C15


def mix(h: int, x: int) -> int:
    h = (h ^ x) * FACTOR & MASK
    return (h << 29 | h >> 35) & MASK


def definition(data: bytes) -> int:
    total = len(data)
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK]
        lanes = np.arange(1, 9, dtype=np.uint64)
        for row in np.frombuffer(block, "<u8").reshape(-1, 8):
            lanes = (lanes ^ row) * np.uint64(FACTOR)
            lanes = lanes << np.uint64(29) | lanes >> np.uint64(35)
            lanes = lanes + (row << np.uint64(32) | row >> np.uint64(32))[[1, 0, 3, 2, 5, 4, 7, 6]]
        part = len(block)
        for lane in lanes:
            part = mix(part, int(lane))
        total = mix(total, part)
    return total


@pytest.mark.parametrize("size", [0, 64, 128, 4096, BLOCK - 64, BLOCK, BLOCK + 64, 2 * BLOCK + 192])
def test_the_definition(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert _core.checksum(data) == definition(data)


@pytest.mark.parametrize("size", [1, 63, 65])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(RequestError, match="multiple of 64"):
        _core.checksum(bytes(size))


@pytest.mark.parametrize("base", ["zeros", "random"])
def test_changes_show(base: str) -> None:
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, 512, np.uint8) if base == "random" else np.zeros(512, np.uint8)
    seen = {_core.checksum(data.tobytes())}
    count = 1
    for bit in range(8 * len(data)):
        changed = data.copy()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(_core.checksum(changed.tobytes()))
        count += 1
    for first in range(0, 256, 8):  # a top bit, and where it goes in the next word of its lane
        changed = data.copy()
        changed[first + 7] ^= 0x80
        changed[first + 64 + 3] ^= 0x10
        seen.add(_core.checksum(changed.tobytes()))
        count += 1
    for size in range(64, 512, 64):  # and what was cut off
        seen.add(_core.checksum(data[:size].tobytes()))
        count += 1
    assert len(seen) == count


def test_exchanged_blocks_show() -> None:
    data = np.random.default_rng(2).integers(0, 256, 2 * BLOCK, np.uint8)
    assert _core.checksum(data.tobytes()) != _core.checksum(np.roll(data, BLOCK).tobytes())
