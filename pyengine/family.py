"""Stage 2, family: how a family may differ from Llama: the fields of its entry in families.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
