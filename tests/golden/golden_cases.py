"""The tiny models that pyengine is compared with transformers on: config.json values and prompts, nothing else.

Shared by tools/goldens/make.py (writes the stored goldens), test_goldens.py (reads them) and
tests/parity/test_live_transformers.py (runs transformers itself). Every config is complete enough to be a real
config.json; weights come from builders.write_tiny_model and the case's seed. All models have a vocabulary of 97.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from builders import write_tiny_model

Config = dict[str, Any]

VOCAB_SIZE = 97
POSITIONS = 40

TL: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TQ2: Config = {
    **TL,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
TQ3: Config = {
    **TQ2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "num_attention_heads": 6,
    "head_dim": 32,
}
TW: Config = {**TL, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}

TO2: Config = {**TL, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}

TO3: Config = {
    **TO2,
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "rope_theta": 500000.0,
    "num_hidden_layers": 5,
    "sliding_window": 8,
}
TG2: Config = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
TG3: Config = {
    **{key: value for key, value in TG2.items() if key not in ("hidden_act", "rope_theta")},
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}
GLM4: Config = {
    **TL,
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "pad_token_id": 0,
    "rms_norm_eps": 1.5625e-7,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
TGPT2: Config = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_ctx": 64,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Flags as in the files of Mixtral 8x7B, Qwen1.5-MoE-A2.7B, Qwen3-30B-A3B and OLMoE-1B-7B.
TX: Config = {
    **TL,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
}
TS: Config = {
    **TQ2,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "max_window_layers": 2,
    "sliding_window": 64,
    "use_sliding_window": False,
}
TM: Config = {
    **TQ3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "max_window_layers": 2,
    "sliding_window": None,
    "use_sliding_window": False,
}
TE: Config = {
    **TL,
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "clip_qkv": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.01,
}


def without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


def rope_v4(base: Config, **scaling: Any) -> Config:
    """The older spelling: `rope_scaling` beside a top-level `rope_theta`."""
    return {**base, "rope_scaling": scaling}


def rope_v5(base: Config, **scaling: Any) -> Config:
    """The newer spelling: one `rope_parameters` with the theta inside, and `dtype` for `torch_dtype`."""
    parameters = {"rope_theta": base["rope_theta"], **scaling}
    return {**without(base, "rope_theta"), "rope_parameters": parameters, "dtype": "float32"}


GRANITE: Config = {
    **TL,
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_bias": True,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
SMOLLM3: Config = without(
    {**TL, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": 0},
    "rope_theta",
    "tie_word_embeddings",
)
MINISTRAL3: Config = {
    **without(TL, "rope_theta"),
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "head_dim": 24,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 9,
        "llama_4_scaling_beta": 0.1,
    },
}

DEEPSEEK_V3: Config = {
    **TL,
    "num_key_value_heads": 4,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rms_norm_eps": 0.05,  # far from that of the latents' norms, which no key gives
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
}
DEEPSEEK_V2: Config = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
}
# Flags as in the files of DeepSeek-V3, DeepSeek-V2-Lite and DeepSeek-V2.
V3_EXPERTS: Config = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "ep_size": 1,
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
}
V2_LITE_EXPERTS: Config = {
    **{key: value for key, value in V3_EXPERTS.items() if key != "num_nextn_predict_layers"},
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
V2_EXPERTS: Config = {
    **V2_LITE_EXPERTS,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # head_dim 16, theta 10000: one pair kept, two blended, five divided
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONG = {"max_position_embeddings": 8192}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "num_hidden_layers": 4}

CONFIGS: dict[str, Config] = {
    # Families
    "llama": TL,
    "llama_tied": {**TL, "tie_word_embeddings": True},
    "llama_biases": {**TL, "attention_bias": True, "mlp_bias": True},
    "llama_head_dim": {**TL, "head_dim": 24},
    "llama_ratio_7": {**TL, "hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2},
    "llama_multi_head": without({**TL, "num_attention_heads": 8}, "num_key_value_heads"),
    "llama_defaults": without(TL, "rope_theta", "tie_word_embeddings"),
    "mistral_window": TW,
    "mistral_nemo": {**TW, "hidden_size": 80, "head_dim": 16, "sliding_window": None},
    "mistral_window_absent": without(TW, "sliding_window"),
    "qwen2": TQ2,
    "qwen2_untied": {**TQ2, "tie_word_embeddings": False},
    "qwen2_window": {**TQ2, **WINDOWED},
    "qwen2_window_off": {**TQ2, **WINDOWED, "use_sliding_window": False},
    "qwen3": TQ3,
    "qwen3_biases": {**TQ3, "attention_bias": True, "tie_word_embeddings": False},
    "qwen3_eps": {**TQ3, "rms_norm_eps": 0.05},
    "qwen3_window": {**TQ3, **WINDOWED},
    # Multipliers, layers without RoPE, q scaled by position
    "granite": GRANITE,
    "granite_defaults": {**TL, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "mlp_bias": True},
    "smollm3": {**SMOLLM3, "num_hidden_layers": 5},
    "smollm3_listed": {**SMOLLM3, "no_rope_layers": [0, 1, 0], "num_hidden_layers": 3, "attention_bias": True},
    "ministral3": MINISTRAL3,
    "olmo2": TO2,
    "olmo2_one_head": {**TO2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 48},
    # Windows by pattern, softcaps, 1 + weight, two thetas, partial interleaved RoPE, LayerNorm and a plain FFN
    "olmo3": TO3,
    "olmo3_yarn": {
        **without(TO3, "rope_theta"),
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "gemma2": TG2,
    "gemma2_no_caps": {**TG2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 5},
    "gemma3": TG3,
    "gemma3_v5": {
        **without(TG3, "rope_theta", "rope_local_base_freq", "sliding_window_pattern"),
        "layer_types": [*["sliding_attention"] * 2, "full_attention"],
        "num_hidden_layers": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "glm4": GLM4,
    "glm4_no_bias": {**GLM4, "attention_bias": False, "tie_word_embeddings": True},
    "gpt2": TGPT2,
    "gpt2_relu": {**TGPT2, "activation_function": "relu", "n_inner": 100, "tie_word_embeddings": False},
    "gpt2_gelu": {**TGPT2, "activation_function": "gelu", "n_inner": 172, "n_embd": 60, "n_head": 3},
    # Mixtures of experts
    "mixtral": TX,
    "mixtral_window": {**TX, "sliding_window": 8},
    "qwen2_moe": TS,
    "qwen2_moe_normalised": {**TS, "norm_topk_prob": True},
    "qwen2_moe_steps": {**TS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_moe": TM,
    "qwen3_moe_not_normalised": without(TM, "norm_topk_prob"),
    "qwen3_moe_all": {**TM, "num_experts": 4, "num_experts_per_tok": 4},
    "qwen3_moe_one": {**TM, "num_experts": 1, "num_experts_per_tok": 1},
    "qwen3_moe_dense_layer": {**TM, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "olmoe": TE,
    # Latent attention: q from a latent or not, yarn with mscale_all_dim, sizes off the panels of 16
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3_mscale": rope_v4({**DEEPSEEK_V3, **LONG}, **YARN, mscale=1.0, mscale_all_dim=1.0),
    "deepseek_v3_biases": {**DEEPSEEK_V3, "attention_bias": True, "kv_lora_rank": 24, "v_head_dim": 20},
    "deepseek_v3_experts": {**DEEPSEEK_V3, **V3_EXPERTS},
    "deepseek_v3_not_normalised": {**DEEPSEEK_V3, **V3_EXPERTS, "norm_topk_prob": False, "n_shared_experts": 2},
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2_experts": {**DEEPSEEK_V2, **V2_LITE_EXPERTS},
    "deepseek_v2_biases": {**DEEPSEEK_V2, **V2_LITE_EXPERTS, "attention_bias": True, "mlp_bias": True},
    "deepseek_v2_groups": {**DEEPSEEK_V2, **V2_EXPERTS, "q_lora_rank": 40},
    "deepseek_v2_yarn": rope_v4({**DEEPSEEK_V2, **LONG}, **YARN, mscale=0.707, mscale_all_dim=0.707),
    # RoPE types, both spellings
    "rope_default_v4": {**TL, "rope_theta": 500000.0, "rope_scaling": None},
    "rope_default_v5": rope_v5({**TL, "rope_theta": 500000.0}, rope_type="default"),
    "rope_linear_v4": rope_v4(TL, type="linear", factor=4.0),
    "rope_linear_v5": rope_v5(TL, rope_type="linear", factor=4.0),
    "rope_dynamic_within": rope_v4(TL, type="dynamic", factor=4.0),
    "rope_dynamic_v4": rope_v4({**TL, "max_position_embeddings": 16}, type="dynamic", factor=4.0),
    "rope_dynamic_v5": rope_v5({**TL, "max_position_embeddings": 16}, rope_type="dynamic", factor=4.0),
    "rope_llama3_v4": rope_v4({**TL, **LONG}, **LLAMA3),
    "rope_llama3_v5": rope_v5({**TL, **LONG}, **LLAMA3),
    "rope_yarn_v4": rope_v4({**TL, **LONG}, **without(YARN, "rope_type"), type="yarn"),
    "rope_yarn_v5": rope_v5({**TL, **LONG}, **YARN),
    "rope_yarn_attention_factor": rope_v4({**TL, **LONG}, **YARN, attention_factor=0.5),
    "rope_yarn_attention_factor_1": rope_v5({**TL, **LONG}, **YARN, attention_factor=1.0),
    "rope_yarn_mscale_equal": rope_v4({**TL, **LONG}, **YARN, mscale=1.0, mscale_all_dim=1.0),
    "rope_yarn_mscale_ratio": rope_v5({**TL, **LONG}, **YARN, mscale=1.0, mscale_all_dim=0.707),
    "rope_yarn_mscale_alone": rope_v4({**TL, **LONG}, **YARN, mscale=0.5),
    "rope_yarn_no_truncate": rope_v5({**TL, **LONG}, **YARN, truncate=False),
    "rope_yarn_betas": rope_v4({**TL, **LONG}, **YARN, beta_fast=64.0, beta_slow=4.0),
    "rope_yarn_original_absent": rope_v5({**TL, **LONG}, **without(YARN, "original_max_position_embeddings")),
    "rope_yarn_qwen2": rope_v4({**TQ2, **LONG}, **YARN),
    "rope_yarn_qwen3": rope_v5({**TQ3, **LONG}, **YARN),
    "rope_linear_mistral": rope_v5(TW, rope_type="linear", factor=2.0),
}
# Cases whose per-layer states are stored too.
WITH_STATES = (
    "llama",
    "mistral_window",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "olmo2",
    "gemma2",
    "gemma3_v5",
    "gpt2",
    "qwen2_moe",
)


@dataclass(frozen=True)
class Golden:
    """One stored case: float32 `logits` [T, 97] and `states` [layers, T, hidden] (no layers when not stored)."""

    name: str
    config: Config
    seed: int
    weights_sha256: str
    made_with: str
    ids: list[int]
    logits: np.ndarray
    states: np.ndarray


def past_dynamic_limit(config: Config) -> bool:
    """Whether the prompt outgrows a dynamic RoPE's limit: the golden is then made token by token.

    transformers gives a whole prompt the frequencies of its last position, and each decoded token its own; pyengine
    always does the latter, so that prefill and decode agree.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    return kind == "dynamic" and config["max_position_embeddings"] < POSITIONS


def prompt(seed: int, length: int = POSITIONS) -> list[int]:
    """Token ids drawn uniformly from the vocabulary."""
    return np.random.default_rng(1000 + seed).integers(0, VOCAB_SIZE, length).tolist()


def build(folder: Path, config: Config, seed: int) -> Path:
    """Write the tiny model's config.json and model.safetensors into `folder` and return it."""
    write_tiny_model(folder, config, seed=seed)
    return folder


def load_golden(path: Path) -> Golden:
    with np.load(path, allow_pickle=False) as data:
        meta = json.loads(str(data["meta"]))
        return Golden(path.stem, **meta, ids=data["ids"].tolist(), logits=data["logits"], states=data["states"])
