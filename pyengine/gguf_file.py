"""Stage 1, gguf_file: the header of a GGUF file, checked whole before anything it describes is read.

A header is magic, version, keys with typed values, and one entry for each tensor; the tensors' data follow at a
multiple of the alignment. Everything is little endian. Files are read with pread, never mapped.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.safetensors_header import CheckpointFile, TensorInfo, tensor_error
from pyengine.strict_json import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Limits are named in the errors.
MAX_HEADER_BYTES = 1 << 30
MAX_KEYS = 100_000
MAX_TENSORS = 1_000_000
MAX_RANK = 4
MAX_BYTES = 2**63 - 1
READ_BYTES = 4 << 20
DEFAULT_ALIGNMENT = 32

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9
# type of a tensor -> its name, weights in a block, bytes of a block
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
}  # fmt: skip
# the types of the format that are not read here
OTHERS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
BLOCKS = {name: (weights, size) for name, weights, size in TYPES.values()}
PLAIN = ("F32", "F16", "BF16")  # types without blocks


def is_gguf(model: Path) -> bool:
    """Whether a MODEL is a GGUF file and no folder."""
    return model.suffix == ".gguf" and not model.is_dir()


@dataclass(frozen=True)
class GgufArray:
    """A list in a header: the type of its elements, how many there are, and where they begin."""

    kind: int
    count: int
    begin: int

    def __repr__(self) -> str:
        return f"a list of {self.count}"


class GgufHeader:
    """A checked header. keys: name -> number, bool, text, or a `GgufArray` to be read with `value`.

    tensors: name -> TensorInfo, in the file's order; shapes are row-major (the file has them the other way round).
    """

    def __init__(self, path: Path, raw: bytes, keys: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.raw = raw
        self.keys = keys
        self.tensors = tensors
        self.sha256 = hashlib.sha256(raw).hexdigest()

    def bad(self, key: str, found: Any, expected: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: key {shown(key)}: {shown(found)}; expected {expected}")

    def value(self, key: str, kind: type | tuple[type, ...] = object, default: Any = None) -> Any:
        """The value of a key, lists as lists; `default` where it is absent. ModelFormatError for another type."""
        value = self.keys.get(key, default)
        if isinstance(value, GgufArray):
            value = self._strings(key, value) if value.kind == STRING else self._numbers(value)
        if value is not None and not isinstance(value, kind):
            names = [one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,))]
            raise self.bad(key, value, f"a value of type {' or '.join(names)}")
        return value

    def _numbers(self, array: GgufArray) -> list[Any]:
        dtype = np.dtype("<" + SCALARS[array.kind])
        values: list[Any] = np.frombuffer(self.raw, dtype, array.count, array.begin).tolist()
        return values

    def _strings(self, key: str, array: GgufArray) -> list[str]:
        at, texts, raw = array.begin, [], self.raw
        length = struct.Struct("<Q").unpack_from
        for index in range(array.count):
            (size,) = length(raw, at)
            begin, at = at + 8, at + 8 + size
            try:
                texts.append(raw[begin:at].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ModelFormatError(
                    f"{self.path}: key {shown(key)}[{index}]: byte {error.start} is not UTF-8; expected UTF-8 text"
                ) from None
        return texts


_last: dict[tuple[Path, tuple[int, int, int, int]], GgufHeader] = {}


class _Cursor:
    """The header's bytes, read as far as they are asked for."""

    def __init__(self, file: CheckpointFile) -> None:
        self.file = file
        self.data = bytearray()
        self.at = 0
        self.what = "the header"

    def fail(self, found: str, expected: str) -> ModelFormatError:
        return ModelFormatError(f"{self.file.path}: {self.what}: {found}; expected {expected}")

    def load(self, end: int) -> None:
        """Have the bytes up to `end`."""
        if end > self.file.size:
            raise self.fail(f"ends at byte {end}, past the end of the file of {self.file.size} bytes", "a whole file")
        if end > MAX_HEADER_BYTES:
            raise self.fail(f"ends at byte {end}", f"a header of at most {MAX_HEADER_BYTES} bytes")
        while len(self.data) < end:
            self.data += self.file.read(len(self.data), min(READ_BYTES, self.file.size - len(self.data)))

    def take(self, kind: str) -> Any:
        """One number."""
        packed = struct.Struct("<" + kind)
        self.load(self.at + packed.size)
        (value,) = packed.unpack_from(self.data, self.at)
        self.at += packed.size
        return value

    def text(self) -> str:
        size = self.take("Q")
        begin, end = self.at, self.at + size
        self.load(end)
        self.at = end
        try:
            return self.data[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"byte {error.start} is not UTF-8", "UTF-8 text") from None

    def skip_texts(self, count: int) -> None:
        """Go past `count` texts, quickly: vocabularies have some 10^5."""
        at, data, length = self.at, self.data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(data):
                self.load(at + 8)
            at += 8 + length(data, at)[0]
        self.load(at)
        self.at = at

    def value(self) -> Any:
        """A typed value; float32 becomes the shortest decimal that means it, as config.json would have it."""
        kind = self.take("I")
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise self.fail(f"value of type {kind}", "a type from 0 to 12")
        value = self.take(SCALARS[kind])
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def array(self) -> GgufArray:
        kind, count = self.take("I"), self.take("Q")
        if kind not in SCALARS and kind != STRING:
            raise self.fail(f"list of type {kind}", "a list of numbers or of texts")
        least = 8 if kind == STRING else struct.calcsize("<" + SCALARS[kind])
        if count * least > self.file.size - self.at:
            raise self.fail(f"{count} values in a file of {self.file.size} bytes", "a whole file")
        begin = self.at
        if kind == STRING:
            self.skip_texts(count)
        else:
            self.at += count * least
            self.load(self.at)
        return GgufArray(kind, count, begin)


def read_header(file: CheckpointFile) -> GgufHeader:
    """The header of an open file; that of the last file is remembered while it stays as it is.

    Errors: ModelFormatError for everything that is wrong with it, naming key or tensor; UnsupportedModelError for a
    type of tensor that is not read here, another version or byte order, and a file that is one of several.
    """
    key = file.path, file.identity
    header = _last.get(key)
    if header is None:
        header = _parse(file)
        _last.clear()
        _last[key] = header
    file.header_sha256 = header.sha256
    return header


def open_header(path: Path) -> GgufHeader:
    """The header of a file. Errors: as `read_header`, and those of opening a file."""
    file = CheckpointFile(path)
    try:
        return read_header(file)
    finally:
        file.close()


def _parse(file: CheckpointFile) -> GgufHeader:
    path, cursor = file.path, _Cursor(file)
    if file.size < 24:
        raise ModelFormatError(f"{path}: {file.size} bytes, needs at least 24; expected a GGUF file")
    cursor.load(24)
    if cursor.data[:4] != MAGIC:
        raise ModelFormatError(f"{path}: begins with {bytes(cursor.data[:4])!r}; expected {MAGIC!r}")
    cursor.at = 4
    version, tensor_count, key_count = cursor.take("I"), cursor.take("Q"), cursor.take("Q")
    if version not in VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big")
        found = f"big endian, version {big}" if big in VERSIONS else f"version {version}"
        raise UnsupportedModelError(f"{path}: {found}; expected GGUF version 2 or 3, little endian")
    for what, count, limit in (("keys", key_count, MAX_KEYS), ("tensors", tensor_count, MAX_TENSORS)):
        if count > limit:
            raise ModelFormatError(f"{path}: {count} {what}; expected at most {limit}")
    keys: dict[str, Any] = {}
    for index in range(key_count):
        cursor.what = f"key {index} of {key_count}"
        name = cursor.text()
        cursor.what = f"key {shown(name)}"
        if name in keys:
            raise cursor.fail("appears twice", "each key once")
        keys[name] = cursor.value()
    if keys.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{path}: key 'split.count': {shown(keys['split.count'])}; expected one file (llama-gguf-split --merge)"
        )
    entries = [_entry(cursor, index, tensor_count) for index in range(tensor_count)]
    return GgufHeader(path, bytes(cursor.data[: cursor.at]), keys, _placed(file, cursor.at, keys, entries))


def _entry(cursor: _Cursor, index: int, count: int) -> tuple[str, str, tuple[int, ...], int, int]:
    """One tensor: name, type, shape, bytes, offset in the data."""
    path = cursor.file.path
    cursor.what = f"tensor {index} of {count}"
    name = cursor.text()
    cursor.what = f"tensor {shown(name)}"
    rank = cursor.take("I")
    if not 1 <= rank <= MAX_RANK:
        raise tensor_error(path, name, f"{rank} dimensions", f"1 to {MAX_RANK}")
    shape = tuple(cursor.take("Q") for _ in range(rank))[::-1]
    number, offset = cursor.take("I"), cursor.take("Q")
    if number in OTHERS:
        raise UnsupportedModelError(
            f"{path}: tensor {shown(name)}: type {OTHERS[number]}; expected {', '.join(BLOCKS)}"
        )
    if number not in TYPES:
        raise tensor_error(path, name, f"unknown type {number}", ", ".join(BLOCKS))
    kind, weights, size = TYPES[number]
    if 0 in shape:
        raise tensor_error(path, name, f"shape {list(shape)}", "at least one value")
    if math.prod(shape) * size // weights > MAX_BYTES:
        raise tensor_error(path, name, f"size overflows: {kind} {list(shape)}", "less than 2^63 bytes")
    if shape[-1] % weights:
        raise tensor_error(path, name, f"rows of {shape[-1]}", f"a multiple of the {weights} of a block of {kind}")
    return name, kind, shape, math.prod(shape) // weights * size, offset


def _placed(
    file: CheckpointFile, end: int, keys: Mapping[str, Any], entries: list[tuple[str, str, tuple[int, ...], int, int]]
) -> dict[str, TensorInfo]:
    """The tensors at their places: aligned, inside the file, none in another."""
    path, alignment = file.path, keys.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 0 < alignment <= 1 << 20:
        raise ModelFormatError(f"{path}: key 'general.alignment': {shown(alignment)}; expected 1 to {1 << 20}")
    start = -(-end // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, size, offset in entries:
        if name in tensors:
            raise tensor_error(path, name, "appears twice", "each tensor once")
        if offset % alignment:
            raise tensor_error(path, name, f"offset {offset}", f"a multiple of the alignment {alignment}")
        if start + offset + size > file.size:
            found = f"ends at byte {start + offset + size}, past the end of the file of {file.size} bytes"
            raise tensor_error(path, name, found, "a whole file")
        tensors[name] = TensorInfo(name, kind, shape, path, start + offset, start + offset + size)
    before: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda info: info.begin):
        if before is not None and info.begin < before.end:
            raise tensor_error(path, info.name, f"overlaps {shown(before.name)}", "data of its own")
        before = info
    return tensors
