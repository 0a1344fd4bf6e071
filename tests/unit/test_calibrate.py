"""Calibration: the importance of a channel is the mean square of what the float model puts into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_close, assert_same_bits
from golden.golden_cases import CONFIGS
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine.calibrate import CALIBRATION_TOKENS, TAP_OF, Calibrator, mean_square
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.pack_layer import read_layer
from pyengine.reference import load_reference
from pyengine.tensors import CanonicalTensors

VOCAB = 258
IDS = np.random.default_rng(0).integers(0, VOCAB, 90).tolist()


@pytest.mark.parametrize("case", ["qwen2_window", "qwen3", "llama_head_dim", "olmo2", "gemma2", "gpt2"])
def test_importance_is_the_references_mean_square(tmp_path: Path, case: str) -> None:
    longest = "n_positions" if case == "gpt2" else "max_position_embeddings"
    config = {**CONFIGS[case], "vocab_size": VOCAB, longest: 512}
    write_tiny_model(tmp_path, config, seed=5)
    reference = load_reference(tmp_path)
    taps: dict[str, list[np.ndarray]] = {}
    reference.forward(IDS, taps=taps)
    spec = load_model_spec(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        observe = Calibrator(checkpoint, spec, IDS, threads=2, isa="")
        source = CanonicalTensors(checkpoint, spec)
        for layer in spec.layers:
            seen = observe(layer, read_layer(source, layer))
            assert set(seen) == set(TAP_OF)
            for matrix, tap in TAP_OF.items():
                expected = mean_square(taps[tap][layer.index])
                assert_close(seen[matrix], expected, 1e-4 * float(expected.max()), f"{matrix} of layer {layer.index}")
        head = observe.head_importance()
    x = taps["hidden"][-1]
    x = reference.norm(x, "model.norm")
    expected = mean_square(x)
    assert_close(head, expected, 1e-4 * float(expected.max()), "head")


def test_no_channel_is_free() -> None:
    x = np.zeros((10, 4), np.float32)
    x[:, 0], x[:, 1], x[0, 3] = 2.0, 1e-6, 1.0
    square = mean_square(x)
    floor = 1e-4 * 4.1 / 4
    assert_close(square * (4 / square[0]), np.array([4, floor, floor, 0.1], np.float32), 1e-6, "E[x^2], with a floor")


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_past_float32_keep_their_ratios(scale: float) -> None:
    x = np.random.default_rng(1).standard_normal((20, 8)).astype(np.float32)
    ratios = mean_square((x * np.float32(scale)).astype(np.float32))
    expected = mean_square(x)
    assert_close(ratios / ratios.max(), expected / expected.max(), 1e-5, "ratios")


@pytest.mark.parametrize("bad", [0.0, np.inf, np.nan])
def test_what_tells_nothing_leaves_all_channels_the_same(bad: float) -> None:
    x = np.full((3, 5), bad, np.float32)
    assert_same_bits(mean_square(x), np.ones(5, np.float32), "importance")


def quantization_error(folder: Path, quant: str, *, calibration: bool) -> float:
    """Mean square error of the logits against float32 on text of the calibration's kind."""
    ids = list(b"It was the best of times, it was the worst of times, it was the age of wisdom")
    with (
        pyengine.load(folder, quant="f32", threads=2) as exact,
        pyengine.load(folder, quant=quant, threads=2, calibration=calibration) as one,
    ):
        assert ("no tokenizer: scales are searched without calibration" in one.notes) is False
        return float(np.square(exact.logits(ids) - one.logits(ids)).mean())


def test_calibration_changes_int4_for_the_better(tmp_path: Path) -> None:
    """A model whose channels differ much in size, as real ones do: without that there is nothing to know."""
    config = {**CONFIGS["llama"], "vocab_size": VOCAB, "max_position_embeddings": 1024}
    tensors = tiny_tensors(config, seed=5)
    rng = np.random.default_rng(2)
    for name, values in tensors.items():
        if name.endswith("layernorm.weight"):
            values *= np.exp(1.5 * rng.standard_normal(values.shape)).astype(np.float32)
    write_tokenizer(write_tiny_model(tmp_path, config, tensors=tensors), byte_level())
    with_it = quantization_error(tmp_path, "int4", calibration=True)
    without = quantization_error(tmp_path, "int4", calibration=False)
    assert 0 < with_it < 0.9 * without


def test_a_folder_without_tokenizer_says_that_it_is_not_calibrated(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS["llama"])
    with pyengine.load(tmp_path, quant="int4") as one:
        assert one.notes == ["no tokenizer: scales are searched without calibration"]
    for arguments in ({"quant": "int4", "calibration": False}, {"quant": "f32"}):
        with pyengine.load(tmp_path, **arguments) as one:
            assert one.notes == []


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_the_result_does_not_depend_on_threads(tmp_path: Path, quant: str) -> None:
    config = {**CONFIGS["llama"], "vocab_size": VOCAB, "max_position_embeddings": 1024}
    write_tokenizer(write_tiny_model(tmp_path, config, seed=5), byte_level())
    packed = []
    for threads in (1, 3):
        with pyengine.load(tmp_path, quant=quant, threads=threads) as one:
            packed.append(one.logits(IDS))
    assert_same_bits(packed[0], packed[1], "threads")
    assert CALIBRATION_TOKENS == 512
