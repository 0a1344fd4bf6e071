"""Stage 2, families: how each family differs from Llama, as values. The registry key is config.json's architectures[0].

Facts are from transformers' configuration_*.py and modeling_*.py of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    head: str = "lm_head"


@dataclass(frozen=True)
class RopeForm:
    """What a family's rotary embedding is beside its parameters in config.json. Defaults are Llama's."""

    partial: float | None = None  # partial_rotary_factor where the key is absent; None: the whole head, the key refused
    interleaved: bool = False
    absent: bool = False  # no layer has one
    local_theta: float | None = None  # windowed layers have parameters of their own: this theta in files of no other
    skips_layers: bool = False  # no_rope_layers and no_rope_layer_interval say which layers have none
    q_scaled: bool = False  # llama_4_scaling_beta multiplies q
    sections: bool = False  # mrope_section: parts of a head turn by time, height, width, which are one place in text


@dataclass(frozen=True)
class Experts:
    """How a family's config.json describes its mixture of experts. Defaults are Mixtral's."""

    count_keys: tuple[str, ...] = ("num_local_experts", "num_experts")  # the first that is there
    size_key: str = "intermediate_size"  # of one expert
    normalise: bool | None = True  # None: the key norm_topk_prob decides, false where it is absent
    shared_size_key: str | None = None  # width of the shared expert
    shared_count_key: str | None = None  # or how many experts wide it is
    shared_gate: bool = False
    steps: bool = False  # decoder_sparse_step and mlp_only_layers say which layers have experts
    first_dense_key: str | None = None  # how many layers before the first with experts
    method: str = "softmax"  # of config_moe.METHODS
    methods: tuple[str, ...] = ("softmax",)
    method_key: str | None = None
    scoring_key: str | None = None
    scaled: bool = False  # by routed_scaling_factor


@dataclass(frozen=True)
class Family:
    """What config.py needs to know of a family. Defaults are Llama's."""

    name: str
    model_type: str
    qkv_bias: bool | None = None  # None: the key attention_bias decides, for o_proj too
    mlp_bias_key: bool = False  # the key mlp_bias exists
    o_bias: bool | None = None  # None: as q, k and v where the key decides, else none
    qk_norm: str | None = None  # as in AttentionSpec
    norm: NormSpec = _RMS  # its eps is that of a file without the key
    norm_eps_key: str = "rms_norm_eps"
    norm_before: bool = True  # as in LayerSpec
    norm_after: bool = False
    # "key": sliding_window alone; "switched": by use_sliding_window, per layer; "off": it must be off; "pattern": ...
    window: str = "none"
    full_every: int = 0  # ... in all layers but every n-th, where layer_types says nothing
    act_key: str = "hidden_act"
    gated: bool = True  # as in FFNSpec
    ffn_bias: bool = False  # always, whatever the file says
    embedding_sqrt: bool = False  # embeddings are multiplied by sqrt(hidden_size), as a float32: so is the hidden state
    learned_positions: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be absent; null is not absent
    names: Names = field(default_factory=Names)
    keys: tuple[str, ...] = ()  # config keys that this family has and others do not
    inert: tuple[str, ...] = ()  # those of them that change no number
    off: tuple[str, ...] = ()  # those of them that are not supported unless off
    spellings: Mapping[str, str] = field(default_factory=dict)  # usual config key -> this family's name of it
    latent: bool = False  # multi-head latent attention
    texts: tuple[str, ...] = ()  # a model of several parts: families its decoder, under text_config, may be of
    flat: bool = False  # without text_config the keys of the first of these stand among the others
    rope: RopeForm = field(default_factory=RopeForm)
    experts: Experts | None = None
    models: str = ""  # of this family, for README's table


_MOE_KEYS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise",
)  # fmt: skip
_QWEN_EXPERTS = Experts(("num_experts", "num_local_experts"), "moe_intermediate_size", normalise=None, steps=True)
_DEEPSEEK_V2_EXPERTS = Experts(
    ("n_routed_experts",),
    "moe_intermediate_size",
    normalise=False,
    shared_count_key="n_shared_experts",
    first_dense_key="first_k_dense_replace",
    method="greedy",
    methods=("greedy", "group_limited_greedy"),
    method_key="topk_method",
    scoring_key="scoring_func",
    scaled=True,
)
_SHARED_EXPERTS = {
    f"mlp.shared_expert.{side}_proj": f"mlp.shared_experts.{side}_proj" for side in ("gate", "up", "down")
}
# Norms after a branch: the canonical names are GLM-4's, because Llama's norm before the FFN has the shorter one.
_AFTER = {"post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
_QWEN = {
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_LATENT_KEYS = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave",
    "qk_head_dim", "num_nextn_predict_layers",
)  # fmt: skip
_EXPERT_KEYS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_layer_freq",
    "first_k_dense_replace", "n_group", "topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor",
    "scoring_func", "ep_size", "seq_aux", "aux_loss_alpha",
)  # fmt: skip
_DEEPSEEK = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_VISION_KEYS = (
    "text_config", "vision_config", "image_token_index", "image_token_id", "projector_hidden_act",
    "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
)  # fmt: skip
_QWEN_VISION_TOKENS = ("image", "video", "vision", "vision_start", "vision_end")
_LANGUAGE_MODEL = Names(
    prefixes=("model.language_model.", "language_model.model."),
    skipped=("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector."),
)
_AROUND = {  # Gemma: four norms, the one before the FFN under the longer name
    **_AFTER,
    "post_attention_layernorm": "pre_feedforward_layernorm",
}
_SOFTCAPS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_GEMMA: dict[str, Any] = {
    "norm": NormSpec(1e-6, plus_one=True),
    "norm_after": True,
    "window": "pattern",
    "act_key": "hidden_activation",
    "embedding_sqrt": True,
}
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Family(
    "gemma3",
    "gemma3_text",
    models="Gemma 3 (text)",
    qk_norm="head",
    full_every=6,
    rope=RopeForm(local_theta=10000.0),
    defaults={**_GEMMA_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0},
    names=Names(renames=_AROUND),
    keys=(*_SOFTCAPS, "hidden_activation", "sliding_window_pattern", "rope_local_base_freq"),
    inert=("cache_implementation",),
    off=("use_bidirectional_attention",),
    **_GEMMA,
)
_OLMO: dict[str, Any] = {"norm_before": False, "norm_after": True, "qk_norm": "whole", "norm": NormSpec(1e-5)}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        "llama",
        models="Llama 2, 3, 3.1, 3.2, 3.3",
        mlp_bias_key=True,
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        "mistral",
        "mistral",
        models="Mistral",
        qkv_bias=False,
        window="key",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", "qwen2", models="Qwen2, Qwen2.5", qkv_bias=True, window="switched", defaults=_QWEN
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", "qwen3", models="Qwen3 (dense)", qk_norm="head", window="switched", defaults={**_QWEN, "head_dim": 128}
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "mixtral",
        models="Mixtral",
        qkv_bias=False,
        window="key",
        norm=NormSpec(1e-5),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        names=Names(
            renames={
                "mlp.gate": "block_sparse_moe.gate",
                "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
                "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
                "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
            }
        ),
        keys=_MOE_KEYS,
        experts=Experts(),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        "qwen2_moe",
        models="Qwen1.5-MoE, Qwen2-MoE",
        qkv_bias=True,
        window="off",
        defaults={
            **_QWEN,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        keys=(*_MOE_KEYS, "shared_expert_intermediate_size", "qkv_bias"),
        experts=replace(_QWEN_EXPERTS, shared_size_key="shared_expert_intermediate_size", shared_gate=True),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "qwen3_moe",
        models="Qwen3-MoE",
        qk_norm="head",
        window="off",
        defaults={
            **_QWEN,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        keys=_MOE_KEYS,
        experts=_QWEN_EXPERTS,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        "olmoe",
        models="OLMoE",
        qk_norm="whole",
        norm=NormSpec(1e-5),
        defaults={"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
        keys=_MOE_KEYS,
        experts=Experts(("num_experts", "num_local_experts"), normalise=None),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        "olmo2",
        models="Olmo 2",
        defaults={"max_position_embeddings": 2048},
        names=Names(renames=_AFTER),
        **_OLMO,
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        "olmo3",
        models="Olmo 3",
        window="pattern",
        full_every=4,
        rope=RopeForm(local_theta=500000.0),
        defaults={"max_position_embeddings": 2048, "sliding_window": 4096, "rope_theta": 500000.0},
        names=Names(renames=_AFTER),
        **_OLMO,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        "gemma2",
        models="Gemma 2",
        full_every=2,
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        names=Names(renames=_AROUND),
        keys=(*_SOFTCAPS, "hidden_activation"),
        inert=("cache_implementation",),
        off=("use_bidirectional_attention",),
        **_GEMMA,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": Family(
        "gemma3 with vision",
        "gemma3",
        models="Gemma 3",
        texts=("Gemma3ForCausalLM",),
        names=replace(_LANGUAGE_MODEL, renames=_AROUND),
        keys=_VISION_KEYS,
        inert=("mm_tokens_per_image", "boi_token_index", "eoi_token_index"),
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        "glm4",
        models="GLM-4",
        o_bias=False,
        norm=NormSpec(1.5625e-7),
        norm_after=True,
        rope=RopeForm(partial=0.5, interleaved=True),
        defaults={
            "attention_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
        names=Names(fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}),
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        "gpt2",
        models="GPT-2",
        qkv_bias=True,
        o_bias=True,
        norm=NormSpec(1e-5, kind="layer", bias=True),
        norm_eps_key="layer_norm_epsilon",
        act_key="activation_function",
        gated=False,
        ffn_bias=True,
        learned_positions=True,
        rope=RopeForm(absent=True),
        defaults={
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 1024,
        },
        names=Names(
            prefixes=("transformer.", ""),
            renames={
                "embed_tokens": "wte",
                "embed_positions": "wpe",
                "layers": "h",
                "norm": "ln_f",
                "input_layernorm": "ln_1",
                "post_attention_layernorm": "ln_2",
                "self_attn.o_proj": "attn.c_proj",
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
            },
            fused={"attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
            transposed=True,
        ),
        keys=("activation_function", "layer_norm_epsilon", "scale_attn_weights"),
        inert=(
            *("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_type", "summary_use_proj", "summary_activation"),
            *("summary_proj_to_labels", "summary_first_dropout", "reorder_and_upcast_attn", "n_ctx"),
        ),
        off=("scale_attn_by_inverse_layer_idx",),
        spellings={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        "ministral3",
        models="Ministral 3 (text)",
        qkv_bias=False,
        window="key",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 262144, "head_dim": 128, "rms_norm_eps": 1e-5},
        rope=RopeForm(q_scaled=True),
    ),
    "Mistral3ForConditionalGeneration": Family(
        "mistral3",
        "mistral3",
        models="Mistral 3, Ministral 3",
        texts=("MistralForCausalLM", "Ministral3ForCausalLM"),
        names=_LANGUAGE_MODEL,
        keys=_VISION_KEYS,
    ),
    "Qwen2_5_VLTextModel": Family(
        "qwen2_5_vl_text",
        "qwen2_5_vl_text",
        models="Qwen2.5-VL (text)",
        qkv_bias=True,
        window="switched",
        norm=NormSpec(1e-5),
        defaults={**_QWEN, "max_window_layers": 80, "num_key_value_heads": 8, "rope_theta": 1000000.0},
        rope=RopeForm(sections=True),
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        "qwen2_5_vl",
        "qwen2_5_vl",
        models="Qwen2.5-VL",
        texts=("Qwen2_5_VLTextModel",),
        flat=True,
        names=Names(prefixes=("model.language_model.", "model."), skipped=("visual.", "model.visual.")),
        keys=("text_config", "vision_config", *(f"{x}_token_id" for x in _QWEN_VISION_TOKENS)),
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        "deepseek_v2",
        models="DeepSeek-V2",
        latent=True,
        mlp_bias_key=True,
        defaults={
            **_DEEPSEEK,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
        },
        names=Names(renames=_SHARED_EXPERTS),
        keys=(*_LATENT_KEYS, *_EXPERT_KEYS),
        rope=RopeForm(interleaved=True),
        experts=_DEEPSEEK_V2_EXPERTS,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        "deepseek_v3",
        models="DeepSeek-V3, R1",
        latent=True,
        defaults={
            **_DEEPSEEK,
            "max_position_embeddings": 4096,
            "num_nextn_predict_layers": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        names=Names(renames=_SHARED_EXPERTS),
        keys=(*_LATENT_KEYS, *_EXPERT_KEYS),
        rope=RopeForm(interleaved=True),
        experts=replace(_DEEPSEEK_V2_EXPERTS, normalise=None, method="noaux_tc", methods=("noaux_tc",)),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "smollm3",
        models="SmolLM3",
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
        models="Granite 3 (dense)",
        mlp_bias_key=True,
        defaults={"max_position_embeddings": 2048},
        keys=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    ),
}
