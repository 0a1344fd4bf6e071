"""Norms of heads, rope and the cache on the device: against float64; every byte of the cache by kv_layout.h alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_cases import BF16, F32, INT8, SOURCES, Array, DeviceCache, HeadsCase, structure
from compare import assert_close, assert_same_bits
from kernel_cases import EPS, bfloat16_bits, normal, up

from pyengine import reference

DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=["f32", "bf16", "int8"])
NORM_EPS = 1e-5


@pytest.fixture(scope="session")
def call(build: Callable[..., Any]) -> Any:
    return build(*SOURCES)


def tables(positions: int, rotary: int, seed: int) -> Array:
    angles = np.random.default_rng(seed).uniform(-7, 7, (positions, rotary // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def joined(*parts: Array) -> Array:
    """[T, heads, dim] each: side by side in whole panels, NaN between."""
    flat = [part.reshape(len(part), -1) for part in parts]
    widths = [up(part.shape[1], 16) for part in flat[:-1]] + [flat[-1].shape[1]]
    out = np.full((len(flat[0]), sum(widths)), np.nan, np.float32)
    for part, at in zip(flat, np.cumsum([0, *widths]), strict=False):
        out[:, at : at + part.shape[1]] = part
    return out


def parts(qkv: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    found, at = [], 0
    for shape in shapes:
        size = shape[1] * shape[2]
        found.append(qkv[:, at : at + size].reshape(shape))
        at += up(size, 16)
    return found


def normed(x: Array, weight: Array, whole: bool) -> tuple[Array, Array]:
    """float64 and its bound: n roundings of a sum, and those of a root, a quotient and two products."""
    rows = x.astype(np.float64).reshape(len(x), 1, -1) if whole else x.astype(np.float64)
    exact = rows / np.sqrt((rows**2).mean(axis=2, keepdims=True) + NORM_EPS) * weight
    return exact.reshape(x.shape), np.abs(exact.reshape(x.shape)) * (rows.shape[2] / 2 + 6) * EPS


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [(1, 1, 2, 2), (4, 2, 24, 8), (6, 3, 64, 64), (8, 1, 80, 66), (3, 3, 33, 30), (2, 1, 256, 0), (71, 1, 16, 16)],
)
@pytest.mark.parametrize("norms", [False, True])
def test_norms_and_rope(call: Any, heads: int, kv_heads: int, dim: int, rotary: int, whole: bool, norms: bool) -> None:
    """And each alone; positions of several sequences, q scaled by position."""
    cache = DeviceCache(call, [40, 5], kv_heads, dim, dim, F32)
    spans = [(0, 37, 40), (1, 4, 5)]
    positions = [37, 38, 39, 4]
    shapes = [(4, heads, dim), (4, kv_heads, dim), (4, kv_heads, dim)]
    q, k, v = (normal(dim + i, *shape) for i, shape in enumerate(shapes))
    fields: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "whole_norms": int(whole)}
    expected = [(q.astype(np.float64), np.zeros(q.shape)), (k.astype(np.float64), np.zeros(k.shape))]
    if norms:
        weights = [1 + normal(i, (n if whole else 1) * dim) / 4 for i, n in ((5, heads), (6, kv_heads))]
        fields["q_norm"], fields["k_norm"] = weights
        expected = [normed(x, w, whole) for x, w in zip((q, k), weights, strict=True)]
    if rotary:
        table, scales = tables(50, rotary, 3), np.linspace(0.5, 2, 50).astype(np.float32)
        fields |= {"rope": table, "q_scales": scales, "rope_positions": 50, "rotary_dim": rotary}
        cos, sin = np.split(table[positions], 2, axis=1)
        for i, by in enumerate((scales[positions].astype(np.float64)[:, None, None], 1.0)):
            exact, bound = expected[i]
            turned = reference.apply_rope(exact, cos, sin)
            wide = bound + 2 * EPS * np.abs(exact)
            a, b = wide[..., : rotary // 2], wide[..., rotary // 2 : rotary]
            wide = np.concatenate([a + b, a + b, bound[..., rotary:]], axis=2)
            expected[i] = turned * by, (wide + EPS * np.abs(turned)) * by
    qkv = joined(q, k, v)
    call("attention_heads", 0, 0, structure(HeadsCase, **fields), NORM_EPS, qkv, qkv.shape[1], cache.batch(spans))
    found = parts(qkv, shapes)
    for what, y, (exact, bound) in zip("qk", found, expected, strict=False):
        assert_close(y, exact, bound, what)
    assert_same_bits(found[2], v, "v")
    # with the cache: the same, and K and V are what stands in the buffer
    again = joined(q, k, v)
    case = structure(HeadsCase, **fields)
    call("attention_heads", cache.handle, 0, case, NORM_EPS, again, again.shape[1], cache.batch(spans))
    assert_same_bits(np.nan_to_num(again), np.nan_to_num(qkv), "with the cache")
    for i, (s, p) in enumerate([(0, 37), (0, 38), (0, 39), (1, 4)]):
        head = cache.pool()[cache.table[s, p // 32], 0].view(np.float32).reshape(kv_heads, 2, 32, up(dim, 16))
        assert_same_bits(head[:, 0, p % 32, :dim], found[1][i], "K")
        assert_same_bits(head[:, 1, p % 32, :dim], found[2][i], "V")


def rows_of(cache: DeviceCache, layer: int) -> list[list[Array]]:
    """By kv_layout.h: K and V as stored [blocks, kv_heads, 32, padded dim], int8 with scales [blocks, kv_heads, 32]."""
    kind: Any = (np.float32, np.uint16, np.int8)[cache.dtype]
    pool, at, found = cache.pool()[:, layer], 0, []
    for dim in (cache.k_dim, cache.v_dim):
        size = 32 * up(dim, 16) * np.dtype(kind).itemsize
        data = np.ascontiguousarray(pool[..., at : at + size]).view(kind)
        found.append([data.reshape(*pool.shape[:2], 32, up(dim, 16))])
        at += size
        if cache.dtype == INT8:
            found[-1].append(np.ascontiguousarray(pool[..., at : at + 128]).view(np.float32))
            at += 128
    assert at == pool.shape[2]
    return found


def stored(x: Array, dtype: int) -> list[Array]:
    """x [..., dim] as the cache keeps it, padded; int8: the scales too."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, up(x.shape[-1], 16) - x.shape[-1])]
    if dtype != INT8:
        return [np.pad(bfloat16_bits(x) if dtype == BF16 else x, pad)]
    largest = np.abs(x).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        by = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    return [np.pad(np.rint(x * by).astype(np.int8), pad), (largest / np.float32(127))[..., 0]]


@DTYPES
@pytest.mark.parametrize("dim", [1, 16, 33, 80])
def test_every_byte_of_the_cache(call: Any, dtype: int, dim: int) -> None:
    """Tokens in blocks out of order, in the middle of three layers; what nobody appended stays as it was."""
    cache = DeviceCache(call, [70, 33], 3, dim, dim, dtype, layers=3)
    spans = [(0, 30, 66), (1, 31, 33)]
    tokens = [(0, p) for p in range(30, 66)] + [(1, p) for p in range(31, 33)]
    k, v = normal(1, len(tokens), 3, dim), normal(2, len(tokens), 3, dim)
    k[3] = v[5, 1] = 0
    v[7] *= 1e-3
    cache.append(spans, k, v, layer=1)
    assert (cache.pool()[:, [0, 2]] == 255).all()
    for (kept, *scales), x in zip(rows_of(cache, 1), (k, v), strict=True):
        written = np.zeros((cache.blocks, 32), bool)
        for i, (s, p) in enumerate(tokens):
            block, slot = cache.table[s, p // 32], p % 32
            written[block, slot] = True
            values, *their = stored(x[i], dtype)
            assert_same_bits(kept[block, :, slot], values, f"{s}, {p}")
            for have, want in zip(scales, their, strict=True):
                assert_same_bits(have[block, :, slot], want, f"the scale of {s}, {p}")
        untouched = np.ascontiguousarray(kept.transpose(0, 2, 1, 3)[~written]).view(np.uint8)
        assert (untouched == 255).all()


def test_int8_of_extreme_values(call: Any) -> None:
    cache = DeviceCache(call, [6], 1, 20, 20, INT8)
    x = normal(3, 6, 1, 20)
    x[1] = 1e-40  # 127 / max overflows: counts as 0
    x[2, 0, 3], x[3, 0, 19] = np.nan, -np.inf
    x[4] *= 1e37
    x[5, 0, :] = 2.5
    cache.append([(0, 0, 6)], x, x)
    for kept, scales in rows_of(cache, 0):
        rows, its = kept[cache.table[0, 0], 0, :6], scales[cache.table[0, 0], 0, :6]
        assert not rows[1].any()
        assert its[1] == 0
        assert np.isnan(its[2:4]).all()
        for i in (0, 4, 5):
            values, scale = stored(x[i, 0], INT8)
            assert_same_bits(rows[i], values, f"row {i}")
            assert its[i] == scale


@DTYPES
@pytest.mark.parametrize(("latent", "rotary", "rest"), [(512, 64, 0), (17, 6, 0), (32, 2, 3)])
def test_a_latent_row(call: Any, dtype: int, latent: int, rotary: int, rest: int) -> None:
    """[latent | key] in place, latent normed, key rotated; K both, V the latent."""
    dim = latent + rotary + rest
    cache = DeviceCache(call, [40, 3], 1, dim, latent, dtype, layers=2)
    spans, positions = [(1, 2, 3), (0, 29, 35)], [2, *range(29, 35)]
    x, weight, table = normal(4, 7, 1, dim), 1 + normal(5, latent) / 4, tables(40, rotary, 6)
    case = structure(HeadsCase, rope=table, rope_positions=40, rotary_dim=rotary)
    y = x.copy()
    call("attention_latent", cache.handle, 1, y, weight, NORM_EPS, case, cache.batch(spans))
    exact, bound = normed(x[..., :latent], weight, whole=False)
    assert_close(y[..., :latent], exact, bound, "the latent")
    cos, sin = np.split(table[positions], 2, axis=1)
    turned = reference.apply_rope(x[..., latent:].astype(np.float64), cos, sin)
    assert_close(y[..., latent:], turned, 4 * EPS * float(np.abs(x).max()), "the key")
    if rest:
        assert_same_bits(y[..., -rest:], x[..., -rest:], "what is not rotated")
    for (kept, *scales), part in zip(rows_of(cache, 1), (y, y[..., :latent]), strict=True):
        for i, (s, p) in enumerate([(1, 2)] + [(0, p) for p in range(29, 35)]):
            values, *their = stored(part[i, 0], dtype)
            assert_same_bits(kept[cache.table[s, p // 32], 0, p % 32], values, f"{s}, {p}")
            for have, want in zip(scales, their, strict=True):
                assert have[cache.table[s, p // 32], 0, p % 32] == want
