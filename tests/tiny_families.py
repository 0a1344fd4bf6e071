"""Random tensors of families whose names and norms are not Llama's, as transformers saves them; for builders.py."""

from __future__ import annotations

from typing import Any

import numpy as np

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

GEMMA2 = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2,
    "glm4": ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
}
PLUS_ONE = ("gemma2", "gemma3_text")  # what is stored is the norm's weight less 1
QK_NORM = {"olmo2": "whole", "olmo3": "whole", "gemma3_text": "head"}
TIED = ("gemma2", "gemma3_text")  # where the config does not say
FUSED = {"glm4": ("gate_up_proj",)}  # matrices that hold the rows of several; of "qkv_proj" and "gate_up_proj"


def decoder(config: Config, rng: np.random.Generator) -> Tensors:
    """Olmo 2 and 3, Gemma 2 and 3, GLM-4: `model.layers.<n>.` with norms of their own, fused matrices or not."""
    kind, hidden, inter = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim") or hidden // heads
    bias = config.get("attention_bias", kind == "glm4")
    tensors: Tensors = {}

    def linear(name: str, rows: int, cols: int, bias: bool = False) -> None:
        tensors[name + ".weight"] = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        if bias:
            tensors[name + ".bias"] = rng.standard_normal(rows).astype(np.float32)

    def norm(name: str, size: int) -> None:
        low, high = (-0.5, 0.5) if kind in PLUS_ONE else (0.5, 1.5)
        tensors[name + ".weight"] = rng.uniform(low, high, size).astype(np.float32)

    def rows_of(module: str, fused: str, sizes: dict[str, int], bias: bool = False) -> None:
        """One matrix `fused`, where the family has it, or one of each name and number of rows in `sizes`."""
        stored = {fused: sum(sizes.values())} if fused in FUSED.get(kind, ()) else sizes
        for name, rows in stored.items():
            linear(f"{module}.{name}", rows, hidden, bias)

    tensors["model.embed_tokens.weight"] = rng.standard_normal((config["vocab_size"], hidden)).astype(np.float32)
    q, kv = heads * head_dim, kv_heads * head_dim
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for name in NORMS[kind]:
            norm(p + name, hidden)
        rows_of(p + "self_attn", "qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias)
        linear(p + "self_attn.o_proj", hidden, q, bias and kind != "glm4")
        if kind in QK_NORM:
            whole = QK_NORM[kind] == "whole"
            norm(p + "self_attn.q_norm", q if whole else head_dim)
            norm(p + "self_attn.k_norm", kv if whole else head_dim)
        rows_of(p + "mlp", "gate_up_proj", {"gate_proj": inter, "up_proj": inter})
        linear(p + "mlp.down_proj", hidden, inter)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", kind in TIED):
        linear("lm_head", config["vocab_size"], hidden)
    return tensors


def gpt2(config: Config, rng: np.random.Generator) -> Tensors:
    """`transformer.h.<n>.`: Conv1D matrices [in, out], a bias everywhere, LayerNorms with weight and bias."""
    hidden, tensors = config["n_embd"], {}
    inter = config.get("n_inner") or 4 * hidden

    def conv(name: str, cols: int, rows: int) -> None:
        tensors[name + ".weight"] = (rng.standard_normal((cols, rows)) / np.sqrt(cols)).astype(np.float32)
        tensors[name + ".bias"] = rng.standard_normal(rows).astype(np.float32)

    def norm(name: str) -> None:
        tensors[name + ".weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
        tensors[name + ".bias"] = rng.standard_normal(hidden).astype(np.float32)

    tensors["transformer.wte.weight"] = rng.standard_normal((config["vocab_size"], hidden)).astype(np.float32)
    tensors["transformer.wpe.weight"] = rng.standard_normal((config["n_positions"], hidden)).astype(np.float32)
    for layer in range(config["n_layer"]):
        p = f"transformer.h.{layer}."
        norm(p + "ln_1")
        norm(p + "ln_2")
        conv(p + "attn.c_attn", hidden, 3 * hidden)
        conv(p + "attn.c_proj", hidden, hidden)
        conv(p + "mlp.c_fc", hidden, inter)
        conv(p + "mlp.c_proj", inter, hidden)
    norm("transformer.ln_f")
    if not config.get("tie_word_embeddings", True):
        tensors["lm_head.weight"] = (rng.standard_normal((config["vocab_size"], hidden)) / np.sqrt(hidden)).astype("f4")
    return tensors


MAKERS = {**dict.fromkeys(NORMS, decoder), "gpt2": gpt2}
