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

from pyengine.checkpoint import Checkpoint
from pyengine.config import INERT, model_spec
from pyengine.config_values import ConfigValues
from pyengine.errors import PyEngineError, UnsupportedModelError
from pyengine.reports.account_encoders import BUILDERS
from pyengine.reports.account_families import FAMILIES, Decoder
from pyengine.reports.account_parts import Anatomy, Attention, Ffn, Part, Parts, merged
from pyengine.spec import ModelSpec
from pyengine.strict_json import shown
from pyengine.tensors import INERT as INERT_TENSORS
from pyengine.tensors import QUANTIZED, expected_tensors

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

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigValues:
        return Recorded(self.path, self.values, defaults, self.seen)

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
    config = ConfigValues.read(path)
    try:
        spec = model_spec(config)
    except UnsupportedModelError as error:
        return _plain(config, str(error), strict)
    if strict:
        model_spec(config, strict=True)
    return of_spec(spec, stored_dtype(config))


def stored_dtype(config: ConfigValues) -> str | None:
    """The dtype of the weights on disk that config.json names."""
    value = config.values.get("dtype", config.values.get("torch_dtype"))
    return value if isinstance(value, str) else None


# ---- models that the engine runs ------------------------------------------------------------------------------------


def of_spec(spec: ModelSpec, stored: str | None) -> Anatomy:
    """Every tensor that the loader expects."""
    parts = Parts()
    for name, shape in expected_tensors(spec).items():
        parts.add(_part(name, shape, spec.tie_word_embeddings))
    layers = [layer.attention for layer in spec.layers]
    attention = [
        Attention(1, a.num_heads, a.head_dim, a.head_dim, a.num_kv_heads, a.head_dim, a.head_dim, window=a.window)
        for a in layers
    ]
    return Anatomy(
        family=spec.family,
        architecture=spec.architecture,
        kind="decoder",
        parts=parts.result(),
        attention=merged(attention),
        ffns=tuple(dict.fromkeys(Ffn(spec.hidden_size, layer.ffn.intermediate_size, 3) for layer in spec.layers)),
        max_context=spec.max_context,
        stored=stored,
        notes=spec.warnings,
    )


def _part(name: str, shape: tuple[int, ...], tied: bool) -> Part:
    pattern = re.sub(r"\.\d+\.", ".*.", name)
    joined = name.rsplit(".", 2)[-2] in ("k_proj", "v_proj", "up_proj")
    if name == "model.embed_tokens.weight":
        return Part(pattern, "embedding", shape[0], shape[1], role="tied" if tied else "table")
    if name == "lm_head.weight":
        return Part(pattern, "lm_head", shape[0], shape[1], role="head")
    group = "norm" if name.endswith("norm.weight") else "ffn" if ".mlp." in name else "attention"
    if len(shape) == 1:
        return Part(pattern, group, shape[0], role="vector", joined=joined)
    return Part(pattern, group, shape[0], shape[1], joined=joined)


# ---- models that it does not run ------------------------------------------------------------------------------------


def _plain(config: ConfigValues, why: str, strict: bool) -> Anatomy:
    """By model_type; a composite model's text decoder alone."""
    values, notes = dict(config.values), []
    text = values.get("text_config")
    if isinstance(text, dict):
        for key in ("tie_word_embeddings", "torch_dtype", "dtype", "architectures"):
            if key in values and key not in text:
                text = {**text, key: values[key]}
        outer, values = values.get("model_type"), text
        notes.append(f"the text decoder (text_config) of {shown(outer)} alone; its other towers are not counted")
    kind = values.get("model_type")
    architectures = values.get("architectures")
    if architectures is not None and (
        not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str)
    ):
        raise config.bad("architectures", architectures, "a list of names")
    architecture = architectures[0] if architectures else ""
    recorded = Recorded(config.path, values, {})
    if isinstance(kind, str) and kind in FAMILIES:
        decoder = Decoder(recorded, FAMILIES[kind])
        anatomy = decoder.build(architecture, stored_dtype(recorded))
    elif isinstance(kind, str) and kind in BUILDERS:
        anatomy = replace(BUILDERS[kind](recorded, architecture), stored=stored_dtype(recorded))
    else:
        known = ", ".join(sorted({*FAMILIES, *BUILDERS}))
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
    """(parameters in the safetensors headers beside config.json, a note). None where there are none to count.

    Of a model that the engine runs the tensors that it uses are counted; else all but the scales of quantization.
    """
    folder = path.parent
    if path.name != "config.json" or not any(folder.glob("*.safetensors")):
        return None, None
    try:
        with Checkpoint.open(folder) as checkpoint:
            sizes = {name: math.prod(info.shape) for name, info in checkpoint.tensors.items()}
    except PyEngineError as error:
        return None, f"the weights beside the config were not counted: {error}"
    used = expected_tensors(model_spec(ConfigValues.read(path))) if anatomy.not_run is None else None
    if used is None:
        counted = {name: size for name, size in sizes.items() if not name.endswith((*QUANTIZED, *INERT_TENSORS))}
    else:
        counted = {name: size for name, size in sizes.items() if name in used}
    found = sum(counted.values())
    groups = anatomy.parameters()
    if found in (groups["total"], groups["total"] + groups["mtp"]):
        return found, None
    return found, f"the files beside the config hold {found:,} parameters, the config means {groups['total']:,}"
