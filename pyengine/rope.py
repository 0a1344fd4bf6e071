"""Stage 2, rope: frequencies and cos/sin tables of every RoPE type. float32, as transformers computes them.

Sources: RoPE, Su et al. 2021; linear (position interpolation), Chen et al. 2023; dynamic (NTK-aware), bloc97 2023;
yarn, Peng et al. 2023; llama3, the Llama 3.1 release. Key names and rounding follow transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.spec import RopeSpec

Float32 = npt.NDArray[np.float32]


def _default(theta: float, dim: int) -> Float32:
    """1 / theta^(2 i / dim), i = 0 .. dim / 2 - 1."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.asarray(np.float32(1.0) / np.power(np.float32(theta), exponents), np.float32)


def _dynamic(rope: RopeSpec, p: dict[str, Any], seq_len: int | None) -> Float32:
    """theta grows with the length once it passes the original maximum."""
    original, dim, factor = p["original_max_position_embeddings"], rope.rotary_dim, p["factor"]
    length = max(seq_len or 0, original)
    base = rope.theta * ((factor * length / original) - (factor - 1)) ** (dim / (dim - 2)) if dim > 2 else rope.theta
    return _default(base, dim)


def _llama3(rope: RopeSpec, p: dict[str, Any]) -> Float32:
    """Long wavelengths are divided by factor, short ones kept, those between blended."""
    inv = _default(rope.theta, rope.rotary_dim)
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / inv
    scaled = np.where(wavelength > original / low, inv / np.float32(factor), inv)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * scaled / np.float32(factor) + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return np.asarray(np.where(between, blended, scaled), np.float32)


def _yarn(rope: RopeSpec, p: dict[str, Any]) -> tuple[Float32, float]:
    """High frequencies kept, low ones divided by factor, a linear ramp between; and the attention factor."""
    dim, factor = rope.rotary_dim, p["factor"]
    original = p["original_max_position_embeddings"]
    beta_fast, beta_slow = p.get("beta_fast") or 32, p.get("beta_slow") or 1

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(beta_fast), correction(beta_slow)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.power(np.float32(rope.theta), exponents)
    extrapolation, interpolation = np.float32(1.0) / powers, np.float32(1.0) / (np.float32(factor) * powers)
    keep = 1 - ramp
    inv = interpolation * (1 - keep) + extrapolation * keep
    return np.asarray(inv, np.float32), _yarn_attention_factor(factor, p)


def _yarn_attention_factor(factor: float, p: dict[str, Any]) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return yarn_mscale(factor, p["mscale"]) / yarn_mscale(factor, p["mscale_all_dim"])
    return yarn_mscale(factor, 1)


def yarn_mscale(factor: float, scale: float) -> float:
    """By what q and k are lengthened for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def inv_freq(rope: RopeSpec, seq_len: int | None = None) -> tuple[Float32, float]:
    """Inverse frequencies float32 [rotary_dim / 2] and the attention factor that multiplies cos and sin.

    seq_len matters to "dynamic" alone.
    """
    inv, factor = _by_type(rope, seq_len)
    if rope.divisors:
        inv = np.asarray(inv / np.array(rope.divisors, np.float32), np.float32)
    return inv, factor


def _by_type(rope: RopeSpec, seq_len: int | None) -> tuple[Float32, float]:
    p: dict[str, Any] = dict(rope.parameters)
    if rope.rope_type == "default":
        return _default(rope.theta, rope.rotary_dim), 1.0
    if rope.rope_type == "linear":
        return _default(rope.theta, rope.rotary_dim) / np.float32(p["factor"]), 1.0
    if rope.rope_type == "dynamic":
        return _dynamic(rope, p, seq_len), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, p), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, p)
    raise ValueError(f"rope type {rope.rope_type!r}")  # config.py lets no other through


def q_scale(rope: RopeSpec, start: int, stop: int) -> Float32 | None:
    """What q at positions start .. stop - 1 is multiplied by, float32 [stop - start]; None where it is 1 everywhere.

    1 + beta ln(1 + floor(position / original maximum)), beta = llama_4_scaling_beta.
    """
    p = dict(rope.parameters)
    if "llama_4_scaling_beta" not in p:
        return None
    passed = np.floor(np.arange(start, stop, dtype=np.float32) / np.float32(p["original_max_position_embeddings"]))
    return np.asarray(1 + np.float32(p["llama_4_scaling_beta"]) * np.log(1 + passed), np.float32)


def half_split(rope: RopeSpec, head_dim: int) -> npt.NDArray[np.int64]:
    """Where each dimension of a head with interleaved pairs is on disk, [head_dim]: (2 i, 2 i + 1) become
    (i, i + rotary_dim / 2). q . k stays the same, so that everything behind the files knows one layout."""
    order = np.arange(head_dim)
    order[: rope.rotary_dim] = order[: rope.rotary_dim].reshape(-1, 2).T.reshape(-1)
    return order


def cos_sin(rope: RopeSpec, start: int, stop: int) -> tuple[Float32, Float32]:
    """cos and sin float32 [stop - start, rotary_dim / 2] of positions start .. stop - 1, times the attention factor.

    Angles are float32(position) * inv_freq in float32. For "dynamic", the row of position p past the original maximum
    uses the frequencies of a sequence of p + 1 tokens: what decoding token by token in transformers sees, and the only
    choice that does not depend on how a prompt is cut into chunks.
    """
    positions = np.arange(start, stop, dtype=np.float32)
    inv, factor = inv_freq(rope)
    angles = positions[:, None] * inv[None, :]
    if rope.rope_type == "dynamic":
        original = int(dict(rope.parameters)["original_max_position_embeddings"])
        for position in range(max(start, original), stop):
            angles[position - start] = np.float32(position) * inv_freq(rope, position + 1)[0]
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def tables(rope: RopeSpec, positions: int) -> tuple[Float32, Float32 | None]:
    """What the core needs of positions 0 .. positions - 1: [cos | sin] float32 [positions, rotary_dim], and q_scale."""
    joined = np.concatenate(cos_sin(rope, 0, positions), axis=1)
    return np.ascontiguousarray(joined, np.float32), q_scale(rope, 0, positions)
