"""Stage 2, families_moe: the families with a mixture of experts, those with latent attention apart."""

from __future__ import annotations

from dataclasses import replace

from pyengine.family import Experts, Family, Names, RopeForm
from pyengine.spec import NormSpec

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
QWEN = {  # what all Qwen2 and Qwen3 take where a key is absent
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
ROUTED: dict[str, Family] = {
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
            **QWEN,
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
            **QWEN,
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
}
LATENT: dict[str, Family] = {
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
}
