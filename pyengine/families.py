"""Stage 2, families: how each family differs from Llama, as values. The registry key is config.json's architectures[0].

Facts are from transformers' configuration_*.py and modeling_*.py of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Names:
    """What a family's tensors are called on disk, and how they lie there. Defaults are Llama's: the canonical names.

    Modules are named by what stands between `model.layers.<n>.` (outside layers: `model.`) and `.weight` or `.bias`.
    """

    prefixes: tuple[str, ...] = ("model.",)  # what `model.` may be; the first under which the embedding is
    renames: Mapping[str, str] = field(default_factory=dict)  # canonical module -> module on disk; {} is a number in it
    fused: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # module on disk -> the modules whose rows it has
    transposed: bool = False  # matrices of layers are stored [in, out]
    skipped: tuple[str, ...] = ()  # beginnings of tensors of other parts of a model, which text does not need


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
    names: Names = field(default_factory=Names)


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
