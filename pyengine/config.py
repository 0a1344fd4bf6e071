"""Stage 2, config: config.json and generation_config.json -> ModelSpec. Every key is accounted for.

A known key is used, or checked against the one value supported here, or listed as inert. An unknown key is inert where
its value means "off"; it is an error where its name tells that it changes the computation; else a warning.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pyengine import strict_json
from pyengine.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from pyengine.families import FAMILIES, Family
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, ModelSpec, RopeSpec
from pyengine.strict_json import shown

MAX_CONFIG_BYTES = 16 << 20
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_CONTEXT = 2**31 - 1
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

USED = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "hidden_act",
    "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "quantization_config",
}  # fmt: skip
INERT = {
    "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout",
    "hidden_dropout", "pretraining_tp", "pad_token_id", "unk_token_id", "sep_token_id", "_name_or_path",
    "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type", "task_specific_params",
    "tokenizer_class", "finetuning_task", "prefix", "is_decoder", "is_encoder_decoder", "add_cross_attention",
    "chunk_size_feed_forward", "use_mrope", "rope_interleaved", "is_llama_config", "transformers.js_config", "do_sample",
    "temperature", "top_p", "top_k", "repetition_penalty", "max_length", "min_length", "mask_token_id", "use_bfloat16",
}  # fmt: skip
CODE_KEYS = {"auto_map", "model_file", "custom_pipelines", "_attn_implementation_internal", "_attn_implementation"}
# Names that contain one of these change what is computed.
LOADED_WORDS = (
    "rope", "rotary", "scal", "norm", "bias", "window", "softcap", "multiplier", "expert", "moe", "router", "quant", "act",
    "layer_types", "lora", "alibi", "head", "clip", "residual", "parallel", "sink", "mask", "embed",
)  # fmt: skip
MUST_BE = {
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}


class _Config:
    """A config.json with typed reads; every error names file and key."""

    def __init__(self, path: Path, values: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        self.defaults = defaults

    def bad(self, key: str, expected: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: key '{key}': {shown(self.values.get(key))}; expected {expected}")

    def get(self, key: str) -> Any:
        return self.values[key] if key in self.values else self.defaults.get(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelFormatError(f"{self.path}: key '{key}' is missing; expected an integer from {low} to {high}")
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(key, f"an integer from {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        return self.number(key, value, positive=True)

    def number(self, key: str, value: Any, *, positive: bool = False) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or (positive and value <= 0)
        ):
            expected = "a finite number above 0" if positive else "a finite number"
            raise ModelFormatError(f"{self.path}: key '{key}': {shown(value)}; expected {expected}")
        return float(value)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a small file; ModelFormatError names it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelFormatError(f"{path}: {error.strerror}; expected a readable JSON file") from None
    if not data:
        raise ModelFormatError(f"{path}: empty; expected a JSON object")
    value = strict_json.loads(data, where=str(path), max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: root is {type(value).__name__}; expected an object")
    return value


def load_model_spec(folder: Path, *, strict: bool = False) -> ModelSpec:
    """The model that a folder's config.json describes; `warnings` holds what a user should see once.

    strict: unknown keys are errors. Errors: ModelNotFoundError without the folder, ModelFormatError for a bad value,
    UnsupportedModelError for a valid one that is not implemented.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder}: no such folder; expected a model folder with config.json")
    path = folder / "config.json"
    if not path.exists():
        raise ModelFormatError(f"{path}: no such file; expected the model's config.json")
    values = read_json_object(path)
    architecture, family = _family(path, values)
    config = _Config(path, values, dict(family.defaults))
    if values.get("quantization_config") is not None:
        q = values["quantization_config"]
        method = q.get("quant_method") if isinstance(q, dict) else q
        raise UnsupportedModelError(
            f"{path}: key 'quantization_config': method {shown(method)}; expected an unquantized checkpoint"
        )
    warnings = _check_keys(path, values, strict)
    layers = _layers(config, family)
    vocab = config.integer("vocab_size", 1, MAX_SIZE)
    bos, eos = _special_ids(folder, config, vocab)
    return ModelSpec(
        family=family.name,
        architecture=architecture,
        hidden_size=config.integer("hidden_size", 1, MAX_SIZE),
        vocab_size=vocab,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        max_position_embeddings=config.integer(
            "max_position_embeddings", 1, 2**62, 2048 if family.name == "llama" else 32768
        ),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        layers=layers,
        bos_token_id=bos,
        eos_token_ids=eos,
        warnings=tuple(warnings),
    )


def _family(path: Path, values: dict[str, Any]) -> tuple[str, Family]:
    known = ", ".join(FAMILIES)
    architectures = values.get("architectures")
    if architectures is None:  # some folders carry the model_type alone
        kind = values.get("model_type")
        for name, family in FAMILIES.items():
            if kind in family.model_types:
                return name, family
        raise UnsupportedModelError(
            f"{path}: key 'architectures' is missing and model_type is {shown(kind)}; expected one of {known}"
        )
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise ModelFormatError(f"{path}: key 'architectures': {shown(architectures)}; expected a list with a name")
    if architectures[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: architecture {shown(architectures[0])} is not known; expected one of {known}"
        )
    family = FAMILIES[architectures[0]]
    kind = values.get("model_type")
    if kind is not None and kind not in family.model_types:
        raise UnsupportedModelError(
            f"{path}: key 'model_type': {shown(kind)} with architecture {architectures[0]}; expected {', '.join(family.model_types)}"
        )
    return architectures[0], family


def _check_keys(path: Path, values: dict[str, Any], strict: bool) -> list[str]:
    warnings = []
    for key, value in values.items():
        if key in MUST_BE and value not in MUST_BE[key]:
            raise UnsupportedModelError(f"{path}: key '{key}': {shown(value)}; expected false")
        if key in USED or key in INERT:
            continue
        off = value is None or value is False or value in ([], {}, "")
        if key in CODE_KEYS:
            if not off:
                warnings.append(f"{path}: key {shown(key)} names code, which is never run: ignored")
            continue
        if strict:
            raise UnsupportedModelError(
                f"{path}: unknown key {shown(key)}: {shown(value)}; expected known keys only (strict)"
            )
        if off or key.startswith("_"):
            continue
        if any(word in key.lower() for word in LOADED_WORDS):
            raise UnsupportedModelError(
                f"{path}: unknown key {shown(key)}: {shown(value)}; its name says that it changes the computation"
            )
        warnings.append(f"{path}: unknown key {shown(key)}: {shown(value)} is ignored")
    return warnings


def _layers(config: _Config, family: Family) -> tuple[LayerSpec, ...]:
    hidden = config.integer("hidden_size", 1, MAX_SIZE)
    count = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    kv_default = (
        config.defaults.get("num_key_value_heads", heads) if "num_key_value_heads" not in config.values else heads
    )
    kv_heads = config.integer("num_key_value_heads", 1, MAX_SIZE, kv_default)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    head_dim = _head_dim(config, hidden, heads)
    bias = config.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
    o_bias = bias if family.qkv_bias is None else False
    if family.qkv_bias is not None and config.values.get("attention_bias") not in (None, family.qkv_bias):
        raise UnsupportedModelError(
            f"{config.path}: key 'attention_bias': {shown(config.values['attention_bias'])}; expected {str(family.qkv_bias).lower()} for {family.name}"
        )
    mlp_bias = config.flag("mlp_bias", False)
    if mlp_bias and not family.mlp_bias_key:
        raise UnsupportedModelError(f"{config.path}: key 'mlp_bias': true; expected false for {family.name}")
    act = config.values.get("hidden_act", "silu")
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ModelFormatError(
            f"{config.path}: key 'hidden_act': {shown(act)}; expected one of {', '.join(ACTIVATIONS)}"
        )
    ffn = FFNSpec(config.integer("intermediate_size", 1, MAX_SIZE), ACTIVATIONS[act], mlp_bias)
    rope = _rope(config, head_dim)
    windows = _windows(config, family, count)
    return tuple(
        LayerSpec(
            index,
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                rope=rope,
                qkv_bias=bias,
                o_bias=o_bias,
                qk_norm=family.qk_norm,
                window=windows[index],
            ),
            ffn,
        )
        for index in range(count)
    )


def _head_dim(config: _Config, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None:
        if hidden % heads:
            raise ModelFormatError(
                f"{config.path}: key 'hidden_size': {hidden} is not divisible by num_attention_heads {heads}; expected that, or head_dim"
            )
        head_dim = hidden // heads
    else:
        head_dim = config.integer("head_dim", 1, 1 << 16)
    if head_dim % 2:
        raise ModelFormatError(
            f"{config.path}: key 'head_dim': {head_dim} is odd; expected an even number, RoPE rotates pairs"
        )
    return head_dim


def _windows(config: _Config, family: Family, count: int) -> list[int | None]:
    types = config.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != count:
            raise config.bad("layer_types", f"a list of {count}, one per layer")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(
                    f"{config.path}: key 'layer_types': {shown(kind)}; expected full_attention or sliding_attention"
                )
    value = config.get("sliding_window")
    window = None if value is None else config.integer("sliding_window", 1, 2**62)
    if family.window == "none":
        if types is not None and "sliding_attention" in types:
            raise UnsupportedModelError(
                f"{config.path}: key 'layer_types': sliding_attention; expected full_attention for {family.name}"
            )
        if config.values.get("sliding_window") is not None:
            raise UnsupportedModelError(
                f"{config.path}: key 'sliding_window': {window}; expected null for {family.name}"
            )
        return [None] * count
    if window is not None and window >= MAX_SIZE:
        window = None  # more keys than any context here
    if family.window == "key":
        return (
            [window] * count if types is None else [window if kind == "sliding_attention" else None for kind in types]
        )
    if not config.flag("use_sliding_window", False) or window is None:
        return [None] * count
    if types is not None:
        return [window if kind == "sliding_attention" else None for kind in types]
    first = config.integer("max_window_layers", 0, MAX_SIZE)
    return [window if index >= first else None for index in range(count)]


def _rope(config: _Config, head_dim: int) -> RopeSpec:
    values = config.values
    old, new = values.get("rope_scaling"), values.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise config.bad(key, "an object or null")
    if isinstance(new, dict) and any(isinstance(v, dict) for v in new.values()):
        raise UnsupportedModelError(
            f"{config.path}: key 'rope_parameters': one per layer type {shown(sorted(new))}; expected one for all layers"
        )
    theta = config.positive("rope_theta") if values.get("rope_theta") is not None else None
    if old and new:
        theirs = {k: v for k, v in new.items() if k != "rope_theta"}
        if _canonical(config, old, "rope_scaling") != _canonical(config, theirs, "rope_parameters"):
            raise ModelFormatError(
                f"{config.path}: key 'rope_scaling' {shown(old)} and key 'rope_parameters' {shown(new)} differ; expected one of them, or the same"
            )
    source = dict(new or old or {})
    key = "rope_parameters" if new else "rope_scaling"
    inner = source.pop("rope_theta", None)
    if inner is not None:
        inner = config.number(f"{key}.rope_theta", inner, positive=True)
        if theta is not None and theta != inner:
            raise ModelFormatError(
                f"{config.path}: key 'rope_theta': {theta} and '{key}.rope_theta': {inner} differ; expected one theta"
            )
        theta = inner
    partial = source.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial not in (1, 1.0, None):
        raise UnsupportedModelError(f"{config.path}: key 'partial_rotary_factor': {shown(partial)}; expected 1")
    kind, parameters = _canonical(config, source, key)
    return RopeSpec(kind, 10000.0 if theta is None else theta, head_dim, parameters)


# key -> needed by the type
_ROPE_KEYS: dict[str, dict[str, bool]] = {
    "default": {},
    "linear": {"factor": True},
    "dynamic": {"factor": True, "original_max_position_embeddings": False},
    "llama3": {
        "factor": True,
        "low_freq_factor": True,
        "high_freq_factor": True,
        "original_max_position_embeddings": True,
    },
    "yarn": {
        "factor": True,
        "original_max_position_embeddings": False,
        "beta_fast": False,
        "beta_slow": False,
        "mscale": False,
        "mscale_all_dim": False,
        "attention_factor": False,
        "truncate": False,
    },
}


def _canonical(config: _Config, source: dict[str, Any], key: str) -> tuple[str, tuple[tuple[str, float], ...]]:
    """(type, sorted parameters) of a scaling object, checked."""
    given = dict(source)
    kind, other = given.pop("rope_type", None), given.pop("type", None)
    if kind is not None and other is not None and kind != other:
        raise ModelFormatError(
            f"{config.path}: key '{key}': type {shown(other)} and rope_type {shown(kind)} differ; expected one"
        )
    kind = kind if kind is not None else other
    if kind is None:
        if given:
            raise ModelFormatError(
                f"{config.path}: key '{key}': {shown(source)} has no rope_type; expected one of {', '.join(_ROPE_KEYS)}"
            )
        kind = "default"
    if kind not in _ROPE_KEYS:
        raise UnsupportedModelError(
            f"{config.path}: key '{key}': rope_type {shown(kind)}; expected one of {', '.join(_ROPE_KEYS)}"
        )
    known = _ROPE_KEYS[kind]
    unknown = [k for k, v in given.items() if k not in known and v is not None]
    if unknown:
        raise UnsupportedModelError(
            f"{config.path}: key '{key}.{unknown[0]}' is not known for rope_type {kind}; expected {', '.join(known) or 'none'}"
        )
    parameters: dict[str, float] = {}
    for name, needed in known.items():
        value = given.get(name)
        if value is None:
            if needed:
                raise ModelFormatError(f"{config.path}: key '{key}.{name}' is missing; rope_type {kind} needs it")
            continue
        if name == "truncate":
            if not isinstance(value, bool):
                raise ModelFormatError(f"{config.path}: key '{key}.truncate': {shown(value)}; expected true or false")
            parameters[name] = value
        else:
            parameters[name] = config.number(f"{key}.{name}", value, positive=True)
    _check_rope(config, key, kind, parameters)
    return kind, tuple(sorted(parameters.items()))


def _check_rope(config: _Config, key: str, kind: str, p: dict[str, float]) -> None:
    """Relations between parameters, and the defaults that come from other keys."""
    if kind in ("dynamic", "yarn"):
        maximum = config.integer("max_position_embeddings", 1, 2**62)
        # transformers' dynamic knows only max_position_embeddings
        p.setdefault("original_max_position_embeddings", float(maximum))
    if p.get("factor", 1.0) < 1:
        raise ModelFormatError(f"{config.path}: key '{key}.factor': {p['factor']}; expected at least 1")
    if kind == "llama3" and p["high_freq_factor"] <= p["low_freq_factor"]:
        raise ModelFormatError(
            f"{config.path}: key '{key}.high_freq_factor': {p['high_freq_factor']}; expected above low_freq_factor {p['low_freq_factor']}"
        )
    if kind == "yarn" and p.get("beta_fast", 32.0) < p.get("beta_slow", 1.0):
        raise ModelFormatError(
            f"{config.path}: key '{key}.beta_fast': {p.get('beta_fast', 32.0)}; expected at least beta_slow {p.get('beta_slow', 1.0)}"
        )


def _special_ids(folder: Path, config: _Config, vocab: int) -> tuple[int | None, tuple[int, ...]]:
    """BOS, and the union of the EOS ids of config.json and generation_config.json."""
    bos = config.values.get("bos_token_id")
    if bos is not None:
        bos = config.integer("bos_token_id", 0, vocab - 1)
    eos = list(_eos_of(config, vocab))
    path = folder / "generation_config.json"
    if path.exists():
        generation = _Config(path, read_json_object(path), {})
        eos += [i for i in _eos_of(generation, vocab) if i not in eos]
        temperature, top_p = generation.values.get("temperature"), generation.values.get("top_p")
        if temperature is not None and generation.number("temperature", temperature) < 0:
            raise generation.bad("temperature", "0 or more")
        if top_p is not None and not 0 <= generation.number("top_p", top_p) <= 1:
            raise generation.bad("top_p", "0 to 1")
    return bos, tuple(eos)


def _eos_of(config: _Config, vocab: int) -> tuple[int, ...]:
    value = config.values.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab for i in ids):
        raise config.bad("eos_token_id", f"an id, or a list of ids, from 0 to {vocab - 1}")
    return tuple(ids)
