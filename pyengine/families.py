"""Stage 2, families: how each family differs from Llama, as values. The registry key is config.json's architectures[0].

Facts are from transformers' configuration_*.py and modeling_*.py of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.spec import NormSpec

_RMS = NormSpec(1e-6)


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
class RopeForm:
    """What a family's rotary embedding is beside its parameters in config.json. Defaults are Llama's."""

    partial: float | None = None  # partial_rotary_factor where the key is absent; None: the whole head, the key refused
    interleaved: bool = False
    skips_layers: bool = False  # no_rope_layers and no_rope_layer_interval say which layers have none
    q_scaled: bool = False  # llama_4_scaling_beta multiplies q


@dataclass(frozen=True)
class Family:
    """What config.py needs to know of a family. Defaults are Llama's."""

    name: str
    model_type: str
    qkv_bias: bool | None = None  # None: the key attention_bias decides, for o_proj too
    mlp_bias_key: bool = False  # the key mlp_bias exists
    qk_norm: str | None = None  # as in AttentionSpec
    norm: NormSpec = _RMS  # its eps is that of a file without the key
    norm_eps_key: str = "rms_norm_eps"
    norm_before: bool = True  # as in LayerSpec
    norm_after: bool = False
    window: str = "none"  # "key": sliding_window alone; "switched": by use_sliding_window, per layer
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be absent; null is not absent
    names: Names = field(default_factory=Names)
    keys: tuple[str, ...] = ()  # config keys that this family has and others do not
    texts: tuple[str, ...] = ()  # a model of several parts: families its decoder, under text_config, may be of
    rope: RopeForm = field(default_factory=RopeForm)


# Norms after a branch: the canonical names are GLM-4's, because Llama's norm before the FFN has the shorter one.
_AFTER = {"post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
_QWEN = {
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_VISION_KEYS = (
    "text_config", "vision_config", "image_token_index", "image_token_id", "projector_hidden_act",
    "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
)  # fmt: skip
_LANGUAGE_MODEL = Names(
    prefixes=("model.language_model.", "language_model.model."),
    skipped=("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector."),
)
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
    "Qwen3ForCausalLM": Family(
        "qwen3", "qwen3", qk_norm="head", window="switched", defaults={**_QWEN, "head_dim": 128}
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        "olmo2",
        qk_norm="whole",
        norm=NormSpec(1e-5),
        norm_before=False,
        norm_after=True,
        defaults={"max_position_embeddings": 2048},
        names=Names(renames=_AFTER),
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        "ministral3",
        qkv_bias=False,
        window="key",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 262144, "head_dim": 128, "rms_norm_eps": 1e-5},
        rope=RopeForm(q_scaled=True),
    ),
    "Mistral3ForConditionalGeneration": Family(
        "mistral3",
        "mistral3",
        texts=("MistralForCausalLM", "Ministral3ForCausalLM"),
        names=_LANGUAGE_MODEL,
        keys=_VISION_KEYS,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "smollm3",
        mlp_bias_key=True,
        defaults={
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
        },
        keys=("no_rope_layers", "no_rope_layer_interval"),
        rope=RopeForm(skips_layers=True),
    ),
    "GraniteForCausalLM": Family(
        "granite",
        "granite",
        mlp_bias_key=True,
        defaults={"max_position_embeddings": 2048},
        keys=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    ),
}
