"""GGUF files of tiny models for tests, and the formulas of their blocks, one weight at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}  # model_type -> general.architecture
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
K_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # of a block of 256


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """A q or k matrix as GGUF has it, written out row by row: row 2i + j of a head is row i + j * half."""
    out = np.empty_like(weights)
    size = len(weights) // heads
    for head in range(heads):
        for row in range(size):
            out[head * size + row] = weights[head * size + row // 2 + (row % 2) * (size // 2)]
    return out


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{LAYER[part]}.{suffix}"
    return f"{OUTSIDE[stem]}.{suffix}"


def model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json's model, behind the architecture's name."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key by the type of its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tokenizer_keys(tokenizer: Any, size: int, pre: str, **further: Any) -> dict[str, Any]:
    """The keys of a byte-level tokenizer of the tokenizers package, filled up to `size` tokens."""
    document = json.loads(tokenizer.to_str())
    names = {i: token for token, i in document["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in document["added_tokens"]}
    special = {token["id"]: 3 if token["special"] else 4 for token in document["added_tokens"]}
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [names.get(i, f"[PAD{i}]") for i in range(size)],
        "token_type": [special.get(i, 1 if i in names else 5) for i in range(size)],
        "merges": [" ".join(merge) for merge in document["model"]["merges"]],
        **further,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def random_blocks(rng: np.random.Generator, kind: str, rows: int, columns: int) -> np.ndarray:
    """Blocks of 256 with any bits, but for scales that keep the weights near those of a model: uint8 [rows, bytes]."""
    blocks = rng.integers(0, 256, (rows * columns // 256, K_BYTES[kind]), np.uint8)
    scales = (rng.uniform(0.5, 1.5, (len(blocks), 2)) * 2e-4).astype(np.float16).view(np.uint8).reshape(len(blocks), 4)
    if kind == "Q6_K":
        blocks[:, 208:210] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(rows, -1)


def _half(two: np.ndarray) -> float:
    return float(two.copy().view(np.float16)[0])


def _scale_and_minimum(packed: np.ndarray, group: int) -> tuple[int, int]:
    """Of group 0 .. 7 of a Q4_K or Q5_K block: two 6-bit integers in 12 bytes."""
    low = [int(byte) for byte in packed]
    if group < 4:
        return low[group] & 63, low[group + 4] & 63
    scale = low[group + 4] & 15 | low[group - 4] >> 6 << 4
    return scale, low[group + 4] >> 4 | low[group] >> 6 << 4


def block_values(kind: str, block: np.ndarray) -> list[float]:
    """The 256 weights of a block of Q4_K, Q5_K or Q6_K, from the layout in ggml's documentation, in float64."""
    if kind == "Q6_K":
        low, high = block[:128], block[128:192]
        scales, d = block[192:208].view(np.int8), _half(block[208:210])
        values = []
        for at in range(256):
            half, inside = divmod(at, 128)
            quarter, place = divmod(inside, 32)
            four = int(low[half * 64 + inside % 64]) >> 4 * (inside // 64) & 15
            two = int(high[half * 32 + place]) >> 2 * quarter & 3
            values.append(d * int(scales[at // 16]) * ((four | two << 4) - 32))
        return values
    d, least, packed = _half(block[:2]), _half(block[2:4]), block[4:16]
    quants = block[16:] if kind == "Q4_K" else block[48:]
    values = []
    for at in range(256):
        group, place = divmod(at, 32)
        number = int(quants[group // 2 * 32 + place]) >> 4 * (group % 2) & 15
        if kind == "Q5_K":
            number |= (int(block[16 + place]) >> group & 1) << 4
        scale, minimum = _scale_and_minimum(packed, group)
        values.append(d * scale * number - least * minimum)
    return values


def stored(kind: str, weights: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(what is written, the float32 weights that it means) of a matrix in a type; K blocks ignore `weights`."""
    rows, columns = weights.shape
    if kind in K_BYTES:
        data = random_blocks(rng, kind, rows, columns)
        blocks = data.reshape(-1, K_BYTES[kind])
        exact = np.array([block_values(kind, block) for block in blocks])
        return data, exact.reshape(rows, columns).astype(np.float32)
    if kind == "F32":
        return weights, weights
    if kind == "F16":
        return weights.astype(np.float16), weights.astype(np.float16).astype(np.float32)
    data = gguf.quantize(weights, gguf.GGMLQuantizationType[kind])
    return data, np.asarray(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]), np.float32).reshape(rows, columns)


def write(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kind: str | Mapping[str, str] = "F32",
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """A GGUF of a tiny model; returns its weights under Hugging Face's names, in their order of rows.

    kind: type of the matrices, or by the tensors' names here ("": the others). keys: more and other keys, None takes
    one out; those that begin with "." stand behind the architecture's name. extra: further tensors, as they are.
    """
    architecture = ARCHITECTURES[config["model_type"]]
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, architecture)
    given = {f".{key}": value for key, value in model_keys(config).items()}
    given |= {
        f"tokenizer.ggml.{name}_token_id": config[f"{name}_token_id"]
        for name in ("bos", "eos")
        if config.get(f"{name}_token_id") is not None
    }
    for key, value in (given | dict(keys or {})).items():
        if value is not None:
            add(writer, architecture + key if key.startswith(".") else key, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    means = {}
    for name, weights in tensors.items():
        on_disk = gguf_name(name)
        part = on_disk.split(".")[-2]
        turned = architecture == "llama" and part in heads
        if weights.ndim == 1:
            writer.add_tensor(on_disk, interleaved(weights, heads[part]) if turned else weights)
            means[name] = weights
            continue
        form = kind if isinstance(kind, str) else kind.get(on_disk, kind[""])
        data, exact = stored(form, weights, rng)  # rows are stored one by one: their order does not matter to it
        if turned:
            data = interleaved(data, heads[part])
        writer.add_tensor(on_disk, data, raw_dtype=gguf.GGMLQuantizationType[form])
        means[name] = exact
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return means
