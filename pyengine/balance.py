"""Stage 3, balance: large biases of k fitted into the one scale per head of an int8 KV cache, q . k unchanged.

Qwen2.5's biases of k reach hundreds in a few channels; a scale for them leaves the other channels no steps. Dividing a
channel of k by a power of two and multiplying q by it changes no bit of a float32 score, and makes channels alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.checkpoint import as_float32
from pyengine.pack_layer import Raw
from pyengine.spec import AttentionSpec, LayerSpec, MLASpec

LARGE = 16.0  # a bias up to here stays as it is (docs/packed_formats.md has what other sizes lose)


def key_factors(a: AttentionSpec, bias: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """By what each channel of k is divided: powers of two, float32 [kv_heads, head_dim], from its bias.

    bias: float [kv_heads * head_dim]. The two channels that RoPE rotates into each other share a factor, so that it
    comes through the rotation: the length of both biases over LARGE, to the nearest power, at least 1.
    """
    size = np.abs(bias.astype(np.float32)).reshape(a.num_kv_heads, a.head_dim)
    size[~np.isfinite(size)] = 0  # packing refuses them, by name
    half = 0 if a.rope is None else a.rope.rotary_dim // 2
    size[:, :half] = size[:, half : 2 * half] = np.hypot(size[:, :half], size[:, half : 2 * half])
    factors: npt.NDArray[np.float32] = np.exp2(np.rint(np.log2(np.maximum(size / np.float32(LARGE), 1))))
    return factors


def balance_keys(layer: LayerSpec, raw: Raw) -> Raw:
    """The raw tensors of a layer with q_proj and k_proj balanced; `raw` itself where k has no bias or a norm after it.

    Exact but for values that become denormal. float16 becomes float32, bfloat16 stays.
    """
    a, bias = layer.attention, raw.get("self_attn.k_proj.bias")
    if bias is None or isinstance(a, MLASpec) or a.qk_norm:
        return raw
    factors = key_factors(a, as_float32(bias))
    rows = {"q_proj": np.repeat(factors, a.num_heads // a.num_kv_heads, axis=0), "k_proj": np.float32(1) / factors}
    out = dict(raw)
    for name, by in rows.items():
        for part in ("weight", "bias"):
            full = f"self_attn.{name}.{part}"
            out[full] = scaled_rows(raw[full], by.reshape(-1))
    return out


def scaled_rows(raw: npt.NDArray[Any], by: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Rows of a raw array (uint16 = bfloat16 bits) times powers of two, `by` [rows]."""
    values = as_float32(raw) * by.reshape(-1, *(1,) * (raw.ndim - 1))
    return (values.view(np.uint32) >> 16).astype(np.uint16) if raw.dtype == np.uint16 else values
