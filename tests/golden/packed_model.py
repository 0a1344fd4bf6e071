"""A quantized engine's matrices under their canonical names, read from the packed bytes alone, and what their scales
allow: how far a stored value may be from the checkpoint's, by itself and in the mean of its group.

Rows are placed by docs/architecture.md and docs/packed_formats.md; nothing of the core or of the reports is used.
"""

from __future__ import annotations

import numpy as np
from kernel_cases import EPS, Array, Unpacked, unpack

import pyengine
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, MLASpec

PANEL = 16
NO_CLIP_INT8, NO_CLIP_INT4 = 126.6, 7.0  # the first places of the search that clip nothing, docs/packed_formats.md
ROUNDED = 64 * EPS  # of float32 sums inside the search, relative: never near a half step


def panels(n: int) -> int:
    return -(-n // PANEL)


def rows_of(size: int, first: int = 0, stride: int = 1) -> Array:
    """Packed rows of a matrix of `size` rows whose panels are first, first + stride, ..."""
    row = np.arange(size)
    return (first + row // PANEL * stride) * PANEL + row % PANEL


def layer_parts(layer: LayerSpec, hidden: int) -> dict[str, dict[str, Array]]:
    """Field of LayerWeights -> canonical module -> the rows that it has of the packed tensor."""
    a, f = layer.attention, layer.ffn
    attn, parts = "self_attn.", {}
    if isinstance(a, AttentionSpec):
        q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        k, v = panels(q), panels(q) + panels(kv)
        parts["qkv"] = {f"{attn}q_proj": rows_of(q), f"{attn}k_proj": rows_of(kv, k), f"{attn}v_proj": rows_of(kv, v)}
    else:
        parts["q"] = {attn + a.q_name: rows_of(a.num_heads * a.head_dim)}
        parts["kv_a"] = {f"{attn}kv_a_proj_with_mqa": rows_of(a.kv_lora_rank + a.qk_rope_head_dim)}
        if a.q_lora_rank is not None:
            parts["q_a"] = {f"{attn}q_a_proj": rows_of(a.q_lora_rank)}
    parts["o"] = {f"{attn}o_proj": rows_of(hidden)}

    def ffn(prefix: str, spec: FFNSpec, number: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
        inter, first = spec.intermediate_size, 2 * number * panels(spec.intermediate_size)
        down = {f"{prefix}down_proj": rows_of(hidden, number * panels(hidden))}
        if not spec.gated:
            return {f"{prefix}up_proj": rows_of(inter)}, down
        gate, up = (rows_of(inter, first + side, 2) for side in (0, 1))
        return {f"{prefix}gate_proj": gate, f"{prefix}up_proj": up}, down

    if isinstance(f, FFNSpec):
        parts["gate_up"], parts["down"] = ffn("mlp.", f)
        return parts
    parts["gate_up"], parts["down"] = {}, {}
    for number in range(f.router.num_experts):
        first, down = ffn(f"mlp.experts.{number}.", f.expert, number)
        parts["gate_up"] |= first
        parts["down"] |= down
    if f.shared is not None:
        parts["shared_gate_up"], parts["shared_down"] = ffn("mlp.shared_expert.", f.shared)
    return parts


def heads_of(k_up: Unpacked, v_up: Unpacked, a: MLASpec) -> Unpacked:
    """kv_b_proj [heads * (nope + v), rank] of its two packed tensors, W_UK of a head transposed and W_UV: bfloat16."""
    nope, rank = a.qk_nope_head_dim, a.kv_lora_rank
    k = k_up.q.reshape(a.num_heads, -1, nope)[:, :rank].transpose(0, 2, 1)
    v = v_up.q.reshape(a.num_heads, -1, rank)[:, : a.v_head_dim]
    q = np.concatenate([k, v], axis=1).reshape(-1, rank)
    return Unpacked(k_up.kind, q, np.ones(q.shape), np.zeros(q.shape), 0, np.zeros((len(q), 2)))


def packed_matrices(engine: pyengine.Engine) -> dict[str, Unpacked]:
    """Canonical name -> every matrix that the engine packs, a tied embedding among them; the router is not packed."""
    spec, weights = engine.spec, engine.weights

    def read(tensor: int) -> Unpacked:
        return unpack(engine.backend.tensor_bytes(tensor))

    out = {"model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight": read(weights.lm_head)}
    for layer, w in zip(spec.layers, weights.layers, strict=True):
        p, parts = f"model.layers.{layer.index}.", layer_parts(layer, spec.hidden_size)
        for field, modules in parts.items():
            whole = read(getattr(w, field))
            for module, rows in modules.items():
                fields = (whole.q[rows], whole.scale[rows], whole.minimum[rows], whole.group, whole.units[rows])
                out[f"{p}{module}.weight"] = Unpacked(whole.kind, *fields)
        if isinstance(layer.attention, MLASpec):
            heads = heads_of(read(w.k_up), read(w.v_up), layer.attention)
            out[f"{p}self_attn.kv_b_proj.weight"] = heads
        assert len(parts) + 2 * isinstance(layer.attention, MLASpec) == len(w.matrices()), "a matrix without a name"
    return out


# ---- what the scales allow ---------------------------------------------------------------------------------------


def value_bound(w: Unpacked, stored: Array) -> Array:
    """The largest |value - stored| of each weight: half a step, or the way to the end of the grid where it is beyond.

    A step is the group's scale, from the packed bytes; of bfloat16 the distance of neighbours. In float64 [N, K].
    """
    if w.kind == "bf16":
        with np.errstate(divide="ignore"):
            return np.where(stored == 0, 0, 2.0 ** (np.floor(np.log2(np.abs(stored))) - 8))
    low, high = {"int8": (-127, 127), "int4 symmetric": (-8, 7), "int4 minimum": (0, 15)}[w.kind]
    ends = np.sort([w.scale * low + w.minimum, w.scale * high + w.minimum], axis=0)
    beyond = np.maximum(np.maximum(ends[0] - stored, stored - ends[1]), 0)
    largest = np.abs(stored).max(axis=1, keepdims=True)
    return np.maximum(np.abs(w.scale) / 2, beyond) + ROUNDED * largest


def groups_of(x: Array, group: int) -> list[Array]:
    return [x[:, at : at + group] for at in range(0, x.shape[1], group)]


def group_bound(w: Unpacked, stored: Array) -> Array:
    """The largest root mean square of value - stored over each group, [N, groups]: the search is without importance.

    The candidates contain plain rounding over the whole range, so the winner is no worse than half of that step; then
    come the roundings of the stored scale and minimum (of the step, not less than 1), times the largest integer.
    """
    scale_unit, minimum_unit = w.units[:, :1], w.units[:, 1:]
    top = np.stack([np.abs(part).max(axis=1) for part in groups_of(stored, w.group)], axis=1)
    if w.kind == "int8":
        bound = top / NO_CLIP_INT8 / 2 + 127 * scale_unit
    elif w.kind == "int4 symmetric":
        bound = top / NO_CLIP_INT4 / 2 + 8 * scale_unit
    else:
        span = np.stack([np.ptp(part, axis=1) for part in groups_of(stored, w.group)], axis=1)
        fit = span / 15 / 2 + 15 * scale_unit
        clipped = (
            np.stack([np.abs(part[:, 0]) for part in groups_of(w.minimum, w.group)], axis=1) > 126.5 * minimum_unit
        )
        bound = fit + minimum_unit / 2 + np.where(clipped, fit, 0)
    return bound + ROUNDED * np.abs(stored).max(axis=1, keepdims=True)


def group_error(w: Unpacked, stored: Array) -> Array:
    """Root mean square of value - stored over each group, [N, groups]."""
    error = groups_of(w.values - stored, w.group)
    return np.stack([np.sqrt(np.square(part).mean(axis=1)) for part in error], axis=1)
