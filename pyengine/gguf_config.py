"""Stage 2, gguf_config: the keys of a GGUF file as a config, and what its tensors are called.

Keys become those of config.json, so that the same rules read them; errors give the file's own names. What the file
leaves out is not the family's default but what llama.cpp takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.config_values import ConfigValues
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.family import Names
from pyengine.gguf_checkpoint import FREQUENCIES
from pyengine.gguf_file import GgufHeader, open_header
from pyengine.safetensors_header import CheckpointFile
from pyengine.spec import LayerSpec, ModelSpec
from pyengine.strict_json import shown

# general.architecture -> the family, its model_type, whether its RoPE turns neighbours (2 i, 2 i + 1)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}
NAMES = Names(
    prefixes=("",),
    renames={
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    head="output",
)
# config.json's key -> the file's, behind the architecture's name
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}
REQUIRED = ("max_position_embeddings", "rms_norm_eps")  # where config.json may leave them to the family
SCALING = {  # of rope_scaling
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
OLD_FACTOR = "rope.scale_linear"
DIMENSIONS = "rope.dimension_count"
VALUE_LENGTH = "attention.value_length"
WINDOW = "attention.sliding_window"
INERT = ("rope.scaling.finetuned", "tensor_data_layout")
NONE = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}  # values that mean a plain decoder
# Tokens that end a turn or a text, by what they are called: files name one, and models emit any
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # behind TOKENIZER
TOKENIZER = "tokenizer.ggml."
CONTROL = 3  # in tokenizer.ggml.token_type


def read(path: Path) -> ConfigValues:
    """The config of a GGUF file under config.json's names.

    Errors: those of opening the file; UnsupportedModelError for an architecture or a key that is not known here,
    ModelFormatError for one that is missing or has another type.
    """
    header = open_header(path)
    name = header.value("general.architecture", str)
    if name is None:
        raise ModelFormatError(f"{path}: key 'general.architecture' is missing; expected it")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"{path}: key 'general.architecture': {shown(name)}; expected one of {known}")
    if header.value("general.type", str, "model") != "model":
        raise UnsupportedModelError(f"{path}: key 'general.type': {shown(header.keys['general.type'])}; expected model")
    own = name + "."
    given = {key[len(own) :]: value for key, value in header.keys.items() if key.startswith(own)}  # lists stay unread
    if given.get("attention.causal", True) is not True:
        causal = own + "attention.causal"
        raise UnsupportedModelError(f"{path}: key {shown(causal)}: {shown(header.keys[causal])}; expected true")
    spelled = {usual: own + key for usual, key in KEYS.items()}
    spelled |= {f"rope_scaling.{usual}": own + key for usual, key in SCALING.items()}
    spelled |= {"partial_rotary_factor": own + DIMENSIONS, "eos_token_id": f"{TOKENIZER}eos_token_id"}
    spelled |= {"bos_token_id": f"{TOKENIZER}bos_token_id", "rope_scaling": own + SCALING["rope_type"]}
    architecture, kind, _ = ARCHITECTURES[name]
    if name == "llama" and WINDOW in given:  # a Llama that sees so many keys is a Mistral
        architecture, kind = "MistralForCausalLM", "mistral"
        spelled["sliding_window"] = own + WINDOW
    values: dict[str, Any] = {usual: given.pop(key, None) for usual, key in KEYS.items()}
    for usual in REQUIRED:
        if values[usual] is None:
            raise ModelFormatError(f"{path}: key {shown(spelled[usual])} is missing; expected it")
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if values["vocab_size"] is None:
        values["vocab_size"] = _rows(header, "token_embd.weight")
    values |= {"architectures": [architecture], "model_type": kind, "rope_scaling": _scaling(header, own, given)}
    values |= _partial(header, own, given, values)
    values |= {
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "bos_token_id": header.keys.get(f"{TOKENIZER}bos_token_id"),
        "eos_token_id": _ends(header) or None,
        "dtype": _dtype(header),
    }
    if kind == "mistral":
        values["sliding_window"] = given.pop(WINDOW)
    if kind == "llama":
        values["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    # what is left is accounted for as an unknown key of config.json would be
    values |= {own + key: value for key, value in given.items() if key not in INERT and NONE.get(key) != value}
    return ConfigValues(path, values, {}, spelled)


def _rows(header: GgufHeader, name: str) -> int | None:
    info = header.tensors.get(name)
    return None if info is None else info.shape[0]


def _dtype(header: GgufHeader) -> str:
    kinds = {info.dtype for info in header.tensors.values() if len(info.shape) > 1}
    return {"BF16": "bfloat16", "F16": "float16"}.get("".join(kinds), "float32")


def _scaling(header: GgufHeader, own: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """rope_scaling, taken out of `given`: none, linear or yarn; a factor without a type is linear, as in llama.cpp."""
    scaling = {usual: given.pop(key) for usual, key in SCALING.items() if key in given}
    old = given.pop(OLD_FACTOR, None)
    if old is not None:
        scaling.setdefault("factor", old)
    kind = scaling.setdefault("rope_type", "linear" if scaling.get("factor") else "none")
    if kind == "none":  # the other keys say what the context was before, and change nothing
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{header.path}: key {shown(own + SCALING['rope_type'])}: {shown(kind)}; expected none, linear or yarn"
        )
    if kind == "linear":
        scaling = {"rope_type": kind, "factor": scaling.get("factor")}
    return scaling


def _partial(header: GgufHeader, own: str, given: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """partial_rotary_factor where not all of a head is rotated; a head of v must be as long as one of k."""
    rotated, length = given.pop(DIMENSIONS, None), given.pop(VALUE_LENGTH, None)
    head_dim = values["head_dim"]
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if head_dim is None and type(hidden) is int and type(heads) is int and heads > 0:
        head_dim = hidden // heads
    if type(head_dim) is not int or head_dim < 1:  # refused under the file's own name
        return {}
    if length is not None and length != head_dim:
        raise UnsupportedModelError(
            f"{header.path}: key {shown(own + VALUE_LENGTH)}: {shown(length)}; expected {head_dim}, the keys'"
        )
    if rotated is None or rotated == head_dim:
        return {}
    if type(rotated) is not int or not 0 < rotated < head_dim:
        raise header.bad(own + DIMENSIONS, rotated, f"1 to {head_dim}")
    return {"partial_rotary_factor": rotated / head_dim}


def _ends(header: GgufHeader) -> list[Any]:
    """The ids that end a text: those under their own keys, and control tokens called so."""
    ids = [value for key in END_KEYS if (value := header.keys.get(TOKENIZER + key)) is not None]
    tokens = header.value(f"{TOKENIZER}tokens", list, [])
    types = header.value(f"{TOKENIZER}token_type", list, [])
    named = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL}
    return list(dict.fromkeys([*ids, *(named[text] for text in ENDS if text in named)]))


def with_own_rope(spec: ModelSpec, path: Path) -> ModelSpec:
    """The spec with the order of rotary pairs of the file's architecture, and what divides their frequencies."""
    header = open_header(path)
    interleaved = ARCHITECTURES[header.value("general.architecture", str)][2]

    def changed(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        assert rope is not None
        rope = replace(rope, interleaved=interleaved, divisors=_divisors(header, rope.rotary_dim))
        return replace(layer, attention=replace(layer.attention, rope=rope))

    return replace(spec, layers=tuple(changed(layer) for layer in spec.layers))


def _divisors(header: GgufHeader, rotary_dim: int) -> tuple[float, ...]:
    info = header.tensors.get(FREQUENCIES)
    if info is None:
        return ()
    if (info.dtype, info.shape) != ("F32", (rotary_dim // 2,)):
        raise ModelFormatError(
            f"{header.path}: tensor {shown(FREQUENCIES)}: {info.dtype} {list(info.shape)}; expected F32 "
            f"{[rotary_dim // 2]}"
        )
    values = np.empty(rotary_dim // 2, np.float32)
    file = CheckpointFile(header.path)
    try:
        file.read_into(values.view(np.uint8).data, info.begin)
    finally:
        file.close()
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelFormatError(
            f"{header.path}: tensor {shown(FREQUENCIES)}: {values.min()}; expected finite and above 0"
        )
    return () if (values == 1).all() else tuple(float(value) for value in values)
