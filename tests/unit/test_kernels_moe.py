"""Mixtures of experts on every ISA: the router against float64, the experts against dense FFNs, bits against bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits, linear_bound
from kernel_cases import EPS, FORMATS, ISAS, THREADS, bfloat16_bits, normal
from router_cases import by_router

from pyengine import kernels, kernels_moe
from pyengine.errors import ComputeError, RequestError
from pyengine.reference_moe import route, weighted_sum
from pyengine.spec import RouterSpec

by_isa = pytest.mark.parametrize("isa", ISAS)


def bias_of(router: RouterSpec) -> np.ndarray | None:
    return normal(9, router.num_experts) if router.selection_bias else None


def oracle(x: np.ndarray, weight: np.ndarray, router: RouterSpec) -> tuple[np.ndarray, np.ndarray]:
    """The reference on float32 logits that are exact: x and weight hold small integers, so the order is no question."""
    return route((x.astype(np.float64) @ weight.T), router, bias_of(router))


def exact(seed: int, *shape: int) -> np.ndarray:
    """Multiples of 1/8 up to 3: products of 64 and more of them are exact in float32, in any order."""
    return np.clip(np.rint(8 * normal(seed, *shape)) / 8, -3, 3).astype(np.float32)


@by_isa
@by_router
def test_report_d05_d15_the_router_is_the_reference(isa: str, router: RouterSpec) -> None:
    x, weight = exact(1, 19, 40), exact(2, router.num_experts, 40) / 8
    ids, weights = kernels_moe.route(x, weight, router, bias_of(router), threads=2, isa=isa)
    expected, exact_weights = oracle(x, weight, router)
    sure = (np.sort(expected, axis=1) == np.sort(ids, axis=1)).all(axis=1)
    assert sure.all()
    by_id = np.argsort(ids, axis=1), np.argsort(expected, axis=1)
    ours, theirs = (np.take_along_axis(w, at, axis=1) for w, at in zip((weights, exact_weights), by_id, strict=True))
    size = router.scale * (router.top_k + router.num_experts + 16) * EPS
    assert_close(ours, theirs, size, "weights")
    assert (ids >= 0).all()
    assert (ids < router.num_experts).all()
    assert (np.sort(ids, axis=1)[:, 1:] > np.sort(ids, axis=1)[:, :-1]).all(), "an expert twice"
    if not router.normalise and router.scoring == "softmax":
        assert (weights >= 0).all()
        assert (weights.sum(axis=1) <= router.scale * (1 + 1e-5)).all()
    first = kernels_moe.route(x, weight, router, bias_of(router), threads=1, isa=ISAS[0])
    for m in (1, 2, 3, 19):
        few = kernels_moe.route(x[:m], weight, router, bias_of(router), threads=3, isa=isa)
        assert_same_bits(few[0], first[0][:m].copy(), f"ids of {m} tokens")
        assert_same_bits(few[1], first[1][:m].copy(), f"weights of {m} tokens")


@by_isa
def test_report_d12_equal_scores_go_to_the_lower_expert(isa: str) -> None:
    for scoring in ("softmax", "sigmoid"):
        ids, weights = kernels_moe.route(
            np.zeros((5, 8), np.float32), np.zeros((8, 8), np.float32), RouterSpec(8, 3, scoring), isa=isa
        )
        assert ids.tolist() == [[0, 1, 2]] * 5
        assert (weights == weights[0, 0]).all()
    grouped = RouterSpec(12, 4, groups=4, top_groups=2, group_score="top2_sum")
    assert kernels_moe.route(np.zeros((1, 8), np.float32), np.zeros((12, 8), np.float32), grouped, isa=isa)[
        0
    ].tolist() == [[0, 1, 2, 3]]


@by_isa
def test_report_d10_d11_logits_that_are_equal_in_bfloat16_are_told_apart(isa: str) -> None:
    weight = np.zeros((6, 4), np.float32)
    weight[:, 0] = [0.5, 1.0, 1.0001, 0.9, 1.0002, 0.1]
    ids, _ = kernels_moe.route(np.array([[1, 0, 0, 0]], np.float32), weight, RouterSpec(6, 2), isa=isa)
    assert ids.tolist() == [[4, 2]]


@by_isa
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_report_d14_a_logit_that_is_not_finite_is_an_error_and_the_router_goes_on(
    isa: str, tokens: int, bad: float
) -> None:
    x, weight, router = normal(1, tokens, 24), normal(2, 8, 24), RouterSpec(8, 2)
    x[-1, 3] = bad
    with pytest.raises(ComputeError, match=rf"NaN or Inf in the router of layer -1 at position {tokens - 1}"):
        kernels_moe.route(x, weight, router, isa=isa)
    moe = kernels_moe.MoE(weight, *experts(8, 24, 16), router, isa=isa)
    with pytest.raises(ComputeError, match="router"):
        moe(x)
    assert np.isfinite(moe(normal(3, tokens, 24))).all()


def test_a_bfloat16_router_gives_the_bits_of_its_float32_values() -> None:
    x, weight = normal(1, 9, 33), bfloat16_bits(normal(2, 40, 33))
    wide = (weight.astype(np.uint32) << 16).view(np.float32)
    for ours, theirs in zip(*(kernels_moe.route(x, w, RouterSpec(40, 5)) for w in (weight, wide)), strict=True):
        assert_same_bits(ours, theirs)


def experts(count: int, width: int, inter: int, seed: int = 20) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    gate, up = (normal(seed + i, count, inter, width) / np.float32(np.sqrt(width)) for i in range(2))
    return gate, up, normal(seed + 2, count, width, inter) / np.float32(np.sqrt(inter))


def dense(
    x: np.ndarray, weight: np.ndarray, stacks: tuple[np.ndarray, ...], router: RouterSpec, isa: str, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The float64 weighted sum of whole float32 FFNs of the core, and how far float32 sums may be from it."""
    ids, weights = kernels_moe.route(x, weight, router, isa=isa)
    sizes: list[float] = [0.0]

    def one(index: int, rows: np.ndarray) -> np.ndarray:
        gate, up, down = (stack[index] for stack in stacks)
        y = kernels.swiglu_ffn(rows.astype(np.float32), gate, up, down, isa=isa, **options)
        sizes.append(float(np.abs(y).max()))
        return y.astype(np.float64)

    y = weighted_sum(x.astype(np.float64), ids, weights.astype(np.float64), one)
    return y, (router.top_k + 1) * EPS * max(sizes) * np.abs(weights).sum(axis=1).max() * np.ones_like(y)


@by_isa
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
def test_report_d19_experts_are_dense_ffns_weighted(isa: str, options: dict[str, Any]) -> None:
    """At M = 1, as few rows of an expert (GEMV) and as many (GEMM); widths with tails in every group size."""
    for count, k, width, inter, tokens in (
        (8, 2, 64, 172, 1),
        (3, 1, 33, 17, 40),
        (7, 7, 100, 65, 11),
        (1, 1, 16, 8, 3),
    ):
        router = RouterSpec(count, k, normalise=count == 8)
        x, weight, stacks = normal(1, tokens, width), normal(2, count, width) / 4, experts(count, width, inter)
        y = kernels_moe.moe_ffn(x, weight, *stacks, router, isa=isa, threads=2, **options)
        expected, bound = dense(x, weight, stacks, router, isa, **options)
        assert_close(y, expected, bound, f"{count} experts, {k} chosen, {tokens} tokens")


def test_experts_in_float64() -> None:
    count, k, width, inter = 9, 3, 48, 40
    router = RouterSpec(count, k)
    x, weight, stacks = normal(1, 21, width), normal(2, count, width) / 4, experts(count, width, inter)
    y = kernels_moe.moe_ffn(x, weight, *stacks, router, quant="f32")
    ids, weights = route(x.astype(np.float64) @ weight.T.astype(np.float64), router)

    def one(index: int, rows: np.ndarray) -> np.ndarray:
        gate, up, down = (stack[index].astype(np.float64) for stack in stacks)
        g = rows @ gate.T
        return (g / (1 + np.exp(-g)) * (rows @ up.T)) @ down.T

    bound = 8 * linear_bound(normal(3, 21, inter), stacks[2][0])
    assert_close(y, weighted_sum(x.astype(np.float64), ids, weights, one), bound, "float64")


@by_isa
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
def test_threads_batch_order_and_fusion_change_no_bit(isa: str, options: dict[str, Any]) -> None:
    count, k, width, inter = 12, 3, 80, 72
    router = RouterSpec(count, k, normalise=True)
    x, weight, stacks = normal(1, 45, width), normal(2, count, width) / 4, experts(count, width, inter)
    first = kernels_moe.moe_ffn(x, weight, *stacks, router, isa=ISAS[0], threads=1, **options)
    for threads in THREADS if isa == ISAS[-1] else (1, 3):
        for fused in (True, False):
            moe = kernels_moe.MoE(weight, *stacks, router, isa=isa, threads=threads, fused=fused, **options)
            what = f"{threads} threads, fused {fused}"
            assert_same_bits(moe(x), first, what)
            assert_same_bits(moe(x[::-1].copy()), first[::-1].copy(), f"{what}, reversed")
            for m in (1, 2, 3, 9):
                assert_same_bits(moe(x[:m]), first[:m].copy(), f"{what}, {m} tokens")
                assert_same_bits(moe(x[-m:]), first[-m:].copy(), f"{what}, the last {m} tokens")


@by_isa
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_report_d20_all_tokens_to_one_expert_and_experts_nobody_chose(isa: str, tokens: int) -> None:
    count, width, inter = 6, 32, 24
    x, weight, stacks = np.abs(normal(1, tokens, width)), normal(2, count, width), experts(count, width, inter)
    weight[4] += 100
    for quant in ("f32", "int4"):
        moe = kernels_moe.MoE(weight, *stacks, RouterSpec(count, 1), quant=quant, isa=isa, threads=2)
        y = moe(x)
        assert moe.routed.tolist() == [0, 0, 0, 0, tokens, 0]
        alone = kernels.swiglu_ffn(x, *(stack[4] for stack in stacks), quant=quant, isa=isa)
        assert_same_bits(y, alone, f"{quant}: weight 1 of one expert")


def test_report_d21_every_expert_chosen_is_the_dense_weighted_sum() -> None:
    count, width, inter = 4, 32, 24
    router = RouterSpec(count, count)
    x, weight, stacks = normal(1, 7, width), normal(2, count, width) / 4, experts(count, width, inter)
    y = kernels_moe.moe_ffn(x, weight, *stacks, router, quant="f32")
    logits = x.astype(np.float64) @ weight.T
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    parts = [kernels.swiglu_ffn(x, *(stack[e] for stack in stacks), quant="f32") for e in range(count)]
    expected = sum(shares[:, e : e + 1] * part.astype(np.float64) for e, part in enumerate(parts))
    assert_close(y, np.asarray(expected), 64 * EPS * float(np.abs(np.stack(parts)).max()), "sum of all")


def test_wrong_sums_are_outside_the_bound() -> None:
    count, k, width, inter = 8, 3, 48, 40
    router = RouterSpec(count, k)
    x, weight, stacks = normal(1, 9, width), normal(2, count, width) / 4, experts(count, width, inter)
    y = kernels_moe.moe_ffn(x, weight, *stacks, router, quant="f32")
    _, bound = dense(x, weight, stacks, router, ISAS[-1], quant="f32")
    others = tuple(np.roll(stack, 1, axis=0) for stack in stacks)
    for what, stack, spec in (
        ("neighbour's experts", others, router),
        ("weights normalised", stacks, RouterSpec(count, k, normalise=True)),
        ("one expert less", stacks, RouterSpec(count, k - 1)),
        ("sigmoid", stacks, RouterSpec(count, k, "sigmoid")),
        ("scaled", stacks, RouterSpec(count, k, scale=1.01)),
    ):
        wrong, _ = dense(x, weight, stack, spec, ISAS[-1], quant="f32")
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(y, wrong, bound, what)


@pytest.mark.parametrize(
    ("router", "text"),
    [
        (RouterSpec(8, 9), "top_k"),
        (RouterSpec(8, 0), "width 0"),
        (RouterSpec(8, 2, groups=3), "do not divide"),
        (RouterSpec(8, 2, groups=4, top_groups=5), "do not divide"),
        (RouterSpec(8, 5, groups=4, top_groups=2), "fewer experts than top_k"),
        (RouterSpec(8, 2, groups=8, top_groups=4, group_score="top2_sum"), "two experts in a group"),
        (RouterSpec(8, 2, "relu"), "expected one of softmax, sigmoid"),
    ],
)
def test_a_router_that_cannot_be_is_refused(router: RouterSpec, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        kernels_moe.route(np.ones((1, 8), np.float32), np.ones((8, 8), np.float32), router)
