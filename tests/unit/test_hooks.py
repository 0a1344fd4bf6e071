"""Taps show what the reference computes and change nothing; masks leave out exactly what they name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_close, assert_same_bits
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.hooks import TAPS, Hooks
from pyengine.reference import load_reference

IDS = np.random.default_rng(5).integers(0, 97, 40).tolist()
NEURONS = [0, 3, 17, 100, 171]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("hooks"), CONFIGS["qwen3"], seed=2)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[pyengine.Engine]:
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Iterator[pyengine.Engine]:
    with pyengine.load(folder, quant="int8", threads=2, calibration=False) as one:
        yield one


def test_taps_are_the_reference_states(engine: pyengine.Engine, folder: Path) -> None:
    keys = tuple((layer, name) for layer in range(2) for name in TAPS)
    program = engine.build(hooks=Hooks(taps=keys))
    seen: dict[tuple[int, str], np.ndarray] = {}
    logits = engine.logits(IDS, program=program, taps=seen, chunk=16)
    np.testing.assert_array_equal(logits, engine.logits(IDS))
    expected: dict[str, list[np.ndarray]] = {}
    load_reference(folder).forward(IDS, taps=expected)
    for (layer, name), values in seen.items():
        theirs = expected[name][layer]
        assert_close(values, theirs, 1e-5 * float(np.abs(theirs).max()), f"{name} of layer {layer}")


@pytest.mark.parametrize("name", TAPS)
def test_a_tapped_program_gives_the_same_bits(quantized: pyengine.Engine, name: str) -> None:
    program = quantized.build(hooks=Hooks(taps=((1, name),)))
    seen: dict[tuple[int, str], np.ndarray] = {}
    logits = quantized.logits(IDS, program=program, taps=seen)
    np.testing.assert_array_equal(logits, quantized.logits(IDS))
    assert seen[1, name].shape[0] == len(IDS)
    assert np.abs(seen[1, name]).max() > 0


@pytest.mark.parametrize("layer", [0, 1])
def test_a_skipped_ffn_is_the_reference_without_it(engine: pyengine.Engine, folder: Path, layer: int) -> None:
    program = engine.build(hooks=Hooks(ffn_skip=frozenset({layer})))
    logits = engine.logits(IDS, program=program)
    assert_close(logits, load_reference(folder).forward(IDS, ffn_skip={layer}), 1e-4, f"without the FFN of {layer}")
    assert np.abs(logits - engine.logits(IDS)).max() > 1e-2


def test_masked_neurons_are_zeroed_columns_of_down(engine: pyengine.Engine, tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIGS["qwen3"], seed=2)
    down = tensors["model.layers.1.mlp.down_proj.weight"].copy()
    down[:, NEURONS] = 0
    tensors["model.layers.1.mlp.down_proj.weight"] = down
    write_tiny_model(tmp_path, CONFIGS["qwen3"], tensors=tensors)
    program = engine.build(hooks=Hooks(neuron_mask={1: NEURONS}))
    logits = engine.logits(IDS, program=program)
    with pyengine.load(tmp_path, quant="f32", threads=2) as other:
        np.testing.assert_array_equal(logits, other.logits(IDS))
    assert np.abs(logits - engine.logits(IDS)).max() > 1e-2


def test_masked_neurons_of_a_quantized_model_are_the_references(quantized: pyengine.Engine) -> None:
    everything = range(CONFIGS["qwen3"]["intermediate_size"])
    masked = quantized.logits(IDS, program=quantized.build(hooks=Hooks(neuron_mask={0: everything})))
    skipped = quantized.logits(IDS, program=quantized.build(hooks=Hooks(ffn_skip=frozenset({0}))))
    np.testing.assert_array_equal(masked, skipped)


@pytest.mark.parametrize("fused", [True, False])
def test_taps_do_not_depend_on_chunks_or_fusion(quantized: pyengine.Engine, fused: bool) -> None:
    keys = ((0, "attention"), (1, "act"), (1, "hidden"))
    shown: list[dict[tuple[int, str], np.ndarray]] = []
    for chunk in (None, 1, 7):
        program = quantized.build(hooks=Hooks(taps=keys), fused=fused)
        shown.append({})
        quantized.logits(IDS, program=program, taps=shown[-1], chunk=chunk)
    for key in keys:
        assert_same_bits(shown[1][key], shown[0][key], f"{key} token by token")
        assert_same_bits(shown[2][key], shown[0][key], f"{key} in chunks of 7")


def test_a_tap_shows_what_a_mask_left(quantized: pyengine.Engine) -> None:
    plain: dict[tuple[int, str], np.ndarray] = {}
    masked: dict[tuple[int, str], np.ndarray] = {}
    quantized.logits(IDS, program=quantized.build(hooks=Hooks(taps=((1, "act"),))), taps=plain)
    hooks = Hooks(taps=((1, "act"),), neuron_mask={1: NEURONS})
    quantized.logits(IDS, program=quantized.build(hooks=hooks), taps=masked)
    expected = plain[1, "act"].copy()
    assert (expected[:, NEURONS] != 0).all()
    expected[:, NEURONS] = 0
    assert_same_bits(masked[1, "act"], expected, "act under the mask")


def test_masks_of_several_layers_are_the_references(engine: pyengine.Engine, folder: Path) -> None:
    mask = {0: [1, 2, 171], 1: NEURONS}
    logits = engine.logits(IDS, program=engine.build(hooks=Hooks(neuron_mask=mask)))
    drop = {layer: np.array(neurons) for layer, neurons in mask.items()}
    expected = load_reference(folder).forward(IDS, neuron_mask=drop)
    assert_close(logits, expected, 1e-4, "masked in both layers")
    both = engine.logits(IDS, program=engine.build(hooks=Hooks(ffn_skip=frozenset({0, 1}))))
    assert_close(both, load_reference(folder).forward(IDS, ffn_skip={0, 1}), 1e-4, "no FFN at all")


@pytest.mark.parametrize(
    "hooks",
    [
        Hooks(taps=((2, "act"),)),
        Hooks(taps=((0, "nothing"),)),
        Hooks(taps=((0, "act"),), ffn_skip=frozenset({0})),
        Hooks(ffn_skip=frozenset({-1})),
        Hooks(neuron_mask={5: [0]}),
        Hooks(neuron_mask={0: [172]}),
        Hooks(neuron_mask={0: [1.5]}),  # type: ignore[list-item]
        Hooks(taps=((0, "act"), (1, "act"), (0, "act"))),
    ],
)
def test_hooks_that_name_nothing_are_refused(engine: pyengine.Engine, hooks: Hooks) -> None:
    with pytest.raises(pyengine.RequestError, match=r"expected"):
        engine.build(hooks=hooks)
