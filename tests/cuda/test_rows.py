"""rows.cu against float64 and the CPU's scalar kernels. Where nothing is summed over a row, the bits are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from cuda_rows import HostQuant, assert_quantized, scalar_op
from kernel_cases import EPS, FORMATS, TINY, bfloat16_bits, normal, to_bfloat16

from pyengine import kernels
from pyengine._core import Backend, OpKind
from pyengine.decoder import ACTIVATIONS
from pyengine.quantize import choose
from pyengine.reference import layer_norm as exact_layer_norm
from pyengine.reference import rms_norm as exact_rms_norm

SOURCES = (
    "tests/cuda/rows_driver.cc", "csrc/cuda/rows.cu", "csrc/cuda/repack.cc", "csrc/core/formats.cc",
    "csrc/core/memory.cc",
)  # fmt: skip
WIDTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 172, 576, 1000, 1441, 4200, 9001)
RMS, LAYER = 0, 1
TO_FLOAT, TO_INT8, TO_RESIDUAL = 0, 1, 2


@pytest.fixture(scope="module")
def rows(build: Callable[..., Any]) -> Any:
    return build(*SOURCES)


def norm(
    rows: Any, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, kind: int = RMS, eps: float = 1e-5,
    picked: np.ndarray | None = None, residual: np.ndarray | None = None, scale: float = 1.0,
) -> np.ndarray:  # fmt: skip
    count = len(x) if picked is None else len(picked)
    out = np.empty((count, x.shape[1]), np.float32) if residual is None else residual.copy()
    to = TO_FLOAT if residual is None else TO_RESIDUAL
    rows("rows_norm", x, len(x), x.shape[1], w, bias, kind, eps, picked, count, to, scale, out, None)
    return out


def norm_bound(x: np.ndarray, w: np.ndarray, centre: bool, eps: float) -> np.ndarray:
    """A sum over n columns takes n / 32 + 15 roundings in any chain; x less its mean loses as many of max |x|."""
    steps = x.shape[1] / 32 + 20
    wide = x.astype(np.float64)
    wide = wide - wide.mean(axis=1, keepdims=True) if centre else wide
    inverse = 1 / np.sqrt((wide**2).mean(axis=1, keepdims=True) + eps)
    lost = steps * EPS * np.abs(x).max(axis=1, keepdims=True) if centre else 0
    return (steps * EPS * np.abs(wide) + lost) * inverse * np.abs(w) * 2 + TINY


@pytest.mark.parametrize("kind", [RMS, LAYER])
@pytest.mark.parametrize("biased", [True, False])
def test_norms(rows: Any, kind: int, biased: bool) -> None:
    for n in WIDTHS:
        x, w, b = normal(n, 5, n) * np.float32(3) + np.float32(kind), normal(n + 1, n), normal(n + 2, n)
        x[3] *= np.float32(1e-4)  # here eps counts
        bias = b if biased and kind == LAYER else None
        wide = x.astype(np.float64), w.astype(np.float64)
        if kind == LAYER:
            exact = exact_layer_norm(*wide, None if bias is None else bias.astype(np.float64), 1e-5)
            scalar = kernels.layer_norm(x, w, bias, eps=1e-5, isa="scalar")
        else:
            exact = exact_rms_norm(*wide, 1e-5)
            scalar = kernels.rms_norm(x, w, eps=1e-5, isa="scalar")
        bound = norm_bound(x, w, kind == LAYER, 1e-5) + EPS * np.abs(exact)
        y = norm(rows, x, w, bias, kind)
        assert_close(y, exact, bound, f"{n} columns")
        assert_close(y, scalar.astype(np.float64), 2 * bound, f"{n} columns, the CPU")
        for row in range(5):
            assert_same_bits(norm(rows, x[row : row + 1].copy(), w, bias, kind)[0], y[row], "a row alone")


def test_norms_wrong_variants(rows: Any) -> None:
    x, w, b = normal(1, 4, 100) + np.float32(1), normal(2, 100), normal(3, 100)
    wide, wide_w = x.astype(np.float64), w.astype(np.float64)
    rms, layer = norm(rows, x, w, eps=1e-2), norm(rows, x, w, b, LAYER, eps=1e-2)
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(rms, exact_rms_norm(wide, wide_w, 0.0), norm_bound(x, w, False, 1e-2), "eps")
    for wrong in (exact_layer_norm(wide, wide_w, None, 1e-2), exact_rms_norm(wide, wide_w, 1e-2) + b):
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(layer, wrong, norm_bound(x, w, True, 1e-2) + EPS * np.abs(layer), "wrong")


def test_norms_of_picked_rows_and_into_a_sum(rows: Any) -> None:
    x, w, b = normal(1, 7, 200), normal(2, 200), normal(3, 200)
    picked = np.array([6, 0, 3, 3], np.int32)
    for kind in (RMS, LAYER):
        whole = norm(rows, x, w, b, kind)
        assert_same_bits(norm(rows, x, w, b, kind, picked=picked), whole[picked].copy(), "picked")
        before = normal(4, 7, 200)
        exact = before.astype(np.float64) + float(np.float32(0.3)) * whole.astype(np.float64)
        added = norm(rows, x, w, b, kind, residual=before, scale=0.3)
        assert_close(added, exact, EPS * np.abs(exact), "added")


@pytest.mark.parametrize("kind", [RMS, LAYER])
def test_a_norm_to_int8_is_the_norm_rounded(rows: Any, kind: int) -> None:
    for n in WIDTHS:
        x, w, b = normal(n, 5, n), normal(n + 1, n), normal(n + 2, n)
        x[1, n // 2] = 400
        quant = HostQuant(5, n)
        rows("rows_norm", x, 5, n, w, b if kind else None, kind, 1e-5, None, 5, TO_INT8, 1.0, None, quant)
        assert_quantized(quant, norm(rows, x, w, b if kind else None, kind), f"{n} columns")


# ---- rounding to int8 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_rounding_to_int8(rows: Any, width: int) -> None:
    x = normal(width, 9, width)
    x[0] = 0
    x[1, width // 2] = 1e4  # kept apart
    x[2, width // 3 :] = -7.5  # many of the largest size: none is
    x[3] *= np.float32(1e-38)  # too small: counts as 0
    x[4] = np.clip(np.rint(normal(5, width) * 60), -127, 127)  # whole numbers: ties where the scale is not 1
    x[5, :: max(1, width // 2)] = -300
    quant = HostQuant(9, width)
    rows("rows_quantize", x, 9, width, quant)
    assert_quantized(quant, x)


def test_rounding_knows_where_exactly_a_value_is_kept_apart(rows: Any) -> None:
    """Over four times every other: at four times it is not."""
    x = np.full((4, 64), np.float32(1))
    x[:, 40] = -1
    x[0, 5], x[1, 5], x[2, 63], x[3, 31:33] = 4, np.nextafter(np.float32(4), np.float32(5)), -8, 9
    quant = HostQuant(4, 64)
    rows("rows_quantize", x, 4, 64, quant)
    assert_quantized(quant, x)
    assert quant.arrays["outlier_column"][:, 0].tolist() == [0, 6, 64, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rounding_what_is_not_finite_makes_its_group_nan(rows: Any, bad: float) -> None:
    x = normal(1, 3, 200)
    x[0, 3], x[1, 70], x[2, 199] = bad, bad, bad
    quant = HostQuant(3, 200)
    rows("rows_quantize", x, 3, 200, quant)
    where = np.zeros((3, 4), bool)
    where[0, 0] = where[1, 1] = where[2, 3] = True
    for name in ("scale", "scaled_sum64"):
        assert (np.isnan(quant.arrays[name]) == where).all()
    assert (np.isnan(quant.arrays["scaled_sum32"]) == np.repeat(where, 2, axis=1)).all()


# ---- elements -------------------------------------------------------------------------------------------------------

SPREAD = np.concatenate([np.linspace(-16, 16, 1601), [-100, -90, -88.4, -87.2, 88, 90, 1e30, -1e30, 0, -0.0]])


def flushed(x: np.ndarray) -> np.ndarray:
    """0 for what is tiny: the CPU flushes it, and factors of it."""
    return np.where(np.abs(x) < 256 * TINY, np.float32(0), x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_the_bits_of_the_cpu(rows: Any, name: str) -> None:
    activation = int(ACTIVATIONS[name])
    x = SPREAD.astype(np.float32)[None, :].copy()
    width = x.shape[1]
    y = np.zeros((1, (width + 15) // 16 * 16), np.float32)
    rows("rows_act", x, 0, activation, y, None, 1, width)
    expected = scalar_op(OpKind.ACT, x, width, activation=activation)
    assert_same_bits(flushed(y[:, :width]), flushed(expected), name)
    for n in (1, 15, 16, 63, 65, 576):
        wide = (n + 15) // 16 * 16
        pairs = normal(n, 3, 2 * wide) * np.float32(4)
        y = np.empty((3, wide), np.float32)
        rows("rows_act", pairs, 1, activation, y, None, 3, n)
        expected = scalar_op(OpKind.ACT_MUL, pairs, wide, activation=activation)
        assert_same_bits(flushed(y), flushed(expected), f"{name}, {n} pairs")
        quant, alone = HostQuant(3, n), HostQuant(3, n)
        rows("rows_act", pairs, 1, activation, None, quant, 3, n)
        assert_quantized(quant, y[:, :n].copy(), f"{name}, {n} pairs")
        rows("rows_act", pairs[:, :n].copy(), 0, activation, None, alone, 3, n)
        expected = scalar_op(OpKind.ACT, pairs[:, :n].copy(), n, activation=activation)
        assert_quantized(alone, expected, f"{name}, {n} values")


def test_an_unknown_activation_is_refused(rows: Any) -> None:
    with pytest.raises(RuntimeError, match="activation 4 is unknown"):
        rows("rows_act", normal(1, 1, 16), 0, 4, np.zeros((1, 16), np.float32), None, 1, 16)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 255, 256, 257, 1000])
def test_adding_masking_and_showing(rows: Any, width: int) -> None:
    x, y = normal(1, 5, width), normal(2, 5, width)
    added = y.copy()
    rows("rows_add", x, 0.7, added, 5, width)
    exact = y.astype(np.float64) + float(np.float32(0.7)) * x.astype(np.float64)
    assert_same_bits(added, exact.astype(np.float32), "one rounding")
    mask = (np.arange(width) % 3 != 1).astype(np.float32)
    masked = y.copy()
    rows("rows_mask", mask, masked, 5, width)
    assert_same_bits(masked, np.where(mask != 0, y, np.float32(0)), "masked")
    shown, place = np.empty_like(x), np.array([3, 1, 4, 0, 2], np.int32)
    rows("rows_tap", x, None, shown, 5, width)
    assert_same_bits(shown, x, "shown")
    rows("rows_tap", x, place, shown, 5, width)
    assert_same_bits(shown, x[place].copy(), "shown where they lie")


@pytest.mark.parametrize("width", [1, 63, 64, 65, 576, 1000])
def test_a_gate(rows: Any, width: int) -> None:
    x, w, y = normal(1, 4, width), normal(2, width) / np.float32(np.sqrt(width)), normal(3, 4, 100)
    gated = y.copy()
    rows("rows_gate", x, width, w, gated, 4, 100)
    dot = x.astype(np.float64) @ w.astype(np.float64)
    exact = y * (1 / (1 + np.exp(-dot)))[:, None]
    # the sum's error moves the sigmoid by at most a quarter of it
    bound = (width / 32 + 20) * EPS * (np.abs(x).astype(np.float64) @ np.abs(w))[:, None] / 4 * np.abs(y)
    assert_close(gated, exact, bound + 8 * EPS * np.abs(y), "gated")


# ---- embeddings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_embedding_rows(rows: Any, bf16: bool, positions: bool) -> None:
    for width in (1, 63, 256, 300):
        table, places = normal(1, 11, width), normal(2, 9, width)
        ids, at = np.array([10, 0, 3, 3], np.int32), np.array([0, 8, 2, 5], np.int32)
        stored = bfloat16_bits(table) if bf16 else table
        out = np.empty((4, width), np.float32)
        rows("rows_embed", stored, 11, int(bf16), places if positions else None, 9, 1.7, ids, at, out, 4, width)
        read = to_bfloat16(table) if bf16 else table
        expected = read[ids] * np.float32(1.7)
        assert_same_bits(out, expected + places[at] if positions else expected, f"{width} columns")


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
def test_rows_of_a_packed_table_have_the_bits_of_the_cpu(rows: Any, options: dict[str, Any]) -> None:
    fmt, ids = choose(**options).layers, np.array([34, 0, 15, 16, 31, 7], np.int32)
    for width in (1, 40, 64, 200, 321):
        table, backend = normal(width, 35, width), Backend(1, "scalar")
        tensor = backend.tensor_create(int(fmt.format), 35, width, fmt.group)
        backend.tensor_pack(tensor, table)
        out = np.empty((len(ids), width), np.float32)
        raw = np.asarray(backend.tensor_bytes(tensor)).copy()
        rows("rows_embed_packed", raw, 1.0, ids, out, len(ids), width)
        assert_same_bits(out, kernels.embed(ids, table, isa="scalar", **options), f"{width} columns")
