"""Requests beside each other and interrupted ones, text requests, and load arguments of odd kinds."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from kv_pools import nothing_lost
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import errors, system
from pyengine.kv_cache import Sequence

CONFIG = {**CONFIGS["llama"], "vocab_size": 258, "max_position_embeddings": 1024, "eos_token_id": 257}
PROMPT = [5, 17, 3, 80]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("requests") / "with spaces, ä and 文", CONFIG, seed=4)
    return write_tokenizer(folder, byte_level())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[pyengine.Engine]:
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


@pytest.fixture
def tight(folder: Path) -> Iterator[pyengine.Engine]:
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


# ---- beside each other -----------------------------------------------------------------------------------------------


def check_times(result: pyengine.GenerationResult) -> None:
    breakdown, n = result.decode_breakdown, result.timings["predicted_n"]
    assert breakdown is not None
    assert n > 0
    assert min(breakdown.values()) >= 0, breakdown
    assert breakdown["ffn"] > 0
    assert sum(breakdown.values()) == pytest.approx(result.timings["predicted_ms"] / n)


def test_interleaved_streams_keep_their_bits_and_times(engine: pyengine.Engine) -> None:
    alone = [engine.generate([*PROMPT, i], max_tokens=30, ignore_eos=True) for i in range(3)]
    streams = [engine.stream([*PROMPT, i], max_tokens=30, ignore_eos=True) for i in range(3)]
    for _ in range(30):
        for stream in streams:
            next(stream)
        engine.logits(PROMPT * 8)  # counts for none of them
    for stream, one in zip(streams, alone, strict=True):
        assert stream.finish().tokens == one.tokens
        assert stream.result is not None
        check_times(stream.result)
    # Not that of all three and the prompts between: the least of each, because a busy machine only ever adds time.
    seen = [stream.result.decode_breakdown["ffn"] for stream in streams]
    assert min(seen) < 5 * max(one.decode_breakdown["ffn"] for one in alone) + 0.5


def test_report_g20_threads_at_once_keep_their_bits_and_times(engine: pyengine.Engine) -> None:
    alone = [engine.generate([*PROMPT, i], max_tokens=25, ignore_eos=True).tokens for i in range(4)]
    results: dict[int, pyengine.GenerationResult] = {}

    def ask(i: int) -> None:
        results[i] = engine.generate([*PROMPT, i], max_tokens=25, ignore_eos=True)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        assert results[i].tokens == alone[i]
        check_times(results[i])


def test_two_engines_run_at_the_same_time(folder: Path, engine: pyengine.Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=40, ignore_eos=True).tokens
    results: list[list[int]] = []
    with pyengine.load(folder, quant="f32", threads=2) as other:
        threads = [
            threading.Thread(
                target=lambda one=one: results.append(one.generate(PROMPT, max_tokens=40, ignore_eos=True).tokens)
            )
            for one in (engine, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [expected, expected]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_outlives_its_engine(tight: pyengine.Engine, taken: int) -> None:
    for ends in ("next", "close"):
        with pyengine.load(tight.folder, quant="f32", threads=1) as one:
            stream = one.stream(PROMPT, max_tokens=20, ignore_eos=True)
            tokens = [next(stream).token for _ in range(taken)]
        if ends == "next":
            with pytest.raises(errors.RequestError, match="closed"):
                next(stream)
        stream.close()
        assert stream.result is not None
        assert (stream.result.finish_reason, stream.result.tokens) == ("cancelled", tokens)
        if taken == 3:
            check_times(stream.result)


def test_malformed_g24_a_batch_is_checked_before_it_computes(tight: pyengine.Engine) -> None:
    for prompts in ([PROMPT, []], [PROMPT, [258]], [PROMPT, ""], "text", [PROMPT, b"text"]):
        with pytest.raises(errors.RequestError):
            tight.generate_batch(prompts, max_tokens=1)
    for seed in ("1", 1.5, True, -1, 2**64 - 1):  # the second request's would be 2^64
        with pytest.raises(errors.RequestError, match="seed"):
            tight.generate_batch([PROMPT, PROMPT], max_tokens=1, seed=seed)
    assert tight.program.program.times()[1] == 0
    results = tight.generate_batch([PROMPT, "text", [9]], max_tokens=3, ignore_eos=True)
    assert [one.usage["prompt_tokens"] for one in results] == [4, 4, 1]
    assert tight.generate_batch([]) == []


# ---- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_ctrl_c_in_a_stream_keeps_what_there_is(tmp_path: Path, speculate: str | None) -> None:
    config = {**CONFIG, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "head_dim": 64}
    write_tiny_model(tmp_path, config)
    with pyengine.load(tmp_path, quant="f32", threads=2) as one:
        expected = one.generate(PROMPT, max_tokens=200, ignore_eos=True).tokens
        stream = one.stream(PROMPT, max_tokens=900, ignore_eos=True, speculate=speculate)
        for _ in range(5):
            next(stream)
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            stream.finish()
        result = stream.result
        assert result is not None
        assert result.finish_reason == "cancelled"
        assert 5 <= len(result.tokens) < 900
        assert result.tokens[:200] == expected[: len(result.tokens)]
        assert result.usage["completion_tokens"] == len(result.tokens)
        check_times(result)
        assert nothing_lost(one.pool)
        assert one.generate(PROMPT, max_tokens=200, ignore_eos=True).tokens == expected


def test_another_thread_cancels_a_step(tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "head_dim": 64}
    write_tiny_model(tmp_path, config)
    ids = np.random.default_rng(0).integers(0, 258, 512).tolist()
    with pyengine.load(tmp_path, quant="f32", threads=2) as one:
        before = one.logits(PROMPT)
        sequence, flag = Sequence(one.pool), np.zeros(1, np.int32)
        one.forward([(sequence, PROMPT)])
        timer = threading.Timer(0.05, flag.fill, (1,))
        timer.start()
        with pytest.raises(errors.CancelledError):
            one.forward([(sequence, ids)], cancel=flag)
        timer.join()
        assert sequence.length == len(PROMPT)
        sequence.close()
        np.testing.assert_array_equal(one.logits(PROMPT), before)


def test_a_dropped_stream_gives_its_blocks_back(engine: pyengine.Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=50, ignore_eos=True)
    next(stream)
    next(stream)
    del stream
    gc.collect()
    assert nothing_lost(engine.pool)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_pieces_joined_are_the_text_and_the_record_is_json(engine: pyengine.Engine) -> None:
    stream = engine.stream("Hello", max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    pieces = list(stream)
    result = stream.result
    assert result is not None
    assert "".join(piece.text for piece in pieces) == result.text == str(result)
    assert result.text == engine.detokenize(result.tokens)
    assert [piece.token for piece in pieces] == result.tokens
    assert [piece.finish_reason for piece in pieces] == [None] * 39 + ["length"]
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["usage"]["prompt_tokens"] == 5


def test_malformed_g21_report_f20_a_stop_string_ends_the_text_before_it(engine: pyengine.Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    whole = engine.generate("Hello", **options).text
    stop = next(
        whole[i : i + 2] for i in range(20, 50) if whole[i : i + 2].isprintable() and "\ufffd" not in whole[i : i + 2]
    )
    stream = engine.stream("Hello", stop=[stop, "never there"], **options)
    text = "".join(piece.text for piece in stream)
    result = stream.result
    assert result is not None
    assert text == result.text == whole[: whole.index(stop)]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_malformed_g06_an_empty_text_without_bos_is_refused(engine: pyengine.Engine) -> None:
    with pytest.raises(errors.RequestError, match="empty prompt"):
        engine.generate("")


def test_a_prompt_longer_than_a_step(engine: pyengine.Engine) -> None:
    prompt = np.random.default_rng(8).integers(0, 256, 700)
    tokens = engine.generate(prompt, max_tokens=3, ignore_eos=True).tokens
    ids = prompt.tolist()
    for token in tokens:
        assert token == int(engine.logits(ids, [len(ids) - 1])[0].argmax())
        ids.append(token)


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"threads": "2"},
        {"threads": 2.0},
        {"ctx_size": "8"},
        {"ctx_size": 8.0},
        {"ctx_size": True},
        {"group_size": 32.0},
        {"group_size": "32"},
        {"quant": ""},
        {"quant": 8},
        {"kv_dtype": 2},
        {"isa": 3},
        {"device": 0},
        {"quant": "int8", "int4_scheme": "minimum"},
        {"quant": "f32", "int4_scheme": "symmetric"},
        {"quant": "f32", "group_size": 32},
        {"strict": "no"},
        {"calibration": 0},
    ],
    ids=str,
)
def test_load_arguments_of_other_kinds_are_refused(folder: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.RequestError, match="expected"):
        pyengine.load(folder, **{"quant": "int4", **arguments})


def test_integers_of_numpy_are_integers(folder: Path) -> None:
    with pyengine.load(folder, quant="f32", threads=np.int64(1), ctx_size=np.int32(64)) as one:
        assert (one.threads, one.ctx_size, type(one.ctx_size)) == (1, 64, int)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.logits(PROMPT, [4]),
        lambda e: e.logits(PROMPT, [-1]),
        lambda e: e.logits(PROMPT, [1.5]),
        lambda e: e.logits(PROMPT, [True]),
        lambda e: e.logits(PROMPT, ["1"]),
        lambda e: e.logits(PROMPT, chunk=0),
        lambda e: e.logits(PROMPT, chunk=513),
        lambda e: e.logits(PROMPT, chunk="8"),
        lambda e: e.logits_batch([]),
        lambda e: e.logits_batch([PROMPT, []]),
        lambda e: e.logits_batch([[1]] * 65),
        lambda e: e.logits_batch([[1] * 300] * 2),
        lambda e: e.detokenize([258]),
    ],
)
def test_bad_rows_chunks_and_batches_are_refused(engine: pyengine.Engine, call: Callable[[Any], Any]) -> None:
    with pytest.raises(errors.RequestError, match="expected"):
        call(engine)


def test_rows_come_in_the_order_asked(engine: pyengine.Engine) -> None:
    whole = engine.logits(PROMPT)
    np.testing.assert_array_equal(engine.logits(PROMPT, [3, 0, 3], chunk=2), whole[[3, 0, 3]])
    assert engine.logits(PROMPT, []).shape == (0, 258)


def test_environment_twins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENGINE_THREADS", "3")
    monkeypatch.setenv("PYENGINE_ISA", "scalar")
    with pyengine.load(folder, quant="f32") as one:
        assert (one.threads, one.isa) == (3, "scalar")
    with pyengine.load(folder, quant="f32", threads=1) as one:
        assert one.threads == 1
    monkeypatch.setenv("PYENGINE_THREADS", "many")
    with pytest.raises(errors.RequestError, match="PYENGINE_THREADS='many'; expected a whole number"):
        pyengine.load(folder)


def test_memory_is_checked_first(folder: Path, tight: pyengine.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "available_memory", lambda: 200_000)
    with pytest.raises(errors.ResourceError, match=r"about \d+ bytes of f32 weights, 200000 bytes of memory available"):
        pyengine.load(folder, quant="f32")
    assert tight.generate(PROMPT, max_tokens=5, ignore_eos=True).finish_reason == "length"
    with pytest.raises(errors.ResourceError, match=r"a KV cache of 904 tokens takes \d+ bytes, \d+ are available"):
        tight.generate(PROMPT, max_tokens=900, ignore_eos=True)
    assert tight.pool.size == [4]


def test_malformed_g28_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", CONFIG).rename(tmp_path / os.fsdecode(b"bad\xff name"))
    for path in (folder, os.fspath(folder), os.fsencode(folder)):
        with pyengine.load(path, quant="f32") as one:
            record = one.generate(PROMPT, max_tokens=2, ignore_eos=True).to_json()
            assert record["model"] == os.fspath(folder)
            json.dumps(record).encode("ascii")


def test_progress_counts_to_its_total(folder: Path) -> None:
    said: list[tuple[int, int, str]] = []
    with pyengine.load(folder, quant="int8", progress=lambda *step: said.append(step)):
        pass
    assert [done for done, _, _ in said] == [0, 1, 2, 3]
    assert {(total, what) for _, total, what in said} == {(3, "loading")}


def test_malformed_g28_a_file_or_an_empty_folder_is_no_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.RequestError, match="a file; expected the folder"):
        pyengine.load(folder / "config.json")
    with pytest.raises(errors.ModelFormatError, match=r"config\.json: no such file"):
        pyengine.load(tmp_path)
    with pytest.raises(errors.ModelNotFoundError, match="no such folder"):
        pyengine.load(tmp_path / "missing")
