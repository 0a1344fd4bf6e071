"""Stage 1, checkpoint: safetensors files of a folder -> validated index -> raw tensor bytes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine import strict_json
from pyengine.errors import ModelFormatError, ModelNotFoundError, RequestError, ResourceError, UnsupportedModelError
from pyengine.safetensors_header import CheckpointFile, parse_header, tensor_error
from pyengine.safetensors_header import TensorInfo as TensorInfo
from pyengine.strict_json import shown

MAX_INDEX_BYTES = 256 << 20
INDEX = "model.safetensors.index.json"
READABLE: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
}


class Checkpoint:
    """The tensors of a model folder, of one file or of shards named by an index. Use as a context manager.

    `tensors`: name -> TensorInfo. Reading is safe from several threads at once.
    """

    def __init__(self, folder: Path, files: list[CheckpointFile], tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder
        self._files = {file.path: file for file in files}
        self.tensors = tensors

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open and check all files of `folder`; no tensor data is read.

        model.safetensors is used if it is there (as transformers does), else the shards that
        model.safetensors.index.json names, else the only *.safetensors file of the folder. Other files are not opened.
        Errors: ModelNotFoundError without such a folder, UnsupportedModelError where there are only pickle files,
        ModelFormatError for everything that is wrong with the files, ResourceError without file descriptors.
        """
        if not folder.is_dir():
            raise ModelNotFoundError(f"{folder}: no such folder; expected a model folder")
        index = folder / INDEX
        single = folder / "model.safetensors"
        sharded = not os.path.lexists(single) and os.path.lexists(index)
        weight_map = _read_index(index) if sharded else None
        paths = [_single_file(folder)] if weight_map is None else _shard_paths(folder, weight_map)
        files: list[CheckpointFile] = []
        try:
            tensors: dict[str, TensorInfo] = {}
            for path in paths:
                files.append(CheckpointFile(path))
                for info in parse_header(files[-1]):
                    other = tensors.setdefault(info.name, info)
                    if other is not info:
                        raise tensor_error(path, info.name, f"also in {other.file.name}", "each tensor in one shard")
            _check_index(index, weight_map or {}, tensors)
            return cls(folder, files, tensors)
        except BaseException:
            for file in files:
                file.close()
            raise

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise RequestError(f"{self.folder}: tensor {shown(name)}: not in the files; expected a name of them")
        if info.dtype not in READABLE:
            raise UnsupportedModelError(
                f"{info.file}: tensor {shown(name)}: dtype {info.dtype}; expected {', '.join(READABLE)}"
            )
        return info

    def read(self, name: str) -> npt.NDArray[Any]:
        """A tensor as stored, in a new array of its shape: float64, float32, float16, uint16 holding bfloat16, or
        uint8 holding E4M3.

        Errors: RequestError for an unknown name or after close, UnsupportedModelError for another dtype, ResourceError
        without the memory, ModelFormatError if the file became shorter.
        """
        info = self._info(name)
        out = allocate(info, info.shape, READABLE[info.dtype])
        if out.size:
            self._files[info.file].read_into(out.reshape(-1).view(np.uint8).data, info.begin)
        return out

    def read_range(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """Rows begin .. end - 1 of a matrix [N, K], as stored (see read): [end - begin, K].

        Of a stack of matrices [E, N, K] the rows of all are counted on: 0 .. E N.
        Errors: as read; RequestError for a tensor that is no matrix and for rows outside 0 .. N.
        """
        info = self._info(name)
        if len(info.shape) not in (2, 3) or not 0 <= begin <= end <= math.prod(info.shape[:-1]):
            found = f"rows {begin} to {end} of {list(info.shape)}"
            raise RequestError(f"{info.file}: tensor {shown(name)}: {found}; expected rows of a matrix")
        dtype = READABLE[info.dtype]
        out = allocate(info, (end - begin, info.shape[-1]), dtype)
        if out.size:
            offset = info.begin + begin * info.shape[-1] * dtype.itemsize
            self._files[info.file].read_into(out.reshape(-1).view(np.uint8).data, offset)
        return out

    def read_float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 (exact for F16 and BF16, rounded for F64)."""
        return as_float32(self.read(name))

    def read_rows(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Rows of a matrix [N, K] as float32 [len(rows), K], in the order asked for, reading only those.

        Errors: as read; RequestError for a tensor that is no matrix and for rows outside 0 .. N - 1.
        """
        info = self._info(name)
        if len(info.shape) != 2:
            raise RequestError(f"{info.file}: tensor {shown(name)}: shape {list(info.shape)}; expected a matrix")
        count, columns = info.shape
        bad = [int(row) for row in rows if not 0 <= int(row) < count]
        if bad:
            raise RequestError(f"{info.file}: tensor {shown(name)}: row {bad[0]}; expected 0 to {count - 1}")
        dtype = READABLE[info.dtype]
        raw = allocate(info, (len(rows), columns), dtype)
        for at, row in enumerate(rows):
            offset = info.begin + int(row) * columns * dtype.itemsize
            self._files[info.file].read_into(raw[at].view(np.uint8).data, offset)
        return as_float32(raw)

    def identity(self) -> list[tuple[str, int, int, str]]:
        """What the files were when they were opened: real path, bytes, time of change in ns, SHA-256 of the header."""
        return [
            (os.path.realpath(file.path), file.size, file.identity[3], file.header_sha256)
            for file in self._files.values()
        ]

    def verify_unchanged(self) -> None:
        """ModelFormatError if a file is no longer what was opened: its inode, size or time of change."""
        for file in self._files.values():
            file.verify_unchanged()

    def close(self) -> None:
        """Close the files; reading afterwards is a RequestError. Safe to call twice."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def allocate(info: TensorInfo, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array for values of a tensor. ResourceError without the memory."""
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        wanted = math.prod(shape) * dtype.itemsize
        raise ResourceError(
            f"{info.file}: tensor {shown(info.name)}: no memory for {wanted} bytes; expected a smaller model"
        ) from None


def _e4m3() -> npt.NDArray[np.float32]:
    """The values of the 256 codes of E4M3 (Micikevicius et al. 2022): 4 bits of exponent with bias 7, 3 of mantissa;
    no infinities, and two NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, np.ldexp(1.0 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


E4M3 = _e4m3()


def as_float32(raw: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A raw array of a checkpoint (uint16 = bfloat16 bits, uint8 = E4M3 codes) as float32."""
    if raw.dtype == np.uint8:
        return np.asarray(E4M3[raw], np.float32)
    if raw.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        wide: npt.NDArray[np.uint32] = np.left_shift(raw, np.uint32(16), dtype=np.uint32)
        return wide.view(np.float32)
    with np.errstate(over="ignore"):  # a float64 past float32 becomes Inf, and is refused as that
        return raw.astype(np.float32, copy=False)


def _single_file(folder: Path) -> Path:
    path = folder / "model.safetensors"
    if os.path.lexists(path):
        return path
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise ModelFormatError(f"{folder}: {len(found)} safetensors files and no {INDEX}; expected it, or one file")
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickles:
        raise UnsupportedModelError(f"{folder}: only {pickles[0]}, and pickle is never read; expected safetensors")
    raise ModelFormatError(f"{folder}: no model.safetensors; expected one, or shards with {INDEX}")


def _read_index(path: Path) -> dict[str, str]:
    """weight_map of an index. Its `metadata` is not used for anything."""
    index = strict_json.loads(strict_json.read_bytes(path, MAX_INDEX_BYTES), where=str(path), max_bytes=MAX_INDEX_BYTES)
    if not isinstance(index, dict):
        raise ModelFormatError(f"{path}: root is {type(index).__name__}; expected an object with 'weight_map'")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{path}: key 'weight_map': {shown(weight_map)}; expected tensor names with shards")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ModelFormatError(f"{path}: key {shown(name)} of weight_map is {shown(shard)}; expected a file name")
        if re.fullmatch(r"[^/\\\x00]+\.safetensors", shard, re.DOTALL) is None:
            raise ModelFormatError(
                f"{path}: key {shown(name)} of weight_map names {shown(shard)}; "
                "expected a safetensors file beside the index"
            )
    return weight_map


def _shard_paths(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    paths = sorted({folder / shard for shard in weight_map.values()})
    missing = []
    for path in paths:
        try:
            os.stat(path)
        except FileNotFoundError:
            missing.append(shown(path.name))
        except OSError:
            continue  # opening it says what is wrong
    if missing:
        raise ModelFormatError(
            f"{folder}: {len(missing)} of {len(paths)} shards of the index are missing: {', '.join(missing)}; "
            "expected all of them"
        )
    return paths


def _check_index(index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    """What the index promises must be in the shard that it names."""
    absent = [name for name, shard in weight_map.items() if name not in tensors or tensors[name].file.name != shard]
    if absent:
        listed = ", ".join(f"{shown(name)} in {shown(weight_map[name])}" for name in absent[:10])
        raise ModelFormatError(
            f"{index}: {len(absent)} tensors are not in their shard: {listed}; expected all of them there"
        )
