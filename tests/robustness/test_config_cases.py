"""Bad config.json and generation_config.json of the Llama, Mistral, Qwen2 and Qwen3 kinds.

Ids are those of the case list, section D. Every refusal names file, key and value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from config_models import BAD, GONE, LLAMA, LLAMA3, UNSUPPORTED, Changes, key, refused, scaling, write
from refusal import assert_refused

from pyengine.config import load_model_spec
from pyengine.errors import PyEngineError, ResourceError
from pyengine.families import FAMILIES

# ---- D01, D02: the file as JSON ---------------------------------------------------------------------------------

FILES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "malformed-D01-empty": ("", ("empty",)),
    "malformed-D01-not-json": ("hidden_size: 64", ("not JSON", "at byte 0")),
    "malformed-D01-cut-short": (json.dumps(LLAMA)[:-9], ("not JSON", "at byte")),
    "malformed-D01-root-list": ("[]", ("root is list",)),
    "malformed-D01-root-null": ("null", ("root is NoneType",)),
    "malformed-D01-bom": (b"\xef\xbb\xbf" + json.dumps(LLAMA).encode(), ("BOM not allowed",)),
    "malformed-D01-latin-1": ('{"a":"é"}'.encode("latin-1"), ("not UTF-8 at byte 6",)),
    "malformed-D01-17-mib": (b" " * (17 << 20), ("17825792 bytes", "16777216")),
    "malformed-D01-nan": (json.dumps({**LLAMA, "rms_norm_eps": float("nan")}), ("literal NaN",)),
    "malformed-D01-infinity": (json.dumps({**LLAMA, "rope_theta": float("inf")}), ("literal Infinity",)),
    "malformed-D01-minus-infinity": (json.dumps({**LLAMA, "rope_theta": float("-inf")}), ("literal -Infinity",)),
    "malformed-D02": ('{"hidden_size":48,"hidden_size":64}', ("duplicate key 'hidden_size'",)),
    "malformed-D02-inside": ('{"rope_scaling":{"factor":1,"factor":2}}', ("duplicate key 'factor' in 'rope_scaling'",)),
    "malformed-D15-1e400": (json.dumps(LLAMA).replace("10000.0", "1e400"), ("1e400 is out of range",)),
    "malformed-D19-factor-nan": (json.dumps({**LLAMA, **scaling("linear", factor=float("nan"))}), ("literal NaN",)),
}


@pytest.mark.parametrize("row", FILES)
def test_file_is_refused(row: str, tmp_path: Path, models: dict[str, Path]) -> None:
    content, texts = FILES[row]
    refused(write(tmp_path, content, models["llama"]), BAD, "config.json: ", *texts)


def test_malformed_d01_missing(tmp_path: Path) -> None:
    refused(tmp_path, BAD, "config.json: no such file")


# ---- values -----------------------------------------------------------------------------------------------------

BAD_SIZES = {"0": 0, "-64": -64, "64.5": 64.5, "64": "64", "True": True, "1e+30": 1e30, "2147483648": 2**31}
BAD_SIZES["9223372036854775808"] = 2**63
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("text", BAD_SIZES)
def test_malformed_d04_size(name: str, text: str, make: Callable[..., Path]) -> None:
    refused(make(**{name: BAD_SIZES[text]}), BAD, *key(name, text), "expected")


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_malformed_d04_size_is_missing(name: str, make: Callable[..., Path]) -> None:
    refused(make(**{name: GONE}), BAD, "config.json: ", f"key '{name}' is missing")


# row -> kind, changes, error, texts
ROUTED: Changes = {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
ROUTED |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
V2: Changes = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
ROWS: dict[str, tuple[str, Changes, type[PyEngineError], tuple[str, ...]]] = {
    "malformed-D03": (
        "llama", {"model_type": "rwkv"}, UNSUPPORTED, (*key("model_type", "rwkv"), "llama, mistral, qwen2, qwen3")
    ),
    "malformed-D03-architecture": (
        "llama", {"architectures": ["RwkvForCausalLM"]}, UNSUPPORTED,
        (*key("architectures", "RwkvForCausalLM"), *FAMILIES),
    ),
    "malformed-D03-no-architecture": (
        "llama", {"architectures": GONE, "model_type": "rwkv"}, UNSUPPORTED, ("config.json: ", "'rwkv'", *FAMILIES)
    ),
    "malformed-D03-architectures-empty": ("llama", {"architectures": []}, BAD, key("architectures", "[]")),
    "malformed-D03-architectures-number": ("llama", {"architectures": [7]}, BAD, key("architectures", "[7]")),
    "malformed-D03-two-kinds": ("llama", {"model_type": "qwen2"}, UNSUPPORTED, key("model_type", "qwen2")),
    "malformed-D08-heads-0": ("llama", {"num_attention_heads": 0}, BAD, key("num_attention_heads", "0")),
    "malformed-D08": (
        "llama", {"hidden_size": 1792, "num_attention_heads": 24, "num_key_value_heads": 8}, BAD,
        (*key("hidden_size", "1792"), "divisible by num_attention_heads 24"),
    ),
    "malformed-D09-more-than-heads": ("llama", {"num_key_value_heads": 12}, BAD, key("num_key_value_heads", "12")),
    "malformed-D09-6-and-4": ("llama", {"num_key_value_heads": 4}, BAD, (*key("num_key_value_heads", "4"), "divisor")),
    "malformed-D10-0": ("qwen3", {"head_dim": 0}, BAD, key("head_dim", "0")),
    "malformed-D10-odd": ("qwen3", {"head_dim": 3}, BAD, (*key("head_dim", "3"), "even")),
    "malformed-D10-odd-from-hidden": ("llama", {"hidden_size": 18}, BAD, (*key("head_dim", "3"), "even")),
    "malformed-D10-negative": ("qwen3", {"head_dim": -16}, BAD, key("head_dim", "-16")),
    "malformed-D10-2^20": ("qwen3", {"head_dim": 2**20}, BAD, key("head_dim", "1048576")),
    "malformed-D14-0": ("llama", {"rms_norm_eps": 0}, BAD, key("rms_norm_eps", "0")),
    "malformed-D14-negative": ("llama", {"rms_norm_eps": -1}, BAD, key("rms_norm_eps", "-1")),
    "malformed-D14-text": ("llama", {"rms_norm_eps": "1e-6"}, BAD, key("rms_norm_eps", "1e-6")),
    "malformed-D15-0": ("llama", {"rope_theta": 0}, BAD, key("rope_theta", "0")),
    "malformed-D15-negative": ("llama", {"rope_theta": -1}, BAD, key("rope_theta", "-1")),
    "malformed-D15-text": ("llama", {"rope_theta": "10000"}, BAD, key("rope_theta", "10000")),
    "malformed-D15-true": ("llama", {"rope_theta": True}, BAD, key("rope_theta", "True")),
    "malformed-D15-inside": (
        "llama", {"rope_theta": GONE, "rope_parameters": {"rope_type": "default", "rope_theta": 0}}, BAD,
        key("rope_parameters.rope_theta", "0"),
    ),
    "malformed-D15-two-thetas": (
        "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, BAD,
        ("key 'rope_theta': 10000.0", "500000.0", "differ"),
    ),
    "malformed-D16": (
        "llama", scaling("su", factor=2.0), UNSUPPORTED,
        (*key("rope_scaling.rope_type", "su"), "default, linear, dynamic, llama3, yarn"),
    ),
    "malformed-D16-old-name": (
        "llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, UNSUPPORTED, ("rope_type': 'su'",)
    ),
    "malformed-D16-disagree": (
        "llama", {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, BAD,
        ("type 'linear' and rope_type 'dynamic' differ",),
    ),
    "malformed-D16-number": ("llama", scaling(3), BAD, key("rope_scaling.rope_type", "3")),
    "malformed-D16-none": ("llama", {"rope_scaling": {"factor": 2.0}}, BAD, ("key 'rope_scaling'", "has no rope_type")),
    "malformed-D16-text": ("llama", {"rope_scaling": "linear"}, BAD, key("rope_scaling", "linear")),
    "malformed-D18": (
        "llama", scaling("llama3", **{**LLAMA3, "high_freq_factor": 1.0}), BAD,
        (*key("rope_scaling.high_freq_factor", "1.0"), "above low_freq_factor 1.0"),
    ),
    "malformed-D18-missing": (
        "llama", scaling("llama3", factor=8.0, high_freq_factor=4.0), BAD,
        ("key 'rope_scaling.low_freq_factor' is missing",),
    ),
    "malformed-D19-factor-0": ("llama", scaling("linear", factor=0), BAD, key("rope_scaling.factor", "0")),
    "malformed-D19-factor-negative": ("llama", scaling("yarn", factor=-2), BAD, key("rope_scaling.factor", "-2")),
    "malformed-D19-factor-below-1": ("llama", scaling("dynamic", factor=0.5), BAD, key("rope_scaling.factor", "0.5")),
    "malformed-D19-factor-missing": ("llama", scaling("yarn"), BAD, ("key 'rope_scaling.factor' is missing",)),
    "malformed-D19-factor-text": ("llama", scaling("linear", factor="2"), BAD, key("rope_scaling.factor", "2")),
    "malformed-D19-original-0": (
        "llama", scaling("yarn", factor=2.0, original_max_position_embeddings=0), BAD,
        key("rope_scaling.original_max_position_embeddings", "0"),
    ),
    "malformed-D19-betas": (
        "llama", scaling("yarn", factor=2.0, beta_fast=1.0, beta_slow=32.0), BAD,
        (*key("rope_scaling.beta_fast", "1.0"), "beta_slow 32.0"),
    ),
    "malformed-D19-beta-0": (
        "llama", scaling("yarn", factor=2.0, beta_slow=0), BAD, key("rope_scaling.beta_slow", "0")
    ),
    "malformed-D19-truncate": (
        "llama", scaling("yarn", factor=2.0, truncate=1), BAD, key("rope_scaling.truncate", "1")
    ),
    "malformed-D19-mscale": ("llama", scaling("yarn", factor=2.0, mscale=-1), BAD, key("rope_scaling.mscale", "-1")),
    "malformed-D19-yarn-theta-1": (
        "llama", {**scaling("yarn", factor=2.0), "rope_theta": 1.0}, BAD, key("rope_theta", "1.0")
    ),
    "malformed-D19-unknown-parameter": (
        "llama", scaling("yarn", factor=2.0, llama_4_scaling_beta=0.1), UNSUPPORTED,
        key("rope_scaling.llama_4_scaling_beta", "0.1"),
    ),
    "malformed-D20": (
        "llama",
        {**scaling("linear", factor=2.0), "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, BAD,
        ("key 'rope_scaling'", "2.0", "key 'rope_parameters'", "4.0", "differ"),
    ),
    "malformed-D21-report-C09": (
        "llama", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}}, UNSUPPORTED,
        (*key("rope_parameters", "full_attention"), "one set of parameters"),
    ),
    "multiplier-0": ("granite", {"residual_multiplier": 0}, BAD, key("residual_multiplier", "0")),
    "multiplier-negative": ("granite", {"logits_scaling": -8.0}, BAD, key("logits_scaling", "-8.0")),
    "multiplier-text": ("granite", {"embedding_multiplier": "12"}, BAD, key("embedding_multiplier", "12")),
    "multiplier-elsewhere": ("llama", {"residual_multiplier": 0.22}, UNSUPPORTED, key("residual_multiplier", "0.22")),
    "no-rope-short": ("smollm3", {"no_rope_layers": [1]}, BAD, (*key("no_rope_layers", "[1]"), "at least 2 numbers")),
    "no-rope-2": ("smollm3", {"no_rope_layers": [1, 2]}, BAD, (*key("no_rope_layers", "[1, 2]"), "0 or 1")),
    "no-rope-interval-0": ("smollm3", {"no_rope_layer_interval": 0}, BAD, key("no_rope_layer_interval", "0")),
    "no-rope-elsewhere": ("llama", {"no_rope_layers": [1, 0]}, UNSUPPORTED, key("no_rope_layers", "[1, 0]")),
    "smollm3-window": ("smollm3", {"use_sliding_window": True}, UNSUPPORTED, key("use_sliding_window", "True")),
    "q-scale-missing": (
        "ministral3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}}, BAD,
        ("key 'rope_parameters.llama_4_scaling_beta' is missing",),
    ),
    "q-scale-default-rope": (
        "ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, UNSUPPORTED,
        (*key("rope_parameters.rope_type", "default"), "yarn"),
    ),
    "latent-kv-heads": ("deepseek_v3", {"num_key_value_heads": 2}, UNSUPPORTED, key("num_key_value_heads", "2")),
    "latent-rope-odd": ("deepseek_v3", {"qk_rope_head_dim": 5}, BAD, (*key("qk_rope_head_dim", "5"), "even")),
    "latent-rank-0": ("deepseek_v3", {"kv_lora_rank": 0}, BAD, key("kv_lora_rank", "0")),
    "latent-q-rank-text": ("deepseek_v3", {"q_lora_rank": "24"}, BAD, key("q_lora_rank", "24")),
    "latent-head-dim": (
        "deepseek_v3", {"head_dim": 64}, UNSUPPORTED, (*key("head_dim", "64"), "4, from the other keys")
    ),
    "latent-not-interleaved": ("deepseek_v3", {"rope_interleave": False}, UNSUPPORTED, key("rope_interleave", "False")),
    "latent-experts-groups": (
        "deepseek_v3", {**ROUTED, "n_group": 3}, BAD, (*key("n_group", "3"), "a divisor of n_routed_experts 8")
    ),
    "latent-experts-group-of-one": ("deepseek_v3", {**ROUTED, "n_group": 8}, BAD, (*key("n_group", "8"), "at most 4")),
    "latent-experts-method": (
        "deepseek_v3", {**ROUTED, "topk_method": "greedy"}, UNSUPPORTED, (*key("topk_method", "greedy"), "noaux_tc")
    ),
    "latent-experts-scale": (
        "deepseek_v3", {**ROUTED, "routed_scaling_factor": 0}, BAD, key("routed_scaling_factor", "0")
    ),
    "latent-experts-top-k": (
        "deepseek_v3", {**ROUTED, **V2, "num_experts_per_tok": None}, BAD, ("num_experts_per_tok", "missing")
    ),
    "latent-elsewhere": ("llama", {"kv_lora_rank": 16}, UNSUPPORTED, key("kv_lora_rank", "16")),
    "fp8-fmt": (
        "deepseek_v3", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, UNSUPPORTED,
        key("quantization_config.fmt", "e5m2"),
    ),
    "fp8-block": (
        "deepseek_v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}}, BAD,
        key("quantization_config.weight_block_size", "[128, 0]"),
    ),
    "fp8-key": (
        "deepseek_v3", {"quantization_config": {"quant_method": "fp8", "weight_bits": 4}}, UNSUPPORTED,
        key("quantization_config.weight_bits", "4"),
    ),
    "partial-rotary": ("llama", {"partial_rotary_factor": 0.5}, UNSUPPORTED, key("partial_rotary_factor", "0.5")),
    "malformed-D22": ("llama", {"num_experts": 8, "num_experts_per_tok": 2}, UNSUPPORTED, key("num_experts", "8")),
    "malformed-D25-0": ("mistral", {"sliding_window": 0}, BAD, key("sliding_window", "0")),
    "malformed-D25-negative": ("mistral", {"sliding_window": -1}, BAD, key("sliding_window", "-1")),
    "malformed-D25-text": ("mistral", {"sliding_window": "4096"}, BAD, key("sliding_window", "4096")),
    "malformed-D25-not-in-llama": ("llama", {"sliding_window": 8}, UNSUPPORTED, (*key("sliding_window", "8"), "null")),
    "malformed-D25-switch-text": ("qwen2", {"use_sliding_window": "yes"}, BAD, key("use_sliding_window", "yes")),
    "malformed-D26-length": ("qwen2", {"layer_types": ["full_attention"]}, BAD, ("key 'layer_types'", "a list of 2")),
    "malformed-D26-value": (
        "qwen2", {"layer_types": ["full_attention", "linear_attention"]}, UNSUPPORTED,
        key("layer_types", "linear_attention"),
    ),
    "malformed-D26-no-window": (
        "qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, BAD,
        (*key("layer_types", "sliding_attention"), "no sliding_window is in force"),
    ),
    "malformed-D28": ("llama", {"hidden_act": "swish7"}, UNSUPPORTED, (*key("hidden_act", "swish7"), "silu")),
    "malformed-D28-mish": ("llama", {"hidden_act": "mish"}, UNSUPPORTED, key("hidden_act", "mish")),
    "malformed-D28-list": ("llama", {"hidden_act": ["silu"]}, BAD, ("key 'hidden_act'",)),
    "malformed-D30-flag": ("llama", {"tie_word_embeddings": "no"}, BAD, key("tie_word_embeddings", "no")),
    "malformed-D32": (
        "llama", {"quantization_config": {"quant_method": "foo", "bits": 4}}, UNSUPPORTED,
        key("quantization_config", "foo"),
    ),
    "malformed-D32-gptq": (
        "llama", {"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 7}}, UNSUPPORTED,
        key("quantization_config", "gptq"),
    ),
    **{
        f"malformed-D33-{size}": (
            "llama", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": size}}, UNSUPPORTED,
            key("quantization_config", "gptq"),
        )
        for size in (0, -1, 7, 512)
    },
    **{
        f"malformed-D34-{bits}": (
            "llama", {"quantization_config": {"quant_method": "awq", "bits": bits, "group_size": 32}}, UNSUPPORTED,
            key("quantization_config", "awq"),
        )
        for bits in (3, 0, 16, "4")
    },
    "malformed-D32-no-method": (
        "llama", {"quantization_config": {"bits": 4}}, UNSUPPORTED, ("key 'quantization_config'",)
    ),
    "malformed-D32-mlx": (
        "llama", {"quantization": {"bits": 4, "group_size": 64}}, UNSUPPORTED, ("key 'quantization'", "bits")
    ),
    "malformed-D36-changes-the-model": (
        "llama", {"final_softcapping": 50}, UNSUPPORTED, key("final_softcapping", "50")
    ),
    "malformed-D36-multiplier": ("llama", {"embedding_multiplier": 12.0}, UNSUPPORTED, ("key 'embedding_multiplier'",)),
    "malformed-D36-text-config": ("llama", {"text_config": {"hidden_size": 8}}, UNSUPPORTED, ("key 'text_config'",)),
    "malformed-D36-mrope": ("qwen2", {"use_mrope": True}, UNSUPPORTED, key("use_mrope", "True")),
    "malformed-D36-odd-name": ("llama", {"x\n\x1b[2Jnorm": 1}, UNSUPPORTED, ("key 'x\\n\\x1b[2Jnorm'",)),
    "malformed-D37-0": ("llama", {"max_position_embeddings": 0}, BAD, key("max_position_embeddings", "0")),
    "malformed-D37-2^60": (
        "llama", {"max_position_embeddings": 2**60}, BAD, key("max_position_embeddings", str(2**60))
    ),
    "malformed-D38-none": ("llama", {"eos_token_id": []}, BAD, key("eos_token_id", "[]")),
    "malformed-D38-text": ("llama", {"eos_token_id": ["2"]}, BAD, ("key 'eos_token_id'", "\"['2']\"".strip('"'))),
    "malformed-D38-nested": ("llama", {"eos_token_id": [[2]]}, BAD, key("eos_token_id", "[[2]]")),
    "malformed-D38-negative": ("llama", {"eos_token_id": -1}, BAD, key("eos_token_id", "-1")),
    "malformed-D38-over": ("llama", {"eos_token_id": 61}, BAD, (*key("eos_token_id", "61"), "from 0 to 60")),
    "malformed-D38-true": ("llama", {"eos_token_id": True}, BAD, key("eos_token_id", "True")),
    "malformed-D38-bos": ("llama", {"bos_token_id": 61}, BAD, key("bos_token_id", "61")),
    "attention-bias-mistral": ("mistral", {"attention_bias": True}, UNSUPPORTED, key("attention_bias", "True")),
    "mlp-bias-qwen3": ("qwen3", {"mlp_bias": True}, UNSUPPORTED, key("mlp_bias", "True")),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_value_is_refused(row: str, make: Callable[..., Path]) -> None:
    kind, changes, error, texts = ROWS[row]
    refused(make(kind, **changes), error, "config.json: ", *texts)


# ---- the config against the tensors -----------------------------------------------------------------------------

FIRST_OF_LAYER_2 = "tensors are missing: 'model.layers.2.input_layernorm.weight'"
AGAINST: dict[str, tuple[str, Changes, type[PyEngineError], tuple[str, ...]]] = {
    "malformed-D06": ("llama", {"num_hidden_layers": 3}, BAD, (FIRST_OF_LAYER_2,)),
    "malformed-D07": ("llama", {"num_hidden_layers": 1}, BAD, ("layers past num_hidden_layers 1: 'model.layers.1.",)),
    "malformed-D12": (
        "llama", {"vocab_size": 64}, BAD, ("tensor 'model.embed_tokens.weight': shape [61, 48]; expected [64, 48]",)
    ),
    "malformed-D13": (
        "llama", {"intermediate_size": 96}, BAD,
        ("tensor 'model.layers.0.mlp.gate_proj.weight': shape [80, 48]; expected [96, 48]",),
    ),
    "malformed-D09-kv-heads": (
        "llama", {"num_key_value_heads": 6}, BAD,
        ("tensor 'model.layers.0.self_attn.k_proj.weight': shape [16, 48]; expected [48, 48]",),
    ),
    "malformed-D10-head-dim": (
        "qwen3", {"head_dim": 8}, BAD,
        ("tensor 'model.layers.0.self_attn.q_proj.weight': shape [96, 48]; expected [48, 48]",),
    ),
    "malformed-D30": ("qwen2", {"tie_word_embeddings": False}, BAD, ("1 tensors are missing: 'lm_head.weight'",)),
    "bias-missing": (
        "llama", {"attention_bias": True}, BAD, ("missing: 'model.layers.0.self_attn.q_proj.bias'",)
    ),
    "other-family": (
        "llama", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}, BAD,
        ("missing: 'model.layers.0.self_attn.q_norm.weight'",),
    ),
    "bias-extra": (
        "qwen2", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, UNSUPPORTED,
        ("6 tensors that a llama model does not have: 'model.layers.0.self_attn.", "would change the numbers"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", AGAINST)
def test_config_that_is_not_the_weights_is_refused(row: str, make: Callable[..., Path]) -> None:
    kind, changes, error, texts = AGAINST[row]
    refused(make(kind, **changes), error, *texts)


# ---- generation_config.json -------------------------------------------------------------------------------------

GENERATION: dict[str, tuple[str, str]] = {
    "malformed-D39-broken": ("{", "not JSON"),
    "malformed-D39-empty": ("", "empty"),
    "malformed-D39-root": ("[]", "root is list"),
    "malformed-D39-temperature": ('{"temperature":-1}', "key 'temperature': '-1'"),
    "malformed-D39-temperature-text": ('{"temperature":"hot"}', "key 'temperature': 'hot'"),
    "malformed-D39-top-p": ('{"top_p":2}', "key 'top_p': '2'"),
    "malformed-D39-top-k": ('{"top_k":-2}', "key 'top_k': '-2'"),
    "malformed-D39-penalty": ('{"repetition_penalty":0}', "key 'repetition_penalty': '0'"),
    "malformed-D39-eos": ('{"eos_token_id":[61]}', "key 'eos_token_id': '[61]'"),
    "malformed-D39-nan": ('{"temperature":NaN}', "literal NaN"),
}


@pytest.mark.parametrize("row", GENERATION)
def test_generation_config_is_refused(row: str, make: Callable[..., Path]) -> None:
    folder = make()
    content, text = GENERATION[row]
    (folder / "generation_config.json").write_text(content)
    refused(folder, BAD, "generation_config.json: ", text)


# ---- sizes ------------------------------------------------------------------------------------------------------


def test_malformed_d42_more_weights_than_memory(tmp_path: Path) -> None:
    """A consistent model of a few terabytes in a sparse file: refused before anything of its size is allocated."""
    import pyengine
    from pyengine.tensors import expected_tensors

    config = {
        **LLAMA, "hidden_size": 1 << 16, "vocab_size": 1 << 20, "num_hidden_layers": 1000,
        "intermediate_size": 1 << 14, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    }  # fmt: skip
    folder = write(tmp_path, json.dumps(config))
    at, header = 0, {}
    for name, shape in expected_tensors(load_model_spec(folder)).items():
        size = 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        try:
            file.truncate(8 + len(raw) + at)
        except OSError:
            pytest.skip("the file system has no files of this size")

    message = assert_refused(
        lambda: pyengine.load(folder, quant="int8", threads=1),
        ResourceError,
        (str(folder), "int8"),
        folder,
        small=False,
    )
    wanted, available = (int(word) for word in message.split() if word.isdigit() and len(word) > 6)
    assert wanted > at // 2 > available
