"""Stage 1, safetensors_header: one open safetensors file and its header, checked whole before anything is read.

Everything a header says is checked before anything it describes is read: by our rules first, whose messages say what
was found and expected, then by the `safetensors` package. Files are opened once and read with pread, never mapped: a
file cut short while we read is an error, not a SIGBUS.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from pyengine import strict_json
from pyengine.errors import ModelFormatError, RequestError
from pyengine.strict_json import open_error, shown

# Limits are named in the errors.
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1_000_000
MAX_NAME_BYTES = 4096
MAX_RANK = 8
MAX_DIM = 2**48 - 1
MAX_OFFSET = 2**64 - 1
READ_BYTES = 64 << 20
METADATA = "__metadata__"
ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))

# bits of one element of every dtype of the format
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint: where its bytes are. begin and end are absolute byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


class CheckpointFile:
    """One open checkpoint file and what it looked like at opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO must not hang
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise open_error(path, error) from None
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self.fd)
            raise ModelFormatError(f"{path}: not a regular file; expected a file of weights")
        self.size = status.st_size
        self.identity = self._identity(status)
        self.header_sha256 = ""  # set where the header is read

    @staticmethod
    def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` from `offset`; ModelFormatError if the file ends before, RequestError after close."""
        if self.fd < 0:
            raise RequestError(f"{self.path}: closed; expected an open checkpoint")
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.fd, [target[done : done + READ_BYTES]], offset + done)
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    raise open_error(self.path, error) from None
                where = f"{self.path}: {error.strerror or error} at byte {offset + done}"
                raise ModelFormatError(f"{where}; expected data") from None
            if count == 0:
                where = f"{self.path}: changed while loading, ends at byte {os.fstat(self.fd).st_size}"
                raise ModelFormatError(f"{where}; expected {self.size}")
            done += count

    def read(self, offset: int, count: int) -> bytes:
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def verify_unchanged(self) -> None:
        """Both the open file and what the path now names must be what was opened."""
        if self.fd < 0:
            raise RequestError(f"{self.path}: closed; expected an open checkpoint")
        try:
            now = {self._identity(os.fstat(self.fd)), self._identity(os.stat(self.path))}
        except OSError as error:
            raise ModelFormatError(
                f"{self.path}: changed while loading: {error.strerror}; expected the file to stay as it was"
            ) from None
        if now != {self.identity}:
            raise ModelFormatError(f"{self.path}: changed while loading; expected the file to stay as it was")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def tensor_error(file: Path, name: str, found: str, expected: str) -> ModelFormatError:
    return ModelFormatError(f"{file}: tensor {shown(name)}: {found}; expected {expected}")


def _check_integers(file: Path, name: str, what: str, values: list[Any]) -> None:
    for value in values:
        if type(value) is not int:  # true and false are int in Python
            raise tensor_error(file, name, f"{what} {shown(value)} must be an integer", "an integer")
        if value < 0:
            raise tensor_error(file, name, f"negative {what} {value}", "0 or more")


def _parse_entry(file: Path, name: str, entry: Any, data_start: int, data_size: int) -> TensorInfo:
    """One header entry, checked alone; the layout of the file is _check_layout's."""
    if len(name) > MAX_NAME_BYTES // 4 and len(name.encode()) > MAX_NAME_BYTES:
        raise tensor_error(file, name, f"name too long, {len(name.encode())} bytes", f"at most {MAX_NAME_BYTES}")
    if not isinstance(entry, dict):
        raise tensor_error(file, name, "entry must be an object", "dtype, shape and data_offsets")
    if entry.keys() != ENTRY_KEYS:
        absent = [f"missing key '{key}'" for key in sorted(ENTRY_KEYS) if key not in entry]
        unknown = [f"unknown key {shown(key)}" for key in entry if key not in ENTRY_KEYS]
        raise tensor_error(file, name, (absent + unknown)[0], ", ".join(sorted(ENTRY_KEYS)))
    dtype, offsets = entry["dtype"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise tensor_error(file, name, f"unknown dtype {shown(dtype)}", "one of " + ", ".join(sorted(DTYPE_BITS)))
    shape, size = _parse_shape(file, name, entry["shape"], dtype)
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise tensor_error(file, name, f"data_offsets {shown(offsets)} must be a list of two", "[begin, end]")
    _check_integers(file, name, "offset", offsets)
    begin, end = offsets
    if end > MAX_OFFSET:
        raise tensor_error(file, name, f"offset {end} is too large", f"at most {MAX_OFFSET}")
    if end < begin:
        raise tensor_error(file, name, f"end before begin in [{begin}, {end}]", "begin <= end")
    if size != end - begin:
        found = f"{dtype} {list(shape)} needs {size} bytes, has {end - begin}"
        if end > data_size:
            found += f", and {_past_end(end, data_start, data_size)}"
        raise tensor_error(file, name, found, "equal sizes")
    return TensorInfo(name, dtype, shape, file, data_start + begin, data_start + end)


def _parse_shape(file: Path, name: str, shape: Any, dtype: str) -> tuple[tuple[int, ...], int]:
    """Dimensions and size in bytes."""
    if not isinstance(shape, list):
        raise tensor_error(file, name, f"shape {shown(shape)} must be a list", "a list of integers")
    if len(shape) > MAX_RANK:
        raise tensor_error(file, name, f"rank over {MAX_RANK}: {len(shape)} dimensions", f"at most {MAX_RANK}")
    _check_integers(file, name, "dim", shape)
    dims = tuple(shape)
    bits = math.prod(dims) * DTYPE_BITS[dtype]
    if bits // 8 > MAX_OFFSET:
        raise tensor_error(file, name, f"size overflows: {dtype} {list(dims)}", "less than 2^64 bytes")
    if dims and max(dims) > MAX_DIM:
        raise tensor_error(file, name, f"dim over 2^48-1 in {list(dims)}", f"at most {MAX_DIM}")
    if bits % 8:
        raise tensor_error(file, name, f"{bits} bits, not a whole number of bytes", "a multiple of 8 bits")
    return dims, bits // 8


def _past_end(end: int, data_start: int, data_size: int) -> str:
    return f"ends at {end}, data section has {data_size}, past the end of the file of {data_start + data_size} bytes"


def _check_layout(file: Path, infos: list[TensorInfo], data_start: int, data_size: int) -> None:
    """Tensors must cover the data section exactly: no holes, no overlaps, nothing left over, nothing past the end."""
    at, previous = 0, ""
    for info in sorted(infos, key=lambda i: (i.begin, i.end)):
        begin, end = info.begin - data_start, info.end - data_start
        if end > data_size:
            raise tensor_error(file, info.name, _past_end(end, data_start, data_size), "an end inside the file")
        if begin > at:
            raise ModelFormatError(f"{file}: hole [{at},{begin}) before tensor {shown(info.name)}; expected no gaps")
        if begin < at:
            if begin == end:
                found = f"offset {begin} is inside {shown(previous)}"
            else:
                found = f"overlaps {shown(previous)}: begins at {begin}, before {at}"
            raise tensor_error(file, info.name, found, f"to begin at {at}")
        if end > at:
            at, previous = end, info.name
    if at < data_size:
        found = f"data section is {data_size} bytes, tensors cover {at}, {data_size - at} bytes not covered"
        last = f" after tensor {shown(previous)}" if previous else ""
        raise ModelFormatError(f"{file}: {found}{last}; expected no other bytes")


def _read_header(file: CheckpointFile) -> bytes:
    """The JSON of a header, its length checked against the limit and the file before it is read."""
    path, size = file.path, file.size
    if size < 8:
        raise ModelFormatError(f"{path}: {size} bytes, needs at least 8; expected a safetensors file")
    first = file.read(0, min(size, 40))
    (length,) = struct.unpack("<Q", first[:8])
    if length == 0:
        raise ModelFormatError(f"{path}: header length 0; expected a JSON header")
    if length > MAX_HEADER_BYTES:
        raise ModelFormatError(
            f"{path}: header length {length}, over the limit {MAX_HEADER_BYTES}; the file begins with "
            f"{shown(first.decode('latin-1'))}, expected a safetensors file"
        )
    if 8 + length > size:
        raise ModelFormatError(
            f"{path}: the header ends at byte {8 + length}, past the end of the file of {size} bytes; "
            "expected a complete file"
        )
    return file.read(8, length)


def _duplicate(place: tuple[str, ...], key: str) -> str:
    """What appears twice, in the words of the format."""
    if not place:
        return "key '__metadata__'" if key == METADATA else f"tensor name {shown(key)}"
    return f"key {shown(key)} in " + (METADATA if place[0] == METADATA else f"tensor {shown(place[0])}")


def parse_header(file: CheckpointFile) -> list[TensorInfo]:
    path = file.path
    raw = _read_header(file)
    file.header_sha256 = hashlib.sha256(raw).hexdigest()
    header = strict_json.loads(
        raw,
        where=f"{path}: header",
        max_bytes=MAX_HEADER_BYTES,
        max_objects=MAX_TENSORS + 2,  # the root and __metadata__
        objects=f"objects, over the tensor limit {MAX_TENSORS}",
        duplicate=_duplicate,
    )
    if not isinstance(header, dict):
        raise ModelFormatError(
            f"{path}: header: root must be an object, is {type(header).__name__}; expected tensors by name"
        )
    metadata = header.pop(METADATA, None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ModelFormatError(f"{path}: header: {METADATA}: metadata must be string to string; expected strings")
    if len(header) > MAX_TENSORS:
        raise ModelFormatError(f"{path}: {len(header)} tensors, over the tensor limit {MAX_TENSORS}; expected fewer")
    start = 8 + len(raw)
    data_size = file.size - start
    infos = [_parse_entry(path, name, entry, start, data_size) for name, entry in header.items()]
    _check_layout(path, infos, start, data_size)
    _check_with_package(file, raw)
    return infos


def _check_with_package(file: CheckpointFile, header: bytes) -> None:
    """The format's own library has the last word.

    It maps what it opens, and a file cut short meanwhile would be a SIGBUS: it gets a copy of the header, with as many
    zeros behind it as the file has bytes, which take no memory.
    """
    try:
        copy = os.memfd_create("safetensors")
        try:
            with os.fdopen(copy, "wb", closefd=False) as target:
                target.write(len(header).to_bytes(8, "little") + header)
            os.ftruncate(copy, file.size)
            with safetensors.safe_open(f"/proc/self/fd/{copy}", framework="np"):
                pass
        finally:
            os.close(copy)
    except safetensors.SafetensorError as error:
        raise ModelFormatError(f"{file.path}: {error}; expected a valid safetensors file") from None
    except MemoryError:
        # The package maps the whole file, which a limit on address space forbids. Our own rules, which refuse all that
        # it refuses, have passed, and reading needs no mapping.
        return
    except OSError as error:
        if error.errno == errno.EFBIG:  # a limit on the size of files: the same
            return
        raise open_error(file.path, error) from None
