"""Sampling, contexts, memory, threads and large sizes: what users of other engines ran into. Ids are those of
case_ids.txt, sections F and G."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import platform
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_same_bits
from golden.golden_cases import TL
from kernel_cases import BEST, normal
from kv_pools import nothing_lost
from refusal import assert_refused

import pyengine
from pyengine import kernels
from pyengine._core import Backend
from pyengine.errors import ModelFormatError, RequestError
from pyengine.kv_cache import Sequence
from pyengine.quantize import choose

CONFIG = {**TL, "max_position_embeddings": 128, "eos_token_id": None}
PROMPT = [5, 17, 3, 80]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("requests"), CONFIG, seed=4)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[pyengine.Engine]:
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


# ---- sampling -------------------------------------------------------------------------------------------------------


def penalised(logits: np.ndarray, ids: list[int], penalty: float, *, each: bool) -> int:
    """The argmax after a penalty on `ids`: once for each that is there, or (the mistake) each time it is there."""
    x = logits.copy()
    for i in ids if each else sorted(set(ids)):
        x[i] = x[i] / np.float32(penalty) if x[i] > 0 else x[i] * np.float32(penalty)
    return int(x.argmax())


def test_report_f05_the_penalty_counts_once_per_id(engine: pyengine.Engine) -> None:
    told_apart = 0
    for i in range(97):
        ids = [i, i, i]
        logits = engine.logits(ids, [2])[0]
        once, each = (penalised(logits, ids, 0.6, each=each) for each in (False, True))
        token = engine.generate(ids, max_tokens=1, ignore_eos=True, repetition_penalty=0.6).tokens[0]
        assert token == once
        told_apart += once != each
    assert told_apart, "a penalty per occurrence gives the same tokens everywhere"


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("stop", [97, 151645, -1, 2**31])
def test_report_f15_a_stop_id_outside_the_vocabulary_is_refused(where: str, stop: int, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, CONFIG)
    values = {**CONFIG, "eos_token_id": stop} if where == "config.json" else {"eos_token_id": [2, stop]}
    (folder / where).write_text(json.dumps(values))
    assert_refused(
        lambda: pyengine.load(folder), ModelFormatError, (where, "eos_token_id", str(stop), "0 to 96"), folder
    )


def test_report_f15_stop_takes_no_ids(engine: pyengine.Engine) -> None:
    for stop in (151645, [151645], [2]):
        with pytest.raises(RequestError, match=r"stop .*; expected strings"):
            engine.generate(PROMPT, stop=stop)


def test_report_f24_random_numbers_belong_to_the_request(engine: pyengine.Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.5, "ignore_eos": True}
    alone = {seed: engine.generate(PROMPT, seed=seed, **options).tokens for seed in range(4)}
    assert len({tuple(tokens) for tokens in alone.values()}) == 4, "seeds do not show"
    found: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        found[seed] = engine.generate(PROMPT, seed=seed, **options).tokens

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8, 14, 15, 16])
def test_report_f10_greedy_does_not_depend_on_threads(threads: int, folder: Path, engine: pyengine.Engine) -> None:
    with pyengine.load(folder, quant="f32", threads=threads) as one:
        assert_same_bits(one.logits(PROMPT), engine.logits(PROMPT), f"{threads} threads")
        found = one.generate(PROMPT, max_tokens=12, ignore_eos=True)
        assert found.tokens == engine.generate(PROMPT, max_tokens=12, ignore_eos=True).tokens


# ---- contexts -------------------------------------------------------------------------------------------------------


def test_report_g02_g05_without_limits_the_context_is_the_models_and_ends(engine: pyengine.Engine) -> None:
    assert engine.ctx_size == 128
    result = engine.generate(PROMPT, max_tokens=-1)
    assert (len(result.tokens), result.finish_reason) == (124, "length")


def test_report_g04_a_new_request_after_a_full_context(engine: pyengine.Engine) -> None:
    before = engine.generate(PROMPT, max_tokens=10).tokens
    for _ in range(3):
        assert engine.generate(list(range(90)), max_tokens=-1).usage["total_tokens"] == 128
        with pytest.raises(RequestError, match="no room in a context of 128"):
            engine.generate(list(range(64)) * 2, max_tokens=1)
        assert engine.generate(PROMPT, max_tokens=10).tokens == before
    gc.collect()  # streams that tests before left
    assert nothing_lost(engine.pool)
    assert engine.generate(PROMPT[:3], max_tokens=10).tokens != before, "the context would not show"


EDGES = (-(2**63), -(2**31), -(2**31) - 1, -2, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64)


@pytest.mark.parametrize("value", EDGES)
def test_report_g07_integers_at_the_edges_are_taken_whole_or_refused(value: int, engine: pyengine.Engine) -> None:
    plain = engine.generate(PROMPT, max_tokens=4).tokens
    for ids in ([value], [*PROMPT, value]):
        with pytest.raises(RequestError, match=f"token id {value} "):
            engine.generate(ids)
    with pytest.raises(RequestError, match="rows"):
        engine.logits(PROMPT, [value] if abs(value) < 2**63 else [-1])
    for name in ("max_tokens", "top_k"):
        if value < -1:
            with pytest.raises(RequestError, match=f"{name} {value}; expected an integer, at least -1"):
                engine.generate(PROMPT, **{name: value})
        elif name == "top_k":
            assert engine.generate(PROMPT, max_tokens=4, top_k=value).tokens == plain
        else:
            assert engine.generate(PROMPT, max_tokens=value).usage["total_tokens"] == 128
    if not 0 <= value < 2**64:
        with pytest.raises(RequestError, match=f"seed {value}"):
            engine.generate(PROMPT, seed=value)
    for name in ("threads", "ctx_size"):
        with pytest.raises(RequestError, match=str(value)):
            pyengine.load(engine.folder, **{name: value})
    assert engine.generate(PROMPT, max_tokens=4).tokens == plain


# ---- past 2^31 ------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 256_000, 12_288  # 3.1 billion values


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="address space of 4 GiB and fast kernels")
@pytest.mark.parametrize("case", ["report-G11-int8", "report-G10-int4"])
def test_a_matrix_of_more_values_than_2_to_the_31(case: str) -> None:
    """Only its first and last rows are filled; memory that is not touched is not taken. Past row 174,762 an offset of
    32 bits would wrap, and give another row's product."""
    fmt = choose(case[11:], 64 if case.endswith("int4") else None).layers
    backend = Backend(2, BEST)
    tensor = backend.tensor_create(int(fmt.format), ROWS, COLUMNS, fmt.group)
    first, last, x = normal(1, 16, COLUMNS), normal(2, 16, COLUMNS), normal(3, 2, COLUMNS)
    for rows, panel in ((first, 0), (last, ROWS // 16 - 1)):
        backend.tensor_pack(tensor, rows, panel, 1)
    found = kernels.packed_linear(backend, tensor, fmt, (ROWS, COLUMNS), x)
    options: dict[str, Any] = {"quant": case[11:], "group_size": 64, "threads": 1, "isa": BEST}
    assert_same_bits(found[:, :16].copy(), kernels.linear(x, first, **options), "the first 16 rows")
    assert_same_bits(found[:, -16:].copy(), kernels.linear(x, last, **options), "the last 16 rows")
    assert not found[:, 16:-16].any()
    assert np.abs(found[:, -16:]).min() > 0


def repeated(rows: int, row_bytes: int) -> tuple[np.ndarray, Any]:
    """float32 [rows, row_bytes / 4] whose rows are all the same memory, and what keeps it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    file = os.memfd_create("row")
    os.ftruncate(file, row_bytes)
    none, shared, fixed, anywhere = 0, mmap.MAP_SHARED, 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    base = libc.mmap(None, rows * row_bytes, none, anywhere, -1, 0)
    for row in range(rows):
        at = libc.mmap(base + row * row_bytes, row_bytes, mmap.PROT_READ | mmap.PROT_WRITE, shared | fixed, file, 0)
        assert at == base + row * row_bytes
    memory = (ctypes.c_char * (rows * row_bytes)).from_address(base)
    return np.frombuffer(memory, np.float32).reshape(rows, row_bytes // 4), (libc, base, rows * row_bytes, file)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="maps one row over and over")
def test_report_g09_a_batch_of_more_logits_than_2_to_the_31(tmp_path: Path) -> None:
    """512 rows of 4.2 million, 2.2 billion values, all in the same 16 MiB: an offset of 32 bits would point before the
    first. Every token and so every row is the same, so that it does not matter which thread writes a row last."""
    vocab, rows = 4105 * 1024, 512
    assert (rows - 1) * vocab > 2**31
    config = {
        **CONFIG, "vocab_size": vocab, "hidden_size": 2, "intermediate_size": 1, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 512,
    }  # fmt: skip
    tensors = tiny_tensors(config)
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = 0  # what attention gives would differ in its rounding
    folder = write_tiny_model(tmp_path, config, tensors=tensors)
    out, (libc, base, size, file) = repeated(rows, 4 * vocab)
    with pyengine.load(folder, quant="f32", threads=2) as one:
        (expected,) = one.logits([7])
        sequence = Sequence(one.pool)
        every = np.arange(rows, dtype=np.int32)
        chosen = one.forward([(sequence, [7] * rows)], rows=every, logits=out, sampling=[None] * rows)
        assert chosen is not None
        assert set(chosen.ids.tolist()) == {int(expected.argmax())}
        assert len(set(chosen.logprobs.tolist())) == 1
        assert_same_bits(out[rows - 1].copy(), expected, "the last row")
        sequence.close()
    del out
    libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(size))
    os.close(file)


def test_report_g12_memory_does_not_grow_with_tokens(folder: Path) -> None:
    """1,500 tokens in requests of 100: less than a tenth of a KiB a token."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("reads the resident size from /proc")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with pyengine.load(folder, quant="int8", threads=1, calibration=False) as one:
        sizes = []
        for _ in range(25):
            one.generate(PROMPT, max_tokens=100)
            sizes.append(resident())
    grown = sizes[-1] - sizes[9]  # the first ten fill pools and caches
    assert grown <= 1500 * 102


# ---- threads --------------------------------------------------------------------------------------------------------


def test_report_g24_an_idle_engine_takes_no_time(folder: Path) -> None:
    with pyengine.load(folder, quant="f32", threads=8) as one:
        one.logits(PROMPT)
        time.sleep(0.05)  # workers spin for less than a millisecond
        used = time.process_time()
        time.sleep(1.0)
        idle = time.process_time() - used
        started = time.process_time()
        one.logits(PROMPT)
        assert time.process_time() > started, "the clock does not count"
    assert idle < 0.02


def test_report_g25_g20_kernels_from_many_threads_at_once(engine: pyengine.Engine) -> None:
    weight, x = normal(1, 129, 172), normal(2, 9, 172)
    expected = kernels.linear(x, weight, quant="int8", threads=1)
    answers = {i: engine.generate([*PROMPT, i], max_tokens=8).tokens for i in range(8)}
    assert len({tuple(tokens) for tokens in answers.values()}) == 8
    wrong: list[Any] = []

    def work(i: int) -> None:
        for _ in range(10):
            if (kernels.linear(x, weight, quant="int8", threads=1 + i % 3) != expected).any():
                wrong.append(i)
            if engine.generate([*PROMPT, i], max_tokens=8).tokens != answers[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_report_g26_denormal_activations_are_zero_and_cost_nothing() -> None:
    """And the mode of the calling thread is what it was: its own denormals stay."""
    weight = normal(1, 512, 512)
    layer = kernels.Linear(weight, quant="f32", threads=1)
    tiny, usual = np.full((8, 512), 1e-40, np.float32), normal(2, 8, 512)
    best = dict.fromkeys(("usual", "tiny"), float("inf"))
    for _ in range(30):
        for name, x in (("usual", usual), ("tiny", tiny)):
            started = time.perf_counter()
            y = layer(x)
            best[name] = min(best[name], time.perf_counter() - started)
            assert name == "usual" or not y.any()
    assert best["tiny"] < 3 * best["usual"]  # each denormal operand costs some hundred cycles where it is slow
    assert (np.float32(1e-40) * np.float32(0.5)) > 0
