"""Blocks of earlier requests: taken over by the exact tokens, bits unchanged, never more bytes than the limit."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.golden_cases import CONFIGS, build
from kv_pools import counted_bytes, nothing_lost

import pyengine
from pyengine import errors, system
from pyengine.kv_cache import KvPool, Sequence
from pyengine.prefix_cache import NODE_BYTES, Node

VOCAB = 97
CASES: list[tuple[str, dict[str, Any]]] = [
    *[("llama", {}), ("mistral_window", {}), ("qwen2_window", {}), ("qwen2_window", {"kv_dtype": "int8"})],
    *[("deepseek_v3", {"kv_dtype": "bf16"}), ("gemma3_v5", {}), ("qwen3_moe", {})],
]


def ids_of(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("prefix"), "llama")


@pytest.fixture
def engine(folder: Path) -> Iterator[pyengine.Engine]:
    with pyengine.load(folder, quant="f32", threads=1) as one:
        yield one
        assert nothing_lost(one.pool)


def make(folder: Path, case: str) -> Path:
    return build(folder, {**CONFIGS[case], "max_position_embeddings": 1024}, seed=4)


def ask(engine: pyengine.Engine, ids: list[int], tokens: int = 8, **options: Any) -> tuple[list[int], list[float], int]:
    result = engine.generate(ids, max_tokens=tokens, ignore_eos=True, **options)
    assert result.timings["prompt_n"] + result.timings["cache_n"] == len(ids)
    return result.tokens, result.logprobs, result.timings["cache_n"]


@pytest.mark.parametrize(("case", "options"), CASES, ids=str)
def test_a_conversation_gives_the_same_bits_with_and_without(
    tmp_path: Path, case: str, options: dict[str, Any]
) -> None:
    make(tmp_path, case)
    with (
        pyengine.load(tmp_path, quant="f32", threads=2, **options) as keeps,
        pyengine.load(tmp_path, quant="f32", threads=2, prefix_cache_bytes=0, **options) as forgets,
    ):
        for start in (1, 40, 64, 77):
            ids, before = ids_of(start, seed=start), 0
            for turn in range(4):
                tokens, logprobs, cached = ask(keeps, ids, 30, speculate="ngram" if turn % 2 else None)
                assert (tokens, logprobs, 0) == ask(forgets, ids, 30)
                if turn:  # all whole blocks of the last turn, but for its last token, which was never run
                    assert cached == (before - 1) // 32 * 32
                assert ask(keeps, ids, 30)[:2] == (tokens, logprobs)  # the answer again
                before = len(ids) + len(tokens)
                ids = ids + tokens + ids_of(9 + turn, seed=turn)
            assert nothing_lost(keeps.pool)
        assert forgets.pool.prefixes.bytes == 0


def test_only_exactly_the_same_tokens_count(engine: pyengine.Engine) -> None:
    ids = ids_of(100)
    assert ask(engine, ids)[2] == 0
    assert ask(engine, ids)[2] == 96
    assert ask(engine, ids[:96])[2] == 64  # the last token is always computed
    assert ask(engine, ids[:97])[2] == 96
    for at, kept in ((0, 0), (31, 0), (32, 32), (63, 32), (95, 64), (96, 96)):
        other = [*ids[:at], (ids[at] + 1) % VOCAB, *ids[at + 1 :]]
        fresh = engine.logits(other, [99])[0]
        tokens, _, cached = ask(engine, other, 1)
        assert (cached, tokens[0]) == (kept, int(fresh.argmax())), at
    assert ask(engine, ids[32:])[2] == 0  # the same tokens elsewhere are others


def test_a_window_is_resumed_where_all_it_sees_is_there(tmp_path: Path) -> None:
    """Also C32: after tokens fell out of the window, a shorter beginning is computed again."""
    make(tmp_path, "mistral_window")
    with pyengine.load(tmp_path, quant="f32", threads=1) as one:
        ids = ids_of(150)
        expected = one.logits(ids)
        assert ask(one, ids, 1)[2] == 0
        assert ask(one, ids, 1)[2] == 128
        for length, resumed in ((15, 0), (60, 0), (100, 32), (127, 96), (60, 32)):  # at the ends of those before
            tokens, _, cached = ask(one, ids[:length], 1)
            assert (tokens[0], cached) == (int(expected[length - 1].argmax()), resumed)
        assert ask(one, ids, 1)[2] == 128
        assert nothing_lost(one.pool)


@pytest.mark.parametrize("limit", [0, NODE_BYTES, 40_000, 1 << 20])
@pytest.mark.parametrize("case", ["llama", "qwen2_window", "mistral_window"])
def test_report_g15_the_limit_is_never_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, limit: int
) -> None:
    """100 prompts under 1 MiB, and less."""
    make(tmp_path, case)
    with pyengine.load(tmp_path, quant="f32", threads=1, prefix_cache_bytes=limit) as one:
        pool, most = one.pool, 0
        share = KvPool.share

        def watched(self: KvPool, group: int, block: int) -> int:
            nonlocal most
            most = max(most, counted_bytes(pool))
            return share(self, group, block)

        monkeypatch.setattr(KvPool, "share", watched)
        for i in range(100):
            ids = [*ids_of(70, seed=i % 3), *ids_of(40 + i, seed=100 + i)]
            ask(one, ids, 2)
            assert counted_bytes(pool) == pool.prefixes.bytes <= limit
            assert nothing_lost(pool)
        assert most <= limit
        if case == "llama" and limit == 1 << 20:
            assert pool.prefixes.bytes > limit - 2 * (pool.block_bytes[0] + NODE_BYTES)  # it is used
            assert ask(one, [*ids_of(70, seed=0), 5], 1)[2] == 64
        size = sum(size * bytes_ for size, bytes_ in zip(pool.size, pool.block_bytes, strict=True))
        assert size < 2 * limit + 16 * sum(pool.block_bytes)


def test_the_least_recently_used_goes_first(folder: Path) -> None:
    with pyengine.load(folder, quant="f32", threads=1) as one:
        node = one.pool.block_bytes[0] + NODE_BYTES
    with pyengine.load(folder, quant="f32", threads=1, prefix_cache_bytes=6 * node) as one:
        a, b, c = (ids_of(70, seed=i) for i in range(3))
        for ids in (a, b, c, a):
            ask(one, ids, 1)
        assert [ask(one, ids, 1)[2] for ids in (a, c)] == [64, 64]
        ask(one, ids_of(40, seed=9), 1)  # takes the place of b's second block
        assert [one.pool.prefixes.find(ids)[0] for ids in (a, b, c)] == [2, 1, 2]
        long = ids_of(400, seed=10)  # more than fits: its beginning is kept
        ask(one, long, 1)
        assert one.pool.prefixes.find(long)[0] == 6
        assert one.pool.prefixes.find(a)[0] == 0
        assert nothing_lost(one.pool)


def test_a_block_in_use_outlives_its_place_in_the_cache(folder: Path) -> None:
    with pyengine.load(folder, quant="f32", threads=1) as one:
        ids = ids_of(100)
        expected = ask(one, ids, 20)
        stream = one.stream(ids, max_tokens=20, ignore_eos=True)
        next(stream)
        while one.pool.prefixes.evict():
            pass
        for seed in range(5):
            ask(one, ids_of(200, seed=50 + seed), 4)
        result = stream.finish()
        assert (result.tokens, result.logprobs, result.timings["cache_n"]) == (*expected[:2], 96)
        assert nothing_lost(one.pool)


def test_cancelled_and_failed_requests_leave_only_what_is_final(
    engine: pyengine.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(600)
    expected = ask(engine, ids, 40)[:2]
    while engine.pool.prefixes.evict():
        pass
    forward, calls = engine.forward, 0

    def failing(entries: Any, **given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # after the step, before it counts: its rows are in the cache, its length is not
            forward(entries, **given)
            raise errors.ComputeError("NaN or Inf in the logits")
        return forward(entries, **given)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "forward", failing)
        with pytest.raises(errors.ComputeError):
            engine.generate(ids, max_tokens=40)
    assert nothing_lost(engine.pool)
    assert (*expected, 512) == ask(engine, ids, 40)
    stream = engine.stream(ids, max_tokens=40, ignore_eos=True, speculate="ngram")
    for _ in range(35):
        next(stream)
    stream.close()
    assert ask(engine, [*ids, *expected[0]], 5)[2] in (608, 640)
    assert ask(engine, ids, 40)[:2] == expected


def test_rejected_drafts_are_never_kept(engine: pyengine.Engine) -> None:
    """Texts that repeat: drafts are wrong now and then, and every whole block is computed again beside what is kept."""
    for seed in range(4):
        ids = ids_of(20, seed=seed) * 3
        text = [*ids, *ask(engine, ids, 100, speculate="ngram", temperature=0.9, seed=seed)[0]]
        depth, blocks = engine.pool.prefixes.find([*text, 1])
        assert depth >= (len(text) - 1) // 32
        sequence = Sequence(engine.pool)
        assert sequence.resume([*text, 1]) == 32 * depth
        out = np.empty((1, VOCAB), np.float32)
        rest = text[32 * depth :] or [1]
        engine.forward([(sequence, rest)], rows=np.array([len(rest) - 1], np.int32), logits=out)
        whole = [*text[: 32 * depth], *rest]
        np.testing.assert_array_equal(out[0], engine.logits(whole, [len(whole) - 1])[0])
        sequence.close()
        assert len(blocks[0]) == depth


def test_prompt_log_probabilities_take_nothing(engine: pyengine.Engine) -> None:
    ids = ids_of(100)
    ask(engine, ids)
    first = engine.generate(ids, max_tokens=2, prompt_logprobs=True, ignore_eos=True)
    assert (first.timings["cache_n"], first.timings["prompt_n"]) == (0, 100)


def test_memory_goes_to_requests_first(engine: pyengine.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        ask(engine, ids_of(300, seed=seed), 1)
    kept = engine.pool.prefixes.bytes
    monkeypatch.setattr(system, "available_memory", lambda: 0)
    ask(engine, ids_of(400, seed=50), 10)
    assert engine.pool.prefixes.bytes < kept + 14 * sum(engine.pool.block_bytes)
    with pytest.raises(errors.ResourceError, match="a KV cache of 1000000 tokens"):
        engine.pool.check_memory(10**6)
    assert engine.pool.prefixes.bytes == 0


def test_a_pool_that_cannot_grow_takes_from_the_cache(engine: pyengine.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        ask(engine, ids_of(300, seed=seed), 1)

    class NoMemory:
        device = "cpu"

        def kv_reserve(self, group: int, blocks: int) -> None:
            raise errors.ResourceError(f"no memory for {blocks} blocks")

    monkeypatch.setattr(engine.pool, "backend", NoMemory())
    assert ask(engine, ids_of(700, seed=50), 1)[2] == 0
    sequence = Sequence(engine.pool)
    with pytest.raises(errors.ResourceError, match="no memory"):
        sequence.reserve(7000)
    sequence.close()


def test_streams_that_are_left_give_their_blocks_back(engine: pyengine.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are collected as garbage while another one's blocks are being kept."""
    share, wrong = KvPool.share, []

    def collecting(self: KvPool, group: int, block: int) -> int:
        gc.collect()
        return share(self, group, block)

    monkeypatch.setattr(sys, "unraisablehook", wrong.append)
    monkeypatch.setattr(KvPool, "share", collecting)
    for seed in range(12):
        for piece in engine.stream([*ids_of(64), *ids_of(70, seed=seed)], max_tokens=4, ignore_eos=True):
            assert piece.token >= 0
            break
    gc.collect()
    assert wrong == []
    assert nothing_lost(engine.pool)
    assert ask(engine, [*ids_of(64), 5])[2] == 64


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows in some of its layers."""
    return make(tmp_path_factory.mktemp("groups"), "qwen2_window")


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("name", ["share", "give_back"])
@pytest.mark.parametrize("groups", [1, 2])
def test_ctrl_c_between_blocks(
    folder: Path, two_groups: Path, monkeypatch: pytest.MonkeyPatch, name: str, groups: int, at: int
) -> None:
    """Also between the groups of one block: no owner and no byte is lost, and none is counted twice."""
    real, calls = getattr(KvPool, name), [0]

    def interrupted(self: KvPool, group: int, block: int) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return real(self, group, block)

    with pyengine.load(two_groups if groups == 2 else folder, quant="f32", threads=1, prefix_cache_bytes=140000) as one:
        assert len(one.pool.ids) == groups
        ask(one, ids_of(70))

        def ask_four() -> None:  # the limit is reached: blocks are evicted too
            for seed in range(9, 13):
                ask(one, [*ids_of(64), *ids_of(200, seed=seed)])

        with monkeypatch.context() as patch:
            patch.setattr(KvPool, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask_four()
        assert calls[0] >= at
        gc.collect()
        assert nothing_lost(one.pool)
        expected = ask(one, ids_of(70), prompt_logprobs=False)[0]
        assert ask(one, ids_of(70))[0] == expected
        assert nothing_lost(one.pool)


@pytest.mark.parametrize("at", range(1, 5))
def test_ctrl_c_while_the_order_is_put_back(engine: pyengine.Engine, at: int) -> None:
    ask(engine, ids_of(130))
    prefixes, calls = engine.pool.prefixes, [0]

    class Interrupted(OrderedDict[Node, None]):
        def __setitem__(self, node: Node, value: None) -> None:
            calls[0] += 1
            if calls[0] == at:
                raise KeyboardInterrupt
            super().__setitem__(node, value)

    before = list(prefixes.order)
    prefixes.order = Interrupted()
    calls[0] = -len(before)
    for node in before:
        prefixes.order[node] = None
    assert calls[0] == 0
    with pytest.raises(KeyboardInterrupt):
        ask(engine, ids_of(130))
    assert list(prefixes.order) == before
    assert nothing_lost(engine.pool)


@pytest.mark.parametrize("value", [-1, 1.5, "1", True, None])
def test_other_limits_are_refused(folder: Path, value: Any) -> None:
    with pytest.raises(errors.RequestError, match=r"prefix_cache_bytes .*expected bytes, 0 or more"):
        pyengine.load(folder, quant="f32", prefix_cache_bytes=value)
