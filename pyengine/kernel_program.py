"""Stage 4, kernel_program: numpy arrays checked for the core, and small programs of a few ops that run on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine._core import Backend, Format, OpKind, Program, Stage
from pyengine.errors import RequestError
from pyengine.fuse import fuse
from pyengine.quantize import PackedFormat

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

MAX_TOKENS = 1 << 20  # of the core, in one call
EMPTY = np.empty(0, np.int32)


def values(array: Any, name: str, *shape: int | None) -> Float32:
    """`array` as C-contiguous float32 of that shape (None: any length); RequestError says what does not fit."""
    array = np.asarray(array)
    if array.dtype.kind != "f" or array.dtype.itemsize > 4:
        raise RequestError(f"{name} is {array.dtype}; expected float32 or float16")
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    if not fits or not array.size:
        raise RequestError(f"{name} has shape {list(array.shape)}; expected {wanted}, not empty")
    return np.ascontiguousarray(array, np.float32)


def matrix(array: Any, name: str, rows: int | None = None, cols: int | None = None) -> Array:
    """A [N, K] matrix as the core packs it: float32, float16, or uint16 holding bfloat16."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    if array.dtype not in (np.float32, np.float16, np.uint16):
        raise RequestError(f"{name} is {array.dtype}; expected float32, float16 or bfloat16")
    wanted = f"[{rows or 'N'}, {cols or 'K'}]"
    if array.ndim != 2 or not array.size or rows not in (None, len(array)) or cols not in (None, array.shape[1]):
        raise RequestError(f"{name} has shape {list(array.shape)}; expected {wanted}, not empty")
    return np.ascontiguousarray(array)


def weighting(importance: Any, cols: int) -> Float32 | None:
    if importance is None:
        return None
    h = values(importance, "importance", cols)
    if not (np.isfinite(h) & (h >= 0)).all():
        raise RequestError("importance has a negative value, NaN or Inf; expected E[x^2] of each input channel")
    return h


class Bench:
    """A backend with the ops and buffers of one small program."""

    def __init__(self, threads: int | None, isa: str | None, backend: Backend | None = None) -> None:
        if threads is not None and (isinstance(threads, bool) or threads < 1):
            raise RequestError(f"threads is {threads}; expected at least 1, or None for the default")
        self.backend = Backend(threads or 0, isa or "") if backend is None else backend
        self.ops: list[dict[str, Any]] = []
        self.buffers: list[tuple[bool, int]] = []
        self.rows: list[int] = []  # of each token, by buffer

    def tensor(
        self, fmt: PackedFormat, rows: int, parts: list[tuple[Array, int, int]], importance: Float32 | None = None
    ) -> int:
        """A tensor of `rows` rows, filled with matrices at (first panel, panel stride)."""
        tensor = self.backend.tensor_create(int(fmt.format), rows, parts[0][0].shape[-1], fmt.group)
        for source, offset, stride in parts:
            self.backend.tensor_pack(tensor, source, offset, stride, importance)
        return tensor

    def vector(self, source: Float32, size: int | None = None) -> int:
        """float32 values, then zeros up to `size`."""
        padding = np.zeros((size or len(source)) - len(source), np.float32)
        return self.tensor(PackedFormat(Format.VECTOR_F32), 1, [(np.concatenate([source, padding]), 0, 1)])

    def buffer(self, width: int, quantized: bool = False, rows: int = 1) -> int:
        """rows: of each token."""
        self.buffers.append((quantized, width))
        self.rows.append(rows)
        return len(self.buffers) - 1

    @property
    def descs(self) -> list[tuple[bool, int, int]]:
        """The buffers as a Program takes them."""
        return [(*buffer, rows) for buffer, rows in zip(self.buffers, self.rows, strict=True)]

    def op(self, kind: OpKind, **fields: Any) -> None:
        self.ops.append({"kind": int(kind), "stage": int(Stage.FFN), **fields})

    def quantized(self, source: int, fmt: PackedFormat) -> int:
        """The buffer that a matrix of `fmt` reads: `source`, or its int8 form."""
        if not fmt.is_integer:
            return source
        out = self.buffer(self.buffers[source][1], quantized=True, rows=self.rows[source])
        self.op(OpKind.QUANTIZE, input=source, output=out)
        return out

    def program(self, output: int | None, max_tokens: int, fused: bool = False) -> Program:
        """The ops so far as a program that shows the buffer `output`."""
        if max_tokens > MAX_TOKENS:
            raise RequestError(f"{max_tokens} tokens; expected at most {MAX_TOKENS}")
        ops = fuse(self.ops) if fused else list(self.ops)
        if output is not None:
            ops.append({"kind": int(OpKind.TAP), "stage": int(Stage.FFN), "input": output, "head_dim": 0})
        return Program(self.backend, ops, self.descs, max_tokens, max_tokens, False)

    def show(
        self, program: Program, hidden: Float32, width: int, start: int = 0, table: Int32 | None = None
    ) -> Float32:
        """Run on hidden [T, ...] at positions start, start + 1 ...; returns the output buffer [T, width]."""
        out = np.empty((len(hidden), width), np.float32)
        run(program, hidden, start=start, taps=[out], table=table)
        return out


def run(
    program: Program,
    hidden: Float32 | None,
    *,
    start: int = 0,
    ids: Int32 = EMPTY,
    taps: list[Float32] | None = None,
    table: Int32 | None = None,
    logits: Float32 | None = None,
) -> None:
    """One batch of one sequence."""
    tokens = len(ids) if hidden is None else len(hidden)
    positions = np.arange(start, start + tokens, dtype=np.int32)
    ends = np.array([0, tokens], np.int32)
    rows = EMPTY if logits is None else np.arange(tokens, dtype=np.int32)
    tables = [] if table is None else [table]
    program.run(ids, positions, ends, tables, rows, logits, None, hidden, taps or [], None, True)
