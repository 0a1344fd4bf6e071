"""Mixtures of experts: what users of other engines ran into. Ids are those of case_ids.txt, section D."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.golden_cases import CONFIGS, TE, TM, TS, TX, without
from report_models import assert_equal_models, assert_nearer, logits, model, rounded

import pyengine
from pyengine.config import load_model_spec
from pyengine.reference import ReferenceModel, load_reference
from pyengine.spec import MoESpec

IDS = np.random.default_rng(8).integers(0, 97, 40).tolist()


def with_router(reference: ReferenceModel, **fields: Any) -> ReferenceModel:
    layers = tuple(
        replace(layer, ffn=replace(layer.ffn, router=replace(layer.ffn.router, **fields)))
        if isinstance(layer.ffn, MoESpec)
        else layer
        for layer in reference.spec.layers
    )
    reference.spec = replace(reference.spec, layers=layers)
    return reference


# row -> config, whether the weights of the chosen experts are to be normalised
NORMALISED: dict[str, tuple[dict[str, Any], bool]] = {
    "report-D01-true": (TM, True),
    "report-D01-false": ({**TM, "norm_topk_prob": False}, False),
    "report-D07-true": ({**TS, "norm_topk_prob": True}, True),
    "report-D07-false": (TS, False),
    "report-D02-qwen3_moe": (without(TM, "norm_topk_prob"), False),
    "report-D02-qwen2_moe": (without(TS, "norm_topk_prob"), False),
    "report-D02-olmoe": (without(TE, "norm_topk_prob"), False),
    "report-D02-mixtral": (TX, True),
    "report-D02-deepseek_v3": (without(CONFIGS["deepseek_v3_experts"], "norm_topk_prob"), True),
    "report-D02-deepseek_v2": (without(CONFIGS["deepseek_v2_experts"], "norm_topk_prob"), False),
}


@pytest.mark.parametrize("case", NORMALISED)
def test_weights_are_normalised_where_the_config_or_the_family_says(case: str, tmp_path: Path) -> None:
    config, expected = NORMALISED[case]
    folder = model(tmp_path, config)
    spec = load_model_spec(folder)
    assert {layer.ffn.router.normalise for layer in spec.layers if isinstance(layer.ffn, MoESpec)} == {expected}
    wrong = with_router(load_reference(folder), normalise=not expected)
    assert_equal_models(logits(folder, IDS), load_reference(folder).forward(IDS), wrong.forward(IDS))


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Lfm2MoeForCausalLM"])
def test_report_d02_d09_families_that_are_not_known_are_not_guessed(architecture: str, tmp_path: Path) -> None:
    folder = model(tmp_path, TM)
    config = {**TM, "architectures": [architecture], "model_type": "other"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(pyengine.UnsupportedModelError, match=architecture):
        logits(folder)


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("normalise", [True, False])
def test_report_d06_the_scale_of_routed_experts_is_a_step_of_its_own(
    scale: float, normalise: bool, tmp_path: Path
) -> None:
    config = {**CONFIGS["deepseek_v3_experts"], "norm_topk_prob": normalise, "routed_scaling_factor": scale}
    folder = model(tmp_path, config)
    found = logits(folder, IDS)
    for wrong in ({"scale": 1.0 if scale != 1 else 2.5}, {"scale": scale * scale if scale != 1 else 6.25}):
        reference = with_router(load_reference(folder), **wrong)
        assert_equal_models(found, load_reference(folder).forward(IDS), reference.forward(IDS))


@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
@pytest.mark.parametrize("experts", [60, 7, 1])
def test_report_d19_any_number_of_experts_in_every_format(experts: int, quant: str, tmp_path: Path) -> None:
    """The router and the gate of the shared expert, a matrix of one row, stay in float32."""
    config = {**TS, "num_experts": experts, "num_experts_per_tok": min(4, experts)}
    folder = model(tmp_path, config)
    with pyengine.load(folder, quant=quant, threads=1, calibration=False) as engine:
        found = engine.logits(IDS)
        layer = engine.weights.layers[0]
        stored = load_reference(folder).weights["model.layers.0.mlp.gate.weight"]
        np.testing.assert_array_equal(engine.backend.tensor_dequantize(layer.router), stored)
    right, wrong = (rounded(folder, quant=quant) for _ in range(2))
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    wrong.weights = {**wrong.weights, name: -wrong.weights[name]}
    # a token whose experts are a matter of rounding is not held to either; half of them are enough
    errors = [np.abs(found - one.forward(IDS)).max(axis=1) for one in (right, wrong)]
    assert np.median(errors[0]) * 3 < np.median(errors[1])
    if quant == "f32":
        assert_nearer(found, right.forward(IDS), wrong.forward(IDS))


# What the config.json of Mixtral 8x7B, Qwen1.5-MoE-A2.7B, Qwen3-30B-A3B and OLMoE-1B-7B say.
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "report-D22-mixtral": (TX, {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}),
    "report-D22-qwen2_moe": (TS, {"norm_topk_prob": False, "decoder_sparse_step": 1, "rope_theta": 1e6}),
    "report-D22-qwen3_moe": (
        TM, {"norm_topk_prob": True, "rope_theta": 1e6, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
    ),
    "report-D22-olmoe": (TE, {"norm_topk_prob": False, "rope_theta": 10000.0, "clip_qkv": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_tiny_configs_have_the_flags_of_the_real_ones(case: str, tmp_path: Path) -> None:
    config, flags = FLAGS[case]
    assert {key: config[key] for key in flags} == flags
    heads, head_dim = config["num_attention_heads"], config.get("head_dim")
    assert case != "report-D22-qwen3_moe" or heads * head_dim != config["hidden_size"], "as 32 * 128 is not 2048"
    turned = {key: not value for key, value in flags.items() if isinstance(value, bool) and key[:4] == "norm"}
    folder = model(tmp_path / "flags", config)
    other = model(tmp_path / "theta", {**config, "rope_theta": 777.0, **turned})
    assert np.abs(logits(folder, IDS) - logits(other, IDS)).max() > 1e-2, "the flags change nothing"
