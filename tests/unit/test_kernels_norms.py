"""LayerNorm alone, norms of all of q and k, and norms that are added: float64 bounds, and the same bits everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from kernel_cases import EPS, ISAS, TINY, normal

from pyengine import kernels, reference
from pyengine._core import Norm, OpKind
from pyengine.errors import RequestError

by_isa = pytest.mark.parametrize("isa", ISAS)
WIDTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 172, 576, 1440)


def norm_bound(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    """Of layer_norm: the mean and x less it lose a few roundings of the largest |x|, which 1 / std scales."""
    n, std = x.shape[1], np.sqrt(x.astype(np.float64).var(axis=1, keepdims=True) + eps)
    lost = (n / 16 + 8) * EPS * np.abs(x).max(axis=1, keepdims=True) / std
    return (lost + (n / 16 + 12) * EPS * np.abs(x - x.mean(axis=1, keepdims=True)) / std) * np.abs(w) + TINY


@by_isa
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(isa: str, biased: bool) -> None:
    for n in WIDTHS:
        x, w, b = normal(n, 5, n) * np.float32(3) + np.float32(2), normal(n + 1, n), normal(n + 2, n)
        x[3] *= np.float32(1e-4)  # here eps counts
        bias = b if biased else None
        y = kernels.layer_norm(x, w, bias, eps=1e-5, threads=2, isa=isa)
        wide = None if bias is None else bias.astype(np.float64)
        expected = reference.layer_norm(x.astype(np.float64), w.astype(np.float64), wide, 1e-5)
        bound = norm_bound(x, w, 1e-5) + 2 * EPS * np.abs(expected)
        assert_close(y, expected, bound, f"{n} columns")
        assert_same_bits(y, kernels.layer_norm(x, w, bias, threads=1, isa=ISAS[0]), f"{n} columns, scalar")


def test_layer_norm_wrong_variants() -> None:
    x, w, b = normal(1, 4, 64) + np.float32(1), normal(2, 64), normal(3, 64)
    y = kernels.layer_norm(x, w, b, eps=1e-2)
    wide, wide_w, wide_b = (a.astype(np.float64) for a in (x, w, b))
    bound = norm_bound(x, w, 1e-2) + 2 * EPS * np.abs(y)
    assert_close(y, reference.layer_norm(wide, wide_w, wide_b, 1e-2), bound, "right")
    centred = wide - wide.mean(axis=1, keepdims=True)
    for wrong in (
        reference.layer_norm(wide, wide_w, wide_b, 0.0),
        reference.layer_norm(wide, wide_w, None, 1e-2),
        reference.rms_norm(wide, wide_w, 1e-2) + wide_b,
        centred / np.sqrt(wide.var(axis=1, ddof=1, keepdims=True) + 1e-2) * wide_w + wide_b,
    ):
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(y, wrong, bound, "wrong")


@by_isa
def test_layer_norm_of_extremes(isa: str) -> None:
    """A row of one value is all bias; a large offset is taken off before anything is squared."""
    w, b = np.ones(100, np.float32), normal(4, 100)
    assert_same_bits(kernels.layer_norm(np.zeros((2, 100), np.float32), w, b, isa=isa), np.stack([b, b]), "zeros")
    small = normal(5, 1, 128)
    moved = kernels.layer_norm(small + np.float32(4096), np.ones(128, np.float32), isa=isa)
    right = reference.layer_norm((small + np.float32(4096)).astype(np.float64), np.ones(128), None, 1e-5)
    assert_close(moved, right, 4096 * 16 * EPS, "an offset of 4096")
    with pytest.raises(RequestError, match="bias has shape"):
        kernels.layer_norm(np.zeros((2, 100), np.float32), w, b[:99], isa=isa)


def programs(isa: str, kind: Norm) -> tuple[kernels.Bench, int]:
    """y = x * 0, then y += norm(x), as two ops."""
    b = kernels.Bench(2, isa)
    x, branch, out = b.buffer(172), b.buffer(172), b.buffer(172)
    norm: dict[str, Any] = {"norm": b.vector(normal(7, 172)), "norm_kind": int(kind), "eps": 1e-5}
    if kind == Norm.LAYER_NORM:
        norm["norm_bias"] = b.vector(normal(8, 172))
    b.op(OpKind.LOAD_HIDDEN, output=x)
    b.op(OpKind.MASK_COLUMNS, output=out, norm=b.vector(np.zeros(172, np.float32)))
    b.op(OpKind.NORM, input=x, output=branch, **norm)
    b.op(OpKind.ADD, input=branch, output=out)
    return b, out


@by_isa
@pytest.mark.parametrize("kind", [Norm.RMS_NORM, Norm.LAYER_NORM])
def test_a_norm_that_is_added_is_the_norm(isa: str, kind: Norm) -> None:
    x = normal(6, 9, 172)
    b, out = programs(isa, kind)
    fused, plain = (b.show(b.program(out, 9, fused), x, 172) for fused in (True, False))
    assert_same_bits(fused, plain, "fused and unfused")
    weight, bias = normal(7, 172), normal(8, 172)
    alone = (
        kernels.rms_norm(x, weight, eps=1e-5, isa=isa)
        if kind == Norm.RMS_NORM
        else kernels.layer_norm(x, weight, bias, isa=isa)
    )
    assert_same_bits(fused, alone + 0, "the norm alone")


@by_isa
def test_norms_of_all_heads(isa: str) -> None:
    """Where the weights are as wide as all heads, q is one row to normalize and k another; v stays."""
    heads, kv_heads, dim = 3, 1, 24
    x, q_weight, k_weight = normal(9, 5, 80 + 32 + 24), normal(10, 72), normal(11, 24)
    b = kernels.Bench(2, isa)
    joined = b.buffer(x.shape[1])
    b.op(OpKind.LOAD_HIDDEN, output=joined)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    b.op(OpKind.QK_NORM, input=joined, norm=b.vector(q_weight), norm2=b.vector(k_weight), eps=1e-5, **shape)
    y = b.show(b.program(joined, 5), x, x.shape[1])
    assert_same_bits(y[:, :72], kernels.rms_norm(x[:, :72], q_weight, eps=1e-5, isa=isa), "q")
    assert_same_bits(y[:, 80:104], kernels.rms_norm(x[:, 80:104], k_weight, eps=1e-5, isa=isa), "k")
    assert_same_bits(y[:, 112:], x[:, 112:], "v")


def refused(kind: OpKind, says: str, *, width: int = 32, out: int = 32, **fields: Any) -> None:
    b = kernels.Bench(1, None)
    x, y = b.buffer(width), b.buffer(out)
    vectors = {name: b.vector(np.ones(n, np.float32)) for name, n in fields.items() if name.startswith("norm") and n}
    numbers = {name: n for name, n in fields.items() if name not in vectors}
    b.op(OpKind.LOAD_HIDDEN, output=x)
    b.op(kind, input=x, **({} if kind == OpKind.QK_NORM else {"output": y}), **numbers, **vectors)
    with pytest.raises(RequestError, match=says):
        b.program(None, 1)


def test_norms_that_do_not_fit_are_refused() -> None:
    for kind in (OpKind.NORM, OpKind.NORM_RESIDUAL):
        refused(kind, "the norm's width differs", norm=31)
        refused(kind, "only a layer norm has a bias", norm=32, norm_bias=32)
        refused(kind, "shapes differ", norm=32, out=31)
    heads = {"heads": 2, "kv_heads": 1, "head_dim": 16}
    refused(OpKind.QK_NORM, "needs the norms of q and k", width=64, **heads)
    refused(OpKind.QK_NORM, "neither head_dim columns nor those of all heads", width=64, norm=32, norm2=32, **heads)
    refused(OpKind.QK_NORM, "neither head_dim columns nor those of all heads", width=64, norm=48, norm2=16, **heads)
