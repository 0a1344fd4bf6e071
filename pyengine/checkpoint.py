"""Stage 1, checkpoint: safetensors files -> validated index -> raw tensor bytes.

Everything a header says is checked before anything it describes is read: by our rules first, whose messages say what
was found and expected, then by the `safetensors` package. Files are opened once and read with pread, never mapped: a
file cut short while we read is an error, not a SIGBUS.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from pyengine import strict_json
from pyengine.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from pyengine.strict_json import shown

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1_000_000
MAX_NAME_BYTES = 4096
MAX_RANK = 8
MAX_DIM = 2**48 - 1
MAX_INDEX_BYTES = 256 << 20
MAX_OFFSET = 2**64 - 1
READ_BYTES = 64 << 20

# bits of one element of every dtype of the format
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
READABLE = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint: where its bytes are. begin and end are absolute byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


class _File:
    """One open checkpoint file and what it looked like at opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO must not hang
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ModelFormatError(f"{path}: no such file; expected a safetensors file") from None
        except OSError as error:
            raise ModelFormatError(f"{path}: {error.strerror}; expected a readable safetensors file") from None
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self.fd)
            raise ModelFormatError(f"{path}: not a regular file; expected a safetensors file")
        self.size = status.st_size
        self.identity = self._identity(status)

    @staticmethod
    def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` from `offset`; ModelFormatError if the file ends before."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self.fd, [target[done : done + READ_BYTES]], offset + done)
            except OSError as error:
                raise ModelFormatError(
                    f"{self.path}: {error.strerror} at byte {offset + done}; expected data"
                ) from None
            if count == 0:
                raise ModelFormatError(
                    f"{self.path}: changed while loading, ends at byte {offset + done}; expected {self.size}"
                )
            done += count

    def read(self, offset: int, count: int) -> bytes:
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def verify_unchanged(self) -> None:
        """Both the open file and what the path now names must be what was opened."""
        try:
            now = {self._identity(os.fstat(self.fd)), self._identity(os.stat(self.path))}
        except OSError as error:
            raise ModelFormatError(f"{self.path}: changed while loading: {error.strerror}") from None
        if now != {self.identity}:
            raise ModelFormatError(f"{self.path}: changed while loading; expected the file to stay as it was")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _tensor_error(file: Path, name: str, found: str, expected: str) -> ModelFormatError:
    return ModelFormatError(f"{file}: tensor {shown(name)}: {found}; expected {expected}")


def _integer(file: Path, name: str, what: str, value: Any, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _tensor_error(file, name, f"{what} {shown(value)} must be an integer", f"0 to {limit}")
    if value < 0:
        raise _tensor_error(file, name, f"{what} {value} is negative, a negative offset or size", f"0 to {limit}")
    if value > limit:
        over = "over 2^48-1" if limit == MAX_DIM else "too large"
        raise _tensor_error(file, name, f"{what} {value} is {over}", f"at most {limit}")
    return value


def _parse_entry(file: Path, name: str, entry: Any, data_start: int, data_size: int) -> TensorInfo:
    """One header entry, checked alone; overlaps and holes are _check_cover's."""
    if len(name.encode()) > MAX_NAME_BYTES:
        raise _tensor_error(file, name, f"name too long, {len(name.encode())} bytes", f"at most {MAX_NAME_BYTES}")
    if not isinstance(entry, dict):
        raise _tensor_error(file, name, "entry must be an object", "dtype, shape and data_offsets")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise _tensor_error(file, name, f"missing key '{key}'", "dtype, shape and data_offsets")
    for key in entry:
        if key not in ("dtype", "shape", "data_offsets"):
            raise _tensor_error(file, name, f"unknown key {shown(key)}", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _tensor_error(file, name, f"unknown dtype {shown(dtype)}", "one of " + ", ".join(sorted(DTYPE_BITS)))
    if not isinstance(shape, list):
        raise _tensor_error(file, name, f"shape {shown(shape)} must be a list", "a list of integers")
    if len(shape) > MAX_RANK:
        raise _tensor_error(file, name, f"rank over {MAX_RANK}: {len(shape)} dimensions", f"at most {MAX_RANK}")
    dims = tuple(_integer(file, name, "dim", dim, MAX_DIM) if not _oversized(dim, shape) else dim for dim in shape)
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise _tensor_error(file, name, f"data_offsets {shown(offsets)} must be a list of two", "[begin, end]")
    begin, end = (_integer(file, name, "offset", offset, MAX_OFFSET) for offset in offsets)
    if end < begin:
        raise _tensor_error(file, name, f"end before begin in [{begin}, {end}]", "begin <= end")
    bits = math.prod(dims) * DTYPE_BITS[dtype]
    if bits // 8 > MAX_OFFSET:
        raise _tensor_error(file, name, f"size overflows: {list(dims)} {dtype}", "less than 2^64 bytes")
    if bits % 8:
        raise _tensor_error(file, name, f"{bits} bits, not a whole number of bytes", "a multiple of 8 bits")
    if bits // 8 != end - begin:
        raise _tensor_error(
            file, name, f"{dtype} {list(dims)} needs {bits // 8} bytes, has {end - begin}", "equal sizes"
        )
    if end > data_size:
        found = (
            f"ends at {end}, data section has {data_size}, past the end of the file of {data_start + data_size} bytes"
        )
        raise _tensor_error(file, name, found, "an end inside the file")
    return TensorInfo(name, dtype, dims, file, data_start + begin, data_start + end)


def _oversized(dim: Any, shape: list[Any]) -> bool:
    """A dim over 2^48-1 whose product with the others is what overflows: reported as an overflow of the size.

    With a 0 among the dimensions the size is 0 whatever the others are, and the dim itself is what is wrong.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or dim <= MAX_DIM:
        return False
    others = [d for d in shape if isinstance(d, int) and not isinstance(d, bool)]
    return len(others) == len(shape) and 0 not in others


def _check_cover(file: Path, infos: list[TensorInfo], data_start: int, data_size: int) -> None:
    """Tensors must cover the data section exactly: no holes, no overlaps, nothing left over."""
    at, previous = 0, ""
    for info in sorted(infos, key=lambda i: (i.begin, i.end)):
        begin, end = info.begin - data_start, info.end - data_start
        if begin > at:
            raise ModelFormatError(f"{file}: hole [{at},{begin}) before tensor {shown(info.name)}; expected no gaps")
        if begin < at:
            if begin == end:
                found = f"offset {begin} is inside {shown(previous)}"
            else:
                found = f"overlaps {shown(previous)}: begins at {begin}, before {at}"
            raise _tensor_error(file, info.name, found, f"to begin at {at}")
        if end > at:
            at, previous = end, info.name
    if at < data_size:
        found = f"data section is {data_size} bytes, tensors cover {at}, {data_size - at} bytes not covered"
        raise ModelFormatError(f"{file}: {found}; expected no other bytes")


def _parse_header(file: _File) -> list[TensorInfo]:
    path, size = file.path, file.size
    if size < 8:
        raise ModelFormatError(f"{path}: {size} bytes, needs at least 8; expected a safetensors file")
    first = file.read(0, min(size, 64))
    (length,) = struct.unpack("<Q", first[:8])
    if length == 0:
        raise ModelFormatError(f"{path}: header length 0; expected a JSON header")
    if length > MAX_HEADER_BYTES:
        begin = first[:32].decode("latin-1").encode("unicode_escape").decode()
        raise ModelFormatError(
            f"{path}: header length {length}, over the limit {MAX_HEADER_BYTES}; the file begins with '{begin}', expected a safetensors file"
        )
    if 8 + length > size:
        raise ModelFormatError(
            f"{path}: the header ends at byte {8 + length}, past the end of the file of {size} bytes; expected a complete file"
        )
    raw = file.read(8, length)
    if b"\x00" in raw:
        raise ModelFormatError(
            f"{path}: header: not JSON: NUL at byte {raw.index(0)}; only space, tab, CR and LF may pad"
        )
    try:
        header = strict_json.loads(raw, where=f"{path}: header", max_bytes=MAX_HEADER_BYTES)
    except ModelFormatError as error:
        raise _name_owner(error, raw) from None
    if not isinstance(header, dict):
        raise ModelFormatError(
            f"{path}: header: root must be an object, is {type(header).__name__}; expected tensors by name"
        )
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ModelFormatError(
            f"{path}: __metadata__: metadata must be string to string; expected an object of strings"
        )
    if len(header) > MAX_TENSORS:
        raise ModelFormatError(f"{path}: {len(header)} tensors, over the tensor limit {MAX_TENSORS}; expected fewer")
    start, data_size = 8 + length, size - 8 - length
    infos = [_parse_entry(path, name, entry, start, data_size) for name, entry in header.items()]
    _check_cover(path, infos, start, data_size)
    return infos


def _name_owner(error: ModelFormatError, raw: bytes) -> ModelFormatError:
    """A duplicate key inside an entry: say which tensor's, as far as the text shows it."""
    text = str(error)
    match = re.search(r"duplicate key '(\w+)'", text)
    if match is None:
        return error
    key = match.group(1)
    if key in ("dtype", "shape", "data_offsets"):
        entry = re.search(rb'"((?:[^"\\]|\\.)*)"\s*:\s*\{[^{}]*"%s"[^{}]*"%s"' % ((key.encode(),) * 2), raw)
        owner = shown(entry.group(1).decode("utf-8", "replace")) if entry else "an entry"
        return ModelFormatError(text.replace(f"duplicate key '{key}'", f"duplicate key '{key}' in tensor {owner}"))
    if key != "__metadata__" and not re.search(rb'"__metadata__"\s*:\s*\{[^{}]*"%s"' % re.escape(key.encode()), raw):
        return ModelFormatError(text.replace("duplicate key", "duplicate tensor name"))
    return error


def _check_with_package(path: Path) -> None:
    """The format's own library has the last word."""
    try:
        with safetensors.safe_open(path, framework="np"):
            pass
    except safetensors.SafetensorError as error:
        raise ModelFormatError(f"{path}: {error}; expected a valid safetensors file") from None
    except OSError as error:
        raise ModelFormatError(f"{path}: {error}; expected a readable safetensors file") from None


class Checkpoint:
    """The tensors of a model folder, of one file or of shards named by an index. Use as a context manager."""

    def __init__(self, folder: Path, files: list[_File], tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder
        self._files = {file.path: file for file in files}
        self.tensors = tensors

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open and check all files of `folder`; no tensor data is read.

        Errors: ModelNotFoundError without such a folder, UnsupportedModelError where there are only pickle files,
        ModelFormatError for everything that is wrong with the files.
        """
        if not folder.is_dir():
            raise ModelNotFoundError(f"{folder}: no such folder; expected a model folder")
        weight_map = _read_index(folder)
        if weight_map is None:
            paths = [_single_file(folder)]
        else:
            paths = sorted({folder / shard for shard in weight_map.values()})
            missing = [path.name for path in paths if not os.path.lexists(path)]
            if missing:
                raise ModelFormatError(
                    f"{folder}: {len(missing)} of {len(paths)} shards of the index are missing: {', '.join(missing)}; expected all of them"
                )
        files: list[_File] = []
        try:
            tensors: dict[str, TensorInfo] = {}
            for path in paths:
                files.append(_File(path))
                for info in _parse_header(files[-1]):
                    if weight_map is not None and weight_map.get(info.name) != path.name:
                        continue  # another shard's tensor, or none of the model's
                    tensors[info.name] = info
                _check_with_package(path)
            absent = [name for name in weight_map or () if name not in tensors]
            if absent and weight_map is not None:
                listed = ", ".join(f"{shown(name)} in {weight_map[name]}" for name in absent[:10])
                raise ModelFormatError(
                    f"{folder}: {len(absent)} tensors of the index are not in their shard: {listed}; expected all"
                )
            return cls(folder, files, tensors)
        except BaseException:
            for file in files:
                file.close()
            raise

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors[name]
        if info.dtype not in READABLE:
            raise UnsupportedModelError(
                f"{info.file}: tensor {shown(name)}: dtype {info.dtype}; expected F32, F16 or BF16"
            )
        return info

    def read(self, name: str) -> npt.NDArray[Any]:
        """A tensor as stored, in a new array of its shape: float64, float32, float16, or uint16 holding bfloat16."""
        info = self._info(name)
        out = np.empty(info.shape, READABLE[info.dtype])
        if out.size:
            self._files[info.file].read_into(memoryview(out.reshape(-1).view(np.uint8)), info.begin)
        return out

    def read_float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 (exact for F16 and BF16)."""
        raw = self.read(name)
        if raw.dtype == np.uint16:
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)

    def read_rows(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Rows of a matrix as float32 [len(rows), K], reading only those."""
        info = self._info(name)
        dtype, cols = READABLE[info.dtype], info.shape[1]
        raw = np.empty((len(rows), cols), dtype)
        for at, row in enumerate(rows):
            offset = info.begin + int(row) * cols * dtype.itemsize
            self._files[info.file].read_into(memoryview(raw[at].view(np.uint8)), offset)
        if raw.dtype == np.uint16:
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)

    def verify_unchanged(self) -> None:
        """ModelFormatError if a file is no longer what was opened."""
        for file in self._files.values():
            file.verify_unchanged()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _single_file(folder: Path) -> Path:
    path = folder / "model.safetensors"
    if os.path.lexists(path):
        return path
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise ModelFormatError(
            f"{folder}: {len(found)} safetensors files and no model.safetensors.index.json; expected the index, or one file"
        )
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        raise UnsupportedModelError(f"{folder}: only {pickles[0]}, and pickle is never read; expected safetensors")
    raise ModelFormatError(f"{folder}: no model.safetensors; expected one, or shards with model.safetensors.index.json")


def _read_index(folder: Path) -> dict[str, str] | None:
    """weight_map of the index, None without one. `metadata` is not used for anything."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise ModelFormatError(f"{path}: {error.strerror}; expected a readable index") from None
    index = strict_json.loads(data, where=str(path), max_bytes=MAX_INDEX_BYTES)
    if not isinstance(index, dict):
        raise ModelFormatError(f"{path}: root is {type(index).__name__}; expected an object with 'weight_map'")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(
            f"{path}: key 'weight_map' is {shown(weight_map)}; expected tensor names with their shards"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ModelFormatError(f"{path}: key {shown(name)} of weight_map is {shown(shard)}; expected a file name")
        if not shard or Path(shard).name != shard or shard in (".", "..") or "\x00" in shard:
            raise ModelFormatError(
                f"{path}: key {shown(name)} of weight_map names {shown(shard)}; expected a file beside the index"
            )
    return weight_map
