"""Prompt-lookup speculation: what is drafted, and that no token, log probability or piece depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from kv_pools import nothing_lost
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import _core, errors
from pyengine import generate as generate_module
from pyengine.sampling import RowSampling
from pyengine.speculate import FIRST_CHANCE, MAX_DRAFT, STEP_COST, NgramDrafter

ISAS = [entry["name"] for entry in _core.isas() if entry["available"]]
PROMPT = [5, 17, 3, 80, 5, 17, 3, 80, 9]
ROOM = 200  # the context of the tiny models
FORMATS: dict[str, dict[str, Any]] = {
    "f32": {"quant": "f32"},
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4"},
    "int8_cache": {"quant": "f32", "kv_dtype": "int8"},
}
CASES = [
    *[("llama", "int8"), ("qwen2_window", "f32"), ("mistral_window", "int4"), ("qwen3", "f32")],
    *[("qwen2_window", "int8_cache"), ("qwen3", "int4")],
]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "warm": {"temperature": 1.0, "seed": 3},
    "cut": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 2**64 - 1},
    "warm_penalty": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.7, "seed": 5},
    "penalties": {"presence_penalty": 1.1, "frequency_penalty": 0.4, "logit_bias": {40: 2.5, 41: float("-inf")}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("speculate")

    def folder(case: str) -> Path:
        config = {**CONFIGS[case], "vocab_size": 258, "max_position_embeddings": ROOM, "eos_token_id": 257}
        if not (base / case).exists():
            write_tokenizer(write_tiny_model(base / case, config, seed=4), byte_level())
        return base / case

    return folder


@pytest.fixture(scope="module")
def engine(folders: Callable[[str], Path]) -> Iterator[pyengine.Engine]:
    with pyengine.load(folders("llama"), quant="f32", threads=2) as one:
        yield one


class Oracle:
    """In place of the drafter: drafts the text that is to come, up to a token that is wrong in about every fourth."""

    texts: ClassVar[dict[tuple[int, ...], list[int]]]  # by prompt: what the model generates
    wrong = 0.25

    def __init__(self, prompt: list[int]) -> None:
        self.text = self.texts[tuple(prompt)]
        self.random = np.random.default_rng(len(prompt))
        self.at = 0

    def push(self, token: int) -> None:
        assert token == self.text[self.at]
        self.at += 1

    def draft(self, most: int) -> list[int]:
        drafts = self.text[self.at : self.at + min(most, MAX_DRAFT)]
        return [(token + 1) % 257 if self.random.random() < self.wrong else token for token in drafts]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> type[Oracle]:
    class Here(Oracle):
        texts: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    monkeypatch.setattr(generate_module, "NgramDrafter", Here)
    return Here


def all_free(engine: pyengine.Engine) -> bool:
    return nothing_lost(engine.pool)


def check_same(engine: pyengine.Engine, prompt: list[int], **options: Any) -> pyengine.GenerationResult:
    """The result with speculation, which is the one without it but for the number of steps."""
    plain = engine.stream(prompt, **options)
    expected = list(plain)
    drafted = engine.stream(prompt, speculate="ngram", **options)
    assert list(drafted) == expected  # pieces: text, token, log probability, reason
    a, b = plain.result, drafted.result
    assert a is not None
    assert b is not None
    assert (b.text, b.tokens, b.logprobs, b.usage) == (a.text, a.tokens, a.logprobs, a.usage)
    assert (b.finish_reason, b.stop_reason) == (a.finish_reason, a.stop_reason)
    assert a.speculation is None
    assert b.speculation is not None
    assert b.timings["predicted_n"] == a.timings["predicted_n"] == max(b.usage["completion_tokens"] - 1, 0)
    assert 0 <= b.speculation["accepted"] <= b.speculation["drafted"]
    assert all_free(engine)
    return b


# ---- what is drafted -------------------------------------------------------------------------------------------------


def drafts_after(text: list[int], most: int = MAX_DRAFT) -> list[int]:
    return NgramDrafter(text).draft(most)


def test_the_longest_match_comes_first_then_the_most_recent() -> None:
    assert drafts_after([1, 2, 3, 40, 41, 9, 2, 3, 50, 51, 1, 2, 3])[:1] == [40]
    assert drafts_after([7, 2, 3, 40, 41, 9, 2, 3, 50, 51, 1, 2, 3])[:1] == [50]
    assert drafts_after([3, 40, 41, 9, 3]) == []  # one token is no match
    assert drafts_after([]) == drafts_after([1]) == drafts_after(list(range(500))) == []


def test_a_draft_goes_on_with_itself_where_the_text_ends() -> None:
    text = [1, 2, 3] * 20
    assert drafts_after(text) == [1, 2, 3, 1, 2, 3, 1]
    assert drafts_after([8, 9, *[4] * 30]) == [4] * MAX_DRAFT
    assert drafts_after(text, 2) == [1, 2]
    assert drafts_after(text, 0) == drafts_after(text, -1) == []


def test_one_wrong_token_is_skipped() -> None:
    source = list(range(100, 140))
    drafter = NgramDrafter([*source, 1, *source[:20]])
    assert drafter.draft(3) == [120, 121, 122]
    drafter.push(2)  # a renamed word
    assert drafter.draft(2)[:1] == [121]
    drafter.push(121)
    assert drafter.draft(2)[:1] == [122]
    for token in (3, 4):  # two wrong ones in a row end it
        drafter.push(token)
    assert drafter.draft(MAX_DRAFT) == []


def test_drafts_grow_with_what_they_were_worth_and_end_where_they_are_wrong() -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 10**6, 60).tolist()
    drafter = NgramDrafter(source)
    lengths = []
    for token in source:
        drafter.push(token)
        lengths.append(len(drafter.draft(MAX_DRAFT)))
    assert lengths[0] == 0
    assert 0 < lengths[1] < lengths[-2] == MAX_DRAFT
    drafter = NgramDrafter([])
    drafted = 0
    for token in rng.integers(0, 12, 4000).tolist():  # pairs come again all the time, and say nothing about the next
        drafter.push(token)
        drafted += len(drafter.draft(MAX_DRAFT))
    assert drafted * STEP_COST < 4000 * 0.03
    assert FIRST_CHANCE > STEP_COST  # or nothing would ever be drafted


# ---- the same text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("case", "fmt"), CASES)
def test_the_text_is_the_same(
    folders: Callable[[str], Path], oracle: type[Oracle], case: str, fmt: str, isa: str
) -> None:
    """Over blocks that a window gives back, with every number of right drafts in a step."""
    with pyengine.load(folders(case), isa=isa, threads=2, calibration=False, **FORMATS[fmt]) as one:
        for name in ("greedy", "cut", "warm_penalty"):
            prompt = [*PROMPT, len(name)]
            options = {"max_tokens": 80, "ignore_eos": True, **SAMPLING[name]}
            oracle.texts[tuple(prompt)] = one.generate(prompt, **options).tokens
            result = check_same(one, prompt, **options)
            assert result.timings["decode_steps"] + result.speculation["accepted"] == 79
            assert 30 < result.speculation["accepted"] < result.speculation["drafted"]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_drafter_itself_changes_nothing(engine: pyengine.Engine, sampling: str) -> None:
    options = {"max_tokens": 150, "ignore_eos": True, **SAMPLING[sampling]}
    result = check_same(engine, PROMPT, **options)
    assert result.speculation["drafted"] <= 7 * result.timings["decode_steps"]
    if sampling == "greedy":  # a tiny model soon repeats itself
        assert result.timings["decode_steps"] < 120


def test_every_row_has_its_own_step_and_penalty(
    engine: pyengine.Engine, oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two, taken from the step's first row, would show in the text."""
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, **SAMPLING["warm_penalty"]}
    expected = engine.generate(PROMPT, **options).tokens
    oracle.texts[tuple(PROMPT)] = expected
    oracle.wrong = 0.0
    assert check_same(engine, PROMPT, **options).timings["decode_steps"] == 8
    own = RowSampling.row
    monkeypatch.setattr(oracle, "push", lambda self, token: setattr(self, "at", self.at + 1))
    for keys in (("step",), ("penalty_ids", "penalty_counts"), ("penalty_counts",)):

        def first_rows(row: Any, drafts: Any = (), keys: tuple[str, ...] = keys) -> dict[str, Any] | None:
            values, first = own(row, drafts), own(row)
            if len(keys) == 1 and keys[0] == "penalty_counts":
                first["penalty_counts"] = np.resize(first["penalty_counts"], len(values["penalty_ids"]))
            return {**values, **{key: first[key] for key in keys}}

        monkeypatch.setattr(RowSampling, "row", first_rows)
        assert engine.generate(PROMPT, speculate="ngram", **options).tokens != expected


def test_streams_beside_each_other(engine: pyengine.Engine) -> None:
    prompts = [[*PROMPT, i] for i in range(3)]
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    alone = [engine.generate(prompt, **options).tokens for prompt in prompts]
    streams = [engine.stream(prompt, speculate="ngram", **options) for prompt in prompts]
    for _ in range(40):
        for stream in streams:
            next(stream)
    assert [stream.finish().tokens for stream in streams] == alone
    batch = engine.generate_batch(prompts, speculate="ngram", **options)
    assert [one.tokens for one in batch] == alone


# ---- the end of a request --------------------------------------------------------------------------------------------


def test_any_number_of_tokens_and_a_full_context(
    engine: pyengine.Engine, oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft lies past the last token that could come."""
    oracle.texts[tuple(PROMPT)] = engine.generate(PROMPT, max_tokens=-1, ignore_eos=True).tokens
    oracle.wrong = 0.0
    ends: list[int] = []
    forward = engine.forward

    def watched(entries: Any, **options: Any) -> Any:
        ends.append(entries[0][0].length + len(entries[0][1]))
        return forward(entries, **options)

    monkeypatch.setattr(engine, "forward", watched)
    for limit in [*range(20), -1, 1000]:
        tokens = len(check_same(engine, PROMPT, max_tokens=limit, ignore_eos=True).tokens)
        assert tokens == (limit if 0 <= limit < 20 else ROOM - len(PROMPT))
        assert max(ends, default=0) <= len(PROMPT) + max(tokens - 1, 0)
        ends.clear()


@pytest.mark.parametrize("at", range(12))
def test_eos_among_the_drafts(engine: pyengine.Engine, oracle: type[Oracle], at: int) -> None:
    expected = engine.generate(PROMPT, max_tokens=30, ignore_eos=True, temperature=1.0, seed=8).tokens
    oracle.texts[tuple(PROMPT)] = expected
    oracle.wrong = 0.0
    stream = engine.stream(PROMPT, max_tokens=30, temperature=1.0, seed=8, speculate="ngram")
    stream.eos = frozenset({expected[at]})
    end = expected.index(expected[at])
    assert [piece.token for piece in stream] == expected[: end + 1]
    result = stream.result
    assert result is not None
    assert (result.tokens, result.finish_reason, result.stop_reason) == (expected[:end], "stop", expected[at])
    assert result.timings["predicted_n"] == result.timings["decode_steps"] + result.speculation["accepted"] == end
    assert all_free(engine)


@pytest.mark.parametrize("at", [3, 4, 8, 15])
def test_a_stop_string_among_the_drafts(engine: pyengine.Engine, oracle: type[Oracle], at: int) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    whole = engine.generate("Hello", **options)
    oracle.texts[tuple(engine.tokenize("Hello"))] = whole.tokens
    oracle.wrong = 0.1
    stops = [whole.text[i : i + 2] for i in range(at, 50) if "\ufffd" not in whole.text[i : i + 2]]
    result = check_same(engine, engine.tokenize("Hello"), stop=stops[:1], **options)
    assert (result.finish_reason, result.stop_reason) == ("stop", stops[0])
    assert result.text == whole.text[: whole.text.index(stops[0])]


@pytest.mark.parametrize("taken", range(1, 12))
def test_closed_in_the_middle_of_a_step(engine: pyengine.Engine, oracle: type[Oracle], taken: int) -> None:
    expected = engine.generate(PROMPT, max_tokens=40, ignore_eos=True)
    oracle.texts[tuple(PROMPT)] = expected.tokens
    oracle.wrong = 0.0
    stream = engine.stream(PROMPT, max_tokens=40, ignore_eos=True, speculate="ngram")
    pieces = [next(stream).token for _ in range(taken)]
    stream.close()
    result = stream.result
    assert result is not None
    assert (result.tokens, result.finish_reason) == (pieces, "cancelled")
    assert pieces == expected.tokens[:taken]
    assert result.timings["predicted_n"] == taken - 1
    assert all_free(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt, errors.CancelledError])
def test_a_cancelled_step_keeps_what_there_is(
    engine: pyengine.Engine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    expected = engine.generate(PROMPT, max_tokens=60, ignore_eos=True).tokens
    forward = engine.forward
    calls = 0

    def interrupted(entries: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise error("cancelled")
        return forward(entries, **options)

    monkeypatch.setattr(engine, "forward", interrupted)
    stream = engine.stream(PROMPT, max_tokens=60, ignore_eos=True, speculate="ngram")
    with pytest.raises(error):
        stream.finish()
    result = stream.result
    assert result is not None
    assert result.finish_reason == "cancelled"
    assert result.tokens == expected[: len(result.tokens)]
    assert result.timings["decode_steps"] == 18
    assert len(result.tokens) >= 19
    assert all_free(engine)


def test_a_draft_whose_logits_are_no_numbers_ends_nothing(
    engine: pyengine.Engine, oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle.texts[tuple(PROMPT)] = engine.generate(PROMPT, max_tokens=10, ignore_eos=True).tokens
    forward, wrong = engine.forward, range(2, 9)

    def failing(entries: Any, **options: Any) -> Any:
        if len(entries[0][1]) in wrong:
            raise errors.ComputeError("NaN or Inf in the logits")
        return forward(entries, **options)

    monkeypatch.setattr(engine, "forward", failing)
    result = check_same(engine, PROMPT, max_tokens=10, ignore_eos=True)
    assert result.speculation == {"drafted": 0, "accepted": 0}
    wrong = range(1, 9)  # without drafts an error is an error
    with pytest.raises(errors.ComputeError):
        engine.generate(PROMPT, max_tokens=10, speculate="ngram")


# ---- results ---------------------------------------------------------------------------------------------------------


def test_times_are_per_token_and_the_record_has_the_counts(engine: pyengine.Engine, oracle: type[Oracle]) -> None:
    oracle.texts[tuple(PROMPT)] = engine.generate(PROMPT, max_tokens=100, ignore_eos=True).tokens
    result = engine.generate(PROMPT, max_tokens=100, ignore_eos=True, speculate="ngram")
    record, timings = result.to_json(), result.timings
    assert set(record) == {*engine.generate(PROMPT, max_tokens=2).to_json(), "speculation"}
    assert set(record["speculation"]) == {"drafted", "accepted"}
    assert timings["predicted_n"] == 99
    assert timings["decode_steps"] == 99 - record["speculation"]["accepted"] < 80
    assert timings["predicted_per_second"] == pytest.approx(99e3 / timings["predicted_ms"])
    breakdown = result.decode_breakdown
    assert breakdown is not None
    assert min(breakdown.values()) >= 0
    assert sum(breakdown.values()) == pytest.approx(timings["predicted_ms"] / 99)
    assert result.ffn_share == pytest.approx(breakdown["ffn"] * 99 / timings["predicted_ms"])
    empty = engine.generate(PROMPT, max_tokens=1, speculate="ngram")
    assert (empty.speculation, empty.decode_breakdown) == ({"drafted": 0, "accepted": 0}, None)


@pytest.mark.parametrize("value", ["ngrams", "", True, 1, ["ngram"], "draft"])
def test_other_values_are_refused(engine: pyengine.Engine, value: Any) -> None:
    with pytest.raises(errors.RequestError, match=r"speculate .*expected None or one of ngram"):
        engine.stream(PROMPT, speculate=value)
