"""Damaged GGUF files: one error each, that names the file and the key or tensor."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from builders import tiny_tensors
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.cli.main import main
from pyengine.errors import ModelFormatError, ModelNotFoundError, PyEngineError, UnsupportedModelError
from pyengine.gguf_checkpoint import open_checkpoint
from pyengine.gguf_file import open_header

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(
    name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    """An entry; shape as the file has it, the row's length first."""
    dims = b"".join(struct.pack("<Q", n) for n in shape)
    return (
        text(name) + struct.pack("<I", len(shape) if rank is None else rank) + dims + struct.pack("<IQ", kind, offset)
    )


def file(
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    counts: tuple[int, int] | None = None,
) -> bytes:
    n_tensors, n_keys = (len(tensors), len(keys)) if counts is None else counts
    head = magic + version + struct.pack("<QQ", n_tensors, n_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


CASES: dict[str, tuple[bytes, type[PyEngineError], str]] = {
    "empty": (b"", ModelFormatError, "0 bytes, needs at least 24"),
    "short": (b"GGUF\3\0\0\0", ModelFormatError, "8 bytes"),
    "magic": (file(magic=b"GGML"), ModelFormatError, "begins with b'GGML'"),
    "safetensors": (b"\x40\0\0\0\0\0\0\0{" + b" " * 63, ModelFormatError, "expected b'GGUF'"),
    "version 1": (file(version=struct.pack("<I", 1)), UnsupportedModelError, "version 1"),
    "version 4": (file(version=struct.pack("<I", 4)), UnsupportedModelError, "version 4"),
    "big endian": (file(version=struct.pack(">I", 3)), UnsupportedModelError, "big endian, version 3"),
    "many keys": (file(counts=(0, 2**60)), ModelFormatError, f"{2**60} keys"),
    "many tensors": (file(counts=(2**60, 0)), ModelFormatError, f"{2**60} tensors"),
    "fewer keys": (file(counts=(0, 3)), ModelFormatError, "key"),
    "fewer tensors": (file(tensors=(tensor(),), data=16, counts=(9, 0)), ModelFormatError, "tensor '': 0 dimensions"),
    "long name": (file(keys=(struct.pack("<Q", 2**63) + b"x",)), ModelFormatError, "key 0 of 1"),
    "name not UTF-8": (file(keys=(key(b"\xff", U32, bytes(4)),)), ModelFormatError, "not UTF-8"),
    "key twice": (file(keys=(key("a", U32, bytes(4)),) * 2), ModelFormatError, "key 'a': appears twice"),
    "type of value": (file(keys=(key("a", 13, bytes(8)),)), ModelFormatError, "key 'a': value of type 13"),
    "long text": (file(keys=(key("a", STRING, struct.pack("<Q", 10**9)),)), ModelFormatError, "key 'a': ends at byte"),
    "text not UTF-8": (file(keys=(key("a", STRING, text(b"\xc3")),)), ModelFormatError, "key 'a': byte 0 is not UTF-8"),
    "list of lists": (file(keys=(key("a", ARRAY, struct.pack("<IQ", ARRAY, 1)),)), ModelFormatError, "list of type 9"),
    "long list": (
        file(keys=(key("a", ARRAY, struct.pack("<IQ", U64, 2**61)),)),
        ModelFormatError,
        f"key 'a': {2**61} values",
    ),
    "long texts": (
        file(keys=(key("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + struct.pack("<Q", 2**62)),), data=64),
        ModelFormatError,
        "key 'a': ends at byte",
    ),
    "split": (file(keys=(key("split.count", U32, struct.pack("<I", 2)),)), UnsupportedModelError, "'split.count'"),
    "alignment 0": (file(keys=(key("general.alignment", U32, bytes(4)),)), ModelFormatError, "'general.alignment'"),
    "alignment text": (file(keys=(key("general.alignment", STRING, text("x")),)), ModelFormatError, "alignment"),
    "rank 0": (file(tensors=(tensor(shape=()),)), ModelFormatError, "tensor 't': 0 dimensions"),
    "rank 5": (file(tensors=(tensor(shape=(1,) * 5),)), ModelFormatError, "tensor 't': 5 dimensions"),
    "rank 2^32": (file(tensors=(tensor(rank=2**32 - 1),)), ModelFormatError, "4294967295 dimensions"),
    "no values": (file(tensors=(tensor(shape=(4, 0)),)), ModelFormatError, "tensor 't': shape [0, 4]"),
    "overflow": (file(tensors=(tensor(shape=(2**40, 2**40)),)), ModelFormatError, "tensor 't': size overflows"),
    "overflow to 0": (file(tensors=(tensor(shape=(2**32, 2**32)),)), ModelFormatError, "tensor 't': size overflows"),
    "type unknown": (file(tensors=(tensor(kind=99),), data=16), ModelFormatError, "tensor 't': unknown type 99"),
    "type not read": (file(tensors=(tensor(kind=20),), data=99), UnsupportedModelError, "tensor 't': type IQ4_NL"),
    "half a block": (file(tensors=(tensor(shape=(48,), kind=2),), data=99), ModelFormatError, "rows of 48"),
    "cut": (file(tensors=(tensor(),), data=15), ModelFormatError, "tensor 't': ends at byte"),
    "far away": (file(tensors=(tensor(offset=2**63),), data=64), ModelFormatError, "tensor 't': ends at byte"),
    "not aligned": (file(tensors=(tensor(offset=4),), data=64), ModelFormatError, "tensor 't': offset 4"),
    "twice": (file(tensors=(tensor(), tensor(offset=32)), data=64), ModelFormatError, "tensor 't': appears twice"),
    "overlap": (file(tensors=(tensor(shape=(16,)), tensor("u", offset=32)), data=64), ModelFormatError, "overlaps 't'"),
    "no architecture": (file(tensors=(tensor(),), data=16), ModelFormatError, "'general.architecture' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_one_error(case: str, tmp_path: Path, capsys: Any) -> None:
    data, error, says = CASES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(PyEngineError) as caught:
        pyengine.load(path, cache=False)
    assert type(caught.value) is error, caught.value
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert main(["inspect", str(path)]) == error.exit_code
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines == [f"pyengine: error: {caught.value}"]


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        pyengine.load(tmp_path / "pipe.gguf")
    (tmp_path / "empty.gguf").mkdir()
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        pyengine.load(tmp_path / "empty.gguf")
    (tmp_path / "empty.gguf" / "one.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"as MODEL: .*/one\.gguf"):
        pyengine.load(tmp_path / "empty.gguf")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    tiny_gguf.write(path, CONFIGS["llama"], tiny_tensors(CONFIGS["llama"]), kind="F16")
    return path.read_bytes()


def test_a_file_that_is_refused_is_closed(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(good[:100])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelFormatError, match=r"m\.gguf: "):
        open_checkpoint(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_cut_anywhere(good: bytes, tmp_path: Path) -> None:
    """In the header every byte counts, in the data every tensor."""
    path = tmp_path / "m.gguf"
    path.write_bytes(good)
    header = len(open_header(path).raw)
    last = max(info.end for info in open_header(path).tensors.values())
    for end in [*range(0, header, 7), header, *np.linspace(header, last - 1, 40).astype(int).tolist()]:
        path.write_bytes(good[:end])
        with pytest.raises(ModelFormatError, match=r"m\.gguf: "):
            open_header(path)
    path.write_bytes(good[:last])
    open_header(path)


def test_bytes_changed_anywhere(good: bytes, tmp_path: Path) -> None:
    """Either it loads, or it is one of our errors: never another exception, never a crash."""
    rng = np.random.default_rng(2)
    path = tmp_path / "m.gguf"
    path.write_bytes(good)
    header = len(open_header(path).raw)
    refused = []
    for _ in range(400):
        damaged = bytearray(good)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            pyengine.load(path, quant="f32", cache=False, threads=1).close()
        except PyEngineError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("m.gguf" in text for text in refused)
