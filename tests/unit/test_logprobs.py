"""Penalties, logit bias and log probabilities against the same rules in numpy, alone, drafted and in a batch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from compare import log_softmax
from golden.golden_cases import CONFIGS

import pyengine
from pyengine import errors
from pyengine.sampling import SaidTokens

CONFIG = {**CONFIGS["llama"], "max_position_embeddings": 512, "eos_token_id": 96}
VOCAB = 97
PROMPT = [5, 17, 3, 80, 17]
INF = float("inf")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pyengine.Engine]:
    folder = write_tiny_model(tmp_path_factory.mktemp("logprobs"), CONFIG, seed=4)
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


def adjusted(row: np.ndarray, prompt: list[int], said: list[int], p: dict[str, Any]) -> np.ndarray:
    """Logits of a step, float32 [V]: bias, repetition, frequency, presence, in this order."""
    x = row.copy()
    for token, value in p.get("logit_bias", {}).items():
        x[token] += np.float32(value)
    repetition = np.float32(p.get("repetition_penalty", 1))
    for token in {*prompt, *said}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(said):
        x[token] -= np.float32(p.get("frequency_penalty", 0)) * np.float32(said.count(token))
        x[token] -= np.float32(p.get("presence_penalty", 0))
    return x


OPTIONS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -1.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {5: 3.0, 9: -4.0, 17: -INF}},
    {"logit_bias": {token: -INF for token in range(VOCAB) if token not in (8, 50)}, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.6, "presence_penalty": 0.7, "frequency_penalty": 0.2, "logit_bias": {3: 6.0, 20: 4.0}},
]


def name_of(options: dict[str, Any]) -> str:
    return "+".join(options)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_greedy_tokens_are_those_of_the_rules(engine: pyengine.Engine, options: dict[str, Any]) -> None:
    result = engine.generate(PROMPT, max_tokens=30, ignore_eos=True, **options)
    rows = engine.logits([*PROMPT, *result.tokens])[len(PROMPT) - 1 : -1]
    for step, (row, token) in enumerate(zip(rows, result.tokens, strict=True)):
        assert token == int(adjusted(row, PROMPT, result.tokens[:step], options).argmax())
    np.testing.assert_allclose(result.logprobs, log_softmax(rows)[np.arange(30), result.tokens], atol=2e-6)
    drafted = engine.generate(PROMPT, max_tokens=30, ignore_eos=True, speculate="ngram", **options)
    assert (drafted.tokens, drafted.logprobs) == (result.tokens, result.logprobs)
    assert result.tokens != engine.generate(PROMPT, max_tokens=30, ignore_eos=True).tokens


def test_the_order_of_the_rules_shows(engine: pyengine.Engine) -> None:
    """Penalties before the bias, or a presence that counts, would give other tokens in some step."""
    p = OPTIONS[-1]
    tokens = engine.generate(PROMPT, max_tokens=30, ignore_eos=True, **p).tokens
    rows = engine.logits([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    bias_last, counted, prompt_counted = [], [], []
    for step, row in enumerate(rows):
        said = tokens[:step]
        late = adjusted(row, PROMPT, said, {**p, "logit_bias": {}})
        for token, value in p["logit_bias"].items():
            late[token] += value
        bias_last.append(int(late.argmax()))
        counted.append(
            int(adjusted(row, PROMPT, said, {**p, "frequency_penalty": 0.9, "presence_penalty": 0}).argmax())
        )
        prompt_counted.append(int(adjusted(row, [], PROMPT + said, p).argmax()))
    assert tokens not in (bias_last, counted, prompt_counted)


def test_sampled_tokens_follow_the_adjusted_logits(engine: pyengine.Engine) -> None:
    options = {"temperature": 0.8, "logit_bias": {7: 4.0, 5: -INF}, "frequency_penalty": 0.5}
    row = adjusted(engine.logits(PROMPT)[-1], PROMPT, [], options).astype(np.float64) / 0.8
    p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    draws = [engine.generate(PROMPT, max_tokens=1, seed=s, ignore_eos=True, **options).tokens[0] for s in range(600)]
    error = np.abs(np.bincount(draws, minlength=VOCAB) / 600 - p)
    assert (error <= 5 * np.sqrt(p * (1 - p) / 600) + 2 / 600).all()
    assert 5 not in draws


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ({VOCAB: 1.0}, "token id 97; expected 0 to 96"),
        ({191222: 1.0}, "token id 191222"),
        ({-1: 1.0}, "token id -1"),
        ({2**70: 1.0}, "expected 0 to 96"),
        (dict.fromkeys(range(VOCAB), -INF), "-inf for all 97"),
        ({"191222": -100}, "'191222'"),
        ({"abc": 1}, "'abc'"),
        ({1: math.nan}, "nan"),
    ],
)
def test_malformed_g22_report_f14_bad_biases_are_refused_at_the_door(
    engine: pyengine.Engine, bias: dict[Any, float], says: str
) -> None:
    runs = engine.program.program.times()[1]
    for call in (engine.stream, lambda ids, **options: engine.generate_batch([ids, ids], **options)):
        with pytest.raises(errors.RequestError, match=says):
            call(PROMPT, logit_bias=bias)
    assert engine.program.program.times()[1] == runs


def test_said_tokens_count_like_a_dictionary() -> None:
    rng = np.random.default_rng(0)
    prompt, text = rng.integers(0, 40, 9).tolist(), rng.integers(0, 60, 200).tolist()
    said = SaidTokens(prompt)
    for step, token in enumerate(text):
        for drafts in ([], [token], [token, 3, token, 70]):
            ids, counts = said.after(drafts)
            assert len(set(ids.tolist())) == len(ids)
            whole = text[:step] + drafts
            expected = {token: whole.count(token) for token in {*prompt, *whole}}
            assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected
        said.push(token)


# ---- log probabilities -----------------------------------------------------------------------------------------------


def check_top(top: list[tuple[int, float]], row: np.ndarray, count: int) -> None:
    """Of a row of raw logits float32 [V]: the best first, the lower id first on ties."""
    order = np.lexsort((np.arange(len(row)), -row))[:count]
    assert [token for token, _ in top] == order.tolist()
    np.testing.assert_allclose([logprob for _, logprob in top], log_softmax(row)[order], atol=2e-6)


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.7, "seed": 3, "top_k": 4}, OPTIONS[-1]], ids=name_of)
def test_the_most_likely_are_those_of_the_raw_logits(
    engine: pyengine.Engine, options: dict[str, Any], count: int
) -> None:
    request = {"max_tokens": 12, "ignore_eos": True, "logprobs": count, **options}
    stream = engine.stream(PROMPT, **request)
    pieces = list(stream)
    result = stream.result
    assert result is not None
    assert result.top_logprobs is not None
    assert [piece.top_logprobs for piece in pieces] == result.top_logprobs
    rows = engine.logits([*PROMPT, *result.tokens])[len(PROMPT) - 1 : -1]
    for top, row, token, logprob in zip(result.top_logprobs, rows, result.tokens, result.logprobs, strict=True):
        check_top(top, row, count)
        assert dict(top).get(token, logprob) == logprob
    drafted = engine.generate(PROMPT, speculate="ngram", **request)
    assert (drafted.top_logprobs, drafted.logprobs) == (result.top_logprobs, result.logprobs)


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 130])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_the_prompt_has_log_probabilities_too(engine: pyengine.Engine, length: int, max_tokens: int) -> None:
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    result = engine.generate(prompt, max_tokens=max_tokens, prompt_logprobs=True, logprobs=2, ignore_eos=True)
    assert result.prompt_logprobs is not None
    assert result.prompt_top_logprobs is not None
    assert (len(result.prompt_logprobs), len(result.prompt_top_logprobs), len(result.tokens)) == (
        length,
        length,
        max_tokens,
    )
    assert (result.prompt_logprobs[0], result.prompt_top_logprobs[0]) == (None, None)
    rows = engine.logits(prompt)
    expected = log_softmax(rows)[np.arange(length - 1), prompt[1:]]
    np.testing.assert_allclose(np.array(result.prompt_logprobs[1:], np.float64), expected, atol=2e-6)
    for top, row in zip(result.prompt_top_logprobs[1:], rows, strict=False):
        assert top is not None
        check_top(top, row, 2)
    assert result.tokens == engine.generate(prompt, max_tokens=max_tokens, ignore_eos=True).tokens
    assert result.timings["prompt_n"] == (length if max_tokens else length - 1)
    assert result.finish_reason == "length"


def test_a_full_context_can_be_scored(engine: pyengine.Engine) -> None:
    prompt = [1 + i % 90 for i in range(512)]
    result = engine.generate(prompt, max_tokens=0, prompt_logprobs=True)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 512


def test_the_record_has_what_was_asked_for(engine: pyengine.Engine) -> None:
    plain = set(engine.generate(PROMPT, max_tokens=2, ignore_eos=True).to_json())
    top = engine.generate(PROMPT, max_tokens=2, ignore_eos=True, logprobs=3).to_json()
    assert set(top) == {*plain, "logprobs", "top_logprobs"}
    assert [[len(pair) for pair in row] for row in json.loads(json.dumps(top))["top_logprobs"]] == [[2] * 3] * 2
    both = engine.generate(PROMPT, max_tokens=0, logprobs=1, prompt_logprobs=True).to_json()
    assert set(both) == {*plain, "logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"}
    assert (both["logprobs"], both["top_logprobs"], both["prompt_logprobs"][0]) == ([], [], None)
    assert set(engine.generate(PROMPT, max_tokens=1, prompt_logprobs=True).to_json()) == {*plain, "prompt_logprobs"}


def test_the_core_refuses_targets_it_cannot_give(engine: pyengine.Engine) -> None:
    from pyengine.kv_cache import Sequence

    sequence, row = Sequence(engine.pool), np.zeros(1, np.int32)
    for options, says in (
        ({"targets": np.array([VOCAB], np.int32)}, "target id 97; expected -1 to 96"),
        ({"targets": np.array([1, 2], np.int32)}, "one target per logits row"),
        ({"top": VOCAB + 1}, "top_count is 98"),
        ({"top": -1}, "top_count is -1"),
    ):
        with pytest.raises(errors.RequestError, match=says):
            engine.forward([(sequence, [1])], rows=row, sampling=[None], **options)
    with pytest.raises(errors.RequestError, match="given by sampling"):
        engine.forward([(sequence, [1])], rows=row, targets=row)
    for values, says in (
        ({"frequency_penalty": float("nan")}, "frequency_penalty nan"),
        ({"bias_ids": row, "bias_values": np.array([INF], np.float32)}, "finite or -inf"),
        ({"penalty_ids": row, "penalty_counts": np.zeros(2, np.int32)}, "differ in length"),
    ):
        with pytest.raises(errors.RequestError, match=says):
            engine.forward([(sequence, [1])], rows=row, sampling=[values])
    assert sequence.length == 0
    sequence.close()
