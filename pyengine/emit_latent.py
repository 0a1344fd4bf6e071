"""Stage 4, emit_latent: the ops of multi-head latent attention in absorbed form.

Per head, q . (W_UK latent) = (W_UK^T q) . latent and sum(weights * W_UV latent) = W_UV sum(weights * latent): so the
cache keeps [latent | rotary key] once a token, and the attention is that of one KV head which all query heads share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._core import OpKind, Stage
from pyengine.pack_layer import LayerWeights
from pyengine.spec import LayerSpec, MLASpec

if TYPE_CHECKING:
    from pyengine.decoder import Builder


def emit_latent_attention(b: Builder, layer: LayerSpec, a: MLASpec, w: LayerWeights, norm: int) -> int:
    """Attention up to, not including, o_proj, of what a branch reads; the buffer [heads * v_head_dim] of its result."""
    i, stage, heads = layer.index, Stage.ATTENTION, a.num_heads
    group, place = b.layout.groups[i]
    cache = {"heads": heads, "kv_heads": 1, "head_dim": a.k_dim, "kv_group": group, "kv_layer": place}
    rope = b.layout.ropes[a.rope]
    x = b.quantized(norm, "norm", Stage.NORM, i)
    source, q = x, b.buffer("q", heads * a.head_dim)
    if a.q_lora_rank is not None:
        q_a, q_latent = b.buffer("q_a", a.q_lora_rank), b.buffer("q_latent", a.q_lora_rank)
        b.emit(OpKind.LINEAR, stage, i, input=x, output=q_a, weight=w.q_a, bias=w.q_a_bias)
        b.emit(OpKind.NORM, Stage.NORM, i, input=q_a, output=q_latent, norm=w.q_a_norm, eps=a.latent_eps)
        b.tap(i, "q_latent", q_latent, Stage.NORM)
        source = b.quantized(q_latent, "q_latent", Stage.NORM, i)
    b.emit(OpKind.LINEAR, stage, i, input=source, output=q, weight=w.q)
    latent = b.buffer("latent", a.k_dim)
    b.emit(OpKind.LINEAR, stage, i, input=x, output=latent, weight=w.kv_a, bias=w.kv_a_bias)
    b.emit(OpKind.LATENT_APPEND, stage, i, input=latent, norm=w.kv_a_norm, eps=a.latent_eps, rope=rope, **cache)
    absorbed, values = b.buffer("q_absorbed", heads * a.k_dim), b.buffer("latent_values", heads * a.v_dim)
    attended = b.buffer("attended", a.width)
    fields = {"heads": heads, "head_dim": a.head_dim, "rope": rope}
    b.emit(OpKind.HEAD_LINEAR, stage, i, input=q, output=absorbed, weight=w.k_up, **fields)
    b.emit(OpKind.ATTENTION, stage, i, input=absorbed, output=values, window=a.window or 0, scale=a.scale, **cache)
    fields = {"heads": heads, "head_dim": a.v_dim}
    b.emit(OpKind.HEAD_LINEAR, stage, i, input=values, output=attended, weight=w.v_up, **fields)
    return attended
