"""Attention on the device against float64 and the scalar CPU kernels: every ratio, tail, dtype, border and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_cases import (
    BF16,
    F32,
    INT8,
    ROUNDED,
    SOURCES,
    Array,
    DeviceCache,
    HeadsCase,
    HostQuant,
    Span,
    in_pieces,
    oracle,
    structure,
)
from compare import assert_close, assert_same_bits
from kernel_cases import EPS, normal, quantize_activations

from pyengine import kernels

ROOT = Path(__file__).resolve().parents[2]
by_dtype = pytest.mark.parametrize("dtype", [F32, BF16, INT8], ids=["f32", "bf16", "int8"])

# one query at the end of each: around blocks of 32 and partitions of 256
LENGTHS = [1, 32, 33, 256, 257, 258, 512]


@pytest.fixture(scope="session")
def call(build: Callable[..., Any]) -> Any:
    return build(*SOURCES)


class Sequences:
    """Keys and values of sequences, in a cache of the device; k and v as the cache has rounded them."""

    def __init__(
        self, call: Any, lengths: Sequence[int], kv_heads: int, dim: int, dtype: int, seed: int = 1, shift: float = 0
    ) -> None:
        self.cache = DeviceCache(call, lengths, kv_heads, dim, dim, dtype)
        raw = [[normal(97 * seed + 2 * s + i, n, kv_heads, dim) for i in (0, 1)] for s, n in enumerate(lengths)]
        for k, v in raw:
            k[:, -1] *= 3  # a head and a token are rounded by a scale of their own
            v[::3] *= 5
            v += shift
        spans = [(s, 0, n) for s, n in enumerate(lengths)]
        self.raw = raw
        self.cache.append(spans, *(np.concatenate([pair[i] for pair in raw]) for i in (0, 1)))
        self.k, self.v = ([ROUNDED[dtype](pair[i]) for pair in raw] for i in (0, 1))

    def check(self, spans: Sequence[Span], q: Array, what: str, **options: Any) -> Array:
        y = self.cache.attend(spans, q, **options)
        options.pop("partitions", None)
        options["pieces"] = in_pieces(spans, self.cache.dtype)
        assert_close(y, *oracle(q, self.k, self.v, spans, **options), f"{what}, {options}")
        return y


def last_tokens(lengths: Sequence[int], count: int = 1) -> list[Span]:
    return [(s, max(0, n - count), n) for s, n in enumerate(lengths)]


@by_dtype
@pytest.mark.parametrize(
    ("ratio", "dim", "windows"),
    [(1, 64, (None, 5)), (2, 1, (None,)), (3, 24, (None, 32, 33)), (4, 80, (256,)), (7, 33, (None, 257)),
     (8, 128, (None,)), (16, 8, (255,)), (32, 16, (None,)), (71, 16, (7,))],
)  # fmt: skip
def test_a_token_of_each_length(call: Any, dtype: int, ratio: int, dim: int, windows: tuple[int | None, ...]) -> None:
    kv_heads = 2 if ratio < 16 else 1
    have = Sequences(call, LENGTHS, kv_heads, dim, dtype)
    q = normal(5 * ratio + dim, len(LENGTHS), kv_heads * ratio, dim)
    for window in windows:
        have.check(last_tokens(LENGTHS), q, f"ratio {ratio}, head_dim {dim}", window=window)


@by_dtype
@pytest.mark.parametrize(
    ("ratio", "dim", "window"), [(1, 48, None), (3, 20, 33), (5, 16, 256), (8, 64, None), (1, 200, 40), (19, 66, None)]
)
def test_many_tokens_of_ragged_sequences(call: Any, dtype: int, ratio: int, dim: int, window: int | None) -> None:
    """More than 8 tokens: tiles of a sequence's tokens. A few decode beside two chunks."""
    lengths = [270, 1, 40, 513, 258]
    spans = [(3, 509, 513), (0, 240, 270), (1, 0, 1), (4, 257, 258), (2, 0, 40)]
    have = Sequences(call, lengths, 2, dim, dtype, seed=2)
    q = normal(ratio, sum(end - begin for _, begin, end in spans), 2 * ratio, dim)
    have.check(spans, q, f"ratio {ratio}, head_dim {dim}", window=window)


@by_dtype
@pytest.mark.parametrize(("heads", "dim"), [(2, 256), (3, 24)])
def test_many_partitions(call: Any, dtype: int, heads: int, dim: int) -> None:
    """More than the merge has slices; also with a window that begins in the middle of them; then as many tokens."""
    lengths = [1300, 1100]
    have = Sequences(call, lengths, 1, dim, dtype, seed=9)
    for window in (None, 700):
        for spans in (last_tokens(lengths), [(0, 1291, 1300), (1, 1099, 1100)]):
            q = normal(dim, sum(end - begin for _, begin, end in spans), heads, dim)
            have.check(spans, q, f"{spans}", window=window)


@by_dtype
def test_many_tokens_in_any_chunks(call: Any, dtype: int) -> None:
    """Among more than 8 tokens, too, the bits of a row depend neither on where its tile begins nor on other rows."""
    have = Sequences(call, [300, 30], 1, 40, dtype, seed=10)
    q = normal(14, 300, 3, 40)
    for window in (None, 50):
        whole = have.check([(0, 240, 300)], q[240:], "whole", window=window)
        for begin, end in ((240, 255), (251, 290), (287, 300)):
            assert_same_bits(
                have.check([(0, begin, end)], q[begin:end], "a chunk", window=window), whole[begin - 240 : end - 240]
            )
        both = np.concatenate([q[:20], q[270:300]])
        assert_same_bits(have.check([(1, 10, 30), (0, 270, 300)], both, "two", window=window)[20:], whole[30:])


@by_dtype
@pytest.mark.parametrize("many", [False, True])
def test_softcap_and_scale(call: Any, dtype: int, many: bool) -> None:
    lengths = [300, 60]
    spans = [(0, 280, 300), (1, 59, 60)] if many else last_tokens(lengths, 2)
    have = Sequences(call, lengths, 2, 24, dtype, seed=3)
    q = normal(9, sum(end - begin for _, begin, end in spans), 6, 24)
    for softcap, scale in ((2.0, None), (30.0, 0.5), (None, 0.01)):
        y = have.check(spans, q, "capped", softcap=softcap, scale=scale)
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(y, *oracle(q, have.k, have.v, spans), "neither cap nor scale")


@by_dtype
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_its_bits_whatever_stands_beside_it(call: Any, dtype: int, window: int | None) -> None:
    """1 to 8 tokens: alone, in a chunk, among other sequences, with room for more partitions than there are."""
    lengths = [300, 7, 260, 520]
    have = Sequences(call, lengths, 1, 40, dtype, seed=4)
    q = {s: normal(60 + s, n, 3, 40) for s, n in enumerate(lengths)}

    def run(spans: Sequence[Span], partitions: int | None = None) -> Array:
        rows = np.concatenate([q[s][begin:end] for s, begin, end in spans])
        return have.check(spans, rows, "a batch", window=window, partitions=partitions)

    alone = {(s, p): run([(s, p, p + 1)])[0] for s, n in enumerate(lengths) for p in range(max(0, n - 5), n)}
    for spans, partitions in (
        ([(0, 296, 299)], None),
        ([(3, 515, 520), (0, 297, 300)], 16),
        ([(1, 2, 7)], 5),
        ([(2, 257, 258), (1, 6, 7), (0, 299, 300), (3, 519, 520)], None),
    ):
        y = run(spans, partitions)
        tokens = [(s, p) for s, begin, end in spans for p in range(begin, end)]
        for i, token in enumerate(tokens):
            assert_same_bits(y[i], alone[token], f"{token} in {spans}")


@by_dtype
@pytest.mark.parametrize("many", [False, True])
def test_what_is_quantized_is_the_output(call: Any, dtype: int, many: bool) -> None:
    """In groups of 64 columns across heads, the last shorter: 5 heads of 24."""
    lengths = [290, 33]
    spans = [(0, 280, 290), (1, 31, 33)] if many else last_tokens(lengths)
    have = Sequences(call, lengths, 1, 24, dtype, seed=5)
    q = normal(7, sum(end - begin for _, begin, end in spans), 5, 24)
    tokens, groups = len(q), 2
    kinds = {"q": (np.int8, 64), "outlier_column": (np.uint8, 1), "scaled_sum32": (np.float32, 2)}
    kinds |= {"negative_sum32": (np.int32, 2), "negative_sum64": (np.int32, 1)}
    kinds |= dict.fromkeys(("scale", "scaled_sum64", "outlier_value"), (np.float32, 1))
    arrays = {name: np.zeros((tokens, groups * many_), kind) for name, (kind, many_) in kinds.items()}
    quant = structure(HostQuant, **arrays)
    y = have.check(spans, q, "floats")
    assert_same_bits(have.cache.attend(spans, q, quant=quant), y, "the floats beside int8")
    rounded, scale, apart = quantize_activations(y.reshape(tokens, -1))
    assert_same_bits(arrays["q"][:, :120].astype(np.float64) + 0.0, rounded + 0.0, "q")
    assert not arrays["q"][:, 120:].any()
    assert_same_bits(arrays["scale"], scale[:, ::64].astype(np.float32), "scale")
    found = np.zeros_like(apart)
    for t, g in np.argwhere(arrays["outlier_column"]):
        found[t, 64 * g + arrays["outlier_column"][t, g] - 1] = arrays["outlier_value"][t, g]
    assert_same_bits(found, apart, "what is kept apart")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("many", [False, True])
def test_absorbed_latent_attention(call: Any, dtype: int, many: bool) -> None:
    """K of 576 columns, V of 512, appended by latent_append in its own test; here both as heads of that width."""
    lengths, heads = [270, 40], 10
    spans = [(0, 262, 270), (1, 38, 40)] if many else last_tokens(lengths)
    cache = DeviceCache(call, lengths, 1, 576, 512, dtype)
    row = [normal(80 + s, n, 576) for s, n in enumerate(lengths)]
    case = structure(HeadsCase, rope=np.tile([[1.0] * 32 + [0.0] * 32], (300, 1)).astype(np.float32),
                     rope_positions=300, rotary_dim=64)  # fmt: skip
    given = np.concatenate(row)
    everything = [(s, 0, n) for s, n in enumerate(lengths)]
    call("attention_latent", cache.handle, 0, given, np.ones(512, np.float32), 1e-6, case, cache.batch(everything))
    kept = np.split(ROUNDED[dtype](given), [lengths[0]])
    q = normal(8, sum(end - begin for _, begin, end in spans), heads, 576)
    y = cache.attend(spans, q, scale=0.07)
    k, v = [x[:, None] for x in kept], [x[:, None, :512] for x in kept]
    assert_close(y, *oracle(q, k, v, spans, scale=0.07), "latent")


@by_dtype
@pytest.mark.parametrize(("tokens", "window"), [(1, None), (3, 257), (12, None), (9, 30)])
def test_against_the_scalar_cpu_kernels(call: Any, dtype: int, tokens: int, window: int | None) -> None:
    """Up to 8 tokens scores of float caches have the CPU's bits; sums of weights run in another order, with one
    rounding a key each. More tokens: see `oracle`.

    An int8 cache: the CPU rounds q to max |q| / 32512, and a partition's weights times the scales of V to their maximum
    / 32512 (tests/unit/test_kernels_attention.py).
    """
    have = Sequences(call, [300], 2, 40, dtype, seed=6)
    q = normal(11, tokens, 6, 40)
    (k, v), name = have.raw[0], ("float32", "bfloat16", "int8")[dtype]
    expected = kernels.attention(q, k, v, window=window, kv_dtype=name, threads=1, isa="scalar")
    spans = [(0, 300 - tokens, 300)]
    y = have.check(spans, q, "the CPU's case", window=window)
    top = float(np.abs(v).max())
    bound = 2 * (300 + 16) * EPS * top
    if in_pieces(spans, dtype):
        norms = float(np.linalg.norm(q, axis=2).max() * np.linalg.norm(have.k[0], axis=2).max())
        bound += (2 * norms * 40**-0.5 + 1) * 2.0**-16 * top
    if dtype == INT8:
        delta = np.abs(q).max() / 65024 * np.abs(have.k[0]).sum(axis=2).max() * 40**-0.5
        bound += (4 * delta + 300 * 127 / 65024 / 127 * 2) * top
    assert_close(y, expected, bound, "the CPU")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@by_dtype
def test_nan_and_inf_reach_the_rows_that_see_them(call: Any, dtype: int, bad: float) -> None:
    have = Sequences(call, [300], 2, 24, dtype, seed=7)
    q = normal(12, 8, 6, 24)
    clean = have.cache.attend([(0, 292, 300)], q, window=4)
    k, v = (x[295:296].copy() for x in have.raw[0])
    for array in (k, v):
        kept = array[0, 1, 3]
        array[0, 1, 3] = bad  # seen from 295 to 298, by the heads of the second KV head
        have.cache.append([(0, 295, 296)], k, v)
        y = have.cache.attend([(0, 292, 300)], q, window=4)
        array[0, 1, 3] = kept
        have.cache.append([(0, 295, 296)], k, v)
        if np.isnan(bad) or dtype == INT8 or array is v:  # a score of -inf is a weight of 0
            assert not np.isfinite(y[3:7, 3:]).all(axis=2).any()
        y[3:7, 3:] = clean[3:7, 3:]
        assert_same_bits(y, clean, "the others")


def test_heads_too_wide_are_refused(call: Any) -> None:
    cache = DeviceCache(call, [1], 1, 16, 4096, F32)
    with pytest.raises(RuntimeError, match="status 3: attention over heads of 16 columns of K and 4096 of V"):
        cache.attend([(0, 0, 1)], normal(1, 1, 1, 16))


# Text of a source and what takes its place: mistakes that the checks above must find.
MISTAKES = {
    "window one wider": (
        "attention.cu",
        "position + 1 - a.window) : 0;\n      if",
        "position - a.window) : 0;\n      if",
    ),
    "own key unseen": ("attention.cu", "rows.end[r] = position + 1;", "rows.end[r] = position;"),
    "another head's keys": ("attention.cuh", "int64_t{kv_head} * kv.head", "int64_t{0 * kv_head} * kv.head"),
    "blocks in order": (
        "attention.cuh",
        "int64_t{table[first / kKvBlock]}",
        "int64_t{first / kKvBlock + 0 * *table + 1}",
    ),
    "no wait for the copies": ("attention.cuh", "copy_async_wait<kStages - 1>();", ""),
    "q of a neighbour": ("attention.cu", "b.first_head + r % w.row_heads} * a.head_dim", "b.first_head} * a.head_dim"),
    "last slice left out": ("attention.cuh", "j < slices; ++j", "j < slices - 1; ++j"),
    "last partition left out": ("attention.cu", "position / kPartition + 1 : 0", "position / kPartition : 0"),
    "pieces of q left out": ("attention_tiles.cu", "load_matrices(lo, t.q_lo +", "load_matrices(lo, t.k + 0 *"),
    "pieces of weights left out": ("attention_tiles.cu", "upper(rest(x0), rest(x1))", "0"),
    "what an earlier owner left": ("attention_tiles.cu", "if (row >= rows) {", "if (row >= rows + kKvBlock) {"),
    "V not waited for": (
        "attention_tiles.cu",
        "copy_async_wait<1>();\n    __syncthreads();  // V",
        "__syncthreads();  // V",
    ),
    "maximum of half a row": ("attention_tiles.cu", "__shfl_xor_sync(kAllLanes, top, 2)", "top"),
    "sums not brought along": ("attention_tiles.cu", "__fmul_rn(rows.sum[half], factor)", "rows.sum[half]"),
}


def few_checks(call: Any) -> None:
    lengths = [260, 40, 300]
    for many, dtype in ((False, F32), (True, F32), (True, BF16)):
        have = Sequences(call, lengths, 2, 24, dtype, seed=8, shift=4)
        spans = last_tokens(lengths, 5 if many else 1)
        q = normal(13, sum(end - begin for _, begin, end in spans), 4, 24)
        for window, scale in ((37, None), (None, None), (None, 0.01)):
            have.check(spans, q, "a few checks", window=window, scale=scale)


def test_no_mistake_is_none(call: Any) -> None:
    few_checks(call)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_seeded_mistakes_are_found(build: Callable[..., Any], mistake: str) -> None:
    name, text, wrong = MISTAKES[mistake]
    path = f"csrc/cuda/{name}"
    source = (ROOT / path).read_text()
    assert source.count(text) == 1, mistake
    call = build(*SOURCES, changed={path: source.replace(text, wrong)})
    with pytest.raises(AssertionError, match=r"out of bound|is nan"):
        few_checks(call)
