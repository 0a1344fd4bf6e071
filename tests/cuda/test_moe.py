"""route.cu and moe.cu: the router and the sorting with the CPU's bits where logits are exact, experts within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from compare import assert_same_bits
from kernel_cases import bfloat16_bits, normal

from pyengine import kernels_moe
from pyengine._core import Backend, Format
from pyengine.decoder import router_fields
from pyengine.reference_moe import route as exact_route
from pyengine.spec import RouterSpec

ROUTERS = [
    RouterSpec(1, 1),
    RouterSpec(7, 7, normalise=True),
    RouterSpec(8, 2, normalise=True),
    RouterSpec(60, 4),
    RouterSpec(128, 8, normalise=True),
    RouterSpec(256, 256),
    RouterSpec(64, 6, scale=16.0, groups=8, top_groups=3),
    RouterSpec(256, 8, scoring="sigmoid", normalise=True, eps=1e-20, scale=2.5, groups=8, top_groups=4,
               group_score="top2_sum", selection_bias=True),
    RouterSpec(33, 3, scoring="sigmoid", selection_bias=True),
    RouterSpec(1600, 3),
]  # fmt: skip
by_router = pytest.mark.parametrize(
    "router", ROUTERS, ids=lambda r: f"{r.num_experts}_{r.top_k}_{r.scoring}_{r.groups}"
)


class Routed(NamedTuple):
    ids: np.ndarray
    weights: np.ndarray
    first_row: np.ndarray
    order: np.ndarray
    place: np.ndarray
    counts: np.ndarray
    failure: np.ndarray


@pytest.fixture(scope="module")
def cuda(build: Callable[..., Any]) -> Any:
    return build("tests/cuda/moe_driver.cc", "csrc/cuda/route.cu", "csrc/cuda/moe.cu", *MATRICES)


MATRICES = (
    "csrc/cuda/linear.cu", "csrc/cuda/rows.cu", "csrc/cuda/repack.cc", "csrc/core/formats.cc", "csrc/core/memory.cc",
)  # fmt: skip


def exact(seed: int, *shape: int) -> np.ndarray:
    """Multiples of 1/8 up to 3: products of 64 and more of them are exact in float32, in any order."""
    return np.clip(np.rint(8 * normal(seed, *shape)) / 8, -3, 3).astype(np.float32)


def bias_of(router: RouterSpec) -> np.ndarray | None:
    return normal(9, router.num_experts) if router.selection_bias else None


def packed(weight: np.ndarray) -> np.ndarray:
    """Bytes of the tensor, header included."""
    fmt = Format.BF16 if weight.dtype == np.uint16 else Format.F32
    backend = Backend(1, "scalar")
    tensor = backend.tensor_create(int(fmt), *weight.shape)
    backend.tensor_pack(tensor, weight)
    return np.asarray(backend.tensor_bytes(tensor)).copy()


def route(
    cuda: Any, x: np.ndarray, weight: np.ndarray, router: RouterSpec, bias: np.ndarray | None = None, layer: int = 5
) -> Routed:
    tokens, rows, f = len(x), len(x) * router.top_k, router_fields(router)
    out = np.empty((tokens, 2 * router.top_k), np.float32)
    first, order, place = (np.full(n, -1, np.int32) for n in (router.num_experts + 1, rows, rows))
    counts, failure = np.full(router.num_experts, 100, np.uint64), np.zeros(3, np.int32)
    numbers = np.array(
        [
            router.num_experts,
            router.top_k,
            f["groups"],
            f["top_groups"],
            f["scoring"],
            f["group_score"],
            f["normalise"],
        ],
        np.int32,
    )
    cuda(
        "moe_route", packed(weight), x, tokens, bias, numbers, float(f["scale"]), float(f["eps"]), layer, out, first,
        order, place, counts, failure,
    )  # fmt: skip
    ids = out[:, router.top_k :].astype(np.int64)
    return Routed(ids, np.ascontiguousarray(out[:, : router.top_k]), first, order, place, counts - 100, failure)


def assert_sorted(routed: Routed, experts: int) -> None:
    """Rows (token, slot) by expert, inside an expert ascending; where each lies; and how many every expert has."""
    flat = routed.ids.ravel()
    assert_same_bits(routed.order, np.argsort(flat, kind="stable").astype(np.int32), "order")
    assert_same_bits(routed.place[routed.order], np.arange(len(flat), dtype=np.int32), "places")
    counts = np.bincount(flat, minlength=experts)
    assert_same_bits(routed.counts, counts.astype(np.uint64), "counts, added to what was there")
    assert_same_bits(routed.first_row, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), "first rows")


@by_router
@pytest.mark.parametrize("bf16", [False, True])
def test_the_router_has_the_ids_and_bits_of_the_cpu(cuda: Any, router: RouterSpec, bf16: bool) -> None:
    x, weight = exact(1, 19, 40), exact(2, router.num_experts, 40) / 8
    given, bias = bfloat16_bits(weight) if bf16 else weight, bias_of(router)
    ids, weights = kernels_moe.route(x, weight, router, bias, isa="scalar")
    expected, _ = exact_route(x.astype(np.float64) @ weight.T, router, bias)
    for tokens in (1, 2, 8, 9, 19):
        ours = route(cuda, x[:tokens], given, router, bias)
        assert_same_bits(ours.ids, ids[:tokens], f"ids of {tokens} tokens")
        assert_same_bits(ours.weights, weights[:tokens].copy(), f"weights of {tokens} tokens")
        assert (np.sort(ours.ids, axis=1) == np.sort(expected[:tokens], axis=1)).all()
        assert ours.failure.tolist() == [0, -1, -1]
        assert_sorted(ours, router.num_experts)


def test_equal_scores_go_to_the_lower_expert(cuda: Any) -> None:
    for scoring in ("softmax", "sigmoid"):
        for tokens in (5, 12):
            zeros = np.zeros((tokens, 8), np.float32)
            ours = route(cuda, zeros, np.zeros((8, 8), np.float32), RouterSpec(8, 3, scoring))
            assert ours.ids.tolist() == [[0, 1, 2]] * tokens
            assert_sorted(ours, 8)
    grouped = RouterSpec(12, 4, groups=4, top_groups=2, group_score="top2_sum")
    zeros = np.zeros((1, 8), np.float32)
    assert route(cuda, zeros, np.zeros((12, 8), np.float32), grouped).ids.tolist() == [[0, 1, 2, 3]]


def test_masked_experts_get_no_token(cuda: Any) -> None:
    mask = np.zeros(40, np.float32)
    mask[::3] = -1e30
    for groups in (1, 5):
        router = RouterSpec(40, 4, groups=groups, top_groups=min(groups, 3), selection_bias=True)
        x, weight = exact(1, 11, 24), exact(2, 40, 24) / 8
        ours = route(cuda, x, weight, router, mask)
        assert (ours.ids % 3 != 0).all()
        assert_same_bits(ours.ids, kernels_moe.route(x, weight, router, mask, isa="scalar")[0], "ids")


def test_many_rows_are_sorted_like_few(cuda: Any) -> None:
    """More rows than a block has threads, and experts that nobody chose."""
    for tokens, experts, k in ((300, 11, 3), (257, 6, 1), (40, 128, 8)):
        weight = exact(3, experts, 16)
        weight[experts // 2] = -3
        x = np.abs(exact(4, tokens, 16))
        ours = route(cuda, x, weight, RouterSpec(experts, k))
        assert_sorted(ours, experts)
        assert (ours.counts == 0).any()


@pytest.mark.parametrize("tokens", [1, 5, 30])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_names_layer_and_first_token(cuda: Any, tokens: int, bad: float) -> None:
    x, weight = normal(1, tokens, 24), normal(2, 8, 24)
    first = tokens // 2
    x[first:, 3] = bad
    assert route(cuda, x, weight, RouterSpec(8, 2)).failure.tolist() == [5, 5, first]  # PE_COMPUTE, layer, token
