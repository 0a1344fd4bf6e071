"""Small model folders and raw safetensors bytes for tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny_families import MAKERS
from tiny_moe import MOE_KINDS, deepseek_experts, moe_tensors

Config = dict[str, Any]


def tiny_tensors(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a config.json of a dense kind with Llama's names, or of one of tiny_families.

    Norm weights are drawn from [0.5, 1.5] and biases of size 1, so that a dropped term shows; matrices are scaled so
    that activations stay O(1). The order of the draws is part of the stored goldens: do not change it.
    """
    rng = np.random.default_rng(seed)
    kind = config["model_type"]
    if kind in MOE_KINDS:
        return moe_tensors(config, rng)
    if kind in MAKERS:
        return MAKERS[kind](config, rng)
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or hidden // heads
    qkv_bias = kind == "qwen2" or config.get("attention_bias", False)
    o_bias = kind != "qwen2" and config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    mla = "kv_lora_rank" in config
    tensors: dict[str, np.ndarray] = {}

    def linear(name: str, rows: int, cols: int, bias: bool = False) -> None:
        tensors[name + ".weight"] = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        if bias:
            tensors[name + ".bias"] = rng.standard_normal(rows).astype(np.float32)

    def norm(name: str, size: int) -> None:
        tensors[name + ".weight"] = rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors["model.embed_tokens.weight"] = rng.standard_normal((vocab, hidden)).astype(np.float32)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        norm(p + "input_layernorm", hidden)
        norm(p + "post_attention_layernorm", hidden)
        if not mla:
            linear(p + "self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
            linear(p + "self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias)
            linear(p + "self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
            linear(p + "self_attn.o_proj", hidden, heads * head_dim, o_bias)
        if kind == "qwen3":
            norm(p + "self_attn.q_norm", head_dim)
            norm(p + "self_attn.k_norm", head_dim)
        linear(p + "mlp.gate_proj", inter, hidden, mlp_bias)
        linear(p + "mlp.up_proj", inter, hidden, mlp_bias)
        linear(p + "mlp.down_proj", hidden, inter, mlp_bias)
        if mla:
            rank, nope, rope_dim = (config[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
            if config["q_lora_rank"] is None:
                linear(p + "self_attn.q_proj", heads * (nope + rope_dim), hidden)
            else:
                linear(p + "self_attn.q_a_proj", config["q_lora_rank"], hidden, o_bias)
                norm(p + "self_attn.q_a_layernorm", config["q_lora_rank"])
                linear(p + "self_attn.q_b_proj", heads * (nope + rope_dim), config["q_lora_rank"])
            linear(p + "self_attn.kv_a_proj_with_mqa", rank + rope_dim, hidden, o_bias)
            norm(p + "self_attn.kv_a_layernorm", rank)
            linear(p + "self_attn.kv_b_proj", heads * (nope + config["v_head_dim"]), rank)
            linear(p + "self_attn.o_proj", hidden, heads * config["v_head_dim"], o_bias)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", kind == "smollm3"):
        linear("lm_head", vocab, hidden)
    return deepseek_experts(config, tensors, rng) if "n_routed_experts" in config else tensors


def write_tiny_model(folder: Path, config: Config, seed: int = 0, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """Write config.json and model.safetensors (random from `seed` unless given) and return the folder."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        tiny_tensors(config, seed) if tensors is None else tensors,
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    return folder


def safetensors_bytes(header: dict[str, Any] | bytes | str, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file from its parts: 8 bytes of header length (right unless given), header, data."""
    if isinstance(header, dict):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data
