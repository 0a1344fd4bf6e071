"""The FFN of two matrices and biases of both forms: by hand, against float64, and the same bits everywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits, linear_bound
from kernel_cases import BEST, EPS, FORMATS, ISAS, THREADS, TINY, normal

from pyengine import kernels, reference
from pyengine._core import OpKind
from pyengine.errors import RequestError

by_isa = pytest.mark.parametrize("isa", ISAS)
by_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
# by hand: h = x W1 = [1, 2, -1], of which ReLU keeps [1, 2, 0]
X = np.array([[1, 2]], np.float32)
W1 = np.array([[1, 0, 1], [0, 1, -1]], np.float32)
W2 = np.array([[1, 0], [0, 1], [1, -1]], np.float32)
UP = np.array([[1, 0.5, 0], [1, 0, 2]], np.float32)


@by_isa
@pytest.mark.parametrize("fused", [True, False])
def test_by_hand(isa: str, fused: bool) -> None:
    options: dict[str, Any] = {"quant": "f32", "fused": fused, "isa": isa}
    plain = kernels.ffn(X, W1.T, W2.T, activation="relu", **options)
    assert_close(plain, np.array([[1.0, 2.0]]), 0)
    biases = np.array([0.5, -3, 2], np.float32), np.array([10, 20], np.float32)
    biased = kernels.ffn(X, W1.T, W2.T, *biases, activation="relu", **options)
    assert_close(biased, np.array([[1.5 + 1 + 10, 0 - 1 + 20]]), 0)
    gated = kernels.gated_ffn(X, W1.T, UP.T, W2.T, **options)
    assert_close(gated, np.array([[1.117, 1.957]]), 5e-4)
    assert_same_bits(gated, kernels.swiglu_ffn(X, W1.T, UP.T, W2.T, **options), "swiglu_ffn")


def act_of(x: np.ndarray, activation: str, isa: str, threads: int = 1) -> np.ndarray:
    """The core's activation of x [M, N]."""
    b = kernels.Bench(threads, isa)
    source, out = b.buffer(x.shape[1]), b.buffer(x.shape[1])
    b.op(OpKind.LOAD_HIDDEN, output=source)
    b.op(OpKind.ACT, input=source, output=out, activation=int(kernels.ACTIVATIONS[activation]))
    return b.show(b.program(out, len(x)), x, x.shape[1])


@by_isa
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_alone(isa: str, activation: str) -> None:
    """Every float32 near 0, both tails, and widths that are no whole panels."""
    grid = np.concatenate([np.linspace(-15, 15, 30011), 10.0 ** np.linspace(-30, 30, 999), [0.0, -0.0, 88, -88, 3e38]])
    x = np.concatenate([grid, -grid]).astype(np.float32)
    y = act_of(x[None, :], activation, isa)[0]
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = reference.ACTIVATIONS[activation](wide)
        others = [f(wide) for name, f in reference.ACTIVATIONS.items() if name != activation]
    bound = 16 * EPS * np.minimum(np.abs(wide) + 1, np.maximum(np.abs(expected), 1) * 4) + TINY
    keep = np.isfinite(expected)
    assert_close(y[keep], expected[keep], bound[keep], activation)
    for other in others:
        fine = keep & np.isfinite(other)
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(y[fine], other[fine], bound[fine], "another")
    assert_same_bits(y, act_of(x[None, :], activation, ISAS[0])[0], "scalar")
    for n in (1, 15, 16, 17, 33, 65):
        assert_same_bits(act_of(x[None, :n], activation, isa, 2), y[None, :n], f"{n} columns")
    assert np.isnan(act_of(np.full((1, 3), np.nan, np.float32), activation, isa)).all()


@by_isa
def test_gelu_keeps_its_digits_in_the_tail(isa: str) -> None:
    """x Phi(x) of large negative x is tiny, and relatively right: it comes from no difference."""
    x = np.linspace(-8, -0.5, 1001).astype(np.float32)[None, :]
    right = np.array([float(v) * 0.5 * math.erfc(-float(v) / math.sqrt(2)) for v in x[0]])
    # exp of x^2 / 2, itself rounded
    relative = (16 + x[0].astype(np.float64) ** 2) * EPS
    assert_close(act_of(x, "gelu", isa)[0], right, relative * np.abs(right), "gelu")


def ffn_weights(seed: int, hidden: int, inter: int, out: int) -> tuple[np.ndarray, ...]:
    up, down = normal(seed, inter, hidden), normal(seed + 1, out, inter)
    biases = normal(seed + 2, inter), normal(seed + 3, out)
    return up / np.float32(np.sqrt(hidden)), down / np.float32(np.sqrt(inter)), *biases


@by_isa
@by_format
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_stage_of_the_plain_ffn(isa: str, options: dict[str, Any], activation: str) -> None:
    """Fused and unfused are a linear layer, its activation and another linear layer, bit for bit."""
    for hidden, inter, out in ((96, 172, 96), (33, 64, 17), (16, 1, 40), (100, 257, 15)):
        up, down, up_bias, down_bias = ffn_weights(1, hidden, inter, out)
        for m in (1, 8, 13):
            x = normal(2, m, hidden)
            sums = kernels.linear(x, up, up_bias, threads=1, isa=isa, **options)
            act = act_of(sums, activation, isa)
            right = kernels.linear(act, down, down_bias, threads=1, isa=isa, **options)
            for fused in (True, False):
                arguments: dict[str, Any] = {"activation": activation, "fused": fused, "threads": 2, "isa": isa}
                y = kernels.ffn(x, up, down, up_bias, down_bias, **arguments, **options)
                assert_same_bits(y + 0, right + 0, f"{hidden}, {inter}, {out}, {m} tokens, fused {fused}")


@by_format
def test_biases_of_the_gated_form(options: dict[str, Any]) -> None:
    up, down, up_bias, down_bias = ffn_weights(3, 96, 172, 40)
    gate, _, gate_bias, _ = ffn_weights(7, 96, 172, 40)
    x = normal(4, 9, 96)
    for fused in (True, False):
        biases = gate_bias, up_bias, down_bias
        y = kernels.gated_ffn(x, gate, up, down, *biases, activation="gelu_tanh", fused=fused, threads=1, **options)
        g, u = (kernels.linear(x, w, b, threads=1, **options) for w, b in ((gate, gate_bias), (up, up_bias)))
        h = act_of(g, "gelu_tanh", BEST) * u
        assert_same_bits(y + 0, kernels.linear(h, down, down_bias, threads=1, **options) + 0, f"fused {fused}")


@by_format
def test_bits_do_not_depend_on_threads_batch_or_isa(options: dict[str, Any]) -> None:
    weights, x = ffn_weights(5, 96, 300, 96), normal(6, 13, 96)
    first = kernels.ffn(x, *weights, threads=1, isa=ISAS[0], **options)
    for isa in ISAS:
        for threads in THREADS if isa == BEST else (2,):
            for m in (1, 13):
                y = kernels.ffn(x[:m], *weights, threads=threads, isa=isa, **options)
                assert_same_bits(y, first[:m], f"{isa}, {threads} threads, {m} tokens")


@by_isa
def test_in_float32_against_float64(isa: str) -> None:
    up, down, up_bias, down_bias = ffn_weights(8, 172, 576, 96)
    x = normal(9, 9, 172)
    y = kernels.ffn(x, up, down, up_bias, down_bias, activation="gelu", quant="f32", threads=2, isa=isa)
    wide = [a.astype(np.float64) for a in (x, up, down, up_bias, down_bias)]
    h = wide[0] @ wide[1].T + wide[3]
    h_error = linear_bound(x, up) + EPS * np.abs(h)
    act_error = 1.2 * h_error + 16 * EPS * (np.abs(h) + 1)  # |gelu'| < 1.13
    bound = act_error @ np.abs(wide[2]).T + linear_bound(reference.gelu(h), down) + EPS * np.abs(wide[4])
    right = reference.ffn(*wide, "gelu")
    assert_close(y, right, bound + EPS * np.abs(right), "ffn")
    for wrong in (
        reference.ffn(*wide, "silu"),
        reference.ffn(*wide[:3], None, wide[4], "gelu"),
        reference.ffn(*wide[:4], None, "gelu"),
    ):
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(y, wrong, bound + EPS * np.abs(right), "wrong")


def test_arguments_that_do_not_fit() -> None:
    up, down, up_bias, down_bias = ffn_weights(9, 16, 32, 16)
    x = normal(10, 2, 16)
    for call, says in (
        (lambda: kernels.ffn(x, up, down[:, :31]), r"down has shape \[16, 31\]; expected \[N, 32\]"),
        (lambda: kernels.ffn(x, up, down, up_bias[:31]), r"up_bias has shape \[31\]; expected \[32\]"),
        (lambda: kernels.ffn(x, up, down, up_bias, down_bias[1:]), r"down_bias has shape \[15\]; expected \[16\]"),
        (lambda: kernels.gated_ffn(x, up, up, down, up_bias[:31]), r"gate_bias has shape \[31\]; expected \[32\]"),
        (lambda: kernels.ffn(x[:, :15], up, down), "x has shape"),
        (lambda: kernels.ffn(x, up, down, activation="tanh"), "activation 'tanh'; expected one of silu, gelu"),
    ):
        with pytest.raises(RequestError, match=says):
            call()
