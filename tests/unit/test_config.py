"""Real config.json files, shortened to what counts, and what each must become; defaults of absent keys by family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyengine.config import load_model_spec
from pyengine.errors import PyEngineError, UnsupportedModelError
from pyengine.families import FAMILIES
from pyengine.spec import AttentionSpec, ModelSpec, NormSpec, RopeSpec

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
NEMO: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 1024000,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 131072,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def load(folder: Path, config: dict[str, Any], **options: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_spec(folder, **options)


def without(config: dict[str, Any], *keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys} | changes


REAL: dict[str, tuple[dict[str, Any], str, AttentionSpec]] = {
    "Llama-3.1-8B": (
        LLAMA_31_8B,
        "llama",
        AttentionSpec(
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            scale=128**-0.5,
            rope=RopeSpec(
                "llama3",
                500000.0,
                128,
                (
                    ("factor", 8.0),
                    ("high_freq_factor", 4.0),
                    ("low_freq_factor", 1.0),
                    ("original_max_position_embeddings", 8192.0),
                ),
            ),
        ),
    ),
    "Mistral-Nemo": (
        NEMO,
        "mistral",
        AttentionSpec(32, 8, 128, 128**-0.5, RopeSpec("default", 1000000.0, 128)),
    ),
    "Qwen2.5-0.5B": (
        QWEN25_05B,
        "qwen2",
        AttentionSpec(14, 2, 64, 64**-0.5, RopeSpec("default", 1000000.0, 64), qkv_bias=True),
    ),
    "Qwen3-0.6B": (
        QWEN3_06B,
        "qwen3",
        AttentionSpec(16, 8, 128, 128**-0.5, RopeSpec("default", 1000000.0, 128), qk_norm="head"),
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_config(name: str, tmp_path: Path) -> None:
    config, family, attention = REAL[name]
    spec = load(tmp_path, config, strict=True)
    assert (spec.family, spec.architecture) == (family, config["architectures"][0])
    assert {layer.attention for layer in spec.layers} == {attention}
    assert [layer.index for layer in spec.layers] == list(range(config["num_hidden_layers"]))
    ffn = spec.layers[0].ffn
    assert (ffn.intermediate_size, ffn.activation, ffn.bias) == (config["intermediate_size"], "silu", False)
    assert spec.norm == NormSpec(config["rms_norm_eps"])
    for key in ("hidden_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(spec, key) == config[key]
    assert spec.bos_token_id == config["bos_token_id"]
    eos = config["eos_token_id"]
    assert spec.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])
    assert spec.warnings == ()


@pytest.mark.parametrize("name", REAL)
def test_as_transformers_5_saves_it(name: str, tmp_path: Path) -> None:
    """rope_parameters with the theta inside, dtype for torch_dtype, layer_types for the window switches."""
    config = REAL[name][0]
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    new = without(config, "rope_scaling", "rope_theta", "torch_dtype", dtype="bfloat16")
    new["rope_parameters"] = {**scaling, "rope_theta": config["rope_theta"]}
    if "use_sliding_window" in config:
        new["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    assert load(tmp_path, new, strict=True) == load(tmp_path, config, strict=True)


def test_attention_and_mlp_bias_of_llama(tmp_path: Path) -> None:
    layer = load(tmp_path, without(LLAMA_31_8B, attention_bias=True, mlp_bias=True)).layers[0]
    assert (layer.attention.qkv_bias, layer.attention.o_bias, layer.ffn.bias) == (True, True, True)


def test_attention_bias_of_qwen3_is_for_all_four(tmp_path: Path) -> None:
    attention = load(tmp_path, without(QWEN3_06B, attention_bias=True)).layers[0].attention
    assert (attention.qkv_bias, attention.o_bias, attention.qk_norm) == (True, True, "head")


def test_attention_bias_of_qwen2_is_not_read(tmp_path: Path) -> None:
    """As in transformers: q, k and v have biases whatever the key says; contradiction is told."""
    for value in (True, False):
        spec = load(tmp_path, without(QWEN25_05B, attention_bias=value))
        assert (spec.layers[0].attention.qkv_bias, spec.layers[0].attention.o_bias) == (True, False)
        assert len(spec.warnings) == (not value)


# Of keys that are absent: transformers' configuration classes.
ABSENT: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "llama": (
        LLAMA_31_8B,
        ("num_key_value_heads", "rope_theta", "rope_scaling", "max_position_embeddings", "rms_norm_eps"),
        {"kv_heads": 32, "theta": 10000.0, "longest": 2048, "eps": 1e-6, "window": None, "head_dim": 128},
    ),
    "mistral": (
        NEMO,
        ("num_key_value_heads", "rope_theta", "max_position_embeddings", "rms_norm_eps", "sliding_window", "head_dim"),
        {"kv_heads": 8, "theta": 10000.0, "longest": 131072, "eps": 1e-6, "window": 4096, "head_dim": 160},
    ),
    "qwen2": (
        without(QWEN25_05B, num_attention_heads=32, hidden_size=2048),
        ("num_key_value_heads", "rope_theta", "max_position_embeddings", "use_sliding_window"),
        {"kv_heads": 32, "theta": 10000.0, "longest": 32768, "eps": 1e-6, "window": None, "head_dim": 64},
    ),
    "qwen3": (
        without(QWEN3_06B, num_attention_heads=32),
        ("num_key_value_heads", "rope_theta", "head_dim", "tie_word_embeddings"),
        {"kv_heads": 32, "theta": 10000.0, "longest": 40960, "eps": 1e-6, "window": None, "head_dim": 128},
    ),
}


@pytest.mark.parametrize("family", ABSENT)
def test_absent_keys(family: str, tmp_path: Path) -> None:
    config, gone, expected = ABSENT[family]
    spec = load(tmp_path, without(config, *gone))
    attention = spec.layers[0].attention
    found = {
        "kv_heads": attention.num_kv_heads,
        "theta": attention.rope.theta,
        "longest": spec.max_position_embeddings,
        "eps": spec.norm.eps,
        "window": attention.window,
        "head_dim": attention.head_dim,
    }
    assert found == expected
    if "tie_word_embeddings" in gone:
        assert spec.tie_word_embeddings is False


def test_null_key_value_heads_means_as_many_as_heads(tmp_path: Path) -> None:
    spec = load(tmp_path, without(NEMO, num_key_value_heads=None))
    assert spec.layers[0].attention.num_kv_heads == 32


def test_yarn_length_is_not_multiplied(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = load(tmp_path, without(QWEN25_05B, rope_scaling=scaling, max_position_embeddings=131072))
    assert spec.max_position_embeddings == 131072
    assert spec.max_context == 131072
    assert dict(spec.layers[0].attention.rope.parameters)["original_max_position_embeddings"] == 32768


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_partial_rotation(spelling: str, tmp_path: Path) -> None:
    whole = {"rope_type": "default", "partial_rotary_factor": 1.0}
    assert load(tmp_path, without(NEMO, **{spelling: whole})) == load(tmp_path, NEMO)
    inside = {spelling: {**whole, "partial_rotary_factor": 0.5}}
    for half in (without(NEMO, partial_rotary_factor=0.5), without(NEMO, **inside)):
        with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor': '0\.5'"):
            load(tmp_path, half)


LAYER_TYPES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "llama": (LLAMA_31_8B, ["sliding_attention"], "no sliding_window is in force"),
    "mistral": (without(NEMO, sliding_window=8), ["full_attention"], "the same window in all layers"),
}


@pytest.mark.parametrize("family", LAYER_TYPES)
def test_layer_types_that_the_family_does_not_have(family: str, tmp_path: Path) -> None:
    config, types, text = LAYER_TYPES[family]
    with pytest.raises(PyEngineError, match=text):
        load(tmp_path, without(config, num_hidden_layers=1, layer_types=types))


def test_layer_types_that_say_the_same(tmp_path: Path) -> None:
    one = without(NEMO, sliding_window=8, num_hidden_layers=1)
    assert load(tmp_path, without(one, layer_types=["sliding_attention"])) == load(tmp_path, one)


def test_every_family_is_its_own_value() -> None:
    assert len({family.name for family in FAMILIES.values()}) == len(FAMILIES)


OTHERS = ("GptOssForCausalLM", "Qwen3NextForCausalLM", "Phi3ForCausalLM", "BertModel", "T5ForConditionalGeneration")


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_families_are_not_supported_and_say_which_are(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, without(LLAMA_31_8B, architectures=[architecture]))
    for text in (architecture, *FAMILIES):
        assert text in str(caught.value)
