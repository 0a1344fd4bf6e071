"""route.cu and moe.cu: the router and the sorting with the CPU's bits where logits are exact, experts within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from compare import assert_close, assert_same_bits, linear_bound
from kernel_cases import EPS, FORMATS, bfloat16_bits, normal
from router_cases import by_router

from pyengine import kernels_moe
from pyengine._core import Backend, Format
from pyengine.decoder import ACTIVATIONS, router_fields
from pyengine.quantize import PackedFormat, choose
from pyengine.reference_moe import route as exact_route
from pyengine.spec import RouterSpec

SOURCES = (
    "tests/cuda/moe_driver.cc", "csrc/cuda/route.cu", "csrc/cuda/moe.cu", "csrc/cuda/linear.cu", "csrc/cuda/ffn.cu",
    "csrc/cuda/rows.cu", "csrc/cuda/repack.cc", "csrc/core/formats.cc", "csrc/core/memory.cc",
)  # fmt: skip


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
    return build(*SOURCES)


def exact(seed: int, *shape: int) -> np.ndarray:
    """Multiples of 1/8 up to 3: products of 64 and more of them are exact in float32, in any order."""
    return np.clip(np.rint(8 * normal(seed, *shape)) / 8, -3, 3).astype(np.float32)


def bias_of(router: RouterSpec) -> np.ndarray | None:
    return normal(9, router.num_experts) if router.selection_bias else None


def packed(fmt: PackedFormat, rows: int, parts: Sequence[tuple[np.ndarray, int, int]]) -> np.ndarray:
    """Bytes of a tensor, header included, of matrices at (first panel, panel stride)."""
    backend = Backend(1, "scalar")
    tensor = backend.tensor_create(int(fmt.format), rows, parts[0][0].shape[1], fmt.group)
    for part in parts:
        backend.tensor_pack(tensor, *part)
    return np.asarray(backend.tensor_bytes(tensor)).copy()


def router_matrix(weight: np.ndarray) -> np.ndarray:
    fmt = PackedFormat(Format.BF16 if weight.dtype == np.uint16 else Format.F32)
    return packed(fmt, len(weight), [(weight, 0, 1)])


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
        "moe_route", router_matrix(weight), x, tokens, bias, numbers, float(f["scale"]), float(f["eps"]), layer, out,
        first, order, place, counts, failure,
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


# ---- experts --------------------------------------------------------------------------------------------------------


class Experts:
    """Gate, up and down of so many experts in the two tensors of a layer, and of each alone."""

    def __init__(self, options: dict[str, Any], count: int, width: int, inter: int, seed: int = 20) -> None:
        gate, up = (normal(seed + i, count, inter, width) / np.float32(np.sqrt(width)) for i in range(2))
        down = normal(seed + 2, count, width, inter) / np.float32(np.sqrt(inter))
        self.stacks, self.count, self.width, self.inter = (gate, up, down), count, width, inter
        fmt, panels, wide = choose(**options).layers, -(-inter // 16), -(-width // 16)

        def pair(e: int, at: int) -> list[tuple[np.ndarray, int, int]]:
            return [(gate[e], 2 * at * panels, 2), (up[e], 2 * at * panels + 1, 2)]

        every = [part for e in range(count) for part in pair(e, e)]
        self.gate_up = packed(fmt, count * 2 * panels * 16, every)
        self.down = packed(fmt, count * wide * 16, [(down[e], e * wide, 1) for e in range(count)])
        self.alone = [
            (packed(fmt, 2 * panels * 16, pair(e, 0)), packed(fmt, wide * 16, [(down[e], 0, 1)])) for e in range(count)
        ]


def choose_rows(
    seed: int, tokens: int, experts: int, k: int, only: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """ids and weights [tokens][k], as a router might choose, among `only` those experts."""
    rng = np.random.default_rng(seed)
    among = list(only) or list(range(experts))
    ids = np.stack([rng.permutation(among)[:k] for _ in range(tokens)])
    return ids, rng.uniform(0.05, 1, (tokens, k)).astype(np.float32)


def run_experts(
    cuda: Any, experts: Experts, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, activation: int,
    before: np.ndarray | None = None, factor: float = 0.0,
) -> np.ndarray:  # fmt: skip
    tokens, k = ids.shape
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable").astype(np.int32)
    place = np.empty_like(order)
    place[order] = np.arange(len(order), dtype=np.int32)
    first = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts.count))]).astype(np.int32)
    chosen = np.concatenate([weights, ids.astype(np.float32)], axis=1)
    out = np.empty((tokens, experts.width), np.float32) if before is None else before.copy()
    cuda(
        "moe_experts", experts.gate_up, experts.down, x, tokens, chosen, first, order, place, experts.count, k,
        activation, factor, None, out, experts.width,
    )  # fmt: skip
    return out


def weighted(
    cuda: Any, experts: Experts, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, activation: int
) -> tuple[np.ndarray, np.ndarray]:
    """The float64 sum of what the dense kernels give for each expert, and how far a float32 one may be from it."""
    y, size = np.zeros((len(x), experts.width)), np.zeros((len(x), experts.width))
    for e in np.unique(ids):
        alone = np.empty((len(x), experts.width), np.float32)
        cuda("moe_dense", *experts.alone[e], x, len(x), activation, alone, experts.width)
        share = np.where(ids == e, weights, np.float32(0)).sum(axis=1, keepdims=True).astype(np.float64)
        y += share * alone
        size += share * np.abs(alone)
    return y, ids.shape[1] * EPS / 2 * size


SHAPES = [  # experts, chosen, width, intermediate columns, tokens
    (8, 2, 64, 172, 1),
    (3, 1, 33, 17, 20),
    (7, 7, 100, 65, 5),
    (1, 1, 16, 8, 9),
    (40, 3, 72, 64, 8),
]


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
def test_experts_are_the_dense_ffns_weighted(cuda: Any, options: dict[str, Any]) -> None:
    for count, k, width, inter, tokens in SHAPES:
        experts = Experts(options, count, width, inter)
        x, (ids, weights) = normal(1, tokens, width), choose_rows(2, tokens, count, k)
        y = run_experts(cuda, experts, x, ids, weights, 0)
        expected, bound = weighted(cuda, experts, x, ids, weights, 0)
        assert_close(y, expected, bound, f"{count} experts, {k} chosen, {tokens} tokens")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_experts_of_every_activation_added_to_the_hidden_state(cuda: Any, name: str) -> None:
    experts, activation = Experts({"quant": "int8"}, 5, 48, 80), int(ACTIVATIONS[name])
    x, (ids, weights) = normal(1, 6, 48), choose_rows(2, 6, 5, 2)
    expected, bound = weighted(cuda, experts, x, ids, weights, activation)
    before = normal(3, 6, 48)
    y = run_experts(cuda, experts, x, ids, weights, activation, before, 0.25)
    exact = before + 0.25 * expected
    assert_close(y, exact, 0.25 * bound + EPS * np.abs(exact), name)


def test_experts_in_float64(cuda: Any) -> None:
    experts = Experts({"quant": "f32"}, 9, 48, 40)
    x, (ids, weights) = normal(1, 21, 48), choose_rows(2, 21, 9, 3)
    y = run_experts(cuda, experts, x, ids, weights, 0)
    exact = np.zeros(y.shape)
    for t, s in np.ndindex(ids.shape):
        gate, up, down = (stack[ids[t, s]].astype(np.float64) for stack in experts.stacks)
        g = gate @ x[t].astype(np.float64)
        exact[t] += weights[t, s] * (down @ (g / (1 + np.exp(-g)) * (up @ x[t].astype(np.float64))))
    assert_close(y, exact, 8 * linear_bound(normal(1, 21, 40), experts.stacks[2][0]), "float64")


@pytest.mark.parametrize("options", [{"quant": "f32"}, {"quant": "int4"}], ids=["f32", "int4"])
def test_bits_of_a_token_do_not_depend_on_the_others(cuda: Any, options: dict[str, Any]) -> None:
    experts = Experts(options, 6, 80, 72)
    x, (ids, weights) = normal(1, 30, 80), choose_rows(2, 30, 6, 3)
    whole = run_experts(cuda, experts, x, ids, weights, 0)
    for part in (slice(0, 1), slice(3, 5), slice(8, 16), slice(29, None, -1)):
        some = run_experts(cuda, experts, x[part].copy(), ids[part].copy(), weights[part].copy(), 0)
        assert_same_bits(some, whole[part].copy(), f"tokens {part}")


def test_all_tokens_to_one_expert_and_experts_nobody_chose(cuda: Any) -> None:
    """Whole and ragged tiles of one expert, which is the first, the last or between."""
    experts = Experts({"quant": "int4"}, 37, 32, 24)
    for expert in (0, 20, 36):
        for tokens in (1, 8, 9, 17):
            x, (ids, _) = normal(1, tokens, 32), choose_rows(2, tokens, 37, 1, only=[expert])
            y = run_experts(cuda, experts, x, ids, np.ones((tokens, 1), np.float32), 0)
            alone = np.empty_like(y)
            cuda("moe_dense", *experts.alone[expert], x, tokens, 0, alone, 32)
            assert_same_bits(y, alone, f"weight 1 of expert {expert}")


def test_wrong_experts_are_outside_the_bound(cuda: Any) -> None:
    experts = Experts({"quant": "int8"}, 8, 48, 40)
    x, (ids, weights) = normal(1, 9, 48), choose_rows(2, 9, 8, 3)
    y = run_experts(cuda, experts, x, ids, weights, 0)
    _, bound = weighted(cuda, experts, x, ids, weights, 0)
    for what, wrong_ids, wrong_weights in (
        ("neighbour's experts", (ids + 1) % 8, weights),
        ("weights of the next slot", ids, np.roll(weights, 1, axis=1)),
        ("one expert less", ids[:, :2], weights[:, :2]),
        ("scaled", ids, weights * np.float32(1.001)),
    ):
        wrong, _ = weighted(cuda, experts, x, wrong_ids, wrong_weights, 0)
        with pytest.raises(AssertionError, match="out of bound"):
            assert_close(y, wrong, bound, what)
