"""The engine: arguments, requests, cancelling, results, timers, life."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.kv_cache import KvPool, Sequence

CONFIG = {**CONFIGS["llama"], "max_position_embeddings": 512, "eos_token_id": 96}
VOCAB = 97
PROMPT = [5, 17, 3, 80]

JSON_KEYS = {
    *(
        "text",
        "tokens",
        "finish_reason",
        "stop_reason",
        "prompt_format",
        "seed",
        "model",
        "family",
        "quant",
        "group_size",
    ),
    *("device", "isa", "threads", "version", "usage", "timings", "ffn_share", "decode_breakdown"),
    *("weight_bytes_per_token", "peak_rss_bytes"),
}
TIMING_KEYS = {
    *("load_ms", "prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms"),
    *("predicted_per_second", "decode_steps", "cache_n"),
}
STAGES = {"embed", "norm", "attention", "router", "ffn", "lm_head", "sample", "other"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engine"), CONFIG, seed=4)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[pyengine.Engine]:
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


def argmax_chain(engine: pyengine.Engine, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(engine.logits(ids, [len(ids) - 1])[0].argmax()))
    return ids[len(prompt) :]


# ---- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"quant": "int3"}, pyengine.RequestError),
        ({"quant": "int4", "group_size": 48}, pyengine.RequestError),
        ({"quant": "int8", "group_size": 32}, pyengine.RequestError),
        ({"quant": "bf16", "group_size": 64}, pyengine.RequestError),
        ({"quant": "int4", "int4_scheme": "odd"}, pyengine.RequestError),
        ({"kv_dtype": "int4"}, pyengine.RequestError),
        ({"threads": 0}, pyengine.RequestError),
        ({"threads": -1}, pyengine.RequestError),
        ({"threads": 10**6}, pyengine.RequestError),
        ({"threads": True}, pyengine.RequestError),
        ({"ctx_size": -1}, pyengine.RequestError),
        ({"ctx_size": 513}, pyengine.RequestError),
        ({"device": "tpu"}, pyengine.RequestError),
        ({"isa": "avx1024"}, pyengine.ResourceError),
    ],
)
def test_malformed_g25_g26_report_a05_bad_arguments_are_refused(
    folder: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"expected|has"):
        pyengine.load(folder, **arguments)


def test_none_is_the_stored_precision(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "f32", CONFIG)
    half = {name: values.astype(np.float16) for name, values in tiny_tensors(CONFIG).items()}
    write_tiny_model(tmp_path / "f16", CONFIG, tensors=half)
    for name in ("f32", "f16"):
        with pyengine.load(tmp_path / name, quant="none") as one:
            assert (one.quant, one.group_size, one.kv_dtype) == ("f32", None, "f32")


@pytest.mark.parametrize(("quant", "bits"), [("f32", 32.0), ("bf16", 16.0), ("int8", 8.25), ("int4", 4.5)])
def test_bits_per_weight_count_scales_and_padding(folder: Path, quant: str, bits: float) -> None:
    with pyengine.load(folder, quant=quant, calibration=False) as one:
        assert bits <= one.bits_per_weight < 1.5 * bits  # 64 columns: the rows' own units weigh heavily
        matrices = one.bits_per_weight * one.weights.layer_matrix_weights / 8
        assert one.weight_bytes_per_token == pytest.approx(matrices + one.weights.head_bytes)


# ---- requests ------------------------------------------------------------------------------------------------------


def test_malformed_g13_report_f01_greedy_is_the_argmax_of_the_logits(engine: pyengine.Engine) -> None:
    result = engine.generate(PROMPT, max_tokens=12, ignore_eos=True)
    assert result.tokens == argmax_chain(engine, PROMPT, 12)
    assert result.finish_reason == "length"
    rows = engine.logits([*PROMPT, *result.tokens], range(3, 15)).astype(np.float64)
    logprobs = rows - rows.max(1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(1, keepdims=True))
    chosen = logprobs[np.arange(12), result.tokens]
    np.testing.assert_allclose(result.logprobs, chosen, atol=1e-5)


@pytest.mark.parametrize("ids", [[], [-1], [VOCAB], [5279552648203111001], [1.5], ["1"], [True], [None]])
def test_malformed_g01_g02_g03_g04_report_f16_f17_bad_token_ids_are_refused(
    engine: pyengine.Engine, ids: list[Any]
) -> None:
    with pytest.raises(pyengine.RequestError):
        engine.generate(ids, max_tokens=1)
    with pytest.raises(pyengine.RequestError):
        engine.logits(ids)


def test_text_without_a_tokenizer_is_refused(engine: pyengine.Engine) -> None:
    for call in (engine.generate, engine.tokenize):
        with pytest.raises(pyengine.TokenizerError, match=r"no tokenizer\.json"):
            call("text")
    with pytest.raises(pyengine.RequestError, match="tokenizer"):
        engine.generate(PROMPT, stop=("x",))


def test_malformed_g09_g10_report_g01_g02_g06_the_context_is_exact(folder: Path) -> None:
    with pyengine.load(folder, quant="f32", ctx_size=40) as one:
        assert len(one.generate(PROMPT, max_tokens=36, ignore_eos=True).tokens) == 36
        assert len(one.generate(PROMPT, max_tokens=-1, ignore_eos=True).tokens) == 36
        assert one.generate(PROMPT, max_tokens=100, ignore_eos=True).finish_reason == "length"
        full = list(range(40))
        with pytest.raises(pyengine.RequestError, match="no room"):
            one.generate(full, max_tokens=1)
        with pytest.raises(pyengine.RequestError):
            one.logits([*full, 1])


@pytest.mark.parametrize(("kind", "positions"), [("yarn", 64), ("linear", 64), ("dynamic", 256)])
def test_report_c12_a_scaled_rope_counts_its_factor_once(tmp_path: Path, kind: str, positions: int) -> None:
    config = {**CONFIG, "max_position_embeddings": 64, "rope_scaling": {"rope_type": kind, "factor": 4.0}}
    write_tiny_model(tmp_path, config)
    with pyengine.load(tmp_path, quant="f32") as one:
        assert one.ctx_size == positions
        assert np.isfinite(one.logits([1] * positions, [positions - 1])).all()
        with pytest.raises(pyengine.RequestError):
            one.logits([1] * (positions + 1))


def test_malformed_c21_unused_tensors_of_other_kinds_load(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.layers.0.self_attn.steps": np.arange(3),
        "model.flag": np.ones(2, bool),
    }
    write_tiny_model(tmp_path, CONFIG, tensors={**tiny_tensors(CONFIG, seed=4), **extra})
    with pyengine.load(tmp_path, quant="int8") as one:
        assert np.isfinite(one.logits(PROMPT)).all()
        assert len(one.notes) >= 3


def test_malformed_g07_report_f22_no_tokens_wanted_is_no_compute(engine: pyengine.Engine) -> None:
    result = engine.generate(PROMPT, max_tokens=0)
    assert (result.tokens, result.finish_reason, result.usage["completion_tokens"]) == ([], "length", 0)
    assert result.timings["prompt_n"] == 0
    assert result.ffn_share is None


def test_eos_ends_and_is_counted(engine: pyengine.Engine) -> None:
    chain = argmax_chain(engine, PROMPT, 6)
    first = next(i for i, token in enumerate(chain) if chain.index(token) == i and i >= 2)
    object.__setattr__(engine.spec, "eos_token_ids", (chain[first],))
    try:
        result = engine.generate(PROMPT, max_tokens=20)
    finally:
        object.__setattr__(engine.spec, "eos_token_ids", (96,))
    assert result.tokens == chain[:first]
    assert (result.finish_reason, result.stop_reason) == ("stop", chain[first])
    assert result.usage["completion_tokens"] == first + 1


def test_a_seed_repeats_and_does_not_depend_on_the_company(engine: pyengine.Engine) -> None:
    options = {"max_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    first = engine.generate(PROMPT, seed=7, **options)
    assert engine.generate(PROMPT, seed=7, **options).tokens == first.tokens
    assert engine.generate(PROMPT, seed=8, **options).tokens != first.tokens
    batch = engine.generate_batch([PROMPT, PROMPT], seed=7, **options)
    assert [one.seed for one in batch] == [7, 8]
    assert batch[0].tokens == first.tokens


@pytest.mark.parametrize(("option", "kept"), [({"top_k": 3}, 3), ({"top_p": 1e-9}, 1), ({"min_p": 1.0}, 1)])
def test_filters_keep_the_most_likely(engine: pyengine.Engine, option: dict[str, Any], kept: int) -> None:
    best = np.argsort(-engine.logits(PROMPT, [3])[0], kind="stable")[:kept]
    drawn = {
        engine.generate(PROMPT, max_tokens=1, temperature=5.0, seed=seed, ignore_eos=True, **option).tokens[0]
        for seed in range(40)
    }
    assert drawn <= set(best.tolist())
    assert len(drawn) == kept


def test_sampling_follows_the_distribution(engine: pyengine.Engine) -> None:
    logits = engine.logits(PROMPT, [3])[0].astype(np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    draws = [
        engine.generate(PROMPT, max_tokens=1, temperature=1.0, seed=seed, ignore_eos=True).tokens[0]
        for seed in range(2000)
    ]
    counts = np.bincount(draws, minlength=VOCAB)
    error = np.abs(counts / len(draws) - p)
    assert (error <= 5 * np.sqrt(p * (1 - p) / len(draws)) + 2 / len(draws)).all()


def test_malformed_g18_g19_report_f04_a_penalty_divides_positive_and_multiplies_negative_logits(
    engine: pyengine.Engine,
) -> None:
    plain = engine.generate(PROMPT, max_tokens=8, ignore_eos=True)
    same = engine.generate(PROMPT, max_tokens=8, ignore_eos=True, repetition_penalty=1.0)
    assert same.tokens == plain.tokens
    ids = list(PROMPT)
    for _ in range(8):
        logits = engine.logits(ids, [len(ids) - 1])[0]
        seen = sorted(set(ids))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / np.float32(3), logits[seen] * np.float32(3))
        ids.append(int(logits.argmax()))
    penalised = engine.generate(PROMPT, max_tokens=8, ignore_eos=True, repetition_penalty=3.0)
    assert penalised.tokens == ids[4:]
    assert penalised.tokens != plain.tokens


# ---- results and timers --------------------------------------------------------------------------------------------


def test_the_result_has_exactly_the_keys_of_the_contract(engine: pyengine.Engine) -> None:
    record = engine.generate(PROMPT, max_tokens=16, ignore_eos=True).to_json()
    assert set(record) == JSON_KEYS
    assert set(record["timings"]) == TIMING_KEYS
    assert set(record["decode_breakdown"]) == STAGES
    assert record["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}
    timings, breakdown = record["timings"], record["decode_breakdown"]
    assert timings["predicted_n"] == timings["decode_steps"] == 15
    assert sum(breakdown.values()) == pytest.approx(timings["predicted_ms"] / 15, rel=1e-9)
    assert min(breakdown.values()) >= 0
    assert record["ffn_share"] == pytest.approx(breakdown["ffn"] * 15 / timings["predicted_ms"])


def test_stages_cover_the_run_and_an_untimed_program_has_none(engine: pyengine.Engine, tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "head_dim": 64}
    write_tiny_model(tmp_path, config)
    with pyengine.load(tmp_path, quant="f32", threads=1) as one:
        one.program.program.times(True)
        for _ in range(5):
            one.logits(PROMPT * 16)
        ops_ns, runs, run_ns = one.program.program.times(True)
        assert runs == 5
        assert 0.99 <= ops_ns.sum() / run_ns <= 1
    untimed = engine.build(timed=False)
    np.testing.assert_array_equal(engine.logits(PROMPT, program=untimed), engine.logits(PROMPT))
    assert untimed.program.times(False)[0].sum() == 0


# ---- cancelling and errors -----------------------------------------------------------------------------------------


def test_report_g16_closing_a_stream_cancels_and_gives_the_blocks_back(engine: pyengine.Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=8, ignore_eos=True).tokens
    free = [len(blocks) for blocks in engine.pool.free]
    stream = engine.stream(PROMPT, max_tokens=100, ignore_eos=True)
    pieces = [next(stream).token for _ in range(3)]
    stream.close()
    assert stream.result is not None
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.tokens == pieces == expected[:3]
    assert [len(blocks) for blocks in engine.pool.free] == free
    assert engine.generate(PROMPT, max_tokens=8, ignore_eos=True).tokens == expected


def run_for_ever(engine: pyengine.Engine, ids: list[int]) -> None:
    while True:
        engine.logits(ids, [len(ids) - 1])


def test_report_g17_ctrl_c_stops_a_run_from_inside(tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "head_dim": 64}
    write_tiny_model(tmp_path, config)
    ids = np.random.default_rng(0).integers(0, VOCAB, 512).tolist()
    with pyengine.load(tmp_path, quant="f32", threads=2) as one:
        before = one.logits(PROMPT)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_for_ever(one, ids)
        timer.join()
        np.testing.assert_array_equal(one.logits(PROMPT), before)


def test_a_cancelled_run_changes_no_length(engine: pyengine.Engine) -> None:
    sequence = Sequence(engine.pool)
    engine.forward([(sequence, PROMPT)])
    flag = np.ones(1, np.int32)
    with pytest.raises(pyengine.PyEngineError, match="cancelled"):
        engine.forward([(sequence, PROMPT)], cancel=flag)
    assert sequence.length == len(PROMPT)
    out = np.empty((1, VOCAB), np.float32)
    engine.forward([(sequence, [9])], rows=np.zeros(1, np.int32), logits=out)
    np.testing.assert_array_equal(out, engine.logits([*PROMPT, 9], [4]))
    sequence.close()


def test_report_f06_f07_infinite_logits_are_an_error_not_a_token(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG)
    tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], 3e38)
    write_tiny_model(tmp_path, CONFIG, tensors=tensors)
    with pyengine.load(tmp_path, quant="f32") as one:
        with pytest.raises(pyengine.ComputeError, match="NaN or Inf in the logits"):
            one.generate(PROMPT, max_tokens=2)
        with pytest.raises(pyengine.ComputeError):
            one.logits(PROMPT)


def test_malformed_g27_two_threads_are_served_in_turn(engine: pyengine.Engine) -> None:
    expected = engine.generate(PROMPT, max_tokens=20, ignore_eos=True).tokens
    results: list[list[int]] = []

    def ask() -> None:
        results.append(engine.generate(PROMPT, max_tokens=20, ignore_eos=True).tokens)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


# ---- life ----------------------------------------------------------------------------------------------------------


def test_malformed_g27_a_closed_engine_refuses(folder: Path) -> None:
    one = pyengine.load(folder, quant="f32")
    stream = one.stream(PROMPT, max_tokens=5)
    one.close()
    one.close()
    for call in (lambda: one.generate(PROMPT), lambda: one.logits(PROMPT), lambda: next(stream)):
        with pytest.raises(pyengine.RequestError, match="closed"):
            call()


def test_a_pickled_engine_loads_again(folder: Path) -> None:
    with pyengine.load(folder, quant="int8", threads=1, calibration=False) as one:
        copy = pickle.loads(pickle.dumps(one))
        with copy:
            assert (copy.quant, copy.threads) == ("int8", 1)
            np.testing.assert_array_equal(copy.logits(PROMPT), one.logits(PROMPT))


def test_window_groups_give_blocks_back(tmp_path: Path) -> None:
    config = {**CONFIGS["qwen2_window"], "max_position_embeddings": 512}
    write_tiny_model(tmp_path, config)
    with pyengine.load(tmp_path, quant="f32") as one:
        assert sorted(w or 0 for w in one.pool.windows) == [0, 8]
        sequence = Sequence(one.pool)
        one.forward([(sequence, [1] * 200)])
        owned = {window: len(blocks) for window, blocks in zip(one.pool.windows, sequence.owned, strict=True)}
        assert owned == {None: 7, 8: 1}
        sequence.close()
        assert [len(free) for free in one.pool.free] == one.pool.size


def test_blocks_are_used_again(engine: pyengine.Engine) -> None:
    pool: KvPool = engine.pool
    engine.logits(PROMPT * 20)
    size = list(pool.size)
    for _ in range(5):
        engine.logits(PROMPT * 20)
    assert pool.size == size
