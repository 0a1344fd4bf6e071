"""Stage 2, families: how each family differs from Llama, as values. The registry key is config.json's architectures[0].

Facts are from transformers' configuration_*.py and modeling_*.py of each family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.checkpoint import TensorInfo
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.spec import ModelSpec
from pyengine.strict_json import shown

LISTED = 10  # tensors that an error names
INERT = (".inv_freq", ".masked_bias", ".attn.bias")  # endings of buffers that older files carry


@dataclass(frozen=True)
class Family:
    """What config.py needs to know of a family. Defaults are Llama's."""

    name: str
    model_type: str
    qkv_bias: bool | None = None  # None: the key attention_bias decides, for o_proj too
    mlp_bias_key: bool = False  # the key mlp_bias exists
    qk_norm: bool = False
    window: str = "none"  # "key": sliding_window alone; "switched": by use_sliding_window, per layer
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be absent; null is not absent


_QWEN = {
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", "llama", mlp_bias_key=True, defaults={"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        "mistral",
        "mistral",
        qkv_bias=False,
        window="key",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "Qwen2ForCausalLM": Family("qwen2", "qwen2", qkv_bias=True, window="switched", defaults=_QWEN),
    "Qwen3ForCausalLM": Family("qwen3", "qwen3", qk_norm=True, window="switched", defaults={**_QWEN, "head_dim": 128}),
}
# Endings of tensors that only quantized checkpoints have.
QUANTIZED = (
    ".qweight", ".qzeros", ".g_idx", ".scales", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".absmax",
    ".biases", ".input_scale", ".weight_zero_point", ".quant_map",
)  # fmt: skip


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


def _is_inert(info: TensorInfo, spec: ModelSpec) -> bool:
    """Extra tensors that change no number: buffers, a head beside a tied embedding, multi-token prediction layers."""
    if info.name == "lm_head.weight" and spec.tie_word_embeddings:
        return info.shape == (spec.vocab_size, spec.hidden_size)
    return info.name.startswith("mtp.") or info.name.endswith(INERT) or info.dtype in ("BOOL", "I64")


def check_tensors(spec: ModelSpec, tensors: Mapping[str, TensorInfo], where: Path) -> list[str]:
    """Account for every tensor; returns notes on extra ones that are not used.

    A stored lm_head.weight of a tied model is not used: the embedding is the head, as in transformers.
    Errors, each listing the first ten: ModelFormatError for missing tensors, wrong shapes or layers past the config's;
    UnsupportedModelError for quantized checkpoints, dtypes not read here and extra tensors that would change the
    numbers.
    """
    expected = expected_tensors(spec)
    extra = [name for name in tensors if name not in expected]
    quantized = [name for name in extra if name.endswith(QUANTIZED)]
    if quantized:
        raise UnsupportedModelError(
            f"{where}: {len(quantized)} tensors of a quantized checkpoint: {_listed(quantized)}; expected none"
        )
    missing = [name for name in expected if name not in tensors]
    if missing:
        others = f" (and {len(extra)} not known: {_listed(extra)})" if extra else ""
        raise ModelFormatError(
            f"{where}: {len(missing)} tensors are missing: {_listed(missing)}{others}; expected all of config.json's"
        )
    for name, shape in expected.items():
        _check_tensor(tensors[name], shape)
    extra = [name for name in extra if not _is_inert(tensors[name], spec)]
    layers = [name for name in extra if _layer_of(name) >= spec.num_layers]
    if layers:
        raise ModelFormatError(
            f"{where}: {len(layers)} tensors of layers past num_hidden_layers {spec.num_layers}: {_listed(layers)}; "
            "expected none"
        )
    if extra:
        raise UnsupportedModelError(
            f"{where}: {len(extra)} tensors that a {spec.family} model does not have: {_listed(extra)}; "
            "expected none, they would change the numbers"
        )
    return [f"tensor {shown(name)} is not used" for name in tensors if name not in expected]


def _check_tensor(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise ModelFormatError(
            f"{info.file}: tensor {shown(info.name)}: shape {list(info.shape)}; "
            f"expected {list(shape)} (from config.json)"
        )
    dtypes = ("F32", "F16", "BF16", "F64") if info.name.endswith("norm.weight") else ("F32", "F16", "BF16")
    if info.dtype not in dtypes:
        raise UnsupportedModelError(
            f"{info.file}: tensor {shown(info.name)}: dtype {info.dtype}; expected {', '.join(dtypes)}"
        )


def _layer_of(name: str) -> int:
    """The n of model.layers.<n>., else -1."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return int(match.group(1)) if match else -1


def _listed(names: list[str]) -> str:
    return ", ".join(shown(name) for name in names[:LISTED]) + (" ..." if len(names) > LISTED else "")
