"""Seeded mistakes in the kernels of rows, routing, experts and sampling: a test of theirs finds each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Mistake(NamedTuple):
    file: str
    old: str
    new: str
    tests: str  # the file of the test
    test: str
    arguments: tuple[Any, ...] = ()


def rows(old: str, new: str, test: str, *arguments: Any, file: str = "rows.cu") -> Mistake:
    return Mistake(f"csrc/cuda/{file}", old, new, "test_rows", test, arguments)


def moe(old: str, new: str, test: str, *arguments: Any, file: str = "route.cu") -> Mistake:
    return Mistake(f"csrc/cuda/{file}", old, new, "test_moe", test, arguments)


def sample(old: str, new: str, test: str, *arguments: Any) -> Mistake:
    return Mistake("csrc/cuda/sample.cu", old, new, "test_sample", test, arguments)


MISTAKES = {
    "row not picked": rows("a.rows ? a.rows[row] : row", "row", "test_norms_of_picked_rows_and_into_a_sum"),
    "not centred": rows("fmaf(at(i) - mean, at(i) - mean, sum)", "fmaf(at(i), at(i), sum)", "test_norms", 1, True),
    "gate and up pair by pair": rows(
        "c / kPanel * 2 * kPanel + c % kPanel", "2 * c", "test_activations_have_the_bits_of_the_cpu", "silu"
    ),
    "position of the row": rows("positions[t]", "positions ? t : 0", "test_embedding_rows", False, True),
    "no barrier in a sum": rows(
        "parts[warp_id()] = x;\n  __syncthreads();", "parts[warp_id()] = x;", "test_norms", 0, False, file="device.h"
    ),
    "one of two apart": rows(
        "__popc(top0) + __popc(top1) == 1", "top0 + top1", "test_rounding_to_int8", 172, file="quantize.cuh"
    ),
    "scale of what is apart": rows("    max = below;\n", "", "test_rounding_to_int8", 64, file="quantize.cuh"),
    "ties to the higher expert": moe("at < best", "at > best", "test_equal_scores_go_to_the_lower_expert"),
    "own part counted": moe("w < warp ? equal", "w <= warp ? equal", "test_many_rows_are_sorted_like_few"),
    "no barrier between counts": moe(
        "equal[warp] = same;\n  }\n  __syncthreads();", "equal[warp] = same;\n  }", "test_many_rows_are_sorted_like_few"
    ),
    "any token's failure": moe("if (weight != weight) atomicMin(&first, t);", "if (weight != weight) first = t + 1;",
                               "test_a_logit_that_is_not_finite_names_layer_and_first_token", 5, float("nan")),
    "row of the slot": moe("tokens.per_row = a.routing.top_k;", "",
                           "test_bits_of_a_token_do_not_depend_on_the_others", {"quant": "f32"}, file="moe.cu"),
    "the tile's first row": moe("(tile - (until - tiles))", "(until - tiles)",
                                "test_all_tokens_to_one_expert_and_experts_nobody_chose", file="moe.cu"),
    "no barrier while sorting": sample("      __syncthreads();\n      for", "      for",
                                       "test_many_seeds_give_the_cpus_ids"),
    "ties to the higher id": sample("(0xffffffffu - id)", "id", "test_ties_go_to_the_lowest_id", 1500),
    "random numbers of another key": sample("k1 += 0xBB67AE85u", "k1 += 0xBB67AE84u",
                                            "test_many_seeds_give_the_cpus_ids"),
    "sums of chunks as they are": sample("* exp(static_cast<double>(logit_of(parts[c].best)) - top)", "",
                                         "test_ids_and_log_probabilities_are_the_cpus", 2500),
    "lists of one block": sample("merged[(row * gridDim.x + block) * kKept", "merged[row * gridDim.x * kKept",
                                 "test_ties_go_to_the_lowest_id", 20000),
}  # fmt: skip


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(build: Callable[..., Any], name: str) -> None:
    m = MISTAKES[name]
    tests = module(m.tests)
    text = (ROOT / m.file).read_text()
    assert text.count(m.old) == 1, f"{m.file} has {m.old!r} {text.count(m.old)} times"
    wrong = build(*tests.SOURCES, changed={m.file: text.replace(m.old, m.new)})
    with pytest.raises((AssertionError, RuntimeError)):
        getattr(tests, m.test)(wrong, *m.arguments)
