"""Stage 2, rope_config: both spellings of RoPE in config.json -> RopeSpec.

Old: `rope_scaling` {rope_type or type, ...} beside a top-level `rope_theta`. New: `rope_parameters` with the theta
inside. Semantics are transformers' modeling_rope_utils.
"""

from __future__ import annotations

from typing import Any

from pyengine.config_values import ConfigValues
from pyengine.errors import ModelFormatError
from pyengine.family import RopeForm
from pyengine.spec import RopeSpec
from pyengine.strict_json import shown

DEFAULT_THETA = 10000.0
MAX_CONTEXT = 2**31 - 1  # positions are int32

LIMIT = "original_max_position_embeddings"
# type -> parameter -> whether the file must give it
PARAMETERS: dict[str, dict[str, bool]] = {
    "default": {},
    "linear": {"factor": True},
    "dynamic": {"factor": True, LIMIT: False},
    "llama3": {"factor": True, "low_freq_factor": True, "high_freq_factor": True, LIMIT: False},
    "yarn": {
        "factor": True,
        LIMIT: False,
        "beta_fast": False,
        "beta_slow": False,
        "mscale": False,
        "mscale_all_dim": False,
        "attention_factor": False,
        "truncate": False,
    },
}
Q_SCALE = "llama_4_scaling_beta"
LLAMA = RopeForm()
LAYER_TYPES = FULL, SLIDING = "full_attention", "sliding_attention"
INERT = {"finetuned"}  # says how the checkpoint was made


def _rope_spec(config: ConfigValues, head_dim: int, form: RopeForm) -> RopeSpec:
    """The rotary embedding that config.json describes, of a head of `head_dim` dimensions in a family's form.

    Errors: ModelFormatError for a bad value and for two spellings that differ; UnsupportedModelError for a rope_type or
    parameter not known here, parameters per layer type, and partial rotation where the family has none.
    """
    found: dict[str, RopeSpec] = {}
    for key in ("rope_parameters", "rope_scaling"):
        source = config.values.get(key)
        if source is not None and not isinstance(source, dict):
            raise config.bad(key, source, "an object or null")
        if source:
            found[key] = _parse(config, key, source, head_dim, form)
    if not found:
        return _parse(config, "rope_parameters", {}, head_dim, form)
    if len(set(found.values())) > 1:
        old, new = config.values["rope_scaling"], config.values["rope_parameters"]
        raise ModelFormatError(
            f"{config.path}: key 'rope_scaling' {shown(old)} and key 'rope_parameters' {shown(new)} differ; "
            "expected one of them, or the same"
        )
    return next(iter(found.values()))


def ropes_by_layer_type(config: ConfigValues, head_dim: int, form: RopeForm = LLAMA) -> dict[str, RopeSpec]:
    """The rotary embeddings of "full_attention" and "sliding_attention" layers: the same unless the form has two.

    Two are given nested in rope_parameters, by layer type; in older files the keys of one embedding mean that of full
    attention, and windowed layers have the default type with a theta of their own. Errors: as _rope_spec.
    """
    if form.local_theta is None:
        return dict.fromkeys(LAYER_TYPES, _rope_spec(config, head_dim, form))
    # no key outside rope_parameters is about windowed layers, but for their theta
    theta = config.positive("rope_local_base_freq", form.local_theta)
    values = {key: value for key, value in config.values.items() if key not in ("rope_theta", "rope_scaling")}
    defaults = {**config.defaults, "rope_theta": theta}
    local = ConfigValues(config.path, values, defaults)
    nested = config.values.get("rope_parameters")
    if nested is None:
        return {FULL: _rope_spec(config, head_dim, form), SLIDING: _rope_spec(local, head_dim, form)}
    if config.values.get("rope_scaling") is not None:
        raise config.unsupported("rope_scaling", config.values["rope_scaling"], "rope_parameters alone")
    if not isinstance(nested, dict) or any(not isinstance(value, dict | None) for value in nested.values()):
        raise config.bad("rope_parameters", nested, f"an object for each of {', '.join(LAYER_TYPES)}")
    unknown = [name for name in nested if name not in LAYER_TYPES]
    if unknown:
        raise config.unsupported("rope_parameters", unknown[0], ", ".join(LAYER_TYPES))
    return {
        kind: _parse(source, f"rope_parameters.{kind}", nested.get(kind) or {}, head_dim, form)
        for kind, source in ((FULL, config), (SLIDING, local))
    }


def _parse(config: ConfigValues, key: str, source: dict[str, Any], head_dim: int, form: RopeForm) -> RopeSpec:
    given = dict(source)
    nested = sorted(name for name, value in given.items() if isinstance(value, dict))
    if nested:
        raise config.unsupported(key, ", ".join(nested), "one set of parameters for all layers")
    theta = _theta(config, key, given.pop("rope_theta", None))
    rotary_dim = _rotary_dim(config, key, given.pop("partial_rotary_factor", None), head_dim, form)
    kind = _type(config, key, given, form)
    if form.sections:
        _check_sections(config, key, given.pop("mrope_section", None), rotary_dim)
    known = PARAMETERS[kind] | ({Q_SCALE: True} if form.q_scaled and kind == "yarn" else {})
    if form.q_scaled and kind != "yarn":
        raise config.unsupported(f"{key}.rope_type", kind, "yarn, beside which q is scaled by position")
    if known.get(Q_SCALE) and given.get("max_position_embeddings") is not None:  # a copy of the outer key
        given.pop("max_position_embeddings")
    for name, value in given.items():
        if name not in known and name not in INERT and value is not None:
            accepted = ", ".join(known) or "no other key"
            raise config.unsupported(f"{key}.{name}", value, f"for rope_type {kind}: {accepted}")
    parameters = {
        name: value for name in known if (value := _parameter(config, key, kind, name, known[name], given)) is not None
    }
    _check(config, key, kind, parameters, rotary_dim, theta)
    return RopeSpec(kind, theta, rotary_dim, tuple(sorted(parameters.items())), form.interleaved)


def _rotary_dim(config: ConfigValues, key: str, inner: Any, head_dim: int, form: RopeForm) -> int:
    """head_dim times partial_rotary_factor, rounded down to a whole number; even, at least 2."""
    outer = config.values.get("partial_rotary_factor")
    factor = outer if inner is None else inner
    name = "partial_rotary_factor" if inner is None else f"{key}.partial_rotary_factor"
    if inner is not None and outer is not None and inner != outer:
        raise ModelFormatError(
            f"{config.path}: key 'partial_rotary_factor': {shown(outer)} and key '{name}': {shown(inner)} differ; "
            "expected one factor"
        )
    if factor is None:
        factor = 1.0 if form.partial is None else form.partial
    share = config.number(name, factor, above=0)
    if form.partial is None and share != 1:
        raise config.unsupported("partial_rotary_factor", factor, "1, rotation of the whole head")
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise config.bad(name, factor, f"up to 1, rotating an even number of the {head_dim} dimensions of a head")
    return rotary_dim


def _theta(config: ConfigValues, key: str, inner: Any) -> float:
    outer = config.values.get("rope_theta")
    if outer is not None:
        outer = config.number("rope_theta", outer, above=0)
    if inner is None:
        return float(config.defaults.get("rope_theta", DEFAULT_THETA) if outer is None else outer)
    theta = config.number(f"{key}.rope_theta", inner, above=0)
    if outer is not None and outer != theta:
        raise ModelFormatError(
            f"{config.path}: key 'rope_theta': {outer} and key '{key}.rope_theta': {theta} differ; expected one theta"
        )
    return theta


def _check_sections(config: ConfigValues, key: str, sections: Any, rotary_dim: int) -> None:
    """mrope_section: how many pairs of a head turn by each of three places, which are the same for text."""
    if sections is None:
        return
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
        raise config.bad(f"{key}.mrope_section", sections, "three whole numbers")
    if sum(sections) != rotary_dim // 2:
        raise config.bad(f"{key}.mrope_section", sections, f"{rotary_dim // 2} in all, half of a head's dimensions")


def _type(config: ConfigValues, key: str, given: dict[str, Any], form: RopeForm) -> str:
    """Takes `rope_type` and its older name `type` out of `given`."""
    kind, other = given.pop("rope_type", None), given.pop("type", None)
    if form.sections:
        kind, other = ("default" if one == "mrope" else one for one in (kind, other))
    if kind is not None and other is not None and kind != other:
        raise ModelFormatError(
            f"{config.path}: key '{key}': type {shown(other)} and rope_type {shown(kind)} differ; expected one"
        )
    kind = other if kind is None else kind
    if kind is None:
        if given:
            raise ModelFormatError(
                f"{config.path}: key '{key}': {shown(given)} has no rope_type; expected one of {', '.join(PARAMETERS)}"
            )
        return "default"
    if not isinstance(kind, str):
        raise config.bad(f"{key}.rope_type", kind, f"one of {', '.join(PARAMETERS)}")
    if kind not in PARAMETERS:
        raise config.unsupported(f"{key}.rope_type", kind, f"one of {', '.join(PARAMETERS)}")
    return kind


def _parameter(
    config: ConfigValues, key: str, kind: str, name: str, required: bool, given: dict[str, Any]
) -> float | None:
    value = given.get(name)
    if name == LIMIT and kind != "linear":
        maximum = config.integer("max_position_embeddings", 1, MAX_CONTEXT)
        if value is None:
            return float(maximum)
        if kind == "dynamic" and value != maximum:  # transformers knows only max_position_embeddings there
            raise config.unsupported(f"{key}.{name}", value, f"max_position_embeddings {maximum} for rope_type dynamic")
    if value is None:
        if required:
            where = config.name(f"{key}.{name}")
            raise ModelFormatError(f"{config.path}: key '{where}' is missing; expected it for rope_type {kind}")
        return None
    if name == "truncate":
        if not isinstance(value, bool):
            raise config.bad(f"{key}.{name}", value, "true or false")
        return float(value)
    if name in ("mscale", "mscale_all_dim", Q_SCALE):  # 0 counts as not given
        return config.number(f"{key}.{name}", value, at_least=0)
    return config.number(f"{key}.{name}", value, above=0)


def _check(
    config: ConfigValues, key: str, kind: str, parameters: dict[str, float], rotary_dim: int, theta: float
) -> None:
    """Relations between parameters without which a formula has no value, or not the one meant."""
    if "factor" in parameters:
        config.number(f"{key}.factor", parameters["factor"], at_least=1)
    if kind == "llama3":
        low = parameters["low_freq_factor"]
        if parameters["high_freq_factor"] <= low:
            raise config.bad(f"{key}.high_freq_factor", parameters["high_freq_factor"], f"above low_freq_factor {low}")
    if kind == "yarn":
        fast, slow = parameters.get("beta_fast", 32.0), parameters.get("beta_slow", 1.0)
        if fast < slow:
            raise config.bad(f"{key}.beta_fast", fast, f"at least beta_slow {slow}")
        config.number("rope_theta", theta, above=1)
    if kind == "dynamic" and rotary_dim <= 2:
        raise config.bad("head_dim", rotary_dim, "at least 4 rotated dimensions for rope_type dynamic")
