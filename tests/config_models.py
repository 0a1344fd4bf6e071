"""Small models of each kind whose config.json a test changes, and how they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refusal import assert_refused

from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, PyEngineError, UnsupportedModelError
from pyengine.spec import ModelSpec
from pyengine.tensors import check_tensors

Config = dict[str, Any]
Changes = dict[str, Any]

LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
GRANITE = {**LLAMA, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "residual_multiplier": 0.22}
SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
MINISTRAL3 = {
    **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "head_dim": 16,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "llama_4_scaling_beta": 0.1},
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
BASES = {
    "deepseek_v3": DEEPSEEK,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "granite": GRANITE,
    "smollm3": SMOLLM3,
    "ministral3": MINISTRAL3,
}
GONE = object()  # a change that takes the key away
BAD, UNSUPPORTED = ModelFormatError, UnsupportedModelError


def write(folder: Path, config: str | bytes, weights: Path | None = None) -> Path:
    raw = config.encode() if isinstance(config, str) else config
    (folder / "config.json").write_bytes(raw)
    link = folder / "model.safetensors"
    if weights is not None and not link.exists():
        link.symlink_to(weights / "model.safetensors")
    return folder


def load(folder: Path, *, strict: bool = False) -> tuple[ModelSpec, list[str]]:
    spec = load_model_spec(folder, strict=strict)
    with Checkpoint.open(folder) as checkpoint:
        return spec, check_tensors(spec, checkpoint.tensors, folder)


def refused(folder: Path, error: type[PyEngineError], *texts: str, strict: bool = False, small: bool = True) -> str:
    return assert_refused(lambda: load(folder, strict=strict), error, texts, folder, small=small)


def key(name: str, value: str) -> tuple[str, str]:
    return "config.json: ", f"key '{name}': '{value}'"


def scaling(rope_type: Any = "yarn", **parameters: Any) -> Changes:
    return {"rope_scaling": {"rope_type": rope_type, **parameters}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
