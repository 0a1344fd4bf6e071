"""Quantized activations as a driver of tests/cuda hands them over, and small programs of the CPU's scalar kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from compare import assert_same_bits
from kernel_cases import Array, quantize_activations

from pyengine._core import OpKind
from pyengine.kernel_program import Bench

HALVES = ("scaled_sum32", "negative_sum32")
NUMBERS = {
    "scale": np.float32, "scaled_sum64": np.float32, "scaled_sum32": np.float32, "negative_sum64": np.int32,
    "negative_sum32": np.int32, "outlier_value": np.float32, "outlier_column": np.uint8,
}  # fmt: skip


class HostQuant(ctypes.Structure):
    """driver.h's struct of the same name, over numpy arrays: rows of int8 and the numbers of their groups."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("q", *NUMBERS)]

    def __init__(self, rows: int, width: int) -> None:
        groups = (width + 63) // 64
        self.width = width
        self.arrays: dict[str, Array] = {"q": np.zeros((rows, groups * 64), np.int8)}
        for name, dtype in NUMBERS.items():
            self.arrays[name] = np.zeros((rows, groups * (2 if name in HALVES else 1)), dtype)
        super().__init__(*(a.ctypes.data for a in self.arrays.values()))


def assert_quantized(actual: HostQuant, x: Array, what: str = "") -> None:
    """Every number of `actual` is what x [n][width] rounds to by docs/packed_formats.md, to the bit."""
    a, width = actual.arrays, actual.width
    q, scales, apart = quantize_activations(x)
    padded = np.zeros(a["q"].shape, np.int64)
    padded[:, :width] = q
    assert_same_bits(a["q"], padded.astype(np.int8), f"{what}: q")
    scale = scales[:, ::64].astype(np.float32)
    assert_same_bits(a["scale"], scale, f"{what}: scale")
    halves = padded.reshape(len(x), -1, 32).sum(axis=2)
    whole = padded.reshape(len(x), -1, 64).sum(axis=2)
    assert_same_bits(a["negative_sum32"], (-halves).astype(np.int32), f"{what}: sums of 32")
    assert_same_bits(a["negative_sum64"], (-whole).astype(np.int32), f"{what}: sums of 64")
    assert_same_bits(a["scaled_sum32"], np.repeat(scale, 2, axis=1) * halves.astype(np.float32), f"{what}: scaled 32")
    assert_same_bits(a["scaled_sum64"], scale * whole.astype(np.float32), f"{what}: scaled 64")
    alone = np.zeros(a["q"].shape, np.float32)
    alone[:, :width] = apart
    groups = alone.reshape(len(x), -1, 64)
    column = np.where(groups.any(axis=2), np.abs(groups).argmax(axis=2) + 1, 0)
    assert_same_bits(a["outlier_column"], column.astype(np.uint8), f"{what}: columns apart")
    value = np.where(column > 0, a["outlier_value"], np.float32(0))
    assert_same_bits(value, np.where(column > 0, groups.sum(axis=2), np.float32(0)), f"{what}: values apart")


def scalar_op(kind: OpKind, x: Array, width: int, vector: Array | None = None, **fields: Any) -> Array:
    """output [n][width] of one op of the CPU's scalar table on x [n][any]; output is at first 0."""
    b = Bench(1, "scalar")
    source, out = b.buffer(x.shape[1]), b.buffer(width)
    b.op(OpKind.LOAD_HIDDEN, output=source)
    if vector is not None:
        fields["norm"] = b.vector(vector)
    b.op(kind, input=source, output=out, **fields)
    return b.show(b.program(out, len(x)), x, width)
