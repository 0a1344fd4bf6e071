"""A token's logits are the same bits whatever runs beside it: any thread count, batch, chunk, fused or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.golden_cases import CONFIGS, build

import pyengine
from pyengine import _core

ISAS = [entry["name"] for entry in _core.isas() if entry["available"]]
FORMATS: dict[str, dict[str, Any]] = {
    "f32": {"quant": "f32"},
    "bf16": {"quant": "bf16"},
    "int8": {"quant": "int8"},
    "int4_minimum_32": {"quant": "int4"},
    "int4_minimum_128": {"quant": "int4", "group_size": 128},
    "int4_symmetric_64": {"quant": "int4", "group_size": 64, "int4_scheme": "symmetric"},
}
LENGTH = 70  # over two KV blocks; the long case below crosses a partition of 256 keys
CASES = ("llama", "mistral_window", "qwen2", "qwen3", "llama_head_dim", "llama_ratio_7")


def ids_of(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("invariance")
    longer = {"max_position_embeddings": 1024}
    return {name: build(base / name, {**CONFIGS[name], **longer}, seed=11) for name in CASES}


@pytest.fixture
def load(folders: dict[str, Path]) -> Iterator[Any]:
    opened: list[pyengine.Engine] = []

    def one(case: str, isa: str, fmt: str, threads: int = 1) -> pyengine.Engine:
        engine = pyengine.load(folders[case], isa=isa, threads=threads, calibration=False, **FORMATS[fmt])
        opened.append(engine)
        return engine

    yield one
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_threads_chunks_and_fusion_change_no_bit(load: Any, case: str, fmt: str, isa: str) -> None:
    engine = load(case, isa, fmt)
    ids = ids_of(LENGTH)
    expected = engine.logits(ids)
    assert np.isfinite(expected).all()
    for chunk in (1, 7, 64):
        np.testing.assert_array_equal(engine.logits(ids, chunk=chunk), expected, err_msg=f"chunk {chunk}")
    unfused = engine.build(fused=False)
    assert len(unfused.ops) > len(engine.program.ops)
    np.testing.assert_array_equal(engine.logits(ids, program=unfused), expected, err_msg="unfused")
    for threads in (2, 3):
        other = load(case, isa, fmt, threads)
        np.testing.assert_array_equal(other.logits(ids), expected, err_msg=f"{threads} threads")
        np.testing.assert_array_equal(other.logits(ids, chunk=1), expected, err_msg=f"{threads} threads, decode")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_batch_of_eight_changes_no_bit(load: Any, fmt: str, isa: str) -> None:
    engine = load("qwen2", isa, fmt, 2)
    prompts = [ids_of(length, seed=length) for length in (1, 2, 7, 8, 31, 32, 33, 65)]
    together = engine.logits_batch(prompts)
    for prompt, row in zip(prompts, together, strict=True):
        alone = engine.logits(prompt, rows=[len(prompt) - 1])[0]
        np.testing.assert_array_equal(row, alone, err_msg=f"{len(prompt)} tokens")


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
@pytest.mark.parametrize("case", ["llama", "mistral_window"])
def test_contexts_over_several_partitions(load: Any, case: str, isa: str) -> None:
    """Decode splits over partitions of 256 keys, prefill walks them: the same bits, also around the borders."""
    ids = ids_of(530)
    one, three = load(case, isa, "int8"), load(case, isa, "int8", 3)
    rows = [0, 254, 255, 256, 257, 511, 512, 513, 529]
    expected = one.logits(ids, rows)
    for engine, chunk in ((one, 1), (three, 1), (three, 7), (three, 64)):
        np.testing.assert_array_equal(engine.logits(ids, rows, chunk=chunk), expected, err_msg=f"chunk {chunk}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_isas_agree(load: Any, fmt: str) -> None:
    """Every ISA adds the same 16 lanes in the same order, so even floats agree to the bit."""
    ids = ids_of(40)
    first = load("qwen3", ISAS[0], fmt).logits(ids)
    for isa in ISAS[1:]:
        np.testing.assert_array_equal(load("qwen3", isa, fmt).logits(ids), first, err_msg=isa)
