"""RMSNorm, the gated FFN, lm_head and embedding rows: against float64 or, where the design says so, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits, linear_bound
from kernel_cases import BEST, EPS, FORMATS, ISAS, THREADS, TINY, normal, unpack

from pyengine import kernels, reference
from pyengine._core import OpKind
from pyengine.errors import ComputeError, RequestError
from pyengine.packer import padded
from pyengine.quantize import choose

by_isa = pytest.mark.parametrize("isa", ISAS)
by_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
WIDTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 172, 576, 1440)


def norm_weight(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 1.5, n).astype(np.float32)


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


@by_isa
def test_rms_norm(isa: str) -> None:
    for n in WIDTHS:
        x, w = normal(n, 5, n) * np.float32(3), norm_weight(n, n)
        x[3] *= np.float32(1e-4)  # here eps counts
        y = kernels.rms_norm(x, w, eps=1e-5, threads=2, isa=isa)
        expected = reference.rms_norm(x.astype(np.float64), w.astype(np.float64), 1e-5)
        # a sum of n / 16 squares per lane and a tree of 4, a root, and three products
        assert_close(y, expected, (n / 16 + 10) * EPS * np.abs(expected) + TINY, f"{n} columns")
        assert_same_bits(y, kernels.rms_norm(x, w, eps=1e-5, threads=1, isa=ISAS[0]), f"{n} columns, scalar")


def test_rms_norm_wrong_variants() -> None:
    x, w = normal(1, 4, 64), norm_weight(2, 64)
    y = kernels.rms_norm(x, w, eps=1e-2)
    bound = 20 * EPS * np.abs(y).astype(np.float64)
    wide, wide_w = x.astype(np.float64), w.astype(np.float64)
    assert_close(y, reference.rms_norm(wide, wide_w, 1e-2), bound, "right")
    centred = wide - wide.mean(axis=1, keepdims=True)
    for wrong in (
        reference.rms_norm(wide, wide_w, 0.0),
        reference.rms_norm(wide, wide_w + 1, 1e-2),
        reference.rms_norm(wide, np.ones(64), 1e-2),
        reference.rms_norm(centred, wide_w, 1e-2),
    ):
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(y, wrong, bound, "wrong")


@by_isa
def test_rms_norm_of_extremes(isa: str) -> None:
    ones = np.ones(100, np.float32)
    zero = kernels.rms_norm(np.zeros((2, 100), np.float32), ones, isa=isa)
    assert not zero.any()
    large = kernels.rms_norm(np.full((1, 100), 1e18, np.float32), ones, isa=isa)
    assert_close(large, np.ones((1, 100)), 20 * EPS, "1e18: its square still fits")
    small = kernels.rms_norm(np.full((1, 100), 1e-40, np.float32), ones, isa=isa)
    assert np.abs(small).max() <= TINY
    with pytest.raises(RequestError, match="weight has shape"):
        kernels.rms_norm(np.zeros((2, 100), np.float32), ones[:99], isa=isa)


# ---- gated FFN -------------------------------------------------------------------------------------------------------


def ffn_weights(seed: int, hidden: int, inter: int) -> tuple[np.ndarray, ...]:
    gate, up = (normal(seed + i, inter, hidden) / np.float32(np.sqrt(hidden)) for i in (0, 1))
    return gate, up, normal(seed + 2, hidden, inter) / np.float32(np.sqrt(inter))


def sums_and_act(
    x: np.ndarray, gate: np.ndarray, up: np.ndarray, activation: str, options: dict[str, Any], isa: str
) -> tuple[np.ndarray, ...]:
    """gate(x), up(x) and the core's activation of them, from a program of its own."""
    b = kernels.Bench(1, isa)
    fmt, inter = choose(options["quant"], options.get("group_size"), options.get("scheme")).layers, len(gate)
    weight = b.tensor(fmt, 2 * padded(inter), [(gate, 0, 2), (up, 1, 2)])
    loaded, sums, act = b.buffer(x.shape[1]), b.buffer(2 * padded(inter)), b.buffer(inter)
    b.op(OpKind.LOAD_HIDDEN, output=loaded)
    b.op(OpKind.LINEAR, input=b.quantized(loaded, fmt), output=sums, weight=weight)
    b.op(OpKind.ACT_MUL, input=sums, output=act, activation=int(kernels.ACTIVATIONS[activation]))
    shown = b.show(b.program(act, len(x)), x, inter)
    joined = b.show(b.program(sums, len(x)), x, 2 * padded(inter)).reshape(len(x), -1, 2, 16)
    halves = [joined[:, :, i].reshape(len(x), -1)[:, :inter] for i in (0, 1)]
    return halves[0], halves[1], shown


@by_isa
@by_format
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_every_stage_of_the_gated_ffn(isa: str, options: dict[str, Any], activation: str) -> None:
    """The sums are two linear layers, the activation is float64 but for rounding, the end is a linear layer of it."""
    hidden, inter = 96, 172
    gate, up, down = ffn_weights(1, hidden, inter)
    gate *= np.float32(4)
    for m in (1, 13):
        x = normal(2, m, hidden)
        g, u, act = sums_and_act(x, gate, up, activation, options, isa)
        assert_same_bits(g, kernels.linear(x, gate, threads=1, isa=isa, **options), "gate")
        assert_same_bits(u, kernels.linear(x, up, threads=1, isa=isa, **options), "up")
        wide = g.astype(np.float64)
        right = reference.ACTIVATIONS[activation](wide) * u
        wrongs = [f(wide) * u for name, f in reference.ACTIVATIONS.items() if name != activation]
        size = (np.abs(wide) + 1) * np.abs(u).astype(np.float64)
        assert_close(act, right, 16 * EPS * size, activation)
        for other in (*wrongs, reference.ACTIVATIONS[activation](u.astype(np.float64)) * g):
            with pytest.raises(AssertionError, match="out of bound"):
                assert_close(act, other, 16 * EPS * size, "the other activation, or of the wrong half")
        y = kernels.gated_ffn(x, gate, up, down, activation=activation, threads=1, isa=isa, **options)
        assert_same_bits(y + 0, kernels.linear(act, down, threads=1, isa=isa, **options) + 0, "down")


@by_isa
@by_format
def test_what_is_wrong_with_a_token_stays_with_it(isa: str, options: dict[str, Any]) -> None:
    """Hidden values of 16 tokens are rounded together: none sees another's NaN, Inf or maximum."""
    weights, x = ffn_weights(5, 64, 100), normal(6, 35, 64)
    right = kernels.swiglu_ffn(x, *weights, threads=1, isa=isa, **options)
    for token in (0, 15, 16, 34):
        for value in (np.nan, np.inf, 1e18):
            changed = x.copy()
            changed[token, 7] = value
            y = kernels.swiglu_ffn(changed, *weights, threads=1, isa=isa, **options)
            others = np.delete(np.arange(35), token)
            assert_same_bits(y[others], right[others], f"{value} in token {token}")
            assert value == 1e18 or not np.isfinite(y[token]).any()


@by_isa
@by_format
def test_fused_and_unfused_give_the_same_bits(isa: str, options: dict[str, Any]) -> None:
    for hidden, inter in ((64, 172), (33, 64), (17, 1), (100, 63), (16, 257)):
        weights = ffn_weights(3, hidden, inter)
        for m in (1, 8, 9, 13):
            x = normal(4, m, hidden)
            fused, plain = (
                kernels.swiglu_ffn(x, *weights, fused=f, threads=1, isa=isa, **options) for f in (True, False)
            )
            assert_same_bits(fused, plain, f"hidden {hidden}, intermediate {inter}, {m} tokens")


@by_format
def test_ffn_bits_do_not_depend_on_threads_batch_or_isa(options: dict[str, Any]) -> None:
    weights, x = ffn_weights(5, 96, 300), normal(6, 13, 96)
    first = kernels.swiglu_ffn(x, *weights, threads=1, isa=ISAS[0], **options)
    for isa in ISAS:
        for threads in THREADS if isa == BEST else (2,):
            for m in (1, 13):
                y = kernels.swiglu_ffn(x[:m], *weights, threads=threads, isa=isa, **options)
                assert_same_bits(y, first[:m], f"{isa}, {threads} threads, {m} tokens")


@by_isa
def test_ffn_in_float32_against_float64(isa: str) -> None:
    gate, up, down = ffn_weights(7, 172, 576)
    x = normal(8, 9, 172)
    wide = [a.astype(np.float64) for a in (x, gate, up, down)]
    y = kernels.swiglu_ffn(x, gate, up, down, quant="f32", threads=2, isa=isa)
    g, u = wide[0] @ wide[1].T, wide[0] @ wide[2].T
    gate_error, up_error = linear_bound(x, gate), linear_bound(x, up)
    # |silu'| <= 1.1; 16 roundings of the activation itself
    act_error = (
        1.1 * gate_error * (np.abs(u) + up_error) + np.abs(g) * up_error + 16 * EPS * (np.abs(g) + 1) * np.abs(u)
    )
    act = reference.silu(g) * u
    bound = act_error @ np.abs(wide[3]).T + linear_bound(act, down)
    assert_close(y, reference.swiglu_ffn(*wide), bound, "ffn")
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(y, reference.swiglu_ffn(wide[0], wide[2], wide[1], wide[3]), bound, "gate and up exchanged")


@by_isa
def test_activations_far_out_are_exact_limits(isa: str) -> None:
    """silu(-large) is 0 and silu(large) its argument; nothing overflows on the way."""
    x = np.array([[1.0], [-1.0]], np.float32)
    gate = np.array([[500.0], [88.0], [1e30], [3e38]], np.float32)
    for activation in ("silu", "gelu_tanh", "gelu", "relu"):
        y = kernels.gated_ffn(
            x, gate, np.ones_like(gate), np.eye(4, dtype=np.float32), quant="f32", activation=activation, isa=isa
        )
        assert_close(y[0], gate[:, 0], 4 * EPS * gate[:, 0].astype(np.float64), activation)
        assert np.abs(y[1]).max() <= 1e-35


def test_ffn_arguments_that_do_not_fit() -> None:
    gate, up, down = ffn_weights(9, 16, 32)
    x = normal(10, 2, 16)
    for call, says in (
        (lambda: kernels.swiglu_ffn(x, gate, up[:31], down), r"up has shape \[31, 16\]; expected \[32, 16\]"),
        (lambda: kernels.swiglu_ffn(x, gate, up, down[:, :31]), r"down has shape \[16, 31\]; expected \[N, 32\]"),
        (lambda: kernels.swiglu_ffn(x[:, :15], gate, up, down), "x has shape"),
        (lambda: kernels.gated_ffn(x, gate, up, down, activation="tanh"), "activation 'tanh'"),
    ):
        with pytest.raises(RequestError, match=says):
            call()


# ---- lm_head and embedding -------------------------------------------------------------------------------------------


@by_isa
@by_format
def test_lm_head_is_a_norm_and_a_linear_layer(isa: str, options: dict[str, Any]) -> None:
    x, norm = normal(11, 13, 172), norm_weight(12, 172)
    for vocab in (1, 15, 16, 33, 129):
        w = normal(13, vocab, 172)
        for m in (1, 13):
            y = kernels.lm_head(x[:m], norm, w, eps=1e-5, threads=2, isa=isa, **options)
            normed = kernels.rms_norm(x[:m], norm, eps=1e-5, threads=1, isa=isa)
            assert_same_bits(
                y, kernels.linear(normed, w, threads=1, isa=isa, **options), f"vocabulary {vocab}, {m} rows"
            )


@by_isa
def test_lm_head_refuses_logits_that_are_not_finite(isa: str) -> None:
    x, norm, w = normal(14, 3, 64), norm_weight(15, 64), normal(16, 40, 64)
    x[1, 5] = np.nan
    with pytest.raises(ComputeError, match="NaN or Inf in the logits at position 1"):
        kernels.lm_head(x, norm, w, threads=2, isa=isa)
    assert np.float32(TINY) * np.float32(0.5) > 0, "denormal arithmetic of the calling thread is gone"


@by_isa
@by_format
def test_embedding_rows_are_what_the_table_holds(isa: str, options: dict[str, Any]) -> None:
    w = normal(17, 50, 129)
    ids = np.array([49, 0, 7, 7, 16])
    table = kernels.Linear(w, threads=1, isa=isa, **options)
    rows = kernels.embed(ids, w, threads=2, isa=isa, **options)
    assert_same_bits(rows, table.dequantized()[ids], "rows")
    layout = unpack(table.packed())
    assert_close(rows, layout.values[ids], EPS * layout.parts[ids], "rows by the layout")


def test_embedding_arguments_that_do_not_fit() -> None:
    w = normal(18, 5, 8)
    for ids, says in (([5], "ids from 5 to 5"), ([-1], "expected 0 to 4"), ([0.5], "float64"), ([], "ids are")):
        with pytest.raises(RequestError, match=says):
            kernels.embed(ids, w)
