"""Stage 2, config: config.json and generation_config.json, or a GGUF file's keys -> ModelSpec. All are accounted for.

A known key is used, or checked against the one value supported here, or listed as inert. An unknown key is inert where
its value means "off"; it is an error where its name tells that it changes the computation; else a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyengine import gguf_config
from pyengine.config_moe import ffn_specs
from pyengine.config_values import ConfigValues
from pyengine.errors import ModelNotFoundError, UnsupportedModelError
from pyengine.families import FAMILIES
from pyengine.family import Family
from pyengine.fp8 import fp8_block
from pyengine.gguf_file import is_gguf
from pyengine.latent_config import latent_attention
from pyengine.rope_config import MAX_CONTEXT, ropes_by_layer_type
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, MLASpec, ModelSpec
from pyengine.strict_json import shown

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_HEAD_DIM = 1 << 16
ACTIVATIONS = {  # several names of one function
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
DTYPES = ("float64", "float32", "float16", "bfloat16")

USED = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "hidden_act", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "quantization_config", "torch_dtype", "dtype",
}  # fmt: skip
# Training, saving and generation settings: no value of theirs changes the logits.
INERT = {
    "transformers_version", "use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp",
    "pad_token_id", "unk_token_id", "sep_token_id", "mask_token_id", "decoder_start_token_id", "output_attentions",
    "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type", "task_specific_params",
    "tokenizer_class", "finetuning_task", "prefix", "is_decoder", "chunk_size_feed_forward", "is_llama_config",
    "transformers.js_config", "do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "max_length",
    "min_length", "use_bfloat16", "num_return_sequences", "num_beams", "length_penalty", "typical_p",
}  # fmt: skip
MUST_BE_OFF = {"rope_interleaved", "use_mrope", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"}
NAMES_CODE = {
    "auto_map", "model_file", "custom_pipelines", "_attn_implementation_internal", "_attn_implementation",
    "attn_implementation",
}  # fmt: skip
# An unknown key whose name contains one of these changes what is computed.
LOADED_WORDS = (
    "rope", "rotary", "scal", "norm", "bias", "window", "softcap", "multiplier", "expert", "moe", "router", "quant",
    "act", "layer_types", "lora", "alibi", "head", "clip", "residual", "parallel", "sink", "mask", "embed", "logit",
    "compress", "text_config", "vision", "audio",
)  # fmt: skip


def load_model_spec(folder: Path, *, strict: bool = False) -> ModelSpec:
    """The model that a folder's config.json or a GGUF file describes; `warnings` holds what a user should see once.

    strict: unknown keys are errors. Errors: ModelNotFoundError without the folder, ModelFormatError for a bad value,
    UnsupportedModelError for a valid one that is not implemented.
    """
    if is_gguf(folder):
        return gguf_config.with_own_rope(model_spec(gguf_config.read(folder), strict=strict), folder)
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder}: no such folder; expected a model folder with config.json")
    path = folder / "config.json"
    if not os.path.lexists(path) and (files := sorted(folder.glob("*.gguf"))):
        raise ModelNotFoundError(
            f"{folder}: no config.json; expected one, or one of its GGUF files as MODEL: {files[0]}"
        )
    return model_spec(ConfigValues.read(path), folder, strict=strict)


def model_spec(config: ConfigValues, folder: Path | None = None, *, strict: bool = False) -> ModelSpec:
    """The same from what config.json holds; generation_config.json is looked for in `folder`."""
    architecture, family = _family(config, FAMILIES)
    warnings: list[str] = []
    if family.texts:
        if not _is_flat(config, family):
            warnings += _check_keys(config, family, strict)
        config = _text_config(config, family)
        _, family = _family(config, {name: FAMILIES[name] for name in family.texts})
    config = config.of_family(family.defaults, family.spellings)
    warnings += _check_keys(config, family, strict)
    layers = _layers(config, family, warnings)
    hidden, longest = (
        config.integer("hidden_size", 1, MAX_SIZE),
        config.integer("max_position_embeddings", 1, MAX_CONTEXT),
    )
    vocab_size = config.integer("vocab_size", 1, MAX_SIZE)
    bos, eos = _special_ids(folder, config, vocab_size)
    return ModelSpec(
        family=family.name,
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=vocab_size,
        norm=replace(family.norm, eps=config.positive(family.norm_eps_key, family.norm.eps)),
        max_position_embeddings=longest,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        layers=layers,
        mtp_layers=_mtp_layers(config, family),
        fp8_block=_quantization(config),
        embedding_scale=hidden**0.5 if family.embedding_sqrt else _multiplier(config, family, "embedding_multiplier"),
        residual_scale=_multiplier(config, family, "residual_multiplier"),
        logits_scale=_multiplier(config, family, "logits_scaling"),
        logits_softcap=_softcap(config, family, "final_logit_softcapping"),
        learned_positions=longest if family.learned_positions else 0,
        bos_token_id=bos,
        eos_token_ids=eos,
        warnings=tuple(warnings),
    )


def _quantization(config: ConfigValues) -> tuple[int, int] | None:
    """The block of a checkpoint in float8, None for one that is not quantized."""
    quantization = config.values.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise config.unsupported("quantization_config", method, "fp8, or an unquantized checkpoint")
    return fp8_block(config, quantization)


def _mtp_layers(config: ConfigValues, family: Family) -> int:
    key = "num_nextn_predict_layers"
    return config.integer(key, 0, MAX_LAYERS, 0) if key in family.keys else 0


def _is_flat(config: ConfigValues, family: Family) -> bool:
    return family.flat and config.values.get("text_config") is None


def _text_config(config: ConfigValues, family: Family) -> ConfigValues:
    """The decoder of a model of several parts. tie_word_embeddings and quantization_config may stand outside, and BOS
    and EOS too: outer EOS ids count beside inner ones."""
    inner = config.values.get("text_config")
    if _is_flat(config, family):
        values = {key: value for key, value in config.values.items() if key not in (*family.keys, "architectures")}
        return ConfigValues(config.path, {**values, "model_type": FAMILIES[family.texts[0]].model_type}, {})
    if not isinstance(inner, dict):
        raise config.bad("text_config", inner, "an object that describes the decoder")
    values = dict(inner)
    for key in ("tie_word_embeddings", "quantization_config"):
        outside, inside = config.values.get(key), values.get(key)
        if None not in (outside, inside) and outside != inside:
            raise config.bad(key, outside, f"{shown(inside)}, as text_config says")
        if outside is not None:
            values[key] = outside
    if values.get("bos_token_id") is None:
        values["bos_token_id"] = config.values.get("bos_token_id")
    ends = [source.get("eos_token_id") for source in (config.values, values)]
    lists = [end if isinstance(end, list) else [end] for end in ends if end is not None]
    if lists:
        values["eos_token_id"] = [end for one in lists for end in one]
    return ConfigValues(Path(f"{config.path}: text_config"), values, {})


def _family(config: ConfigValues, families: Mapping[str, Family]) -> tuple[str, Family]:
    """The entry of `families` that config.json names."""
    known = f"one of {', '.join(families)}"
    architectures, kind = config.values.get("architectures"), config.values.get("model_type")
    if architectures is None:  # some folders carry the model_type alone
        for name, family in families.items():
            if kind == family.model_type:
                return name, family
        raise UnsupportedModelError(
            f"{config.path}: key 'architectures' is missing and key 'model_type' is {shown(kind)}; expected {known}"
        )
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise config.bad("architectures", architectures, "a list of names")
    name = architectures[0]
    if name not in families:
        raise config.unsupported("architectures", name, known)
    family = families[name]
    if kind is not None and kind != family.model_type:
        types = ", ".join(f.model_type for f in families.values())
        raise config.unsupported("model_type", kind, f"'{family.model_type}' for {name} (known: {types})")
    return name, family


def _multiplier(config: ConfigValues, family: Family, key: str, default: float = 1.0) -> float:
    """A factor of the family's, above 0; `default` where the family or the file has none."""
    return config.positive(key, default) if key in family.keys else default


def _softcap(config: ConfigValues, family: Family, key: str) -> float | None:
    value = config.get(key) if key in family.keys else None
    return None if value is None else config.number(key, value, above=0)


def _check_keys(config: ConfigValues, family: Family, strict: bool) -> list[str]:
    """Account for every key; returns the warnings."""
    warnings = []
    for key in ("torch_dtype", "dtype"):
        value = config.values.get(key)
        if value is not None and value not in DTYPES:
            warnings.append(f"{config.path}: key '{key}': {shown(value)} is ignored; the files' own dtypes count")
    for key, value in config.values.items():
        off = value is None or value is False or value in ([], {}, "")
        must_be_off = key in MUST_BE_OFF or key in family.off
        if must_be_off and not off:
            raise config.unsupported(key, value, "false")
        known = key in USED or key in family.keys or key in INERT or key in family.inert or must_be_off
        if known or (key.startswith("_") and key not in NAMES_CODE):
            continue
        if key in NAMES_CODE:
            if not off:
                warnings.append(f"{config.path}: key '{key}' is ignored; code that a model brings is never run")
            continue
        name = shown(key)[1:-1]
        if strict:
            raise config.unsupported(name, value, "only known keys under strict; this one is unknown")
        if off:
            continue
        if any(word in key.lower() for word in LOADED_WORDS):
            raise config.unsupported(name, value, "no such key: unknown, and its name says that it changes the model")
        warnings.append(f"{config.path}: unknown key '{name}': {shown(value)} is ignored")
    return warnings


def _layers(config: ConfigValues, family: Family, warnings: list[str]) -> tuple[LayerSpec, ...]:
    count = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    attentions: Sequence[AttentionSpec | MLASpec]
    if family.latent:
        attentions = [latent_attention(config, family, heads)] * count
    else:
        attentions = _attentions(config, family, heads, count, warnings)
    mlp_bias = config.flag("mlp_bias", False)
    if mlp_bias and not family.mlp_bias_key:
        raise config.unsupported("mlp_bias", mlp_bias, f"false for {family.name}")
    dense = _ffn(config, family, mlp_bias or family.ffn_bias, warnings)
    ffns = [dense] * count if family.experts is None else ffn_specs(config, family.experts, dense, count)
    return tuple(
        LayerSpec(index, attention, ffn, family.norm_before, family.norm_after)
        for index, (attention, ffn) in enumerate(zip(attentions, ffns, strict=True))
    )


def _attentions(
    config: ConfigValues, family: Family, heads: int, count: int, warnings: list[str]
) -> list[AttentionSpec]:
    kv_heads = config.integer("num_key_value_heads", 1, MAX_SIZE, heads)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    head_dim = _head_dim(config, heads, rotates=not family.rope.absent)
    qkv_bias, o_bias = _attention_bias(config, family, warnings)
    if config.values.get("scale_attn_weights") is False:
        raise config.unsupported(
            "scale_attn_weights", False, "true: scores divided by the root of the head's dimensions"
        )
    ropes = ropes_by_layer_type(config, head_dim, family.rope)
    rotated = _rotated_layers(config, family, count)
    scale = _multiplier(config, family, "attention_multiplier", head_dim**-0.5)
    if "attention_multiplier" in family.keys and config.get("attention_multiplier") is None:
        scale = 1.0  # not head_dim ** -0.5
    if "query_pre_attn_scalar" in family.keys:
        scalar = config.get("query_pre_attn_scalar")
        scale = config.number("query_pre_attn_scalar", scalar, above=0) ** -0.5
    softcap = _softcap(config, family, "attn_logit_softcapping")
    types = _layer_types(config, family, count)
    return [
        AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            rope=ropes[types[index]] if rotated[index] else None,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=family.qk_norm,
            window=window,
            softcap=softcap,
        )
        for index, window in enumerate(_windows(config, family, types))
    ]


def _ffn(config: ConfigValues, family: Family, bias: bool, warnings: list[str]) -> FFNSpec:
    key = family.act_key
    act = config.get(key) or "silu"
    if not isinstance(act, str):
        raise config.bad(key, act, f"one of {', '.join(ACTIVATIONS)}")
    if act not in ACTIVATIONS:
        raise config.unsupported(key, act, f"one of {', '.join(ACTIVATIONS)}")
    other = config.values.get("hidden_act")
    named = ACTIVATIONS.get(other) if isinstance(other, str) else None
    if key != "hidden_act" and other is not None and named != ACTIVATIONS[act]:
        warnings.append(
            f"{config.path}: key 'hidden_act': {shown(other)} is ignored; {family.name} has '{key}': '{act}'"
        )
    default = None if family.gated else 4 * config.integer("hidden_size", 1, MAX_SIZE)
    size = config.integer("intermediate_size", 1, MAX_SIZE, default)
    return FFNSpec(size, ACTIVATIONS[act], bias, family.gated)


def _head_dim(config: ConfigValues, heads: int, *, rotates: bool) -> int:
    if config.get("head_dim") is None:
        hidden = config.integer("hidden_size", 1, MAX_SIZE)
        if hidden % heads:
            raise config.bad("hidden_size", hidden, f"divisible by num_attention_heads {heads}, or a head_dim")
        head_dim = hidden // heads
    else:
        head_dim = config.integer("head_dim", 1, MAX_HEAD_DIM)
    if (rotates and head_dim % 2) or head_dim > MAX_HEAD_DIM:
        raise config.bad("head_dim", head_dim, f"an even number up to {MAX_HEAD_DIM}: RoPE rotates pairs")
    return head_dim


def _attention_bias(config: ConfigValues, family: Family, warnings: list[str]) -> tuple[bool, bool]:
    """Whether q/k/v and o have a bias."""
    key = config.flag("qkv_bias" if "qkv_bias" in family.keys else "attention_bias", bool(family.qkv_bias))
    if "qkv_bias" in family.keys and not key:
        raise config.unsupported("qkv_bias", key, f"true for {family.name}")
    if family.qkv_bias is None:
        return key, key if family.o_bias is None else family.o_bias
    if key and not family.qkv_bias:
        raise config.unsupported("attention_bias", key, f"false for {family.name}")
    if key != family.qkv_bias:  # transformers does not read the key for this family
        warnings.append(f"{config.path}: key 'attention_bias': false is ignored; {family.name} always has q/k/v biases")
    return family.qkv_bias, bool(family.o_bias)


def _layer_types(config: ConfigValues, family: Family, count: int) -> list[str]:
    """Of each layer, "full_attention" or "sliding_attention", as layer_types or the family's pattern says."""
    types = config.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != count:
            raise config.bad("layer_types", types, f"a list of {count}, one per layer")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise config.unsupported("layer_types", kind, "full_attention or sliding_attention")
        return types[:]
    every = family.full_every
    if "sliding_window_pattern" in family.keys:
        every = config.integer("sliding_window_pattern", 1, MAX_SIZE, every)
    if family.window != "pattern":
        return ["full_attention"] * count
    return ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(count)]


def _windows(config: ConfigValues, family: Family, types: list[str]) -> list[int | None]:
    """Keys each layer sees; None = all. types: as `_layer_types` has them."""
    given, count = config.values.get("layer_types") is not None, len(types)
    value = config.get("sliding_window")
    window = None if value is None else config.integer("sliding_window", 1, MAX_SIZE)
    switched = config.flag("use_sliding_window", False)
    if family.window == "none":
        if window is not None or switched:
            key = "sliding_window" if window is not None else "use_sliding_window"
            raise config.unsupported(key, config.values[key], f"null or false for {family.name}")
    elif family.window == "off":
        if switched:
            raise config.unsupported("use_sliding_window", True, f"false for {family.name}")
        window = None
    elif family.window == "switched" and not switched:
        window = None
    if window is None and given and "sliding_attention" in types:
        raise config.bad("layer_types", "sliding_attention", "full_attention, because no sliding_window is in force")
    by_type = [window if kind == "sliding_attention" else None for kind in types]
    if family.window == "pattern":
        return by_type
    first = config.integer("max_window_layers", 0, MAX_SIZE, 0) if family.window == "switched" else 0
    windows = [window if index >= first else None for index in range(count)]
    if not given:
        return windows
    if family.window != "switched" and by_type != windows:
        raise config.unsupported("layer_types", types, f"the same window in all layers for {family.name}")
    return by_type


def _rotated_layers(config: ConfigValues, family: Family, count: int) -> list[bool]:
    """Whether each layer has a rotary embedding: no_rope_layers (1 = it has), else all but every n-th."""
    if not family.rope.skips_layers:
        return [not family.rope.absent] * count
    interval = config.integer("no_rope_layer_interval", 1, MAX_SIZE, 4)
    given = config.values.get("no_rope_layers")
    if given is None:
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(given, list) or len(given) < count or any(value not in (0, 1) for value in given):
        raise config.bad("no_rope_layers", given, f"a list of at least {count} numbers 0 or 1")
    return [value == 1 for value in given[:count]]


def _special_ids(folder: Path | None, config: ConfigValues, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """BOS, and the union of the EOS ids of config.json and generation_config.json."""
    bos = config.values.get("bos_token_id")
    if bos is not None:
        bos = config.integer("bos_token_id", 0, vocab_size - 1)
    eos = _eos_ids(config, vocab_size)
    path = None if folder is None else folder / "generation_config.json"
    if path is not None and (path.exists() or path.is_symlink()):
        generation = ConfigValues.read(path)
        eos += _eos_ids(generation, vocab_size)
        for key, low, high in (("temperature", 0, None), ("top_p", 0, 1), ("min_p", 0, 1), ("top_k", -1, None)):
            value = generation.values.get(key)
            if value is not None and high is not None and generation.number(key, value) > high:
                raise generation.bad(key, value, f"a number from {low} to {high}")
            if value is not None:
                generation.number(key, value, at_least=low)
        generation.positive("repetition_penalty", 1.0)
    return bos, tuple(dict.fromkeys(eos))


def _eos_ids(config: ConfigValues, vocab_size: int) -> list[int]:
    value: Any = config.values.get("eos_token_id")
    if value is None:
        return []
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
        raise config.bad("eos_token_id", value, f"an id, or a list of ids, from 0 to {vocab_size - 1}")
    return ids[:]
