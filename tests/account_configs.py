"""Real config.json files, shortened to what counts, with the parameters of the released models.

active is written as the total without the experts that a token is not sent to, beside what the makers say of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Real:
    config: Config
    total: int
    active: int | None = None  # None: all of it
    mtp: int = 0  # beside the total


def causal(kind: str, name: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> Config:
    """sizes: vocabulary, hidden, intermediate, layers, heads, KV heads."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads")  # fmt: skip
    base = {"architectures": [name + "ForCausalLM"], "model_type": kind, "torch_dtype": "bfloat16"}
    return {**base, **dict(zip(keys, sizes, strict=True)), "max_position_embeddings": 131072, **more}


def mla(nope: int, rope: int, v: int, rank: int, q_rank: int | None) -> Config:
    return {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v, "kv_lora_rank": rank,
            "q_lora_rank": q_rank}  # fmt: skip


def experts(key: str, count: int, top_k: int, width: int | None = None, **more: Any) -> Config:
    wide = {} if width is None else {"moe_intermediate_size": width}
    return {key: count, "num_experts_per_tok": top_k, **wide, **more}


TIED = {"tie_word_embeddings": True}
DEEPSEEK_V3 = causal(
    "deepseek_v3", "DeepseekV3", (129280, 7168, 18432, 61, 128, 128), **mla(128, 64, 128, 512, 1536),
    **experts("n_routed_experts", 256, 8, 2048, n_shared_experts=1, first_k_dense_replace=3),
    num_nextn_predict_layers=1, n_group=8, topk_group=4, norm_topk_prob=True, ep_size=1, moe_layer_freq=1,
    rms_norm_eps=1e-6, rope_theta=10000, attention_bias=False,
)  # fmt: skip
GPT2: Config = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "n_ctx": 1024,
    "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
BERT: Config = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 768, "intermediate_size": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip
T5: Config = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_ff": 3072, "d_kv": 64, "d_model": 768,
    "num_heads": 12, "num_layers": 12, "relative_attention_num_buckets": 32, "vocab_size": 32128,
    "is_encoder_decoder": True, "layer_norm_epsilon": 1e-6, "n_positions": 512,
}  # fmt: skip
# Vaswani et al., table 3, base: one matrix of 37000 byte pairs for both embeddings and the head.
TRANSFORMER: Config = {
    "architectures": ["MarianMTModel"], "model_type": "marian", "vocab_size": 37000, "d_model": 512,
    "encoder_layers": 6, "encoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_layers": 6,
    "decoder_ffn_dim": 2048, "decoder_attention_heads": 8, "max_position_embeddings": 512, "is_encoder_decoder": True,
    "share_encoder_decoder_embeddings": True, "activation_function": "relu",
    "pad_token_id": 0,
}  # fmt: skip
BART: Config = {
    **TRANSFORMER, "architectures": ["BartModel"], "model_type": "bart", "vocab_size": 50265, "d_model": 768,
    "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    "max_position_embeddings": 1024,
}  # fmt: skip
GEMMA3_TEXT: Config = causal(
    "gemma3_text", "Gemma3", (262144, 1152, 6912, 26, 4, 1), head_dim=256, sliding_window=512, sliding_window_pattern=6
)

REAL: dict[str, Real] = {
    "Llama-3.1-8B": Real(causal("llama", "Llama", (128256, 4096, 14336, 32, 32, 8)), 8_030_261_248),
    "Llama-2-7B": Real(causal("llama", "Llama", (32000, 4096, 11008, 32, 32, 32)), 6_738_415_616),
    "Llama-3.1-70B": Real(causal("llama", "Llama", (128256, 8192, 28672, 80, 64, 8)), 70_553_706_496),
    "Mistral-7B": Real(
        causal("mistral", "Mistral", (32000, 4096, 14336, 32, 32, 8), sliding_window=4096), 7_241_732_096
    ),
    "Qwen2.5-0.5B": Real(causal("qwen2", "Qwen2", (151936, 896, 4864, 24, 14, 2), **TIED), 494_032_768),
    "Qwen2.5-1.5B": Real(causal("qwen2", "Qwen2", (151936, 1536, 8960, 28, 12, 2), **TIED), 1_543_714_304),
    "Qwen3-0.6B": Real(causal("qwen3", "Qwen3", (151936, 1024, 3072, 28, 16, 8), head_dim=128, **TIED), 596_049_920),
    "Qwen3-8B": Real(causal("qwen3", "Qwen3", (151936, 4096, 12288, 36, 32, 8), head_dim=128), 8_190_735_360),
    "SmolLM3-3B": Real(causal("smollm3", "SmolLM3", (128256, 2048, 11008, 36, 16, 4)), 3_075_098_624),
    "Granite-3.1-8B": Real(causal("granite", "Granite", (49155, 4096, 12800, 40, 32, 8), **TIED), 8_170_848_256),
    "OLMo-2-7B": Real(causal("olmo2", "Olmo2", (100352, 4096, 11008, 32, 32, 32)), 7_298_617_344),
    "Olmo-3-7B": Real(causal("olmo3", "Olmo3", (100278, 4096, 11008, 32, 32, 32)), 7_298_011_136),
    "Phi-3-mini": Real(causal("phi3", "Phi3", (32064, 3072, 8192, 32, 32, 32)), 3_821_079_552),
    "GLM-4-9B": Real(causal("glm4", "Glm4", (151552, 4096, 13696, 40, 32, 2), head_dim=128), 9_400_279_040),
    "Gemma-7B": Real(causal("gemma", "Gemma", (256000, 3072, 24576, 28, 16, 16), head_dim=256), 8_537_680_896),
    "Gemma-2-9B": Real(
        causal("gemma2", "Gemma2", (256000, 3584, 14336, 42, 16, 8), head_dim=256, sliding_window=4096), 9_241_705_984
    ),
    "Gemma-3-1B": Real(GEMMA3_TEXT, 999_885_952),
    "GPT-2": Real(GPT2, 124_439_808),
    "Pythia-1.4B": Real(causal("gpt_neox", "GPTNeoX", (50304, 2048, 8192, 24, 16, 16)), 1_414_647_808),
    "Mixtral-8x7B": Real(
        causal("mixtral", "Mixtral", (32000, 4096, 14336, 32, 32, 8), **experts("num_local_experts", 8, 2)),
        46_702_792_704,
        46_702_792_704 - 32 * 6 * 3 * 4096 * 14336,  # 12.9 billion
    ),
    "Qwen1.5-MoE-A2.7B": Real(
        causal("qwen2_moe", "Qwen2Moe", (151936, 2048, 5632, 24, 16, 16),
               **experts("num_experts", 60, 4, 1408), shared_expert_intermediate_size=5632),
        14_315_784_192,
        14_315_784_192 - 24 * 56 * 3 * 2048 * 1408,  # 2.7 billion
    ),
    "Qwen3-30B-A3B": Real(
        causal("qwen3_moe", "Qwen3Moe", (151936, 2048, 6144, 48, 32, 4), head_dim=128,
               **experts("num_experts", 128, 8, 768)),
        30_532_122_624,
        30_532_122_624 - 48 * 120 * 3 * 2048 * 768,  # 3.3 billion
    ),
    "OLMoE-1B-7B": Real(
        causal("olmoe", "Olmoe", (50304, 2048, 1024, 16, 16, 16), **experts("num_experts", 64, 8)),
        6_919_161_856,
        6_919_161_856 - 16 * 56 * 3 * 2048 * 1024,  # 1.3 billion
    ),
    "gpt-oss-20b": Real(
        causal("gpt_oss", "GptOss", (201088, 2880, 2880, 24, 64, 8), head_dim=64,
               **experts("num_local_experts", 32, 4)),
        20_914_757_184,
        20_914_757_184 - 24 * 28 * (3 * 2880 * 2880 + 3 * 2880),  # 3.6 billion and the embedding
    ),
    "DeepSeek-V2-Lite": Real(
        causal("deepseek_v2", "DeepseekV2", (102400, 2048, 10944, 27, 16, 16), **mla(128, 64, 128, 512, None),
               **experts("n_routed_experts", 64, 6, 1408, n_shared_experts=2, first_k_dense_replace=1)),
        15_706_484_224,
        15_706_484_224 - 26 * 58 * 3 * 2048 * 1408,
    ),
    "DeepSeek-V2": Real(
        causal("deepseek_v2", "DeepseekV2", (102400, 5120, 12288, 60, 128, 128), **mla(128, 64, 128, 512, 1536),
               **experts("n_routed_experts", 160, 6, 1536, n_shared_experts=2, first_k_dense_replace=1)),
        235_741_434_880,
        235_741_434_880 - 59 * 154 * 3 * 5120 * 1536,  # 21 billion
    ),
    "DeepSeek-V3": Real(
        DEEPSEEK_V3,
        671_026_419_200,
        671_026_419_200 - 58 * 248 * 3 * 7168 * 2048,  # 37 billion
        684_489_845_504 - 671_026_419_200,  # all values of the published index
    ),
    "GLM-4.5-Air": Real(
        causal("glm4_moe", "Glm4Moe", (151552, 4096, 10944, 46, 96, 8), head_dim=128, attention_bias=True,
               **experts("n_routed_experts", 128, 8, 1408, n_shared_experts=1, first_k_dense_replace=1),
               num_nextn_predict_layers=1, use_qk_norm=False),
        106_852_251_264,
        106_852_251_264 - 45 * 120 * 3 * 4096 * 1408,  # 12 billion and embedding and head
        110_468_824_832 - 106_852_251_264,
    ),
    "Qwen3-Next-80B-A3B": Real(
        causal("qwen3_next", "Qwen3Next", (151936, 2048, 5120, 48, 16, 2), head_dim=256,
               **experts("num_experts", 512, 10, 512), shared_expert_intermediate_size=512, linear_conv_kernel_dim=4,
               linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
               linear_num_value_heads=32),
        79_674_391_296,
        79_674_391_296 - 48 * 502 * 3 * 2048 * 512,  # 3 billion and embedding and head
    ),
    "BERT-base": Real(BERT, 109_482_240),
    "RoBERTa-base": Real(
        {**BERT, "architectures": ["RobertaModel"], "model_type": "roberta", "vocab_size": 50265,
         "max_position_embeddings": 514, "type_vocab_size": 1},
        124_645_632,
    ),
    "T5-base": Real(T5, 222_903_552),
    "T5-v1.1-base": Real(
        {**T5, "d_ff": 2048, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, 247_577_856
    ),
    "mT5-small": Real(
        {**T5, "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "d_model": 512, "d_ff": 1024,
         "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6, "vocab_size": 250112},
        300_176_768,
    ),
    "Transformer-base": Real(TRANSFORMER, 63_082_496),
    "BART-base": Real(BART, 139_420_416),
}  # fmt: skip
