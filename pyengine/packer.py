"""Stage 3, packer: arrays of a checkpoint -> packed tensors of the core, checked, with errors that name them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine._core import Backend, Format
from pyengine.checkpoint import as_float32
from pyengine.errors import ModelFormatError
from pyengine.quantize import PackedFormat
from pyengine.tensors import CanonicalTensors

PANEL = 16
CHUNK_BYTES = 32 << 20  # of the embedding and the head, as float32, read at a time

TensorDesc = tuple[int, int, int, int]  # format, rows, cols, group size


def padded(n: int) -> int:
    """n rounded up to whole panels."""
    return -(-n // PANEL) * PANEL


class Packer:
    """Creates tensors in one backend from arrays of one checkpoint; errors name the tensor as it is on disk."""

    def __init__(self, backend: Backend, source: CanonicalTensors, *, strict: bool = False) -> None:
        self.backend = backend
        self.source = source
        self.strict = strict
        self.made: dict[int, TensorDesc] = {}
        self.warnings: list[str] = []

    def create(self, fmt: PackedFormat, rows: int, cols: int) -> int:
        tensor = self.backend.tensor_create(int(fmt.format), rows, cols, fmt.group)
        self.made[tensor] = (int(fmt.format), rows, cols, fmt.group)
        return tensor

    def fill(
        self,
        tensor: int,
        name: str,
        source: npt.NDArray[Any],
        offset: int = 0,
        stride: int = 1,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Pack `source` into panels offset, offset + stride, ... ModelFormatError names tensor and place of a NaN."""
        if source.ndim == 2:
            self.check_not_zero(name, source)
        self.pack(tensor, name, source, offset, stride, importance)

    def fill_rows(self, tensor: int, name: str, unit: int, importance: npt.NDArray[np.float32] | None = None) -> None:
        """Read and pack a matrix CHUNK_BYTES at a time, so that it is never held whole beside what it becomes.

        unit: rows that one step of the tensor's offset covers (16 for panels, 1 for rows).
        """
        info = self.source.tensors[name]
        rows, cols = info.shape
        step = max(1, CHUNK_BYTES // (4 * cols * unit)) * unit
        zero = True
        for begin in range(0, rows, step):
            source = self.source.read_range(name, begin, min(begin + step, rows))
            if source.dtype != np.uint16 and unit == 1:
                source = as_float32(source)
            zero = zero and is_zero(source)
            self.pack(tensor, name, source, begin // unit, 1, importance, first_row=begin)
        if zero:
            self.note_zero(name)

    def pack(
        self,
        tensor: int,
        name: str,
        source: npt.NDArray[Any],
        offset: int,
        stride: int,
        importance: npt.NDArray[np.float32] | None,
        first_row: int = 0,
    ) -> None:
        try:
            self.backend.tensor_pack(tensor, source, offset, stride, importance)
        except ModelFormatError:
            raise self.not_finite(name, source, first_row) from None

    def not_finite(self, name: str, source: npt.NDArray[Any], first_row: int = 0) -> ModelFormatError:
        """The error that names the first NaN or Inf of `source`, which holds the tensor's rows from first_row on."""
        at = int(np.flatnonzero(~np.isfinite(as_float32(source)))[0])
        value, info = as_float32(source).reshape(-1)[at], self.source.tensors[name]
        flat = self.source.flat_on_disk(name, first_row * source.shape[-1] + at)
        return ModelFormatError(
            f"{info.file}: tensor '{info.name}': {value} at flat index {flat}; expected finite values"
        )

    def check_not_zero(self, name: str, source: npt.NDArray[Any]) -> None:
        if is_zero(source[:4]) and is_zero(source):
            self.note_zero(name)

    def note_zero(self, name: str) -> None:
        """Warn of a tensor that is all zero: a file that was laid out and never filled. ModelFormatError if strict."""
        info = self.source.tensors[name]
        text = f"{info.file}: tensor '{info.name}' is all zero"
        if self.strict:
            raise ModelFormatError(f"{text}; expected weights")
        self.warnings.append(text)

    def vector(self, parts: list[tuple[str, npt.NDArray[Any], npt.NDArray[np.int64]]], size: int) -> int:
        """float32 [size], zero but for each part (name, values, where they go)."""
        values = np.zeros(size, np.float32)
        for name, raw, places in parts:
            part = as_float32(raw)
            if not np.isfinite(part).all():
                raise self.not_finite(name, part)
            values[places] = part
        tensor = self.create(PackedFormat(Format.VECTOR_F32), 1, size)
        self.backend.tensor_pack(tensor, values)
        return tensor

    def norm(self, name: str, raw: npt.NDArray[Any], divisor: float = 1.0) -> int:
        """The weight of a norm as it multiplies (1 + what is stored where the spec says so), over `divisor`."""
        if self.source.spec.norm.plus_one:
            raw = np.float32(1) + as_float32(raw)
        else:
            self.check_not_zero(name, raw)
        return self.row(name, raw, divisor)

    def row(self, name: str, raw: npt.NDArray[Any], divisor: float = 1.0) -> int:
        """A vector as it is stored, over `divisor`."""
        return self.vector([(name, as_float32(raw) / np.float32(divisor), np.arange(len(raw)))], len(raw))


def is_zero(raw: npt.NDArray[Any]) -> bool:
    """Whether every value of a raw array is zero, of either sign."""
    return not (np.bitwise_and(raw, 0x7FFF) if raw.dtype == np.uint16 else raw).any()


def pack_table(packer: Packer, name: str, fmt: PackedFormat, importance: npt.NDArray[np.float32] | None = None) -> int:
    """One [vocab, hidden] tensor, packed."""
    tensor = packer.create(fmt, *packer.source.tensors[name].shape)
    packer.fill_rows(tensor, name, PANEL, importance)
    return tensor


def pack_rows(packer: Packer, name: str) -> int:
    """An untied embedding, or a table of positions, stays row-major: bfloat16 as stored, everything else float32."""
    info = packer.source.tensors[name]
    fmt = Format.ROWS_BF16 if info.dtype == "BF16" else Format.ROWS_F32
    tensor = packer.create(PackedFormat(fmt), *info.shape)
    packer.fill_rows(tensor, name, 1)
    return tensor
