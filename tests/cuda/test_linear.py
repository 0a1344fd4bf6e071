"""linear.cu against float64 and the CPU's scalar kernels, over the packed bytes of the CPU core.

The device adds what the CPU adds, in another order: 8 partial sums of every eighth tile of 64 columns, each ascending,
then their sum. So results differ from the float64 sum by at most one rounding a float32 operation, each relative to a
partial sum and so to sum |terms|: `linear_oracle` counts the CPU's operations; the device has 16 more (the sum of 8
parts, the products with a row's units and the powers of two), which `bound` adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from cuda_linear import LINEAR_SOURCES, ROOT, integer_weight, linear_bound_of, packed, run_linear, same_or_nan
from kernel_cases import EPS, FORMATS, INTEGER, normal, unpack

from pyengine.kernels import Linear

SHAPES = [(1, 8), (15, 24), (17, 72), (40, 200), (16, 64), (33, 576), (48, 1032)]


@pytest.fixture(scope="module")
def lin(build: Callable[..., Any]) -> Any:
    return build(*LINEAR_SOURCES)


@pytest.mark.parametrize("name", FORMATS)
def test_against_float64_and_the_scalar_table(lin: Any, name: str) -> None:
    for n, k in SHAPES:
        w, x = normal(n * k, n, k), normal(k, 3, k)
        x[1, k // 2] = 40  # kept apart
        x[2, -1] = -1000
        raw = packed(w, FORMATS[name])
        exact, bound = linear_bound_of(x, raw)
        y = run_linear(lin, raw, n, x)
        assert_close(y, exact, bound, f"{name} {n} x {k}")
        cpu = Linear(w, isa="scalar", threads=1, **FORMATS[name])(x)
        assert_close(y, cpu.astype(np.float64), 2 * bound, f"{name} {n} x {k}, scalar")


@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_the_batch(lin: Any, name: str) -> None:
    """1 to 9 tokens and 17: the bits of a row are those of the row alone; bias and factor come with them."""
    n, k = 24, 712  # 12 tiles: some warps have two, some one
    w, x, bias = normal(5, n, k), normal(6, 17, k), normal(7, n)
    x[4, 100], x[9, 3] = np.nan, np.inf  # only their own rows are NaN
    x[3, ::65] = 90
    raw = packed(w, FORMATS[name])
    alone = np.concatenate([run_linear(lin, raw, n, x[i : i + 1], bias) for i in range(17)])
    assert not np.isfinite(alone[[4, 9]]).any()
    assert np.isfinite(np.delete(alone, [4, 9], axis=0)).all()
    for tokens in (2, 3, 4, 5, 7, 8, 9, 17):
        same_or_nan(run_linear(lin, raw, n, x[:tokens], bias), alone[:tokens], f"{tokens} tokens")
    assert_same_bits(run_linear(lin, raw, n, x[:3]) + bias, alone[:3], "bias")
    base = normal(8, 3, n)
    # a product and a sum rounded once: in float64 exact but for its last bits
    want = base.astype(np.float64) + 0.37109375 * alone[:3].astype(np.float64)
    added = run_linear(lin, raw, n, x[:3], bias, 0.37109375, base)
    assert_close(added, want, EPS * np.abs(want), "factor")


@pytest.mark.parametrize("name", ["int8", "int4_minimum_32", "int4_symmetric_128", "bf16"])
def test_long_rows(lin: Any, name: str) -> None:
    """Activations of 8 tokens come with the weights, tile by tile; of one token all at once, before them."""
    n, k = 16, 2600
    x, raw = normal(1, 8, k), packed(normal(2, n, k), FORMATS[name])
    x[5, 64:2000:192] = 50
    y = run_linear(lin, raw, n, x)
    exact, bound = linear_bound_of(x, raw)
    assert_close(y, exact, bound, name)
    for token in (0, 5):
        assert_same_bits(run_linear(lin, raw, n, x[token : token + 1]), y[token : token + 1], f"{name} {token}")


@pytest.mark.parametrize("panels", [528, 529, 1057])
def test_blocks_of_more_panels_have_the_same_bits(lin: Any, panels: int) -> None:
    """1, 2 and 4 panels a block, the last one short of some."""
    n, k = 16 * panels - 3, 40
    w, x = normal(1, n, k), normal(2, 2, k)
    for name in ("int4_minimum_32", "bf16"):
        y = run_linear(lin, packed(w, FORMATS[name]), n, x)
        for part in (slice(0, 32), slice(n - 29, n)):
            few = run_linear(lin, packed(np.ascontiguousarray(w[part]), FORMATS[name]), part.stop - part.start, x)
            assert_same_bits(y[:, part], few, f"{name} rows {part}")


@pytest.mark.parametrize("name", INTEGER)
def test_integer_sums_are_exact(lin: Any, name: str) -> None:
    """Whole numbers throughout (units and scales of 1, activations -127 .. 127): every float sum is exact, too."""
    n, k = 31, 392
    for seed, fill in ((1, None), (2, 255), (3, 0)):
        raw = integer_weight(packed(normal(seed, n, k), FORMATS[name]), seed, fill)
        x = np.random.default_rng(seed).integers(-127, 128, (8, k)).astype(np.float32)
        x[:, ::32] = 127
        x[1:3] = [[127], [-127]]
        w = unpack(raw)
        want = (x.astype(np.int64) @ w.values.astype(np.int64).T).astype(np.float32)
        assert np.abs(want).max() < 2**24
        assert_same_bits(run_linear(lin, raw, n, x), want, f"{name} bytes {fill}")


def test_sizes_near_the_ends_of_float32(lin: Any) -> None:
    """Weights and activations that no partial sum may overflow with, and tiny ones that must not vanish."""
    w, x = normal(1, 16, 128), normal(2, 2, 128)
    for name in FORMATS:
        for large, small in ((1e36, 1e-30), (1e-30, 1e36), (1e15, 1e15), (1e-12, 1e-12)):
            a, b = (w * np.float32(large)).astype(np.float32), (x * np.float32(small)).astype(np.float32)
            raw = packed(a, FORMATS[name])
            exact, bound = linear_bound_of(b, raw)
            assert_close(run_linear(lin, raw, 16, b), exact, bound + np.abs(exact) * 1e-6, f"{name} {large} {small}")


@pytest.mark.parametrize("name", ["f32", "bf16"])
@pytest.mark.parametrize(("width", "rest", "rows"), [(24, 8, 16), (13, 0, 21), (32, 6, 40)])
def test_heads(lin: Any, name: str, width: int, rest: int, rows: int) -> None:
    """Each head its own panels and columns, from any offset; what is left of the input, rotated, behind the product."""
    heads, tokens, positions, rotary = 3, 10, 12, rest // 2 * 2
    up = -(-rows // 16) * 16
    w = np.zeros((heads, up, width), np.float32)
    w[:, :rows] = normal(1, heads, rows, width)
    x, table = normal(2, tokens, heads, width + rest), normal(3, positions, max(rotary, 1))
    at = np.random.default_rng(4).integers(0, positions, tokens).astype(np.int32)
    raw = packed(w.reshape(heads * up, width), FORMATS[name])
    out = np.empty((tokens, heads * (rows + rest)), np.float32)
    lin("linear_heads", raw, x, tokens, heads, width + rest, table, positions, rotary, at, out, out.shape[1])
    out = out.reshape(tokens, heads, rows + rest)
    values = unpack(raw).values.reshape(heads, up, width)[:, :rows]
    wide = x[:, :, :width].astype(np.float64)
    exact = np.einsum("thk,hnk->thn", wide, values)
    bound = (width + 16) * EPS * np.einsum("thk,hnk->thn", np.abs(wide), np.abs(values))
    assert_close(out[:, :, :rows], exact, bound, "product")
    if not rest:
        return
    half, tail = rotary // 2, x[:, :, width:].astype(np.float64)
    cos, sin = (table[at][:, None, i : i + half].astype(np.float64) for i in (0, half))
    first, second = tail[..., :half], tail[..., half:rotary]
    want = np.concatenate([first * cos - second * sin, second * cos + first * sin, tail[..., rotary:]], axis=-1)
    size = np.concatenate([np.abs(first * cos) + np.abs(second * sin), np.abs(second * cos) + np.abs(first * sin)], -1)
    assert_close(out[:, :, rows : rows + rotary], want[..., :rotary], EPS * size, "rotated")


HEADERS = [f"csrc/cuda/{name}.cuh" for name in ("linear", "products", "slabs")]
MISTAKES = {  # in those: what is there, what is there instead, a format that shows it
    "a lane's activations of the other token": ("g = min(lane / 4, count - 1)", "g = min(lane % 8, count - 1)", "int8"),
    "scales of the neighbour rows": ("+ lane_id() / 4 * kSubs", "+ (lane_id() / 4 ^ 1) * kSubs", "int4_minimum_32"),
    "a slot of the ring too early": ("copy_async_wait<S::kSlots - 2>()", "copy_async_wait<S::kSlots - 1>()", "int8"),
    "columns past K": ("k + e < cols ? from[e] : 0.0f", "from[e]", "f32"),
    "a warp forgotten": ("for (int w = 1; w < kWarps", "for (int w = 1; w < kWarps - 1", "bf16"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(build: Callable[..., Any], mistake: str) -> None:
    old, new, name = MISTAKES[mistake]
    headers = {path: (ROOT / path).read_text() for path in HEADERS}
    assert sum(text.count(old) for text in headers.values()) == 1
    wrong = build(*LINEAR_SOURCES, changed={path: text.replace(old, new) for path, text in headers.items()})
    n, k = 16, 2700  # longer than the rings
    x, raw = normal(3, 8, k), packed(normal(4, n, k), FORMATS[name])
    exact, bound = linear_bound_of(x, raw)
    try:
        y = run_linear(wrong, raw, n, x)
    except RuntimeError:  # the emulation found it
        return
    with pytest.raises(AssertionError, match=r"out of bound|nan"):
        assert_close(y, exact, bound)
