"""Blocks of the KV pools: taken once, given back, used again; the bits never depend on which ones a sequence has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_same_bits
from golden.golden_cases import CONFIGS

import pyengine
from pyengine._core import KV_BLOCK
from pyengine.errors import RequestError
from pyengine.kv_cache import KvPool, Sequence
from pyengine.reference import ReferenceCache, load_reference

VOCAB = 97
CONFIG = {**CONFIGS["qwen2_window"], "max_position_embeddings": 1024}  # two layers without and two with a window of 8
GROUPS = {None: 0, 8: 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pyengine.Engine]:
    folder = write_tiny_model(tmp_path_factory.mktemp("kv"), CONFIG, seed=6)
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


@pytest.fixture
def pool(engine: pyengine.Engine) -> Iterator[KvPool]:
    """The engine's pool, which every test leaves as it was: no block lost, none given back twice."""
    yield engine.pool
    for free, size in zip(engine.pool.free, engine.pool.size, strict=True):
        assert sorted(free) == list(range(size))


def ids_of(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def step(engine: pyengine.Engine, sequences: list[Sequence], parts: list[list[int]]) -> np.ndarray:
    """Logits [S, V] of the last token of every sequence's new tokens."""
    rows = np.cumsum([len(part) for part in parts]).astype(np.int32) - 1
    out = np.empty((len(parts), VOCAB), np.float32)
    engine.forward(list(zip(sequences, parts, strict=True)), rows=rows.astype(np.int32), logits=out)
    return out


def last_logits(engine: pyengine.Engine, ids: list[int]) -> np.ndarray:
    return engine.logits(ids, [len(ids) - 1])[0]


def test_layers_of_one_shape_share_a_group(pool: KvPool) -> None:
    assert {window: group for group, window in enumerate(pool.windows)} == GROUPS
    assert pool.groups == ((0, 0), (0, 1), (1, 0), (1, 1))
    bytes_per_layer = 2 * 2 * 16 * 4  # K and V, two heads of 16, float32
    assert pool.bytes_per_token == 4 * bytes_per_layer


@pytest.mark.parametrize("length", [1, KV_BLOCK - 1, KV_BLOCK, KV_BLOCK + 1, 2 * KV_BLOCK, 2 * KV_BLOCK + 1])
def test_malformed_g12_blocks_are_taken_as_tokens_need_them(engine: pyengine.Engine, pool: KvPool, length: int) -> None:
    """Also G12: prompts around a block's border give what they give in one token after another."""
    sequence = Sequence(pool)
    ids = ids_of(length + 1)
    step(engine, [sequence], [ids[:-1]])
    assert sequence.length == length
    assert len(sequence.owned[GROUPS[None]]) == -(-length // KV_BLOCK)
    out = step(engine, [sequence], [ids[-1:]])
    assert_same_bits(out[0], engine.logits(ids, [length], chunk=1)[0], "after the border")
    sequence.close()
    assert sequence.length == 0


def test_no_two_sequences_own_a_block(engine: pyengine.Engine, pool: KvPool) -> None:
    sequences = [Sequence(pool) for _ in range(5)]
    prompts = [ids_of(20 + 17 * i, seed=i) for i in range(5)]
    step(engine, sequences, prompts)
    for group in range(2):
        owned = [block for sequence in sequences for block in sequence.owned[group].values()]
        assert len(owned) == len(set(owned))
        assert not set(owned).intersection(pool.free[group])
    tokens = [ids_of(1, seed=50 + i) for i in range(5)]
    out = step(engine, sequences, tokens)
    for prompt, token, row in zip(prompts, tokens, out, strict=True):
        assert_same_bits(row, last_logits(engine, prompt + token), f"{len(prompt)} tokens before")
    for sequence in sequences:
        sequence.close()


def test_used_blocks_are_as_good_as_new(engine: pyengine.Engine, pool: KvPool) -> None:
    """What an earlier sequence left in a block, and the order in which blocks come, show nowhere."""
    ids = ids_of(70)
    first = engine.logits(ids)
    for free in pool.free:
        free.reverse()
    engine.logits(ids_of(300, seed=9))
    size = list(pool.size)
    assert_same_bits(engine.logits(ids), first, "in used blocks")
    assert_same_bits(engine.logits(ids, chunk=1), first, "in used blocks, token by token")
    assert pool.size == size


def test_a_window_group_keeps_only_what_the_next_token_sees(engine: pyengine.Engine, pool: KvPool) -> None:
    sequence = Sequence(pool)
    ids = ids_of(200)
    for length, token in enumerate(ids, start=1):
        step(engine, [sequence], [[token]])
        first_key = max(0, length + 1 - 8)
        assert sorted(sequence.owned[1]) == list(range(first_key // KV_BLOCK, (length - 1) // KV_BLOCK + 1))
        assert sorted(sequence.owned[0]) == list(range((length - 1) // KV_BLOCK + 1))
    assert_same_bits(step(engine, [sequence], [[3]])[0], last_logits(engine, [*ids, 3]), "after 200 tokens")
    sequence.close()
    step(engine, [sequence := Sequence(pool)], [ids_of(500)])
    assert (len(sequence.owned[0]), len(sequence.owned[1])) == (16, 1)
    sequence.close()


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 59, 60, 99])
def test_truncated_tokens_are_forgotten(tmp_path: Path, length: int) -> None:
    write_tiny_model(tmp_path, CONFIGS["qwen2"], seed=6)
    ids, other = ids_of(60), ids_of(20, seed=8)
    with pyengine.load(tmp_path, quant="f32") as one:
        sequence = Sequence(one.pool)
        step(one, [sequence], [ids])
        sequence.truncate(length)
        kept = min(length, 60)
        assert sequence.length == kept
        assert sorted(sequence.owned[0]) == list(range(-(-kept // KV_BLOCK)))
        other = other[: 64 - kept]
        out = step(one, [sequence], [other])
        assert_same_bits(out[0], last_logits(one, ids[:kept] + other), f"others after {length}")
        sequence.close()
        assert sorted(one.pool.free[0]) == list(range(one.pool.size[0]))


def test_report_c32_a_window_refuses_to_go_back_to_what_it_gave_away(engine: pyengine.Engine, pool: KvPool) -> None:
    sequence = Sequence(pool)
    ids = ids_of(100)
    step(engine, [sequence], [ids])
    owned = [dict(blocks) for blocks in sequence.owned]
    for length in (1, 50, 64):
        with pytest.raises(RequestError, match="expected as many as the window"):
            sequence.truncate(length)
        assert (sequence.length, sequence.owned) == (100, owned)
    sequence.truncate(95)
    assert_same_bits(step(engine, [sequence], [[4]])[0], last_logits(engine, [*ids[:95], 4]), "back to 95")
    sequence.truncate(0)
    step(engine, [sequence], [ids[:30]])
    sequence.truncate(12)
    assert_same_bits(step(engine, [sequence], [[4]])[0], last_logits(engine, [*ids[:12], 4]), "back to 12")
    sequence.close()


def test_a_refused_step_changes_no_length(engine: pyengine.Engine, pool: KvPool) -> None:
    sequence = Sequence(pool)
    step(engine, [sequence], [ids_of(40)])
    with pytest.raises(RequestError):
        step(engine, [sequence], [[VOCAB]])
    with pytest.raises(RequestError):
        engine.forward([(sequence, [1])], rows=np.array([1], np.int32), logits=np.empty((1, VOCAB), np.float32))
    assert sequence.length == 40
    assert_same_bits(step(engine, [sequence], [[5]])[0], last_logits(engine, [*ids_of(40), 5]), "after the refusals")
    sequence.close()


def test_tables_grow_past_their_first_size(engine: pyengine.Engine, pool: KvPool) -> None:
    """Sequences whose tables have different lengths run in one batch."""
    long, short = Sequence(pool), Sequence(pool)
    ids = ids_of(700)
    step(engine, [long], [ids[:500]])
    step(engine, [long], [ids[500:]])
    step(engine, [short], [ids[:3]])
    assert len(long.tables[0]) > len(short.tables[0])
    out = step(engine, [short, long], [[7], [7]])
    assert_same_bits(out[0], last_logits(engine, [*ids[:3], 7]), "short")
    assert_same_bits(out[1], last_logits(engine, [*ids, 7]), "long")
    long.close()
    short.close()


def test_a_bfloat16_cache_takes_half(tmp_path: Path, engine: pyengine.Engine) -> None:
    write_tiny_model(tmp_path, CONFIG, seed=6)
    with pyengine.load(tmp_path, quant="f32", kv_dtype="bf16") as half:
        assert half.pool.bytes_per_token == engine.pool.bytes_per_token / 2
        ids = ids_of(60)
        difference = np.abs(half.logits(ids) - engine.logits(ids)).max()
        assert 0 < difference < 0.1


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen2_large_bias", "qwen3", "llama_head_dim", "mistral_window"])
def test_an_int8_cache_rounds_as_the_reference_does(tmp_path: Path, case: str) -> None:
    """The rounding shows in the logits, and little beside it: a value halfway between two steps may fall otherwise."""
    config = CONFIGS[case.removesuffix("_large_bias")]
    tensors = tiny_tensors(config, seed=6)
    if case.endswith("_large_bias"):
        for bias in (b for name, b in tensors.items() if name.endswith("k_proj.bias")):
            bias[3::11] *= 60
    write_tiny_model(tmp_path, config, tensors=tensors)
    ids = ids_of(60)
    model = load_reference(tmp_path)
    with pyengine.load(tmp_path, quant="f32", kv_dtype="int8") as one:
        a = one.spec.layers[0].attention
        values = -(-a.head_dim // 16) * 16
        assert one.pool.bytes_per_token == one.spec.num_layers * a.num_kv_heads * (a.head_dim + values + 8)
        ours = one.logits(ids)
    rounded = model.forward(ids, cache=ReferenceCache("int8"))
    distance = np.abs(rounded - model.forward(ids)).mean()
    assert 0 < distance < 0.5
    assert np.abs(ours - rounded).mean() < distance / 8


def test_what_an_earlier_sequence_left_shows_nowhere_in_an_int8_cache(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIG, seed=6)
    ids = ids_of(70)
    with pyengine.load(tmp_path, quant="f32", kv_dtype="int8") as one:
        first = one.logits(ids)
        one.logits(ids_of(300, seed=9))
        for free in one.pool.free:
            free.reverse()
        assert_same_bits(one.logits(ids), first, "in used blocks")
        assert_same_bits(one.logits(ids, chunk=1), first, "in used blocks, token by token")
