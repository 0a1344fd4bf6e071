"""pyengine against transformers itself, on fresh random models: extra `[parity]`, skipped where torch is not installed.

The stored goldens (tests/golden) hold the same with one seed and no torch; here the seeds are others, so the two share
nothing but the configs. Set PYENGINE_PARITY_SEED to try more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from compare import assert_close

pytest.importorskip("torch", reason="live parity needs torch: pip install '.[parity]'")
pytest.importorskip("transformers", reason="live parity needs transformers: pip install '.[parity]'")

from golden.golden_cases import CONFIGS, build, past_dynamic_limit, prompt
from golden.live import run_transformers

import pyengine
from pyengine.reference import load_reference

SEED = int(os.environ.get("PYENGINE_PARITY_SEED", "1"))
BOUND = 1e-4
LONG = 300  # past several KV blocks of 32 and one key partition of 256

Run = tuple[Path, list[int], np.ndarray, np.ndarray]


@pytest.fixture(scope="module", params=list(CONFIGS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A fresh model, a prompt, and transformers' logits and states for it."""
    config = CONFIGS[request.param]
    folder = build(tmp_path_factory.mktemp(request.param), config, SEED)
    ids = prompt(SEED)
    return folder, ids, *run_transformers(folder, ids, one_by_one=past_dynamic_limit(config))


def test_reference_equals_transformers(run: Run) -> None:
    folder, ids, logits, states = run
    taps: dict[str, list[np.ndarray]] = {}
    assert_close(load_reference(folder).forward(ids, taps=taps), logits, BOUND, "logits")
    for layer, (ours, theirs) in enumerate(zip(taps["hidden"], states, strict=True)):
        assert_close(ours, theirs, 1e-5 * np.abs(theirs).max(), f"after layer {layer}")


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_engine_equals_transformers(run: Run, chunk: int | None) -> None:
    folder, ids, logits, _ = run
    with pyengine.load(folder, quant="f32", threads=1) as engine:
        assert_close(engine.logits(ids, chunk=chunk), logits, BOUND, f"logits, chunk {chunk}")


def test_engine_generates_the_greedy_tokens_of_transformers(run: Run, tmp_path: Path) -> None:
    """32 tokens; where two logits of the reference are within the bound either token would be right, so none is.

    A softcap of 3 puts every likely token at the cap in float32: here it is the 30 of Gemma 2's files.
    """
    folder, ids, *_ = run
    ids = ids[:8]
    config = json.loads((folder / "config.json").read_text())
    if config.get("final_logit_softcapping"):
        folder = build(tmp_path, {**config, "final_logit_softcapping": 30.0}, SEED)
    with pyengine.load(folder, quant="f32", threads=1) as engine:
        tokens = list(engine.generate(ids, max_tokens=32, ignore_eos=True).tokens)
    logits, _ = run_transformers(folder, ids + tokens, one_by_one=True)
    rows = logits[len(ids) - 1 : -1]
    best = np.sort(rows, axis=-1)
    near_tie = best[:, -1] - best[:, -2] <= BOUND
    assert len(tokens) == 32
    assert near_tie.sum() <= 1, "the model is too flat for a greedy comparison"
    assert ((rows.argmax(axis=-1) == tokens) | near_tie).all()


@pytest.mark.parametrize(
    "name", ["llama", "mistral_window", "qwen2_window", "qwen3", "rope_llama3_v5", "rope_yarn_qwen2"]
)
def test_long_prompts(name: str, tmp_path: Path) -> None:
    config = {**CONFIGS[name], "max_position_embeddings": 8192}
    folder = build(tmp_path, config, SEED)
    ids = prompt(SEED, LONG)
    logits, _ = run_transformers(folder, ids)
    assert_close(load_reference(folder).forward(ids), logits, BOUND, "reference")
    with pyengine.load(folder, quant="f32", threads=1) as engine:
        assert_close(engine.logits(ids), logits, BOUND, "engine, at once")
        assert_close(engine.logits(ids, chunk=64), logits, BOUND, "engine, 64 at a time")
