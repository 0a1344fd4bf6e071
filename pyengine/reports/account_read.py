"""Stage 6, account_read: config.json -> Anatomy, by the engine's own tables where it runs the model.

Weights are not needed. Where they lie beside the config, their headers are summed up and compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyengine import gguf_config
from pyengine.config import INERT, load_model_spec, model_spec
from pyengine.config_values import ConfigValues
from pyengine.errors import PyEngineError, UnsupportedModelError
from pyengine.gguf_checkpoint import open_checkpoint
from pyengine.gguf_file import is_gguf
from pyengine.reports.account_encoders import BUILDERS
from pyengine.reports.account_families import FAMILIES as SHAPES
from pyengine.reports.account_families import Decoder
from pyengine.reports.account_parts import Anatomy, Attention, Ffn, Ffns, Part, Parts, merged
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, MLASpec, ModelSpec, MoESpec
from pyengine.strict_json import shown
from pyengine.tensors import INERT as INERT_TENSORS
from pyengine.tensors import QUANTIZED, expected_tensors, layer_tensors, names_on_disk

# An unread key whose name contains one of these may stand for weights.
WEIGHT_WORDS = ("size", "dim", "layer", "expert", "lora", "rank", "head", "bias", "norm", "num_", "tie_", "vision")
# Keys with such a word that change no shape counted here.
SHAPELESS = {
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_topk_prob", "ep_size", "moe_layer_freq", "n_ctx",
    "num_nextn_predict_layers", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "num_mtp_layers",
    "max_window_layers", "use_parallel_residual", "no_rope_layers", "no_rope_layer_interval", "normalize_embedding",
    "attention_probs_dropout_prob", "gradient_checkpointing", "cache_implementation", "tie_encoder_decoder",
    "encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers", "hidden_act", "mm_tokens_per_image",
    "position_embedding_type", "add_cross_attention", "rope_interleave", "num_key_value_heads", "head_dim",
    "num_experts_per_tok", "router_aux_loss_coef", "router_jitter_noise", "attention_bias", "layer_types",
    "relative_attention_max_distance", "max_length", "intermediate_size", "num_labels", "vocab_size_per_layer_input",
}  # fmt: skip


class Recorded(ConfigValues):
    """A config that remembers which keys were asked for."""

    def __init__(
        self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any], seen: set[str] | None = None
    ) -> None:
        super().__init__(path, values, defaults)
        self.seen: set[str] = set() if seen is None else seen

    def of_family(self, defaults: Mapping[str, Any], spellings: Mapping[str, str]) -> ConfigValues:
        found = super().of_family(defaults, spellings)
        return Recorded(found.path, found.values, found.defaults, self.seen)

    def get(self, key: str) -> Any:
        self.seen.add(key)
        return super().get(key)

    def unread(self) -> list[str]:
        """Keys that may stand for weights and were not looked at."""
        found = []
        for key, value in self.values.items():
            off = value is None or value is False or value in ([], {}, "")
            if off or key in self.seen or key in INERT or key in SHAPELESS or key.startswith("_"):
                continue
            if any(word in key.lower() for word in WEIGHT_WORDS):
                found.append(key)
        return found


def read_anatomy(path: Path, *, strict: bool = False) -> Anatomy:
    """The parts of the model that the file `path` describes.

    strict: keys that are not understood are errors. Errors: ModelFormatError for a bad value, UnsupportedModelError for
    a family that is not known.
    """
    config = gguf_config.read(path) if is_gguf(path) else ConfigValues.read(path)
    try:
        spec = model_spec(config)
    except UnsupportedModelError as error:
        return _plain(config, str(error), strict)
    if strict:
        model_spec(config, strict=True)
    if "num_nextn_predict_layers" not in config.values:  # the loader skips such layers, but need not meet any
        spec = replace(spec, mtp_layers=0)
    return of_spec(spec, stored_dtype(config), _text_notes(config))


def stored_dtype(config: ConfigValues) -> str | None:
    """The dtype of the weights on disk that config.json names."""
    value = config.values.get("dtype", config.values.get("torch_dtype"))
    return value if isinstance(value, str) else None


# ---- models that the engine runs ------------------------------------------------------------------------------------


def _text_notes(config: ConfigValues) -> tuple[str, ...]:
    """What is not counted of a composite model."""
    if not isinstance(config.values.get("text_config"), dict):
        return ()
    outer = shown(config.values.get("model_type"))
    return (f"the text decoder (text_config) of {outer} alone; its other towers are not counted",)


def of_spec(spec: ModelSpec, stored: str | None, notes: tuple[str, ...] = ()) -> Anatomy:
    """Every tensor that the loader expects, and the layers of multi-token prediction that it skips."""
    parts, ffns = Parts(), Ffns()
    for name, shape in expected_tensors(replace(spec, layers=())).items():
        parts.add(_outer(name, shape, spec.tie_word_embeddings))
    for layer in spec.layers:
        _add_layer(parts, spec, layer, "decoder")
        ffns.add(_ffn(layer.ffn, spec.hidden_size), layer.index)
    for _ in range(spec.mtp_layers):
        _add_mtp(parts, spec)
    return Anatomy(
        family=spec.family,
        architecture=spec.architecture,
        kind="decoder",
        parts=parts.result(),
        attention=merged(_attention(layer.attention) for layer in spec.layers),
        ffns=ffns.result(),
        max_context=spec.max_context,
        stored=stored,
        notes=(*notes, *spec.warnings),
    )


def _attention(a: AttentionSpec | MLASpec) -> Attention:
    k, v = a.k_dim, a.v_dim  # latent attention in absorbed form: what is cached is what a head multiplies with
    return Attention(1, a.num_heads, k, v, a.num_kv_heads, k, v, window=a.window)


def _ffn(f: FFNSpec | MoESpec, hidden: int) -> Ffn:
    if isinstance(f, MoESpec):
        return replace(_ffn(f.expert, hidden), experts=f.router.num_experts, top_k=f.router.top_k)
    return Ffn(hidden, f.intermediate_size, 3 if f.gated else 2)


def _outer(name: str, shape: tuple[int, ...], tied: bool) -> Part:
    """A tensor outside the layers."""
    if len(shape) == 1:
        return Part(name, "norm", shape[0], role="vector")
    if name == "lm_head.weight":
        return Part(name, "lm_head", shape[0], shape[1], role="head")
    return Part(name, "embedding", shape[0], shape[1], role="tied" if tied and "tokens" in name else "table")


def _add_layer(parts: Parts, spec: ModelSpec, layer: LayerSpec, stage: str) -> None:
    """The tensors of a layer, of experts the first with its number."""
    a, f = layer.attention, layer.ffn
    experts, chosen = (f.router.num_experts, f.router.top_k) if isinstance(f, MoESpec) else (1, 1)
    tensors = layer_tensors(spec, layer)
    for name, shape in tensors.items():
        expert = re.match(r"mlp\.experts\.(\d+)\.", name)
        if expert is not None and expert.group(1) != "0":
            continue
        full, module = "model.layers.*." + name.replace(".0.", ".*."), name.rsplit(".", 2)[-2]
        group = "norm" if module.endswith("norm") else "attention" if name.startswith("self_attn.") else "ffn"
        group = "router" if module in ("gate", "shared_expert_gate") else group
        one = Part(full, group, shape[0], 0 if len(shape) == 1 else shape[1], stage=stage)
        if module in ("k_proj", "v_proj") or (module == "up_proj" and name.replace("up_", "gate_") in tensors):
            one = replace(one, joined=True)
        if isinstance(a, MLASpec) and module == "kv_b_proj":
            one = replace(one, role="heads", count=a.num_heads, active=a.num_heads, stacked=a.num_heads)
            keys, values = (full.replace("weight", part) for part in ("keys.weight", "values.weight"))
            parts.add(replace(one, name=keys, rows=a.kv_lora_rank, cols=a.qk_nope_head_dim))
            parts.add(replace(one, name=values, rows=a.v_head_dim, cols=a.kv_lora_rank))
        elif len(shape) == 1 or module == "shared_expert_gate":
            parts.add(replace(one, rows=shape[-1], cols=0, role="vector"))
        elif group == "router":
            parts.add(replace(one, role="router"))
        elif expert is not None:
            parts.add(replace(one, count=experts, active=chosen, experts=experts, stacked=experts))
        else:
            parts.add(one)


def _add_mtp(parts: Parts, spec: ModelSpec) -> None:
    """A layer of multi-token prediction: like the last, with an embedding, a head and two norms more."""
    p, hidden, vocab = "model.layers.*.", spec.hidden_size, spec.vocab_size
    parts.add(Part(p + "embed_tokens.weight", "embedding", vocab, hidden, "table", stage="mtp"))
    for name in ("enorm", "hnorm", "shared_head.norm"):
        parts.add(Part(f"{p}{name}.weight", "norm", hidden, role="vector", stage="mtp"))
    parts.add(Part(p + "eh_proj.weight", "other", hidden, 2 * hidden, stage="mtp"))
    _add_layer(parts, spec, spec.layers[-1], "mtp")
    parts.add(Part(p + "shared_head.head.weight", "lm_head", vocab, hidden, "head", stage="mtp"))


# ---- models that it does not run ------------------------------------------------------------------------------------


def _plain(config: ConfigValues, why: str, strict: bool) -> Anatomy:
    """By model_type; a composite model's text decoder alone."""
    values, notes = dict(config.values), []
    text = values.get("text_config")
    if isinstance(text, dict):
        for key in ("tie_word_embeddings", "torch_dtype", "dtype", "architectures"):
            if key in values and key not in text:
                text = {**text, key: values[key]}
        notes, values = [*_text_notes(config)], text
    kind = values.get("model_type")
    architectures = values.get("architectures")
    if architectures is not None and (
        not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str)
    ):
        raise config.bad("architectures", architectures, "a list of names")
    architecture = architectures[0] if architectures else ""
    recorded = Recorded(config.path, values, {})
    if isinstance(kind, str) and kind in SHAPES:
        decoder = Decoder(recorded, SHAPES[kind])
        anatomy = decoder.build(architecture, stored_dtype(recorded))
    elif isinstance(kind, str) and kind in BUILDERS:
        anatomy = replace(BUILDERS[kind](recorded, architecture), stored=stored_dtype(recorded))
    else:
        known = ", ".join(sorted({*SHAPES, *BUILDERS}))
        raise UnsupportedModelError(
            f"{config.path}: key 'model_type': {shown(kind)}; expected one whose shapes are known: {known}"
        )
    unread = [key for key in recorded.unread() if isinstance(text, dict) or key != "text_config"]
    if unread and strict:
        raise config.unsupported(unread[0], values[unread[0]], "only keys that account reads, under strict")
    if unread:
        notes.append(f"keys that may stand for weights and were not read: {', '.join(shown(k) for k in unread[:10])}")
    return replace(anatomy, notes=tuple(notes), not_run=why)


# ---- weights beside the config --------------------------------------------------------------------------------------


def stored_parameters(path: Path, anatomy: Anatomy) -> tuple[int | None, str | None]:
    """(parameters in the headers of the weights beside config.json, a note). None where there are none to count.

    Of a model that the engine runs the tensors that it uses are counted; else all but the scales of quantization.
    """
    model = path if is_gguf(path) else path.parent
    if model != path and (path.name != "config.json" or not any(model.glob("*.safetensors"))):
        return None, None
    try:
        with open_checkpoint(model) as checkpoint:
            tensors = checkpoint.tensors
    except PyEngineError as error:
        return None, f"the weights beside the config were not counted: {error}"
    sizes = {name: math.prod(info.shape) for name, info in tensors.items()}
    if anatomy.not_run is not None:
        counted = {name: size for name, size in sizes.items() if not name.endswith((*QUANTIZED, *INERT_TENSORS))}
    else:
        spec = load_model_spec(model)
        sources = names_on_disk(spec, tensors).sources(expected_tensors(spec)).values()
        counted = {source.name: sizes[source.name] for source in sources if source.name in sizes}
    found = sum(counted.values())
    groups = anatomy.parameters()
    if found in (groups["total"], groups["total"] + groups["mtp"]):
        return found, None
    return found, f"the files beside the config hold {found:,} parameters, the config means {groups['total']:,}"
