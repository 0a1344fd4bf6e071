"""Stage 2, latent_config: config.json of a model with multi-head latent attention -> MLASpec."""

from __future__ import annotations

from pyengine.config_values import ConfigValues
from pyengine.family import Family
from pyengine.rope import yarn_mscale
from pyengine.rope_config import FULL, ropes_by_layer_type
from pyengine.spec import MLASpec, RopeSpec

MAX_DIM = 1 << 16


def latent_attention(config: ConfigValues, family: Family, heads: int) -> MLASpec:
    """The attention of every layer.

    Errors: ModelFormatError for a bad value, UnsupportedModelError for one that is not implemented.
    """
    kv_heads = config.integer("num_key_value_heads", 1, 2**31 - 1, heads)
    if kv_heads != heads:
        raise config.unsupported("num_key_value_heads", kv_heads, f"num_attention_heads {heads}")
    rope_dim = config.integer("qk_rope_head_dim", 2, MAX_DIM)
    if rope_dim % 2:
        raise config.bad("qk_rope_head_dim", rope_dim, "an even number: RoPE rotates pairs")
    nope_dim, rank = config.integer("qk_nope_head_dim", 1, MAX_DIM), config.get("q_lora_rank")
    for key, meant in (("head_dim", rope_dim), ("qk_head_dim", nope_dim + rope_dim)):  # transformers writes both
        if config.values.get(key) not in (None, meant):
            raise config.unsupported(key, config.values[key], f"{meant}, from the other keys, or no such key")
    if not config.flag("rope_interleave", True):
        raise config.unsupported("rope_interleave", False, "true")
    rope = ropes_by_layer_type(config, rope_dim, family.rope)[FULL]
    return MLASpec(
        num_heads=heads,
        q_lora_rank=None if rank is None else config.integer("q_lora_rank", 1, MAX_DIM),
        kv_lora_rank=config.integer("kv_lora_rank", 1, MAX_DIM),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=config.integer("v_head_dim", 1, MAX_DIM),
        scale=(nope_dim + rope_dim) ** -0.5 * _mscale(rope) ** 2,
        rope=rope,
        bias=config.flag("attention_bias", False),
    )


def _mscale(rope: RopeSpec) -> float:
    """By what both q and k are longer under a scaling type with mscale_all_dim: their product carries its square."""
    p = dict(rope.parameters)
    return yarn_mscale(p["factor"], p["mscale_all_dim"]) if p.get("mscale_all_dim") else 1.0
