"""Random tensors of tiny models with experts, under the names that checkpoints of each family have."""

from __future__ import annotations

from typing import Any

import numpy as np

Config = dict[str, Any]
MOE_KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def moe_tensors(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE. Norms, biases and matrices as in builders.tiny_tensors.

    Router rows are drawn three times as large, so that a wrong choice or a wrong weight of an expert shows.
    """
    kind, hidden, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    experts = config.get("num_local_experts") or config["num_experts"]
    inter = config["moe_intermediate_size"] if kind.startswith("qwen") else config["intermediate_size"]
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    tensors: dict[str, np.ndarray] = {}

    def linear(name: str, rows: int, cols: int, bias: bool = False, size: float = 1.0) -> None:
        tensors[name + ".weight"] = (size * rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        if bias:
            tensors[name + ".bias"] = rng.standard_normal(rows).astype(np.float32)

    def norm(name: str, size: int) -> None:
        tensors[name + ".weight"] = rng.uniform(0.5, 1.5, size).astype(np.float32)

    def ffn(name: str, width: int, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        for part, (rows, cols) in zip(parts, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            linear(f"{name}.{part}", rows, cols)

    tensors["model.embed_tokens.weight"] = rng.standard_normal((vocab, hidden)).astype(np.float32)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        norm(p + "input_layernorm", hidden)
        norm(p + "post_attention_layernorm", hidden)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            linear(f"{p}self_attn.{name}_proj", rows * head_dim, hidden, kind == "qwen2_moe")
        linear(p + "self_attn.o_proj", hidden, heads * head_dim)
        if kind in ("qwen3_moe", "olmoe"):
            whole = kind == "olmoe"
            norm(p + "self_attn.q_norm", heads * head_dim if whole else head_dim)
            norm(p + "self_attn.k_norm", kv_heads * head_dim if whole else head_dim)
        if layer in dense or (layer + 1) % step:
            ffn(p + "mlp", config["intermediate_size"])
            continue
        block = p + ("block_sparse_moe" if kind == "mixtral" else "mlp")
        linear(block + ".gate", experts, hidden, size=3.0)
        for e in range(experts):
            parts = {"parts": ("w1", "w3", "w2")} if kind == "mixtral" else {}
            ffn(f"{block}.experts.{e}", inter, **parts)
        if kind == "qwen2_moe":
            ffn(block + ".shared_expert", config["shared_expert_intermediate_size"])
            linear(block + ".shared_expert_gate", 1, hidden, size=2.0)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        linear("lm_head", vocab, hidden)
    return tensors


def deepseek_experts(config: Config, tensors: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """`tensors` of a dense model with experts in place of the FFNs from layer first_k_dense_replace on."""
    layers = [f"model.layers.{n}.mlp." for n in range(config["first_k_dense_replace"], config["num_hidden_layers"])]
    out = {name: values for name, values in tensors.items() if not name.startswith(tuple(layers))}
    count, hidden, inter = config["n_routed_experts"], config["hidden_size"], config["moe_intermediate_size"]

    def linear(name: str, rows: int, cols: int, size: float = 1.0, bias: bool = False) -> None:
        out[name + ".weight"] = (size * rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        if bias:
            out[name + ".bias"] = rng.standard_normal(rows).astype(np.float32)

    for p in layers:
        linear(p + "gate", count, hidden, size=3.0)
        if config["model_type"] == "deepseek_v3":
            out[p + "gate.e_score_correction_bias"] = (rng.standard_normal(count) / 4).astype(np.float32)
        ffns = {f"experts.{e}.": inter for e in range(count)}
        for name, width in {**ffns, "shared_experts.": inter * config["n_shared_experts"]}.items():
            for side, (rows, cols) in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
                linear(f"{p}{name}{side}_proj", rows, cols, bias=name[0] == "s" and config.get("mlp_bias", False))
    return out


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with the experts of each layer in two tensors, gate_up_proj [E, 2 F, K] and down_proj [E, K, F]."""
    out = {name: values for name, values in tensors.items() if ".experts." not in name}
    layers = sorted({name.split("mlp.experts.")[0] for name in tensors if "mlp.experts." in name})
    for p in layers:
        prefix = p + "mlp.experts."
        count = 1 + max(int(name[len(prefix) :].split(".")[0]) for name in tensors if name.startswith(prefix))
        gate, up, down = (
            np.stack([tensors[f"{prefix}{e}.{side}_proj.weight"] for e in range(count)])
            for side in ("gate", "up", "down")
        )
        out[prefix + "gate_up_proj"], out[prefix + "down_proj"] = np.concatenate([gate, up], axis=1), down
    return out
