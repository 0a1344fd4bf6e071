"""Sampling in the core against the same rules in numpy: Philox, penalties, temperature, top-k, top-p, min-p, ties."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.kv_cache import Sequence

CONFIG = {**CONFIGS["llama"], "max_position_embeddings": 512, "eos_token_id": 96}
VOCAB = 97
PROMPT = [5, 17, 3, 80]

# Random123's published answers for philox4x32-10: counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def uniform(seed: int, step: int) -> float:
    words = philox((step & 0xFFFFFFFF, step >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def expected_token(logits: np.ndarray, seen: list[int], **p: Any) -> tuple[int, float]:
    """The token that the rules give, and how far the random number was from choosing another, relative to the mass."""
    x = logits.copy()
    penalty, ids = np.float32(p.get("repetition_penalty", 1.0)), sorted(set(seen))
    x[ids] = np.where(x[ids] > 0, x[ids] / penalty, x[ids] * penalty)
    order = np.lexsort((np.arange(len(x)), -x))  # largest first, lower ids first among equals
    kept = order[: p.get("top_k") or len(x)]
    weights = np.exp((x[kept].astype(np.float64) - float(x[order[0]])) / float(np.float32(p["temperature"])))
    if (top_p := float(np.float32(p.get("top_p", 1.0)))) < 1:
        before = np.cumsum(weights) - weights
        inside = before < top_p * weights.sum()
        inside[0] = True
        kept, weights = kept[inside], weights[inside]
    inside = weights >= float(np.float32(p.get("min_p", 0.0)))
    kept, weights = kept[inside], weights[inside]
    if "top_k" not in p and p.get("top_p", 1.0) >= 1:
        by_id = np.argsort(kept)  # nothing had to be sorted
        kept, weights = kept[by_id], weights[by_id]
    ends = np.cumsum(weights)
    left = uniform(p["seed"], p["step"]) * ends[-1]
    margin = float(np.abs(ends - left).min() / ends[-1])
    return int(kept[min(int(np.searchsorted(ends, left, side="right")), len(kept) - 1)]), margin


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pyengine.Engine]:
    folder = write_tiny_model(tmp_path_factory.mktemp("sampling"), CONFIG, seed=4)
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pyengine.Engine]:
    """A model whose logits are all the same: its head is zero."""
    tensors = tiny_tensors(CONFIG, seed=4)
    tensors["lm_head.weight"][:] = 0
    folder = write_tiny_model(tmp_path_factory.mktemp("flat"), CONFIG, tensors=tensors)
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_oracle_knows_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    assert philox(counter, key) == result


OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.5, "min_p": 0.05},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "top_k": 10},
    {"top_k": 1000, "top_p": 0.999},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_every_token_is_the_one_the_rules_give(
    engine: pyengine.Engine, temperature: float, options: dict[str, Any]
) -> None:
    for seed in (0, 1, 2**32, 2**64 - 1):
        chosen = {"temperature": temperature, **options, "seed": seed}
        tokens = engine.generate(PROMPT, max_tokens=12, ignore_eos=True, **chosen).tokens
        rows = engine.logits([*PROMPT, *tokens], range(3, 15))
        for step, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            expected, margin = expected_token(row, [*PROMPT, *tokens[:step]], step=step, **chosen)
            assert token == expected or margin < 1e-12


def test_malformed_g13_report_f01_ties_go_to_the_lowest_id(flat: pyengine.Engine) -> None:
    assert flat.generate(PROMPT, max_tokens=3, ignore_eos=True).tokens == [0, 0, 0]
    drawn = {
        flat.generate(PROMPT, max_tokens=1, temperature=1.0, top_k=2, seed=seed, ignore_eos=True).tokens[0]
        for seed in range(20)
    }
    assert drawn == {0, 1}
    for options in ({"top_k": 1}, {"top_p": 0.0}):
        assert flat.generate(PROMPT, max_tokens=2, temperature=9.0, seed=3, ignore_eos=True, **options).tokens == [0, 0]


def test_malformed_g15_top_p_keeps_the_fewest_that_reach_it(flat: pyengine.Engine) -> None:
    """97 equal weights: 0.1 of them is reached by the tenth."""
    draws = [
        flat.generate(PROMPT, max_tokens=1, temperature=1.0, top_p=0.1, seed=seed, ignore_eos=True).tokens[0]
        for seed in range(300)
    ]
    assert set(draws) == set(range(10))


@pytest.mark.parametrize("temperature", [1e-30, 1e-4])
def test_malformed_g14_report_f02_a_tiny_temperature_is_greedy(engine: pyengine.Engine, temperature: float) -> None:
    greedy = engine.generate(PROMPT, max_tokens=10, ignore_eos=True).tokens
    sampled = engine.generate(PROMPT, max_tokens=10, temperature=temperature, seed=5, ignore_eos=True)
    assert sampled.tokens == greedy


def test_malformed_g14_a_huge_temperature_is_uniform(engine: pyengine.Engine) -> None:
    draws = [
        engine.generate(PROMPT, max_tokens=1, temperature=1e308, seed=seed, ignore_eos=True).tokens[0]
        for seed in range(970)
    ]
    counts = np.bincount(draws, minlength=VOCAB)
    assert np.square(counts - 10).sum() / 10 < 160  # chi-squared of 96 degrees: 160 is 1 in 10,000


def test_malformed_g16_report_f11_f12_top_k_of_the_vocabulary_is_off(engine: pyengine.Engine) -> None:
    options = {"max_tokens": 12, "temperature": 2.0, "seed": 11, "ignore_eos": True}
    plain = engine.generate(PROMPT, **options).tokens
    for top_k in (0, -1, VOCAB, VOCAB + 1, 2**31):
        assert engine.generate(PROMPT, top_k=top_k, **options).tokens == plain


def test_report_f19_log_probabilities_are_of_the_untouched_logits(engine: pyengine.Engine) -> None:
    result = engine.generate(
        PROMPT, max_tokens=12, temperature=2.0, top_k=4, repetition_penalty=1.5, seed=1, ignore_eos=True
    )
    rows = engine.logits([*PROMPT, *result.tokens], range(3, 15)).astype(np.float64)
    logprobs = (
        rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    )
    np.testing.assert_allclose(result.logprobs, logprobs[np.arange(12), result.tokens], atol=1e-5)


def test_rows_of_a_batch_are_sampled_alone(engine: pyengine.Engine) -> None:
    """Each row has its own values, seed and step; what stands beside it changes nothing."""
    values = [{"temperature": 1.0 + i / 4, "top_k": 5 * i, "seed": 40 + i, "step": i} for i in range(7)]
    prompts = [[*PROMPT, i] for i in range(7)]

    def drawn(order: list[int]) -> dict[int, int]:
        sequences = [Sequence(engine.pool) for _ in order]
        entries = [(sequence, prompts[i]) for sequence, i in zip(sequences, order, strict=True)]
        rows = np.arange(4, 5 * len(order), 5, dtype=np.int32)
        out = engine.forward(entries, rows=rows, sampling=[values[i] for i in order])
        assert out is not None
        for sequence in sequences:
            sequence.close()
        return dict(zip(order, out[0].tolist(), strict=True))

    together = drawn(list(range(7)))
    assert drawn(list(reversed(range(7)))) == together
    for i in range(7):
        assert drawn([i]) == {i: together[i]}
        logits = engine.logits(prompts[i], [4])[0]
        p = {key: value for key, value in values[i].items() if value or key != "top_k"}
        assert together[i] == expected_token(logits, [], **p)[0]


def test_steps_do_not_repeat_random_numbers() -> None:
    numbers = [uniform(seed, step) for seed, step in itertools.product(range(20), range(50))]
    assert len(set(numbers)) == 1000
    assert abs(float(np.mean(numbers)) - 0.5) < 0.03
