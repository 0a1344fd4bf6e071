"""Differential fuzz of the safetensors header: the package is never stricter, and what both accept reads the same."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import safetensors_bytes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from pyengine.checkpoint import READABLE, Checkpoint
from pyengine.errors import ModelFormatError
from pyengine.safetensors_header import DTYPE_BITS

SIZES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8}


def package_accepts(path: Path) -> bool:
    try:
        with safe_open(path, framework="np"):
            return True
    except SafetensorError:
        return False


def ours(folder: Path) -> dict[str, Any] | None:
    """Name -> (dtype, shape, bytes), or None where the file is refused. Any other exception is a defect."""
    try:
        with Checkpoint.open(folder) as checkpoint:
            found: dict[str, Any] = {}
            for name, info in checkpoint.tensors.items():
                raw = checkpoint.read(name).tobytes() if info.dtype in READABLE else None
                found[name] = (info.dtype, info.shape, raw)
            return found
    except ModelFormatError as error:
        message = str(error)
    assert "model.safetensors" in message
    assert message.isprintable()
    return None


def compare(data: bytes) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        path.write_bytes(data)
        found = ours(path.parent)
        if found is not None:
            assert package_accepts(path), "accepted here and refused by the package"
        return found


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
    """A valid header, its data, and what reading it gives."""
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=5))
    names = [name for name in names if name != "__metadata__" and name.isprintable()]
    header: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    data = b""
    for name in names:
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        size = int(np.prod(shape, dtype=int)) * SIZES[dtype]
        raw = draw(st.binary(min_size=size, max_size=size))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        expected[name] = (dtype, tuple(shape), raw if dtype in READABLE else None)
        data += raw
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
    order = draw(st.permutations(list(header)))
    return {name: header[name] for name in order}, data, expected


@settings(max_examples=150, deadline=None)
@given(files(), st.booleans(), st.integers(0, 9))
def test_valid_file_reads_as_written(made: tuple[dict[str, Any], bytes, Any], escaped: bool, padding: int) -> None:
    header, data, expected = made
    text = json.dumps(header, ensure_ascii=escaped) + " " * padding
    assert compare(safetensors_bytes(text, data)) == expected


BASE = safetensors_bytes(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.c": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "z": {"dtype": "U8", "shape": [0], "data_offsets": [24, 24]},
    },
    bytes(range(32)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(BASE) - 1), st.integers(0, 255)), min_size=1, max_size=3))
@example([(0, 0)])
def test_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(BASE)
    for at, value in changes:
        data[at] = value
    compare(bytes(data))


SNIPPETS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"0", b"-0", b"-1", b"1e9", b"1.0", b"24", b"18446744073709551615",
    b"18446744073709551616", b"null", b"true", b"NaN", b'"a":{}', b'"a":', b'"dtype":"F32",', b'"shape":[1],',
    b"\\ud800", b"\xff", b"\x00", b"\n", b" ", b"9" * 70, b"[" * 70,
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_header_with_pieces_cut_out_and_put_in(data: st.DataObject) -> None:
    length = int.from_bytes(BASE[:8], "little")
    header = BASE[8 : 8 + length]
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(header)))
        end = data.draw(st.integers(begin, min(len(header), begin + 12)))
        header = header[:begin] + data.draw(st.sampled_from(SNIPPETS)) + header[end:]
    compare(safetensors_bytes(header, BASE[8 + length :]))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(DTYPE_BITS)),
            st.lists(st.integers(0, 2**64) | st.integers(0, 4), max_size=4),
            st.integers(0, 40) | st.integers(0, 2**65),
            st.integers(0, 40) | st.integers(0, 2**65),
        ),
        max_size=4,
    ),
    st.integers(0, 40),
)
def test_report_b27_any_numbers(entries: list[tuple[str, list[int], int, int]], size: int) -> None:
    header = {
        f"t{at}": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for at, (dtype, shape, begin, end) in enumerate(entries)
    }
    compare(safetensors_bytes(header, bytes(size)))


@pytest.mark.parametrize("cut", range(0, len(BASE), 7))
def test_every_truncation_is_refused(cut: int) -> None:
    assert compare(BASE[:cut]) is None
    assert compare(BASE) is not None
