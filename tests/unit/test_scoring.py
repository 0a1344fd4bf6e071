"""score and score_rolling against log softmax of Engine.logits; shared contexts, windows, bad requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from compare import log_softmax
from golden.golden_cases import CONFIGS
from kv_pools import nothing_lost

import pyengine
from pyengine import errors, scoring, system

CONFIG = {**CONFIGS["qwen2_window"], "max_position_embeddings": 256, "eos_token_id": 96, "bos_token_id": 1}
VOCAB = 97


def ids_of(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("scoring"), CONFIG, seed=6)


@pytest.fixture(scope="module", params=["f32", "int8_cache", "no_prefix_cache"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[pyengine.Engine]:
    options: dict[str, dict[str, Any]] = {
        "f32": {},
        "int8_cache": {"kv_dtype": "int8"},
        "no_prefix_cache": {"prefix_cache_bytes": 0},
    }
    with pyengine.load(folder, quant="f32", threads=2, **options[request.param]) as one:
        yield one
        assert nothing_lost(one.pool)


def expected(engine: pyengine.Engine, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = context + continuation
    rows = engine.logits(ids[:-1])[len(context) - 1 :]
    chosen = log_softmax(rows)[np.arange(len(continuation)), continuation]
    return float(chosen.sum()), rows.argmax(1).tolist() == continuation


def check(found: tuple[float, bool], wanted: tuple[float, bool], tokens: int) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=2e-6 * tokens)
    assert found[1] == wanted[1]


def test_scores_are_sums_of_log_softmax(engine: pyengine.Engine) -> None:
    greedy = engine.generate(ids_of(40), max_tokens=5, ignore_eos=True).tokens
    shared = ids_of(70, seed=5)
    requests = [
        (ids_of(40), greedy),
        (ids_of(40), [*greedy[:4], (greedy[4] + 1) % VOCAB]),
        ([3], [4]),
        (ids_of(31), ids_of(2, seed=2)),
        (ids_of(32), ids_of(90, seed=3)),
        *[(shared, ids_of(1 + 7 * i, seed=20 + i)) for i in range(9)],
        (ids_of(100, seed=7), ids_of(157, seed=8)),  # a full context, and one token that is not run
    ]
    found = engine.score(requests)
    assert [found[0][1], found[1][1]] == [True, False]
    for got, (context, continuation) in zip(found, requests, strict=True):
        check(got, expected(engine, context, continuation), len(continuation))
    assert engine.score(requests[::-1]) == found[::-1]
    assert [engine.score([request])[0] for request in requests] == found
    assert nothing_lost(engine.pool)


def test_an_empty_context_is_bos_or_eos(engine: pyengine.Engine, tmp_path: Path) -> None:
    assert engine.score([([], [7, 8])]) == engine.score([([1], [7, 8])])
    write_tiny_model(tmp_path / "eos", {**CONFIG, "bos_token_id": None}, seed=6)
    with pyengine.load(tmp_path / "eos", quant="f32") as one:
        assert one.score([([], [7, 8])]) == one.score([([96], [7, 8])])
        assert one.score_rolling([7, 8]) == (one.score([([96], [7, 8])])[0][0], 2)
    write_tiny_model(tmp_path / "none", {**CONFIG, "bos_token_id": None, "eos_token_id": None}, seed=6)
    with pyengine.load(tmp_path / "none", quant="f32") as one, pytest.raises(errors.RequestError, match="BOS"):
        one.score([([], [7])])


@pytest.mark.parametrize(
    ("window", "stride"), [(None, None), (256, 100), (64, None), (64, 64), (64, 1), (33, 8), (1, 1)]
)
@pytest.mark.parametrize("length", [0, 1, 40, 64, 65, 130, 300])
def test_a_rolling_score_counts_each_token_once(
    engine: pyengine.Engine, length: int, window: int | None, stride: int | None
) -> None:
    ids = ids_of(length, seed=11)
    text, size = [1, *ids], window or 256
    step = stride or size
    total, at = 0.0, 0
    while at < length:
        end = min(at + (step if at else size), length)
        begin = max(0, end - size)
        total += expected(engine, text[begin : at + 1], text[at + 1 : end + 1])[0]
        at = end
    if length > 130 and step == 1:
        return  # 300 windows, slowly
    found, count = engine.score_rolling(ids, window=window, stride=stride)
    assert count == length
    assert found == pytest.approx(total, abs=2e-6 * max(length, 1))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e.score([([1], [])]), "request 0: an empty continuation"),
        (lambda e: e.score([([1], [2]), ([VOCAB], [2])]), "token id 97"),
        (lambda e: e.score([([1], [2.0])]), "expected an integer"),
        (lambda e: e.score([([1] * 200, [2] * 58)]), "request 0: 200 and 58 tokens, the context takes 256"),
        (lambda e: e.score([[1]]), "request 0: .*expected .context ids, continuation ids"),
        (lambda e: e.score(["ab"]), "request 0"),
        (lambda e: e.score_rolling([VOCAB]), "token id 97"),
        (lambda e: e.score_rolling([1], window=257), "window 257; expected 1 to 256"),
        (lambda e: e.score_rolling([1], window=0), "window 0"),
        (lambda e: e.score_rolling([1], window=8, stride=9), "stride 9; expected 1 to 8"),
        (lambda e: e.score_rolling([1], stride=1.0), "stride 1.0"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(engine: pyengine.Engine, call: Any, says: str) -> None:
    runs = engine.program.program.times()[1]
    with pytest.raises(errors.RequestError, match=says):
        call(engine)
    assert engine.program.program.times()[1] == runs


def test_nothing_is_no_compute(engine: pyengine.Engine) -> None:
    assert engine.score([]) == []
    assert engine.score_rolling([]) == (0.0, 0)


def test_memory_is_checked_and_a_closed_engine_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pyengine.load(folder, quant="f32")
    monkeypatch.setattr(system, "available_memory", lambda: 100_000)
    with pytest.raises(errors.ResourceError, match="a KV cache of 1600 tokens"):
        one.score([(ids_of(200), [2])] * 9)
    one.close()
    for call in (lambda: one.score([]), lambda: one.score_rolling([])):
        with pytest.raises(errors.RequestError, match="closed"):
            call()


def test_a_shared_context_is_computed_once(folder: Path) -> None:
    context = ids_of(100)
    with pyengine.load(folder, quant="f32") as one:
        one.score([(context, [i, i + 1]) for i in range(5)])
        tokens = []
        forward = one.forward
        one.forward = lambda entries, **options: (  # type: ignore[method-assign]
            tokens.append(sum(len(ids) for _, ids in entries)),
            forward(entries, **options),
        )[1]
        one.score([(context, [i, i + 1]) for i in range(5)])
        assert sum(tokens) == 5 * (100 + 1 - 96)  # whole blocks, and not the token before the continuation
    assert scoring.SCORED_AT_A_TIME > 5
