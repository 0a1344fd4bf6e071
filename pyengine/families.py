"""Stage 2, families: how each family differs from Llama, as values. The registry key is config.json's architectures[0].

Facts are from transformers' configuration_*.py and modeling_*.py of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.checkpoint import TensorInfo
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.spec import ModelSpec
from pyengine.strict_json import shown

LISTED = 10  # tensors that an error names


@dataclass(frozen=True)
class Family:
    """What config.py needs to know of a family. Defaults are Llama's."""

    name: str
    model_types: tuple[str, ...]
    qkv_bias: bool | None = None  # None: the key attention_bias decides, for o_proj too
    mlp_bias_key: bool = False  # the key mlp_bias exists
    qk_norm: bool = False
    window: str = "none"  # "key": sliding_window alone; "flag": use_sliding_window and max_window_layers or layer_types
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be absent


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", ("llama",), mlp_bias_key=True),
    "MistralForCausalLM": Family(
        "mistral",
        ("mistral",),
        qkv_bias=False,
        window="key",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        ("qwen2",),
        qkv_bias=True,
        window="flag",
        defaults={"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        ("qwen3",),
        qk_norm=True,
        window="flag",
        defaults={"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32, "head_dim": 128},
    ),
}


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names on disk -> shape of every tensor the model needs."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in spec.layers:
        a, f, p = layer.attention, layer.ffn, f"model.layers.{layer.index}."
        q, kv, inter = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, f.intermediate_size
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, cols, bias in (
            ("self_attn.q_proj", q, hidden, a.qkv_bias),
            ("self_attn.k_proj", kv, hidden, a.qkv_bias),
            ("self_attn.v_proj", kv, hidden, a.qkv_bias),
            ("self_attn.o_proj", hidden, q, a.o_bias),
            ("mlp.gate_proj", inter, hidden, f.bias),
            ("mlp.up_proj", inter, hidden, f.bias),
            ("mlp.down_proj", hidden, inter, f.bias),
        ):
            shapes[f"{p}{name}.weight"] = (rows, cols)
            if bias:
                shapes[f"{p}{name}.bias"] = (rows,)
        if a.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (a.head_dim,)
    return shapes


def _inert(name: str, info: TensorInfo, spec: ModelSpec) -> bool:
    """Extra tensors that change no number: buffers, a head beside a tied embedding, layers for multi-token prediction."""
    if name.endswith((".inv_freq", ".masked_bias", ".attn.bias")) or info.dtype in ("BOOL", "I64"):
        return not name.endswith("g_idx")
    return (name == "lm_head.weight" and spec.tie_word_embeddings) or name.startswith("mtp.")


def check_tensors(spec: ModelSpec, tensors: Mapping[str, TensorInfo], where: Path) -> list[str]:
    """Account for every tensor; returns notes on extra ones that are not used.

    Errors, each listing the first ten: ModelFormatError for missing tensors, wrong shapes or layers past the config's;
    UnsupportedModelError for dtypes not read here and for extra tensors that would change the numbers.
    """
    expected = expected_tensors(spec)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ModelFormatError(
            f"{where}: {len(missing)} tensors are missing: {_listed(missing)}; expected all of config.json's model"
        )
    for name, shape in expected.items():
        info = tensors[name]
        if info.shape != shape:
            raise ModelFormatError(
                f"{info.file}: tensor '{name}': shape {list(info.shape)}; expected {list(shape)} (from config.json)"
            )
        kinds = ("F32", "F16", "BF16") if len(shape) == 2 else ("F64", "F32", "F16", "BF16")
        if info.dtype not in kinds:
            raise UnsupportedModelError(
                f"{info.file}: tensor '{name}': dtype {info.dtype}; expected {', '.join(kinds)}"
            )
    extra = [name for name in tensors if name not in expected]
    layers = [name for name in extra if name.startswith("model.layers.") and _layer_of(name) >= spec.num_layers]
    if layers:
        raise ModelFormatError(
            f"{where}: {len(layers)} tensors of layers past num_hidden_layers {spec.num_layers}: {_listed(layers)}; expected none"
        )
    harmful = [name for name in extra if not _inert(name, tensors[name], spec)]
    if harmful:
        raise UnsupportedModelError(
            f"{where}: {len(harmful)} tensors that this model does not have: {_listed(harmful)}; expected none, they would change the numbers"
        )
    return [f"tensor {shown(name)} is not used" for name in extra]


def _layer_of(name: str) -> int:
    part = name.split(".")[2]
    return int(part) if part.isdigit() and len(part) < 10 else -1


def _listed(names: list[str]) -> str:
    return ", ".join(shown(name) for name in names[:LISTED]) + (" ..." if len(names) > LISTED else "")
