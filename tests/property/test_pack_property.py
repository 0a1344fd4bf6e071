"""Packing, any shape and scale: an independent unpacker reads the bytes; the search is never worse than rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BEST, EPS, FORMATS, INTEGER, Array, unpack, up

from pyengine import kernels
from pyengine._core import Backend, Format
from pyengine.quantize import choose

few = settings(deadline=None, max_examples=25, database=None)
by_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
by_integer = pytest.mark.parametrize("options", INTEGER.values(), ids=INTEGER.keys())


@st.composite
def matrices(draw: st.DrawFn, min_rows: int = 1, min_cols: int = 1) -> Array:
    """A float32 matrix: normal values, with rows of very different sizes, offsets, flat parts and zeros among them."""
    n, k = draw(st.integers(min_rows, 50)), draw(st.integers(min_cols, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    w = rng.standard_normal((n, k))
    kind = draw(st.sampled_from(["plain", "offset", "heavy", "flat", "sparse", "grid"]))
    if kind == "offset":
        w += rng.uniform(-5, 5, (n, 1))
    elif kind == "heavy":
        w = w**3
    elif kind == "flat":
        w[:, : k // 2] = rng.standard_normal((n, 1))
    elif kind == "sparse":
        w *= rng.random((n, k)) < 0.1
    elif kind == "grid":
        w = np.round(w * 4)
    return (w * 10.0 ** rng.uniform(-6, 6, (n, 1))).astype(np.float32)


def plain(w: Array, options: dict[str, Any]) -> Array:
    """Rounding to the range of each group, float64 scales: what the search starts from."""
    out = np.empty(w.shape)
    group = choose(options["quant"], options.get("group_size"), options.get("scheme")).layers.group
    for start in range(0, w.shape[1], group):
        part = w[:, start : start + group].astype(np.float64)
        low, high = (f(part, axis=1, keepdims=True) for f in (np.min, np.max))
        if options.get("scheme") == "minimum":
            scale = (high - low) / 15
            q = np.clip(np.rint((part - low) / np.where(scale, scale, 1)), 0, 15)
            out[:, start : start + group] = scale * q + low
            continue
        extreme = np.where(high > -low, high, low)
        scale = extreme / -8 if options["quant"] == "int4" else np.abs(extreme) / 127
        ends = (-8, 7) if options["quant"] == "int4" else (-127, 127)
        out[:, start : start + group] = scale * np.clip(np.rint(part / np.where(scale, scale, 1)), *ends)
    return out


def rounding_of_stored_numbers(w: Array, options: dict[str, Any]) -> Array:
    """How far a value can move because its group's scale and minimum are kept in few bits, in units of the row: [N, 1].

    Scales up to s in 255 steps move a value of 15 steps by 15 s / 510, and at least one step is kept; minimums up to m
    in 127 steps by m / 254. 16-bit scales move a value by its 65534th part, and at least one of 32767 steps is kept.
    """
    top = np.abs(w).max(axis=1, keepdims=True).astype(np.float64)
    if options.get("scheme") == "minimum":
        return 2 * top / 15 * 15 / 255 + 1.2 * top / 127
    return top / 32767


def half_steps(w: Array) -> Array:
    """Half a step of int8 where the largest value of a group of 64 lands on 115.8, the last candidate: [N, K]."""
    tops = [np.abs(w[:, s : s + 64]).max(axis=1, keepdims=True) for s in range(0, w.shape[1], 64)]
    return np.repeat(np.concatenate(tops, axis=1), 64, axis=1)[:, : w.shape[1]].astype(np.float64) / (2 * 115.8)


@by_format
@few
@given(w=matrices())
def test_the_unpacker_and_the_core_agree(options: dict[str, Any], w: Array) -> None:
    layer = kernels.Linear(w, threads=2, **options)
    read = unpack(layer.packed())
    values = layer.dequantized()
    assert_close(values, read.values, EPS * read.parts, "dequantized")
    if options["quant"] == "f32":
        assert_same_bits(values, w, "f32")
    if options["quant"] == "bf16":
        assert_close(values, w.astype(np.float64), np.abs(w).astype(np.float64) * 2.0**-8, "bf16")


@by_integer
@few
@given(w=matrices(), seed=st.integers(0, 1000))
def test_the_search_is_no_worse_than_rounding_to_the_range(options: dict[str, Any], w: Array, seed: int) -> None:
    """Row by row, in the weighted square error, up to the rounding of stored numbers; and every value is bounded."""
    h = np.exp(np.random.default_rng(seed).standard_normal(w.shape[1])).astype(np.float32)
    slack = rounding_of_stored_numbers(w, options)
    for importance in (None, h):
        weights = np.ones(w.shape[1]) if importance is None else h.astype(np.float64)
        values = kernels.quantize_dequantize(w, importance=importance, threads=2, **options)
        assert np.isfinite(values).all()
        cost, start = (
            np.sqrt(((v - w.astype(np.float64)) ** 2 * weights).sum(axis=1)) for v in (values, plain(w, options))
        )
        if options["quant"] == "int8":  # its candidates do not hold 127 itself: half of the widest step is the bound
            start = np.sqrt((half_steps(w) ** 2 * weights).sum(axis=1))
        limit = 1.02 * start + slack[:, 0] * np.sqrt(weights.sum())
        assert (cost <= limit).all(), (cost / np.maximum(limit, 1e-300)).max()
        top = np.abs(w).max(axis=1, keepdims=True)
        assert (np.abs(values) <= 1.35 * top + slack).all()


@by_integer
@few
@given(w=matrices(), exponent=st.integers(-40, 40))
def test_a_power_of_two_changes_no_integer(options: dict[str, Any], w: Array, exponent: int) -> None:
    """Rows are divided by their largest magnitude before the search, so their size cannot matter."""
    layers = [kernels.Linear(a, threads=1, **options) for a in (w, np.ldexp(w, exponent))]
    first, second = (unpack(layer.packed()) for layer in layers)
    assert_same_bits(first.q, second.q, "integers")
    assert_same_bits(np.ldexp(layers[0].dequantized(), exponent), layers[1].dequantized(), "values")


@by_format
@few
@given(w=matrices(min_rows=2), seed=st.integers(0, 1000))
def test_rows_are_packed_alone(options: dict[str, Any], w: Array, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(w))
    values = kernels.quantize_dequantize(w, threads=1, **options)
    assert_same_bits(kernels.quantize_dequantize(w[order], threads=3, **options), values[order], "permuted rows")


@by_format
@few
@given(w=matrices(min_rows=16), offset=st.integers(0, 2), stride=st.integers(1, 3))
def test_panels_land_where_they_are_told(options: dict[str, Any], w: Array, offset: int, stride: int) -> None:
    """As gate and up do: panel i of the source is panel offset + i * stride; the others stay as they were."""
    fmt = choose(options["quant"], options.get("group_size"), options.get("scheme")).layers
    panels = up(len(w), 16) // 16
    backend = Backend(1, BEST)
    tensor = backend.tensor_create(int(fmt.format), 16 * (offset + panels * stride), w.shape[1], fmt.group)
    backend.tensor_pack(tensor, w, offset, stride)
    whole = backend.tensor_dequantize(tensor).reshape(-1, 16, w.shape[1])
    alone = kernels.quantize_dequantize(w, threads=1, **options)
    at = offset + stride * np.arange(panels)
    assert_same_bits(whole[at].reshape(-1, w.shape[1])[: len(w)], alone, "placed")
    raw = backend.tensor_bytes(tensor)[64:].reshape(len(whole), -1)
    assert not np.delete(raw, at, axis=0).any()


MUTATIONS = ("nibbles swapped", "last column dropped", "scale of the neighbour group")


@by_integer
@pytest.mark.parametrize("mutation", MUTATIONS)
@few
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 40), k=st.integers(129, 300))
def test_every_seeded_mistake_of_the_layout_is_found(
    options: dict[str, Any], mutation: str, seed: int, n: int, k: int
) -> None:
    w = (np.random.default_rng(seed).standard_normal((n, k)) + 3).astype(np.float32)  # no integer stands for zero
    w *= np.exp(np.arange(k) / 100).astype(np.float32)  # so that no two groups have one scale
    layer = kernels.Linear(w, threads=1, **options)
    raw, values = layer.packed(), layer.dequantized()
    right = unpack(raw)
    assert_close(values, right.values, EPS * right.parts, "right")
    if mutation == "nibbles swapped" and options["quant"] == "int8":
        layout = raw.copy()
        layout[-64:] = layout[-64:].reshape(16, 4)[:, ::-1].reshape(-1)  # a byte holds one column: its quad is turned
        wrong = unpack(layout)
    else:
        wrong = unpack(raw, mutation)
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(values, wrong.values, EPS * right.parts, mutation)


def test_formats_of_the_unpacker_are_those_of_the_core() -> None:
    assert [int(f) for f in (Format.F32, Format.BF16, Format.INT8, Format.INT4_SYM, Format.INT4_MIN)] == [0, 1, 2, 3, 4]
