"""Stage 4, reference_latent: multi-head latent attention in plain numpy, keys and values of every head written out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyengine import rope
from pyengine.spec import MLASpec

if TYPE_CHECKING:
    from pyengine.reference import ReferenceCache, ReferenceModel

Array = NDArray[Any]


def latent_qkv(
    model: ReferenceModel, x: Array, a: MLASpec, index: int, start: int, cache: ReferenceCache
) -> tuple[Array, Array, Array]:
    """q [T, heads, head_dim], and of all tokens so far k [S, heads, head_dim] and v [S, heads, v_head_dim].

    x [T, hidden_size]. The cache takes what the engine's takes: [latent | rotary key] as K, the latent as V, one head.
    """
    from pyengine.reference import apply_rope, rms_norm

    prefix = f"model.layers.{index}.self_attn."
    tokens, nope = len(x), a.qk_nope_head_dim

    def latent_norm(y: Array, name: str) -> Array:
        return rms_norm(y, model.weight(f"{prefix}{name}.weight"), a.latent_eps)

    if a.q_lora_rank is None:
        q = model.linear(x, prefix + "q_proj")
    else:
        q_latent = latent_norm(model.linear(x, prefix + "q_a_proj", a.bias), "q_a_layernorm")
        q = model.linear(q_latent, prefix + "q_b_proj")
    q = q.reshape(tokens, a.num_heads, a.head_dim)
    joined = model.linear(x, prefix + "kv_a_proj_with_mqa", a.bias)
    latent = latent_norm(joined[:, : a.kv_lora_rank], "kv_a_layernorm")
    cos, sin = rope.cos_sin(a.rope, start, start + tokens)
    q = np.concatenate([q[..., :nope], apply_rope(q[..., nope:], cos, sin)], axis=-1)
    key = apply_rope(joined[:, None, a.kv_lora_rank :], cos, sin)

    k, v = cache.append(index, np.concatenate([latent[:, None], key], axis=-1), latent[:, None])
    up = model.weight(prefix + "kv_b_proj.weight").reshape(a.num_heads, nope + a.v_head_dim, a.kv_lora_rank)
    latents, keys, values = k[:, 0, : a.kv_lora_rank], k[:, :, a.kv_lora_rank :], v[:, 0]
    k = np.concatenate([np.einsum("sr,hdr->shd", latents, up[:, :nope]), np.repeat(keys, a.num_heads, axis=1)], axis=-1)
    return q, k, np.einsum("sr,hdr->shd", values, up[:, nope:])
