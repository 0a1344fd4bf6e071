"""sample.cu: ids and log probabilities of the CPU's sampler (the scalar table) for the same logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from kernel_cases import EPS, normal

from pyengine._core import Format, OpKind
from pyengine.kernel_program import Bench
from pyengine.quantize import PackedFormat

SOURCES = ("tests/cuda/sample_driver.cc", "csrc/cuda/sample.cu")
VOCABS = (1, 2, 63, 64, 65, 97, 1000, 1023, 1024, 1025, 2500)


class Sampled(NamedTuple):
    ids: np.ndarray
    logprobs: np.ndarray
    targets: np.ndarray
    finite: np.ndarray


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any]) -> Any:
    return build(*SOURCES)


def on_cuda(kernels: Any, logits: np.ndarray, params: Sequence[dict[str, Any]], targets: Sequence[int]) -> Sampled:
    """params: temperature 0 and no more is greedy."""
    rows, vocab = logits.shape

    def of(name: str, dtype: Any) -> np.ndarray:
        return np.array([p.get(name, 0) for p in params], dtype)

    out = Sampled(np.empty(rows, np.int32), *(np.empty(rows, np.float32) for _ in range(2)), np.empty(rows, np.int32))
    kernels(
        "sample_rows", logits, rows, vocab, of("temperature", np.float32), of("top_k", np.int32), of("seed", np.uint64),
        of("step", np.uint64), np.array(targets, np.int32), *out,
    )  # fmt: skip
    return out


def on_cpu(logits: np.ndarray, params: Sequence[dict[str, Any]], targets: Sequence[int]) -> Sampled:
    """The same for one row of logits, which are the column of a head that multiplies 1."""
    b = Bench(1, "scalar")
    source = b.buffer(1)
    b.op(OpKind.LOAD_HIDDEN, output=source)
    weight = b.tensor(PackedFormat(Format.F32), len(logits), [(np.ascontiguousarray(logits[:, None]), 0, 1)])
    b.op(OpKind.LM_HEAD, input=source, weight=weight, norm=b.vector(np.ones(1, np.float32)), eps=0.0)
    b.op(OpKind.SAMPLE)
    n = len(params)
    positions, ends, rows = np.arange(n, dtype=np.int32), np.array([0, n], np.int32), np.arange(n, dtype=np.int32)
    sampling = [p if p.get("temperature") else None for p in params]
    ids, logprobs, wanted, _, _ = b.program(None, n).run(
        np.empty(0, np.int32), positions, ends, [], rows, None, sampling, np.ones((n, 1), np.float32), [], None, True,
        targets=np.array(targets, np.int32),
    )  # fmt: skip
    return Sampled(ids, logprobs, wanted, np.ones(n, np.int32))


def logprob_bound(logits: np.ndarray) -> float:
    """exp and a sum of n of them, each a few roundings: their log moves by as much, and the result is rounded."""
    return (len(logits) / 16 + 24) * EPS + EPS * float(np.ptp(logits.astype(np.float64)) + 16)


def assert_like_the_cpu(kernels: Any, logits: np.ndarray, params: Sequence[dict[str, Any]], what: str) -> None:
    targets = [(7 * i) % len(logits) for i in range(len(params))]
    ours = on_cuda(kernels, np.tile(logits, (len(params), 1)), params, targets)
    theirs = on_cpu(logits, params, targets)
    assert_same_bits(ours.ids, theirs.ids, f"{what}: ids")
    assert ours.finite.all()
    bound = logprob_bound(logits)
    assert_close(ours.logprobs, theirs.logprobs, 2 * bound, f"{what}: log probabilities")
    assert_close(ours.targets, theirs.targets, 2 * bound, f"{what}: those of targets")
    wide = logits.astype(np.float64)
    exact = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert_close(ours.logprobs, exact[ours.ids], bound, f"{what}: float64")
    assert_close(ours.targets, exact[targets], bound, f"{what}: targets in float64")


@pytest.mark.parametrize("vocab", VOCABS)
def test_ids_and_log_probabilities_are_the_cpus(kernels: Any, vocab: int) -> None:
    logits = normal(vocab, vocab) * np.float32(3)
    params = [
        {"temperature": t, "top_k": k, "seed": 1000 * k + s, "step": s}
        for t in (0.3, 1.0, 4.0)
        for k in (1, 2, 40, 64)
        for s in range(3)
    ]
    assert_like_the_cpu(kernels, logits, [{}, *params], f"vocabulary {vocab}")


def test_many_seeds_give_the_cpus_ids(kernels: Any) -> None:
    logits = normal(5, 300)
    params = [{"temperature": 1.5, "top_k": 64, "seed": 2**63 + 11 * s, "step": s << 20} for s in range(400)]
    assert_like_the_cpu(kernels, logits, params, "400 seeds")
    chosen = on_cuda(kernels, np.tile(logits, (400, 1)), params, [-1] * 400).ids
    assert len(set(chosen.tolist())) > 30  # it does draw


@pytest.mark.parametrize("vocab", [40, 1500, 20000])
def test_ties_go_to_the_lowest_id(kernels: Any, vocab: int) -> None:
    logits = np.zeros(vocab, np.float32)
    logits[::3] = -0.0
    top = on_cuda(kernels, logits[None].copy(), [{}], [-1])
    assert top.ids.tolist() == [0]
    assert top.targets.tolist() == [0.0]
    params = [{"temperature": 1.0, "top_k": 20, "seed": s, "step": 1} for s in range(12)]
    assert_like_the_cpu(kernels, logits, params, "all equal")
    logits[vocab // 2 :] = 5
    assert on_cuda(kernels, logits[None].copy(), [{}], [-1]).ids.tolist() == [vocab // 2]
    assert_like_the_cpu(kernels, logits, params, "half equal")


def test_extremes(kernels: Any) -> None:
    """Logits far apart: no overflow, and what has no weight is not drawn."""
    logits = np.array([-3e38, 3e38, 1, -1, 2.9e38] * 20, np.float32)
    params = [{"temperature": t, "top_k": 64, "seed": s, "step": 0} for s in range(4) for t in (1e-3, 1.0, 1e6)]
    ours = on_cuda(kernels, np.tile(logits, (len(params), 1)), params, [-1] * len(params))
    theirs = on_cpu(logits, params, [-1] * len(params))
    assert_same_bits(ours.ids, theirs.ids, "ids")
    assert_same_bits(ours.logprobs, theirs.logprobs, "log probabilities")


def test_rows_are_sampled_alone(kernels: Any) -> None:
    logits = normal(3, 4, 1100)
    params: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_k": 50, "seed": 5, "step": 2}, {}, {"temperature": 2.0, "top_k": 9, "seed": 5}, {},
    ]  # fmt: skip
    whole = on_cuda(kernels, logits, params, [3, -1, 8, 1099])
    for r in range(4):
        alone = on_cuda(kernels, logits[r : r + 1].copy(), params[r : r + 1], [[3, -1, 8, 1099][r]])
        for one, all_rows, name in zip(alone, whole, Sampled._fields, strict=True):
            assert_same_bits(one, all_rows[r : r + 1].copy(), f"row {r}: {name}")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_wherever_it_is(kernels: Any, bad: float) -> None:
    logits = normal(1, 4, 2100)
    logits[0, 0], logits[1, 1023], logits[3, 2099] = bad, bad, bad
    assert on_cuda(kernels, logits, [{}, {"temperature": 1.0, "top_k": 3}, {}, {}], [-1] * 4).finite.tolist() == [
        0, 0, 1, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("cap", [30.0, 0.5])
def test_softcap_has_the_bits_of_the_cpu(kernels: Any, cap: float) -> None:
    x = np.stack([normal(1, 1001) * np.float32(20), np.linspace(-2, 2, 1001, dtype=np.float32)])
    y = x.copy()
    kernels("sample_softcap", y, cap, 2, 1001)
    for row in range(2):
        b = Bench(1, "scalar")
        source = b.buffer(1)
        b.op(OpKind.LOAD_HIDDEN, output=source)
        weight = b.tensor(PackedFormat(Format.F32), 1001, [(np.ascontiguousarray(x[row][:, None]), 0, 1)])
        b.op(OpKind.LM_HEAD, input=source, weight=weight, norm=b.vector(np.ones(1, np.float32)), eps=0.0, softcap=cap)
        logits = np.empty((1, 1001), np.float32)
        b.program(None, 1).run(
            np.empty(0, np.int32), np.zeros(1, np.int32), np.array([0, 1], np.int32), [], np.zeros(1, np.int32),
            logits, None, np.ones((1, 1), np.float32), [], None, True,
        )  # fmt: skip
        assert_same_bits(y[row : row + 1].copy(), logits, "softcap")
    exact = cap * np.tanh(x.astype(np.float64) / cap)
    assert_close(y, exact, 4 * EPS * np.abs(exact), "float64")
