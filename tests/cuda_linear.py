"""What the tests of matrix products on CUDA share: packed tensors, a call of the driver, the bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from compare import assert_same_bits
from kernel_cases import EPS, Array, linear_oracle, quantize_activations, unpack, up

from pyengine.kernels import Linear

ROOT = Path(__file__).resolve().parents[1]
PACKING = ("csrc/cuda/repack.cc", "csrc/core/formats.cc", "csrc/core/memory.cc")
LINEAR_SOURCES = ("tests/cuda/linear_driver.cc", "csrc/cuda/linear.cu", "csrc/cuda/rows.cu", *PACKING)


def packed(w: Array, options: dict[str, Any]) -> Array:
    return Linear(w, isa="scalar", threads=1, **options).packed()


def run_linear(
    lin: Any, raw: Array, rows: int, x: Array, bias: Array | None = None, factor: float = 0.0, out: Array | None = None,
    function: str = "linear_run", *more: Any,
) -> Array:  # fmt: skip
    """x [T, K] times the packed tensor `raw` of `rows` rows: [T, rows]; added to `out` where factor is not 0."""
    x = np.ascontiguousarray(x, np.float32)
    y = np.full((len(x), up(rows, 16)), np.nan, np.float32)
    if out is not None:
        y[:] = 0
        y[:, :rows] = out
    padding = np.zeros(up(rows, 16) - rows, np.float32)
    lin(function, raw, x, len(x), None if bias is None else np.concatenate([bias, padding]), factor, y, *more)
    return np.ascontiguousarray(y[:, :rows])


def linear_bound_of(x: Array, raw: Array) -> tuple[Array, Array]:
    """(the product in float64, how far the device may be from it): see test_linear.py."""
    w = unpack(raw)
    exact, bound = linear_oracle(x, w)
    if w.kind in ("f32", "bf16"):
        inputs = np.abs(x.astype(np.float64))
    else:
        q, scale, apart = quantize_activations(x)
        inputs = np.abs(q * scale) + np.abs(apart)
    return exact, bound + 16 * EPS * (inputs @ w.parts.T)


def same_or_nan(actual: Array, expected: Array, what: str) -> None:
    """The same bits, or both not finite."""
    assert np.array_equal(np.isfinite(actual), np.isfinite(expected)), what
    assert_same_bits(np.where(np.isfinite(actual), actual, 0), np.where(np.isfinite(expected), expected, 0), what)


def integer_weight(raw: Array, seed: int, fill: int | None) -> Array:
    """The packed tensor with units and scales of 1, minimums of 3, and random bytes (or `fill`) for integers."""
    raw = raw.copy()
    code, group = (int(v) for v in raw[12:20].view(np.int32))
    n, k = (int(v) for v in raw[24:40].view(np.int64))
    groups, minimum, int8 = -(-k // group), code == 4, code == 2
    head = 128 + 2 * up(16 * groups, 64) if minimum else 64 + up(32 * groups, 64)
    panels = raw[64:].reshape(-1, head + 64 * (-(-k // (4 if int8 else 8))))
    assert len(panels) == up(n, 16) // 16
    units = np.ones((len(panels), 32 if minimum else 16), np.float32)
    panels[:, : 4 * units.shape[1]] = units.view(np.uint8)
    if minimum:
        panels[:, 128 : 128 + up(16 * groups, 64)] = 1
        panels[:, 128 + up(16 * groups, 64) : head] = 3
    else:
        panels[:, 64:head] = np.ones((len(panels), (head - 64) // 2), np.int16).view(np.uint8)
    data = panels[:, head:]
    random = np.random.default_rng(seed).integers(1 if int8 else 0, 256, data.shape).astype(np.uint8)
    data[:] = random if fill is None else max(fill, int8)
    return raw
