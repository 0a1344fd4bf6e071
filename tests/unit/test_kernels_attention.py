"""Attention and RoPE against the float64 reference: head ratios, windows, block borders, threads, ISAs."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from kernel_cases import BEST, EPS, ISAS, THREADS, TINY, normal, to_bfloat16

from pyengine import kernels, reference
from pyengine.errors import RequestError

by_isa = pytest.mark.parametrize("isa", ISAS)

# keys, queries, window: around blocks of 32 and partitions of 256, one token and many
SHAPES = [
    (1, 1, None), (2, 2, None), (31, 1, None), (32, 8, None), (33, 9, 5), (65, 33, 32), (255, 2, None), (256, 1, 33),
    (257, 2, None), (257, 9, 256), (300, 33, 300), (513, 3, 257), (520, 12, None),
]  # fmt: skip


def qkv(seed: int, tokens: int, keys: int, heads: int, kv_heads: int, dim: int) -> tuple[np.ndarray, ...]:
    shapes = [(tokens, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim)]
    return tuple(normal(3 * seed + i, *shape) for i, shape in enumerate(shapes))


def oracle(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None, scale: float | None = None
) -> tuple[np.ndarray, float]:
    """The float64 result and how far float32 may be from it.

    Scores are wrong by at most delta = (d + 2) eps |q| |k| scale, so a weight by a factor within exp(+-2 delta) and the
    roundings of one exp, one product and sum per key, and a merge per partition.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    exact = reference.attention(*(a.astype(np.float64) for a in (q, k, v)), scale, len(k) - len(q), window)
    norms = [float(np.linalg.norm(a.astype(np.float64), axis=2).max()) for a in (q, k)]
    delta = (q.shape[2] + 2) * EPS * norms[0] * norms[1] * abs(scale)
    return exact.reshape(q.shape), (2 * delta + (len(k) + 16) * EPS) * float(np.abs(v).max())


@by_isa
@pytest.mark.parametrize(("ratio", "dim"), [(1, 64), (3, 16), (5, 24), (7, 80), (12, 32), (2, 1), (1, 33)])
def test_report_c20_every_ratio_window_and_border(isa: str, ratio: int, dim: int) -> None:
    for seed, (keys, tokens, window) in enumerate(SHAPES):
        q, k, v = qkv(seed, tokens, keys, 2 * ratio, 2, dim)
        expected, bound = oracle(q, k, v, window)
        y = kernels.attention(q, k, v, window=window, threads=1, isa=isa)
        assert_close(y, expected, bound, f"{keys} keys, {tokens} queries, window {window}")


@by_isa
def test_bfloat16_cache_rounds_k_and_v_to_nearest(isa: str) -> None:
    q, k, v = qkv(40, 9, 300, 6, 2, 24)
    y = kernels.attention(q, k, v, kv_dtype="bfloat16", threads=1, isa=isa)
    rounded = [to_bfloat16(a) for a in (k, v)]
    expected, bound = oracle(q, *rounded)
    assert_close(y, expected, bound, "bfloat16 KV")
    assert_same_bits(y, kernels.attention(q, *rounded, threads=1, isa=isa), "rounded before")
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(y, oracle(q, k, v)[0], bound, "not rounded")


def int8_oracle(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The float64 result over K and V as an int8 cache holds them, and the bound on top of float32's.

    q is rounded to max |q| / 32512, half of which times |k| may be wrong in a score. The weights of a partition, times
    the scale of V, are rounded in the same way to their maximum, and each meets at most 127 steps of V.
    """
    heads, dim, start = q.shape[1], q.shape[2], len(k) - len(q)
    k8, v8 = reference.round_int8(k), reference.round_int8(v)
    exact, bound = oracle(q, k8, v8, window)
    ratio = heads // k.shape[1]
    delta = np.abs(q).max() / 65024 * np.abs(k8).sum(axis=2).max() * dim**-0.5
    bounds = np.full(q.shape, bound + 2 * delta * float(np.abs(v8).max()))
    scales = np.abs(v).max(axis=2) / 127
    for t, h in np.ndindex(len(q), heads):
        seen = np.arange(max(0, start + t + 1 - window) if window else 0, start + t + 1)
        scores = k8[seen, h // ratio].astype(np.float64) @ q[t, h] * dim**-0.5
        weights = np.exp(scores - scores.max())
        weights *= scales[seen, h // ratio] / weights.sum()
        for partition in np.unique(seen // 256):
            inside = weights[seen // 256 == partition]
            bounds[t, h] += len(inside) * inside.max() * 127 / 65024 * (1 + 4 * delta)
    return exact, bounds


@by_isa
@pytest.mark.parametrize(("ratio", "dim"), [(1, 64), (3, 16), (5, 24), (7, 80), (12, 32), (2, 1), (1, 33), (6, 128)])
def test_int8_cache_rounds_k_and_v_per_token_and_head(isa: str, ratio: int, dim: int) -> None:
    for seed, (keys, tokens, window) in enumerate(SHAPES):
        q, k, v = qkv(seed, tokens, keys, 2 * ratio, 2, dim)
        k[:, 1] *= 3  # a head is rounded by its own scale
        v[::3] *= 7  # and so is a token
        expected, bound = int8_oracle(q, k, v, window)
        y = kernels.attention(q, k, v, window=window, kv_dtype="int8", threads=1, isa=isa)
        assert_close(y, expected, bound, f"{keys} keys, {tokens} queries, window {window}")
        if keys == 300 and dim > 1:
            with pytest.raises(AssertionError, match="out of bound"):
                assert_close(y, oracle(q, k, v, window)[0], bound, "not rounded")


@by_isa
def test_int8_cache_of_extreme_values(isa: str) -> None:
    q, k, v = qkv(45, 9, 300, 6, 2, 24)
    y = kernels.attention(q, k * 0, v, kv_dtype="int8", threads=1, isa=isa)
    assert_close(y, *int8_oracle(q, k * 0, v), "keys of zeros")
    zero = kernels.attention(q, k, v * 0, kv_dtype="int8", threads=1, isa=isa)
    assert not zero.any(), "values of zeros"
    for tiny in (kernels.attention(q, k, np.full_like(v, 1e-40), kv_dtype="int8", threads=2, isa=isa),):
        assert np.abs(tiny).max() <= TINY
    huge = kernels.attention(q * 1e4, k * 1e4, v * 1e30, kv_dtype="int8", threads=1, isa=isa)
    assert np.isfinite(huge).all()


@by_isa
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_in_an_int8_cache_reach_exactly_the_rows_that_see_them(isa: str, bad: float) -> None:
    q, k, v = qkv(47, 40, 300, 6, 2, 24)
    clean = kernels.attention(q, k, v, window=20, kv_dtype="int8", threads=1, isa=isa)
    for array in (k, v):
        kept = array[270, 1, 5]
        array[270, 1, 5] = bad  # queries at 270 .. 289 see it, those of the second KV head
        y = kernels.attention(q, k, v, window=20, kv_dtype="int8", threads=1, isa=isa)
        array[270, 1, 5] = kept
        assert np.isnan(y[10:30, 3:]).all()
        y[10:30, 3:] = clean[10:30, 3:]
        assert_same_bits(y, clean, "the others")


@pytest.mark.parametrize("kv_dtype", kernels.KV_DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_threads_and_instruction_sets_give_the_same_bits(kv_dtype: str, window: int | None) -> None:
    """Blocks are filled by several threads at once here, so every count runs more than once."""
    for tokens in (1, 5, 40):
        q, k, v = qkv(50 + tokens, tokens, 300, 6, 2, 24)
        first = kernels.attention(q, k, v, window=window, kv_dtype=kv_dtype, threads=1, isa=ISAS[0])
        for isa in ISAS:
            for threads in THREADS if isa == BEST else (1, 2):
                for _ in range(1 if threads == 1 else 4):
                    y = kernels.attention(q, k, v, window=window, kv_dtype=kv_dtype, threads=threads, isa=isa)
                    assert_same_bits(y, first, f"{isa}, {threads} threads, {tokens} tokens")


@by_isa
@pytest.mark.parametrize("kv_dtype", kernels.KV_DTYPES)
@pytest.mark.parametrize("window", [None, 33])
def test_decode_and_any_chunk_give_the_bits_of_the_whole_prompt(isa: str, kv_dtype: str, window: int | None) -> None:
    q, k, v = qkv(60, 290, 290, 3, 1, 16)
    whole = kernels.attention(q, k, v, window=window, kv_dtype=kv_dtype, threads=2, isa=isa)
    for end, tokens in ((1, 1), (32, 32), (33, 1), (100, 7), (256, 9), (257, 1), (258, 8), (290, 33), (290, 1)):
        given = (q[end - tokens : end], k[:end], v[:end])
        part = kernels.attention(*given, window=window, kv_dtype=kv_dtype, threads=2, isa=isa)
        assert_same_bits(part, whole[end - tokens : end], f"{tokens} tokens up to {end}")


def test_wrong_arithmetic_is_outside_the_bound() -> None:
    q, k, v = qkv(70, 9, 70, 6, 2, 24)
    y = kernels.attention(q, k, v, window=20)
    expected, bound = oracle(q, k, v, 20)
    assert_close(y, expected, bound, "right")
    wrongs = {
        "window one wider": oracle(q, k, v, 21)[0],
        "window one narrower": oracle(q, k, v, 19)[0],
        "no window": oracle(q, k, v)[0],
        "heads interleaved": oracle(q, np.tile(k, (1, 3, 1)), np.tile(v, (1, 3, 1)), 20)[0],
        "scale left out": oracle(q, k, v, 20, scale=1.0)[0],
        "one key later": oracle(q, np.roll(k, 1, axis=0), np.roll(v, 1, axis=0), 20)[0],
    }
    for what, wrong in wrongs.items():
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(y, wrong, bound, what)


@by_isa
def test_scores_of_any_size_stay_finite(isa: str) -> None:
    """Huge scores choose one key; equal ones, however large, give the mean."""
    q, k, v = qkv(80, 3, 300, 2, 1, 16)
    chosen = kernels.attention(q * 1e4, k, v, threads=1, isa=isa)
    scores = np.einsum("thd,sd->ths", q.astype(np.float64), k[:, 0].astype(np.float64))
    for t in range(3):
        best = scores[t, :, : 298 + t].argmax(axis=1)
        assert_close(chosen[t], v[best, 0], 16 * EPS * float(np.abs(v).max()), "one key")
    flat = kernels.attention(q * 0, k * 1e18, v, threads=1, isa=isa)
    means = np.stack([v[: 298 + t].astype(np.float64).mean(axis=0).repeat(2, axis=0) for t in range(3)])
    assert_close(flat, means, 316 * EPS * float(np.abs(v).max()), "mean")
    denormal = kernels.attention(q, k, np.full_like(v, 1e-40), threads=2, isa=isa)
    assert np.abs(denormal).max() <= TINY
    assert np.float32(TINY) * np.float32(0.5) > 0, "denormal arithmetic of the calling thread is gone"


def test_attention_arguments_that_do_not_fit() -> None:
    q, k, v = qkv(90, 3, 5, 6, 2, 16)
    for call, says in (
        (lambda: kernels.attention(q, k, v[:4]), r"v has shape \[4, 2, 16\]; expected \[5, 2, 16\]"),
        (lambda: kernels.attention(q, k[:2], v[:2]), "S >= 3"),
        (lambda: kernels.attention(q[:, :5], k, v), "a divisor of 5"),
        (lambda: kernels.attention(q, k[..., :8], v[..., :8]), "16"),
        (lambda: kernels.attention(q, k, v, window=0), "window 0"),
        (lambda: kernels.attention(q, k, v, kv_dtype="int4"), "kv_dtype 'int4'"),
        (lambda: kernels.attention(q[0], k, v), "q has shape"),
    ):
        with pytest.raises(RequestError, match=says):
            call()


# ---- RoPE ------------------------------------------------------------------------------------------------------------


def angles(seed: int, tokens: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    a = np.random.default_rng(seed).uniform(-7, 7, (tokens, half))
    return np.cos(a).astype(np.float32), np.sin(a).astype(np.float32)


@by_isa
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(1, 2, 2), (3, 24, 8), (5, 64, 64), (2, 80, 66), (7, 33, 30)])
def test_rope_whole_and_partial(isa: str, heads: int, dim: int, rotary: int) -> None:
    for tokens in (1, 9):
        x, (cos, sin) = normal(tokens, tokens, heads, dim), angles(tokens, tokens, rotary // 2)
        y = kernels.rope(x, cos, sin, threads=2, isa=isa)
        expected = reference.apply_rope(x.astype(np.float64), cos, sin)
        size = np.abs(x[..., : rotary // 2]) + np.abs(x[..., rotary // 2 : rotary])
        bound = np.zeros(x.shape)
        bound[..., :rotary] = 2 * EPS * np.concatenate([size, size], axis=-1) + TINY
        assert_close(y, expected, bound, f"{tokens} tokens")
        if rotary < dim:
            assert_same_bits(y[..., rotary:], x[..., rotary:], "what is not rotated")
        assert_same_bits(y, kernels.rope(x, cos, sin, threads=1, isa=ISAS[0]), "other threads, scalar")


def test_report_c17_interleaved_rope_is_something_else() -> None:
    x, (cos, sin) = normal(1, 4, 3, 16), angles(2, 4, 8)
    y = kernels.rope(x, cos, sin)
    order = np.arange(16).reshape(8, 2).T.reshape(-1)  # even dimensions first
    interleaved = reference.apply_rope(x[..., order].astype(np.float64), cos, sin)[..., np.argsort(order)]
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(y, interleaved, 1e-3, "pairs (2 i, 2 i + 1)")
    for bad, says in ((angles(3, 3, 8), "cos has shape"), (angles(3, 4, 9), "at most head_dim / 2")):
        with pytest.raises(RequestError, match=says):
            kernels.rope(x, *bad)
