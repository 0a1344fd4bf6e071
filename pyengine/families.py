"""Stage 2, families: how each family differs from Llama, as values. The registry key is config.json's architectures[0].

Facts are from transformers' configuration_*.py and modeling_*.py of each family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyengine.families_moe import LATENT, QWEN, ROUTED
from pyengine.family import Family, Names, RopeForm
from pyengine.spec import NormSpec

# Norms after a branch: the canonical names are GLM-4's, because Llama's norm before the FFN has the shorter one.
_AFTER = {"post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
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
        "qwen2", "qwen2", models="Qwen2, Qwen2.5", qkv_bias=True, window="switched", defaults=QWEN
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", "qwen3", models="Qwen3 (dense)", qk_norm="head", window="switched", defaults={**QWEN, "head_dim": 128}
    ),
    **ROUTED,
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
        defaults={**QWEN, "max_window_layers": 80, "num_key_value_heads": 8, "rope_theta": 1000000.0},
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
    **LATENT,
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
