"""generate_batch: every answer is, to the bit, that of the request alone, whatever runs beside it."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS, build
from kv_pools import nothing_lost
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import _core, errors, system
from pyengine.batching import Batch

BEST = next(entry["name"] for entry in reversed(_core.isas()) if entry["available"])
CASES = [
    *[("llama", "f32", {}), ("qwen2_window", "int8", {}), ("mistral_window", "int4", {}), ("deepseek_v3", "int8", {})],
    *[("qwen3", "int8", {"kv_dtype": "int8"}), ("qwen3_moe", "int8", {}), ("deepseek_v3_experts", "f32", {})],
]
LENGTHS = (1, 2, 31, 32, 33, 70, 5, 64, 130, 3, 17)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 5},
    "drafted": {"speculate": "ngram", "frequency_penalty": -0.5, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 3, "prompt_logprobs": True, "logit_bias": {5: 2.0}},
}


def prompts(count: int = len(LENGTHS)) -> list[list[int]]:
    return [np.random.default_rng(i).integers(0, 90, length).tolist() for i, length in enumerate(LENGTHS[:count])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("batching")

    def folder(case: str) -> Path:
        if not (base / case).exists():
            build(base / case, {**CONFIGS[case], "max_position_embeddings": 1024}, seed=4)
        return base / case

    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**CONFIGS["llama"], "vocab_size": 258, "max_position_embeddings": 1024, "eos_token_id": 257}
    return write_tokenizer(write_tiny_model(tmp_path_factory.mktemp("texts"), config, seed=4), byte_level())


def gist(result: pyengine.GenerationResult) -> dict[str, Any]:
    """All but times and places."""
    record = result.to_json()
    for name in ("timings", "decode_breakdown", "ffn_share", "peak_rss_bytes", "speculation", "routing", "seed"):
        record.pop(name, None)
    return {**record, "logprobs": result.logprobs}


@pytest.mark.parametrize(("case", "quant", "options"), CASES, ids=lambda value: str(value))
def test_answers_are_those_of_each_alone(
    folders: Callable[[str], Path], case: str, quant: str, options: dict[str, Any]
) -> None:
    with pyengine.load(folders(case), quant=quant, threads=2, calibration=False, **options) as one:
        expected = [gist(one.generate(ids, max_tokens=20 + i)) for i, ids in enumerate(prompts())]
    for threads, bytes_kept in ((1, 0), (3, 256 << 20)):
        with pyengine.load(
            folders(case), quant=quant, threads=threads, calibration=False, prefix_cache_bytes=bytes_kept, **options
        ) as one:
            for most, order in ((2, list(range(11))), (8, list(range(10, -1, -1))), (64, [3, 0, 9, 3, 8, 8])):
                streams = [one.stream(prompts()[i], max_tokens=20 + i) for i in order]
                Batch(one, most).run(streams)
                for i, stream in zip(order, streams, strict=True):
                    assert stream.result is not None
                    assert gist(stream.result) == {**expected[i], "threads": threads}, f"{most} at a time, request {i}"
                assert nothing_lost(one.pool)


@pytest.mark.parametrize("name", SAMPLING)
def test_every_kind_of_sampling(texts: Path, name: str) -> None:
    options = {"max_tokens": 40, "ignore_eos": True, **SAMPLING[name]}
    seed = options.pop("seed", None)
    with pyengine.load(texts, quant="int8", threads=2) as one:
        together = one.generate_batch([*prompts(), "some text"], max_batch=7, seed=seed, **options)
        alone = [
            one.generate(ids, seed=None if seed is None else seed + i, **options)
            for i, ids in enumerate([*prompts(), "some text"])
        ]
        assert [gist(result) for result in together] == [gist(result) for result in alone]
        if name == "drafted":
            assert sum(result.speculation["accepted"] for result in together if result.speculation) > 20


def test_stops_and_ends_leave_room_for_the_next(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most max_batch at a time, and as many as that while others wait; each step holds all of them."""
    with pyengine.load(texts, quant="f32", threads=1) as one:
        whole = one.generate(prompts()[4], max_tokens=60, ignore_eos=True).text
        sizes: list[int] = []
        forward = one.forward
        monkeypatch.setattr(
            one, "forward", lambda entries, **given: (sizes.append(len(entries)), forward(entries, **given))[1]
        )
        results = one.generate_batch(prompts(), max_tokens=60, max_batch=3, stop=[whole[10:12]])
        assert max(sizes) == 3
        assert sizes.count(3) > len(sizes) / 2
        assert {result.finish_reason for result in results} == {"stop", "length"}
        assert len(sizes) < sum(result.usage["completion_tokens"] for result in results) / 2
        for result in results:
            breakdown, n = result.decode_breakdown, result.timings["predicted_n"]
            if n:
                assert breakdown is not None
                assert min(breakdown.values()) >= 0
                assert breakdown["ffn"] > 0
                assert sum(breakdown.values()) == pytest.approx(result.timings["predicted_ms"] / n)


@pytest.mark.parametrize("max_batch", [0, -1, 65, 2.0, "8", True])
def test_other_sizes_are_refused(texts: Path, max_batch: Any) -> None:
    with pyengine.load(texts, quant="f32") as one:
        with pytest.raises(errors.RequestError, match=r"max_batch .*; expected 1 to 64"):
            one.generate_batch([[1], [2]], max_batch=max_batch)
        assert one.program.program.times()[1] == 0


def test_prompts_longer_than_a_step_and_no_tokens(texts: Path) -> None:
    long = [np.random.default_rng(i).integers(0, 256, 600 + 50 * i).tolist() for i in range(3)]
    with pyengine.load(texts, quant="f32", threads=2) as one:
        together = one.generate_batch([*long, [7]], max_tokens=5, ignore_eos=True)
        assert [result.tokens for result in together] == [
            one.generate(ids, max_tokens=5, ignore_eos=True).tokens for ids in [*long, [7]]
        ]
        empty = one.generate_batch([*long, [7]], max_tokens=0)
        assert [(result.tokens, result.finish_reason) for result in empty] == [([], "length")] * 4
        one.generate_batch([[1]] * 70, max_tokens=1, max_batch=64)


def test_memory_is_checked_for_those_that_run_together(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pyengine.load(texts, quant="f32", prefix_cache_bytes=0) as one:
        need = int(one.pool.bytes_per_token)
        monkeypatch.setattr(system, "available_memory", lambda: 3 * 110 * need)
        with pytest.raises(errors.ResourceError, match=r"a KV cache of 432 tokens"):
            one.generate_batch([[1] * 8] * 9, max_tokens=100, max_batch=4)
        assert one.program.program.times()[1] == 0
        one.generate_batch([[1] * 8] * 9, max_tokens=100, max_batch=3)


@pytest.mark.parametrize("error", [KeyboardInterrupt, errors.CancelledError, errors.ResourceError])
def test_an_error_in_a_step_closes_all(
    texts: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with pyengine.load(texts, quant="f32", threads=1) as one:
        expected = [one.generate(ids, max_tokens=9, ignore_eos=True).tokens for ids in prompts(6)]
        forward, calls = one.forward, itertools.count()

        def failing(entries: Any, **given: Any) -> Any:
            if next(calls) == 5:
                raise error("now")
            return forward(entries, **given)

        monkeypatch.setattr(one, "forward", failing)
        with pytest.raises(error):
            one.generate_batch(prompts(6), max_tokens=9, ignore_eos=True, max_batch=4)
        assert nothing_lost(one.pool)
        assert [r.tokens for r in one.generate_batch(prompts(6), max_tokens=9, ignore_eos=True)] == expected


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("bad", [(2,), (0, 5), (0, 1, 2, 3, 4, 5)])
def test_nan_in_one_request_ends_that_one_alone(
    texts: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...], max_batch: int
) -> None:
    """At its fourth token, and every time the step is tried; the others' bits are those of requests alone."""
    with pyengine.load(texts, quant="f32", threads=1, prefix_cache_bytes=0) as one:
        alone = [one.generate(ids, max_tokens=9, ignore_eos=True) for ids in prompts(6)]
        forward, lengths = one.forward, {index: len(prompts(6)[index]) + 3 for index in bad}
        assert len({tuple(ids) for ids in prompts(6)}) == 6
        ours: dict[int, Any] = {}  # index -> its sequence, known by its prompt

        def failing(entries: Any, **given: Any) -> Any:
            for sequence, ids in entries:
                ours.update({i: sequence for i in bad if not sequence.length and ids == prompts(6)[i]})
                if any(ours.get(i) is sequence and sequence.length == lengths[i] for i in bad):
                    raise errors.ComputeError("NaN or Inf in the logits")
            return forward(entries, **given)

        monkeypatch.setattr(one, "forward", failing)
        with pytest.raises(pyengine.BatchError) as caught:
            one.generate_batch(prompts(6), max_tokens=9, ignore_eos=True, max_batch=max_batch)
        more = f"; and {len(bad) - 1} more of 6 prompts" if len(bad) > 1 else ""
        assert str(caught.value) == f"prompt {bad[0]}: NaN or Inf in the logits{more}"
        for index, (result, whole) in enumerate(zip(caught.value.results, alone, strict=True)):
            count = 4 if index in bad else 9
            assert (result.tokens, result.logprobs) == (whole.tokens[:count], whole.logprobs[:count])
            assert result.finish_reason == ("cancelled" if index in bad else "length")
        assert pickle.loads(pickle.dumps(caught.value)).results == caught.value.results
        assert nothing_lost(one.pool)
        monkeypatch.undo()
        again = one.generate_batch(prompts(6), max_tokens=9, ignore_eos=True, max_batch=max_batch)
        assert [r.tokens for r in again] == [r.tokens for r in alone]


def test_nan_in_a_score_is_an_error(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pyengine.load(texts, quant="f32", threads=1) as one:
        forward = one.forward

        def failing(entries: Any, **given: Any) -> Any:
            if any(9 in ids for _, ids in entries):
                raise errors.ComputeError("NaN or Inf in the logits")
            return forward(entries, **given)

        monkeypatch.setattr(one, "forward", failing)
        with pytest.raises(pyengine.ComputeError, match="NaN or Inf in the logits"):
            one.score([([1, 2], [3]), ([9], [3]), ([1, 2], [4])])
        assert nothing_lost(one.pool)
        assert len(one.score([([1, 2], [3]), ([1, 2], [4])])) == 2


def test_streams_and_other_calls_between_the_steps(texts: Path) -> None:
    with pyengine.load(texts, quant="f32", threads=2) as one:
        expected = [one.generate(ids, max_tokens=25, ignore_eos=True).tokens for ids in prompts(4)]
        streams = [one.stream(ids, max_tokens=25, ignore_eos=True) for ids in prompts(4)]
        batch = Batch(one, 2)
        batch.waiting.extend(streams[:3])
        while batch.waiting or batch.active:
            batch.step()
            if streams[3].result is None:
                next(streams[3], None)
            one.score([([1], [2])])
        assert [stream.finish().tokens for stream in streams] == expected


def test_one_batch_in_each_thread(texts: Path) -> None:
    """Also G20: 16 requests from 4 threads, each answer the single one."""
    import threading

    with pyengine.load(texts, quant="f32", threads=2) as one:
        expected = [one.generate(ids, max_tokens=15, ignore_eos=True).tokens for ids in prompts(4)]
        found: list[list[list[int]]] = []
        threads = [
            threading.Thread(
                target=lambda: found.append(
                    [r.tokens for r in one.generate_batch(prompts(4), max_tokens=15, ignore_eos=True)]
                )
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 4
        assert nothing_lost(one.pool)


@pytest.mark.parametrize("isa", [BEST, "scalar"])
def test_any_isa(texts: Path, isa: str) -> None:
    with pyengine.load(texts, quant="int4", isa=isa, threads=2, calibration=False) as one:
        alone = [one.generate(ids, max_tokens=12, ignore_eos=True).tokens for ids in prompts(8)]
        assert [r.tokens for r in one.generate_batch(prompts(8), max_tokens=12, ignore_eos=True)] == alone
