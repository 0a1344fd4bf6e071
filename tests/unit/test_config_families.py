"""config.json of dense families that are not Llama's line: what real files and absent keys mean, what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, RequestError, UnsupportedModelError
from pyengine.spec import FFNSpec, ModelSpec, NormSpec

Config = dict[str, Any]

GEMMA2_2B: Config = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "use_cache": True,
    "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B: Config = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_4B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
OLMO3_7B: Config = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_theta": 500000,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "sliding_window": 4096, "tie_word_embeddings": False, "use_cache": False, "vocab_size": 100278,
}  # fmt: skip
GLM4_9B: Config = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 151552,
}  # fmt: skip
GPT2: Config = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip


def load(tmp_path: Path, config: Config, **changes: Any) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    return load_model_spec(tmp_path, strict=True)


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def test_gemma_2(tmp_path: Path) -> None:
    spec = load(tmp_path, GEMMA2_2B)
    assert spec.norm == NormSpec(1e-6, plus_one=True)
    assert spec.layers[0].norm_before
    assert spec.layers[0].norm_after
    assert windows(spec) == [4096, None] * 13
    attention = spec.layers[1].attention
    assert (attention.scale, attention.softcap, spec.logits_softcap) == (1 / 16, 50.0, 30.0)
    assert (spec.embedding_scale, spec.tie_word_embeddings) == (48.0, True)
    assert spec.layers[0].ffn == FFNSpec(9216, "gelu_tanh")


def test_gemma_3(tmp_path: Path) -> None:
    spec = load(tmp_path, GEMMA3_1B)
    assert windows(spec) == ([512] * 5 + [None]) * 4 + [512] * 2
    ropes = [layer.attention.rope for layer in spec.layers]
    assert [rope.theta for rope in ropes if rope] == ([1e4] * 5 + [1e6]) * 4 + [1e4] * 2
    assert (spec.layers[0].attention.qk_norm, spec.layers[0].attention.softcap) == ("head", None)
    assert spec.logits_softcap is None
    text = load(tmp_path, GEMMA3_4B)  # its text_config leaves most keys to their defaults
    assert (text.vocab_size, text.num_layers, text.layers[0].attention.num_heads) == (262208, 34, 8)
    full, local = text.layers[5].attention.rope, text.layers[0].attention.rope
    assert full is not None
    assert local is not None
    assert (full.rope_type, full.theta, dict(full.parameters)) == ("linear", 1e6, {"factor": 8.0})
    assert (local.rope_type, local.theta) == ("default", 1e4)


def test_olmo_3(tmp_path: Path) -> None:
    spec = load(tmp_path, OLMO3_7B)
    assert windows(spec) == [4096, 4096, 4096, None] * 8
    types = [layer.attention.rope.rope_type for layer in spec.layers if layer.attention.rope]
    assert types == ["default", "default", "default", "yarn"] * 8
    layer = spec.layers[0]
    assert (layer.norm_before, layer.norm_after, layer.attention.qk_norm) == (False, True, "whole")


def test_glm_4(tmp_path: Path) -> None:
    spec = load(tmp_path, GLM4_9B)
    rope = spec.layers[0].attention.rope
    assert rope is not None
    assert (rope.rotary_dim, rope.interleaved, spec.layers[0].norm_after) == (64, True, True)
    biased = load(tmp_path, {key: value for key, value in GLM4_9B.items() if key != "attention_bias"})
    assert (biased.layers[0].attention.qkv_bias, biased.layers[0].attention.o_bias) == (True, False)


def test_gpt_2(tmp_path: Path) -> None:
    spec = load(tmp_path, GPT2)
    assert spec.norm == NormSpec(1e-5, kind="layer", bias=True)
    assert spec.layers[0].ffn == FFNSpec(3072, "gelu_tanh", bias=True, gated=False)
    a = spec.layers[0].attention
    assert (a.num_heads, a.num_kv_heads, a.head_dim, a.rope, a.qkv_bias, a.o_bias) == (12, 12, 64, None, True, True)
    assert (spec.learned_positions, spec.max_context, spec.tie_word_embeddings) == (1024, 1024, True)


REFUSED = {
    "softcap-0": (GEMMA2_2B, {"attn_logit_softcapping": 0}, ModelFormatError, "'attn_logit_softcapping': '0'"),
    "softcap-text": (GEMMA2_2B, {"final_logit_softcapping": "30"}, ModelFormatError, "'final_logit_softcapping'"),
    "scalar": (GEMMA2_2B, {"query_pre_attn_scalar": -1}, ModelFormatError, "'query_pre_attn_scalar': '-1'"),
    "scalar-null": (GEMMA2_2B, {"query_pre_attn_scalar": None}, ModelFormatError, "'query_pre_attn_scalar'"),
    "both-ways": (GEMMA3_1B, {"use_bidirectional_attention": True}, UnsupportedModelError, "expected false"),
    "pattern": (GEMMA3_1B, {"sliding_window_pattern": 0}, ModelFormatError, "'sliding_window_pattern': '0'"),
    "local-theta": (GEMMA3_1B, {"rope_local_base_freq": -1}, ModelFormatError, "'rope_local_base_freq'"),
    "activation": (GEMMA2_2B, {"hidden_activation": "mish"}, UnsupportedModelError, "'hidden_activation': 'mish'"),
    "nested": (
        OLMO3_7B,
        {"rope_scaling": None, "rope_parameters": {"chunked_attention": {}}},
        UnsupportedModelError,
        "'rope_parameters': 'chunked_attention'; expected full_attention, sliding_attention",
    ),
    "flat": (
        OLMO3_7B,
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
        ModelFormatError,
        "an object for",
    ),
    "two": (OLMO3_7B, {"rope_parameters": {}}, UnsupportedModelError, "'rope_scaling'"),
    "no-softcap": (
        OLMO3_7B,
        {"attn_logit_softcapping": 5.0},
        UnsupportedModelError,
        "attn_logit_softcapping",
    ),
    "spelling": (
        GPT2,
        {"hidden_size": 64},
        ModelFormatError,
        "'n_embd': '768'; expected '64', as key",
    ),
    "n_embd": (GPT2, {"n_embd": "768"}, ModelFormatError, "'n_embd': '768'; expected an integer"),
    "n_inner": (GPT2, {"n_inner": -4}, ModelFormatError, "'n_inner': '-4'"),
    "unscaled": (GPT2, {"scale_attn_weights": False}, UnsupportedModelError, "'scale_attn_weights'"),
    "by-layer": (GPT2, {"scale_attn_by_inverse_layer_idx": True}, UnsupportedModelError, "by_inverse_layer_idx"),
    "cross": (GPT2, {"add_cross_attention": True}, UnsupportedModelError, "'add_cross_attention'"),
    "eps": (GPT2, {"layer_norm_epsilon": 0}, ModelFormatError, "'layer_norm_epsilon': '0'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_are_refused(case: str, tmp_path: Path) -> None:
    config, changes, error, text = REFUSED[case]
    with pytest.raises(error) as caught:
        load(tmp_path, config, **changes)
    assert text in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_hidden_act_of_gemma_2_is_not_read(tmp_path: Path) -> None:
    spec = load(tmp_path, GEMMA2_2B, hidden_act="gelu")
    assert spec.layers[0].ffn.activation == "gelu_tanh"
    assert len(spec.warnings) == 1
    assert "'hidden_act': 'gelu' is ignored" in spec.warnings[0]


def test_there_are_no_positions_past_the_learned_ones(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, CONFIGS["gpt2"])
    with pyengine.load(folder, quant="f32", threads=1) as engine:
        assert engine.logits(list(range(64))).shape == (64, 97)
        with pytest.raises(RequestError, match="64"):
            engine.logits(list(range(65)))


def test_a_gpt_2_without_prefix_is_the_same(tmp_path: Path) -> None:
    """As its first files were saved: the body alone, with the masks that are buffers."""
    import numpy as np
    from builders import tiny_tensors

    config = CONFIGS["gpt2"]
    tensors = {name.removeprefix("transformer."): value for name, value in tiny_tensors(config).items()}
    tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
    one, other = write_tiny_model(tmp_path / "a", config), write_tiny_model(tmp_path / "b", config, tensors=tensors)
    with pyengine.load(one, quant="f32", threads=1) as a, pyengine.load(other, quant="f32", threads=1) as b:
        assert b.notes == ["tensor 'h.0.attn.bias' is not used"]
        np.testing.assert_array_equal(a.logits([1, 2, 3]), b.logits([1, 2, 3]))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_list_in_any_key_is_read_or_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for key in sorted({key for config in CONFIGS.values() for key in config}):
        path.write_text(json.dumps({**CONFIGS[name], key: [[1]]}))
        with contextlib.suppress(ModelFormatError, UnsupportedModelError):
            assert load_model_spec(tmp_path).layers
