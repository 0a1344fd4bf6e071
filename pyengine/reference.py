"""Stage 4, reference: the same decoder in plain numpy, the oracle of the kernel tests and the text to learn from.

One decoder layer is `ReferenceModel.layer`; everything it calls is a short function of this file. All arrays are
[tokens, features] unless a docstring says otherwise; weights are [N, K] (output features, input features) as on disk.
With dtype=float64 every product, sum and exponential is float64; only the RoPE tables stay float32-valued, because the
models were trained with float32 angles (rope.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyengine import reference_moe, rope
from pyengine.balance import key_factors
from pyengine.config import load_model_spec
from pyengine.errors import RequestError
from pyengine.gguf_checkpoint import open_checkpoint
from pyengine.hooks import NEVER, Hooks, check_hooks
from pyengine.reference_latent import latent_qkv
from pyengine.spec import FFNSpec, LayerSpec, MLASpec, ModelSpec, MoESpec, NormSpec
from pyengine.tensors import CanonicalTensors, check_tensors, settle_head

Array = NDArray[Any]
QUERY_BLOCK = 128  # queries whose scores are held at once: memory grows with T, not with T squared


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; x [..., d], weight [d]."""
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight
    return y


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias over the last axis; x [..., d], weight, bias [d]."""
    centred = x - x.mean(axis=-1, keepdims=True)
    y = rms_norm(centred, weight, eps)
    return y if bias is None else y + bias


def normalize(x: Array, spec: NormSpec, weight: Array, bias: Array | None = None) -> Array:
    """The norm that `spec` describes over the last axis of x; `weight` and `bias` [d] as stored."""
    if spec.plus_one:
        weight = 1 + weight
    return layer_norm(x, weight, bias, spec.eps) if spec.kind == "layer" else rms_norm(x, weight, spec.eps)


def softmax(x: Array) -> Array:
    """exp(x) / sum(exp(x)) over the last axis; the maximum is taken off first, so nothing overflows."""
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


def silu(x: Array) -> Array:
    """x * sigmoid(x), from exp(-|x|) so that no exponential overflows."""
    e = np.exp(-np.abs(x))
    y: Array = x * np.where(x >= 0, 1, e) / (1 + e)
    return y


def gelu(x: Array) -> Array:
    """x Phi(x), Phi the normal distribution: with erf."""
    return np.asarray(x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))).astype(x.dtype)


def gelu_tanh(x: Array) -> Array:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    u = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
    y: Array = x.dtype.type(0.5) * x * (1 + np.tanh(u))
    return y


def relu(x: Array) -> Array:
    y: Array = np.maximum(x, 0)
    return y


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu}


def capped(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap); x itself where cap is None."""
    return x if cap is None else np.asarray(np.tanh(x / x.dtype.type(cap)) * x.dtype.type(cap))


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x [T, heads, head_dim] by the angles of cos, sin [T, rotary_dim / 2].

    Half-split: dimension i pairs with i + rotary_dim / 2; dimensions from rotary_dim on pass through.
    """
    half = cos.shape[1]
    cos, sin = cos[:, None, :].astype(x.dtype), sin[:, None, :].astype(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attention(
    q: Array, k: Array, v: Array, scale: float, start: int, window: int | None = None, softcap: float | None = None
) -> Array:
    """Causal softmax attention with grouped KV heads.

    q [T, heads, d] at positions start .. start + T; k [start + T, kv_heads, d] and v [start + T, kv_heads, dv] at
    positions 0 on; heads is a multiple of kv_heads, and query head h reads KV head h // (heads / kv_heads). A query at
    position p sees the keys max(0, p - window + 1) .. p. softcap: as in AttentionSpec.
    Returns [T, heads * dv].
    """
    tokens, heads, _ = q.shape
    keys, kv_heads = k.shape[:2]
    out = np.empty((tokens, heads, v.shape[2]), q.dtype)
    for begin in range(0, tokens, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, tokens)
        low = 0 if window is None else max(0, start + begin - window + 1)
        high = min(keys, start + end)
        age = np.arange(start + begin, start + end)[:, None] - np.arange(low, high)  # [block, keys], 0 = itself
        hidden = (age < 0) if window is None else (age < 0) | (age >= window)
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = capped(q[begin:end, h] @ k[low:high, g].T * q.dtype.type(scale), softcap)
            scores[hidden] = -np.inf
            out[begin:end, h] = softmax(scores) @ v[low:high, g]
    return out.reshape(tokens, -1)


def swiglu_ffn(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """down @ (silu(gate @ x) * (up @ x)) for every row of x [T, d]; gate, up [d_ff, d]; down [d, d_ff]."""
    y: Array = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    return y


def ffn(x: Array, up: Array, down: Array, up_bias: Array | None, down_bias: Array | None, activation: str) -> Array:
    """down @ act(up @ x + up_bias) + down_bias for every row of x [T, d]; up [d_ff, d]; down [d, d_ff]."""
    h = x @ up.T if up_bias is None else x @ up.T + up_bias
    y: Array = ACTIVATIONS[activation](h) @ down.T
    return y if down_bias is None else y + down_bias


def round_bf16(x: Array) -> Array:
    """x rounded to bfloat16, nearest even, in the dtype of x; finite input."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return rounded.view(np.float32).astype(x.dtype)


def round_int8(x: Array) -> Array:
    """x [..., head_dim] as an int8 KV cache holds it: -127 .. 127 times max |x| / 127 of the head, nearest even."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint(x * np.where(largest > 0, x.dtype.type(127) / largest, 0))
    y: Array = q * (largest / x.dtype.type(127))
    return y


KV_ROUNDING: dict[str, Callable[[Array], Array]] = {"f32": np.asarray, "bf16": round_bf16, "int8": round_int8}


class ReferenceCache:
    """Keys and values of the tokens seen: per layer two arrays [tokens, kv_heads, head_dim], keys already rotated.

    kv_dtype: "f32" keeps them as they are; "bf16" and "int8" round them when they are appended, "int8" after the
    channels of k were balanced (balance.py).
    """

    def __init__(self, kv_dtype: str = "f32") -> None:
        if kv_dtype not in KV_ROUNDING:
            raise RequestError(f"KV dtype {kv_dtype!r}; expected one of {', '.join(KV_ROUNDING)}")
        self.kv_dtype = kv_dtype
        self.layers: dict[int, tuple[Array, Array]] = {}
        self.length = 0

    def append(self, layer: int, k: Array, v: Array, factors: Array | None = None) -> tuple[Array, Array]:
        """Append k and v [T, kv_heads, head_dim] to a layer; returns all keys and all values of it.

        factors [kv_heads, head_dim]: what k is divided by while an int8 cache rounds it.
        """
        rounded = KV_ROUNDING[self.kv_dtype]
        k = rounded(k) if factors is None or self.kv_dtype != "int8" else rounded(k / factors) * factors
        v = rounded(v)
        if layer in self.layers:
            k, v = (np.concatenate([old, new]) for old, new in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = (k, v)
        return k, v


class ReferenceModel:
    """A decoder computed from its ModelSpec and its weights by canonical name (tensors.py).

    Weights may be of any float dtype; each is converted to `dtype` where it is used, so a float64 run of a float32
    model does not hold a second copy of it.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Array], dtype: Any = np.float32) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = np.dtype(dtype)

    def weight(self, name: str) -> Array:
        return np.asarray(self.weights[name]).astype(self.dtype, copy=False)

    def linear(self, x: Array, name: str, bias: bool = False) -> Array:
        """x [T, K] times `<name>.weight` [N, K] transposed, plus `<name>.bias` [N]: [T, N]."""
        y: Array = x @ self.weight(name + ".weight").T
        return y + self.weight(name + ".bias") if bias else y

    def norm(self, x: Array, name: str) -> Array:
        bias = self.weight(name + ".bias") if name + ".bias" in self.weights else None
        return normalize(x, self.spec.norm, self.weight(name + ".weight"), bias)

    def forward(
        self,
        ids: Sequence[int] | Array,
        start: int = 0,
        cache: ReferenceCache | None = None,
        taps: dict[str, list[Array]] | None = None,
        ffn_skip: Collection[int] = (),
        neuron_mask: Mapping[int, Sequence[int] | Array] | None = None,
        expert_mask: Mapping[int, Sequence[int] | Array] | None = None,
    ) -> Array:
        """Logits [T, vocab_size] of the tokens `ids` [T] at positions start, start + 1, ...

        cache: holds exactly the `start` tokens before; extended by these. Without one, start must be 0.
        taps: filled with one array [T, features] per layer under "attn_norm", "attention" (input of o_proj),
            "ffn_norm", "act" (input of down_proj) and "hidden" (the layer's output). A skipped FFN leaves no "ffn_norm"
            or "act": its entry is an array of zero rows.
        ffn_skip: layers whose FFN adds nothing.
        neuron_mask: layer -> indices of the FFN's neurons held at zero.
        expert_mask: layer -> experts that no token goes to.
        Raises RequestError for an id outside the vocabulary, no ids, a start the cache does not match, or a hook on a
        layer, neuron or expert that is not there.
        """
        masks: dict[int, Sequence[int] | Array] = {**(neuron_mask or {}), **(expert_mask or {})}
        hooks = Hooks((), frozenset(ffn_skip), neuron_mask or {}, expert_mask or {})
        check_hooks(self.spec, hooks)
        ids = np.asarray(ids, dtype=np.int64)
        if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= self.spec.vocab_size:
            raise RequestError(f"token ids {ids.shape}: expected a non-empty list of 0 .. {self.spec.vocab_size - 1}")
        cache = ReferenceCache() if cache is None else cache
        if start != cache.length:
            raise RequestError(f"start {start}: expected {cache.length}, the number of tokens in the cache")
        x = np.asarray(self.weights["model.embed_tokens.weight"])[ids].astype(self.dtype)
        x = x * self.dtype.type(self.spec.embedding_scale)
        if self.spec.learned_positions:
            if start + len(ids) > self.spec.learned_positions:
                last = start + len(ids) - 1
                raise RequestError(
                    f"position {last}; expected 0 to {self.spec.learned_positions - 1}, the learned ones"
                )
            x = x + self.weight("model.embed_positions.weight")[start : start + len(ids)]
        for layer in self.spec.layers:
            x = self.layer(x, layer, start, cache, taps, layer.index in ffn_skip, masks.get(layer.index))
        cache.length += len(ids)
        x = self.norm(x, "model.norm")
        logits = self.linear(x, "model.embed_tokens" if self.spec.tie_word_embeddings else "lm_head")
        logits /= self.dtype.type(self.spec.logits_scale)
        return capped(logits, self.spec.logits_softcap)

    def layer(
        self,
        x: Array,
        layer: LayerSpec,
        start: int,
        cache: ReferenceCache,
        taps: dict[str, list[Array]] | None = None,
        skip_ffn: bool = False,
        masked: Sequence[int] | Array | None = None,
    ) -> Array:
        """One decoder layer: x += scale attention(norm(x)); x += scale ffn(norm(x)), scale = residual_scale.

        Norms stand before the branches, after them, or both.
        """
        scale = self.dtype.type(self.spec.residual_scale)

        def before(x: Array, name: str) -> Array:
            return self.norm(x, prefix + name) if layer.norm_before else x

        def after(branch: Array, name: str) -> Array:
            return self.norm(branch, prefix + name) if layer.norm_after else branch

        prefix = f"model.layers.{layer.index}."
        seen: dict[str, Array] = {}
        seen["attn_norm"] = before(x, "input_layernorm")
        seen["attention"] = self.attend(seen["attn_norm"], layer, start, cache)
        branch = self.linear(seen["attention"], prefix + "self_attn.o_proj", layer.attention.o_bias)
        x = x + scale * after(branch, "post_self_attn_layernorm")
        if not skip_ffn:
            seen["ffn_norm"] = before(x, "post_attention_layernorm")
            branch = self.ffn(seen["ffn_norm"], layer.ffn, prefix + "mlp.", seen, masked)
            x = x + scale * after(branch, "post_mlp_layernorm")
        seen["hidden"] = x
        if taps is not None:
            widths = {"ffn_norm": self.spec.hidden_size, "act": act_width(layer.ffn)}
            for point in ("attn_norm", "attention", "ffn_norm", "act", "hidden"):
                value = seen[point] if point in seen else np.empty((0, widths[point]), self.dtype)
                taps.setdefault(point, []).append(value)
        return x

    def ffn(
        self,
        x: Array,
        spec: FFNSpec | MoESpec,
        prefix: str,
        seen: dict[str, Array],
        masked: Sequence[int] | Array | None = None,
    ) -> Array:
        """The FFN's branch [T, hidden_size]; `seen` gets "act" [T, intermediate_size], of experts the chosen ones'.

        masked: neurons held at zero, or experts that no token goes to.
        """
        if isinstance(spec, FFNSpec):
            seen["act"] = self.activated(x, spec, prefix)
            if masked is not None:
                seen["act"][:, np.asarray(masked, dtype=np.int64)] = 0
            return self.linear(seen["act"], prefix + "down_proj", spec.bias)
        bias = self.weight(prefix + "gate.e_score_correction_bias") if spec.router.selection_bias else None
        if masked is not None:
            bias = np.zeros(spec.router.num_experts, x.dtype) if bias is None else bias.copy()
            bias[np.asarray(masked, dtype=np.int64)] = NEVER
        ids, weights = reference_moe.route(self.linear(x, prefix + "gate"), spec.router, bias)
        acts = np.zeros((*ids.shape, spec.expert.intermediate_size), x.dtype)

        def expert(index: int, rows: Array) -> Array:
            name = f"{prefix}experts.{index}."
            act = acts[ids == index] = self.activated(rows, spec.expert, name)
            return self.linear(act, name + "down_proj")

        y = reference_moe.weighted_sum(x, ids, weights, expert)
        seen["act"] = acts.reshape(len(x), -1)
        if spec.shared is not None:
            shared = self.ffn(x, spec.shared, prefix + "shared_expert.", {})
            if spec.shared_gate:
                shared = shared * reference_moe.scores_of(self.linear(x, prefix + "shared_expert_gate"), "sigmoid")
            y = y + shared
        return y

    def attend(self, x: Array, layer: LayerSpec, start: int, cache: ReferenceCache) -> Array:
        """Attention up to, not including, o_proj: x [T, hidden_size] to [T, width]."""
        spec = layer.attention
        if isinstance(spec, MLASpec):
            q, k, v = latent_qkv(self, x, spec, layer.index, start, cache)
            return attention(q, k, v, spec.scale, start)
        prefix = f"model.layers.{layer.index}.self_attn."
        q, k, v = (self.linear(x, prefix + name, spec.qkv_bias) for name in ("q_proj", "k_proj", "v_proj"))
        if spec.qk_norm == "whole":
            q, k = self.norm(q, prefix + "q_norm"), self.norm(k, prefix + "k_norm")
        q, k, v = (y.reshape(len(x), -1, spec.head_dim) for y in (q, k, v))
        if spec.qk_norm == "head":  # before the rotation
            q, k = self.norm(q, prefix + "q_norm"), self.norm(k, prefix + "k_norm")
        if spec.rope is not None:
            cos, sin = rope.cos_sin(spec.rope, start, start + len(x))
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            by_position = rope.q_scale(spec.rope, start, start + len(x))
            q = q if by_position is None else q * by_position[:, None, None].astype(q.dtype)
        balanced = spec.qkv_bias and not spec.qk_norm
        factors = key_factors(spec, self.weight(prefix + "k_proj.bias")).astype(x.dtype) if balanced else None
        k, v = cache.append(layer.index, k, v, factors)
        return attention(q, k, v, spec.scale, start, spec.window, spec.softcap)

    def activated(self, x: Array, spec: FFNSpec, prefix: str) -> Array:
        """act(gate(x)) * up(x), or act(up(x)): the intermediate [T, intermediate_size] that down_proj reads."""
        up, act = self.linear(x, prefix + "up_proj", spec.bias), ACTIVATIONS[spec.activation]
        return act(self.linear(x, prefix + "gate_proj", spec.bias)) * up if spec.gated else act(up)


def act_width(spec: FFNSpec | MoESpec) -> int:
    """Columns of the tap "act"."""
    if isinstance(spec, MoESpec):
        return spec.router.top_k * spec.expert.intermediate_size
    return spec.intermediate_size


def load_reference(folder: Path | str, dtype: Any = np.float32) -> ReferenceModel:
    """Read a model folder or GGUF file whole into float32 and return its ReferenceModel computing in `dtype`."""
    folder = Path(folder)
    spec = load_model_spec(folder)
    with open_checkpoint(folder) as checkpoint:
        spec = settle_head(spec, checkpoint)
        check_tensors(spec, checkpoint.tensors, folder)
        tensors = CanonicalTensors(checkpoint, spec)
        weights = {name: tensors.read_float32(name) for name in tensors.tensors}
        checkpoint.verify_unchanged()
    return ReferenceModel(spec, weights, dtype)
