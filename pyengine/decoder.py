"""Stage 4, decoder: a ModelSpec and its packed weights -> the list of ops that the core runs: the model, to read.

`emit_layer` is one decoder block in plain, unfused ops; fuse.py joins what stands together. A tap or a mask is an op
between others: where it looks at something that fusion would hide, the ops around it simply stay apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine._core import Activation, Backend, Format, GroupScore, Norm, OpKind, Program, Scoring, Stage
from pyengine.emit_latent import emit_latent_attention
from pyengine.errors import RequestError, UnsupportedModelError
from pyengine.fuse import fuse
from pyengine.hooks import NEVER, Hooks, check_hooks
from pyengine.pack_layer import NONE, LayerWeights, QkvLayout
from pyengine.packer import padded
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, MLASpec, ModelSpec, MoESpec, RopeSpec, RouterSpec
from pyengine.weights import ModelWeights

Op = dict[str, Any]  # the fields of pe_op (csrc/include/pyengine.h)

NORMS = {"rms": Norm.RMS_NORM, "layer": Norm.LAYER_NORM}
ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
SCORINGS = {"softmax": Scoring.SOFTMAX, "sigmoid": Scoring.SIGMOID}
GROUP_SCORES = {"max": GroupScore.MAX, "top2_sum": GroupScore.TOP2_SUM}


@dataclass(frozen=True)
class KvLayout:
    """KV groups of the core by layer: (group, layer inside the group), and rope tables by RopeSpec."""

    groups: tuple[tuple[int, int], ...]
    ropes: Mapping[RopeSpec, int]


class Builder:
    """Collects ops and buffers; buffers are named, and made on first use."""

    def __init__(self, backend: Backend, spec: ModelSpec, integer: bool, layout: KvLayout, hooks: Hooks) -> None:
        self.backend = backend
        self.spec = spec
        self.integer = integer  # whether the layers' matrices take int8 activations
        self.layout = layout
        self.hooks = hooks
        self.ops: list[Op] = []
        self.buffers: list[tuple[bool, int, int]] = []  # int8 or not, width, rows of a token
        self.names: dict[tuple[str, bool, int, int], int] = {}
        self.masks: list[int] = []
        self.tap_widths: list[int] = []

    def buffer(self, name: str, width: int, quantized: bool = False, rows: int = 1) -> int:
        """rows: of each token."""
        key = (name, quantized, width, rows)
        if key not in self.names:
            self.names[key] = len(self.buffers)
            self.buffers.append((quantized, width, rows))
        return self.names[key]

    def emit(self, kind: OpKind, stage: Stage, layer: int, **fields: Any) -> None:
        self.ops.append({"kind": int(kind), "stage": int(stage), "layer": layer, **fields})

    def norm_fields(self, weight: int, bias: int) -> Op:
        """Fields of an op that normalizes."""
        spec = self.spec.norm
        return {"norm": weight, "norm_bias": bias, "norm_kind": int(NORMS[spec.kind]), "eps": spec.eps}

    def enter(self, layer: LayerSpec, x: int, weight: int, bias: int) -> int:
        """The buffer that a branch reads: the norm of x, or x itself."""
        if not layer.norm_before:
            return x
        out = self.buffer("norm", self.spec.hidden_size)
        fields = self.norm_fields(weight, bias)
        self.emit(OpKind.NORM, Stage.NORM, layer.index, input=x, output=out, **fields)
        return out

    def leave(self, layer: LayerSpec, branch: int, x: int, weight: int, bias: int, stage: Stage) -> None:
        """x += branch, or its norm."""
        if layer.norm_after:
            fields = self.norm_fields(weight, bias)
            self.emit(OpKind.NORM, Stage.NORM, layer.index, input=branch, output=branch, **fields)
        self.emit(OpKind.ADD, stage, layer.index, input=branch, output=x, scale=self.spec.residual_scale)

    def quantized(self, source: int, name: str, stage: Stage, layer: int) -> int:
        """The buffer a matrix reads: `source` itself for float weights, its int8 form otherwise."""
        if not self.integer:
            return source
        _, width, rows = self.buffers[source]
        out = self.buffer(name, width, quantized=True, rows=rows)
        self.emit(OpKind.QUANTIZE, stage, layer, input=source, output=out)
        return out

    def tap(self, layer: int, name: str, source: int, stage: Stage) -> None:
        if (layer, name) not in self.hooks.taps:
            return
        index = self.hooks.taps.index((layer, name))
        while len(self.tap_widths) < len(self.hooks.taps):
            self.tap_widths.append(0)
        self.tap_widths[index] = self.buffers[source][1] * self.buffers[source][2]
        self.emit(OpKind.TAP, stage, layer, input=source, head_dim=index)

    def mask(self, layer: int, buffer: int, width: int) -> None:
        neurons = self.hooks.neuron_mask.get(layer)
        if not neurons:
            return
        keep = np.ones(width, np.float32)
        keep[list(neurons)] = 0
        self.emit(OpKind.MASK_COLUMNS, Stage.FFN, layer, output=buffer, norm=self.mask_vector(keep))

    def mask_vector(self, values: npt.NDArray[np.float32]) -> int:
        """A tensor that the program alone keeps."""
        tensor = self.backend.tensor_create(int(Format.VECTOR_F32), 1, len(values), 0)
        self.masks.append(tensor)
        self.backend.tensor_pack(tensor, values, 0, 1, None)
        return tensor

    def router_bias(self, layer: int, experts: int, bias: int) -> int:
        """What is added to the scores for the choice: the layer's own bias, or NONE; far less for masked experts."""
        masked = self.hooks.expert_mask.get(layer)
        if not masked:
            return bias
        values = np.zeros(experts, np.float32) if bias == NONE else self.backend.tensor_dequantize(bias)[0]
        values[list(masked)] = NEVER
        return self.mask_vector(values)


def emit_ffn(
    b: Builder,
    i: int,
    f: FFNSpec,
    f_in: int,
    gate_up: int,
    down: int,
    gate_up_bias: int = NONE,
    down_bias: int = NONE,
    act_tap: str = "act",
) -> int:
    """An FFN of what `f_in` holds; the buffer of its result. gate_up: up alone where there is no gate."""
    inter = f.intermediate_size
    first = b.buffer("gate_up", 2 * padded(inter)) if f.gated else b.buffer("up", inter)
    act, branch = b.buffer("act", inter), b.buffer("branch", b.spec.hidden_size)
    b.emit(OpKind.LINEAR, Stage.FFN, i, input=f_in, output=first, weight=gate_up, bias=gate_up_bias)
    kind = OpKind.ACT_MUL if f.gated else OpKind.ACT
    b.emit(kind, Stage.FFN, i, input=first, output=act, activation=int(ACTIVATIONS[f.activation]))
    b.mask(i, act, inter)
    b.tap(i, act_tap, act, Stage.FFN)
    d_in = b.quantized(act, "act", Stage.FFN, i)
    b.emit(OpKind.LINEAR, Stage.FFN, i, input=d_in, output=branch, weight=down, bias=down_bias)
    return branch


def router_fields(router: RouterSpec) -> dict[str, Any]:
    """The fields of a ROUTER op. RequestError for a scoring or group score that is not there."""
    if router.scoring not in SCORINGS or router.group_score not in GROUP_SCORES:
        raise RequestError(
            f"scoring {router.scoring!r}, group_score {router.group_score!r}; expected one of {', '.join(SCORINGS)} "
            f"and of {', '.join(GROUP_SCORES)}"
        )
    return {
        "experts": router.num_experts,
        "top_k": router.top_k,
        "groups": router.groups,
        "top_groups": router.top_groups,
        "scoring": int(SCORINGS[router.scoring]),
        "group_score": int(GROUP_SCORES[router.group_score]),
        "normalise": int(router.normalise),
        "eps": router.eps,
        "scale": router.scale,
    }


def emit_moe(b: Builder, layer: LayerSpec, f: MoESpec, w: LayerWeights, norm: int, x: int) -> None:
    """x += sum over a token's experts of weight * expert(norm); x += shared expert(norm), times its gate.

    Calibration runs it without the experts, which it has one by one.
    """
    i, r, hidden = layer.index, f.router, b.spec.hidden_size
    if layer.norm_after:
        raise UnsupportedModelError(f"layer {i}: a norm after experts; expected none")
    routing, scores = b.buffer("routing", 2 * r.top_k), b.buffer("scores", r.num_experts)
    ids = {"weight": w.router, "bias": b.router_bias(i, r.num_experts, w.router_bias)}
    b.emit(OpKind.ROUTER, Stage.ROUTER, i, input=norm, output=routing, scratch=scores, **ids, **router_fields(r))
    b.tap(i, "routing", routing, Stage.ROUTER)
    f_in = b.quantized(norm, "norm", Stage.NORM, i)
    if w.gate_up != NONE:
        act, rows = (
            b.buffer("experts_act", f.expert.intermediate_size, rows=r.top_k),
            b.buffer("rows", hidden, rows=r.top_k),
        )
        common = {"experts": r.num_experts, "top_k": r.top_k, "routing": routing, "rows": rows}
        branch, activation = b.buffer("branch", hidden), int(ACTIVATIONS[f.expert.activation])
        b.emit(
            OpKind.MOE_GATE_UP, Stage.FFN, i, input=f_in, output=act, weight=w.gate_up, activation=activation, **common
        )
        b.tap(i, "act", act, Stage.FFN)
        d_in = b.quantized(act, "experts_act", Stage.FFN, i)
        b.emit(OpKind.MOE_DOWN, Stage.FFN, i, input=d_in, output=branch, weight2=w.down, **common)
        b.leave(layer, branch, x, NONE, NONE, Stage.FFN)
    if f.shared is not None:
        biases = w.shared_gate_up_bias, w.shared_down_bias
        branch = emit_ffn(b, i, f.shared, f_in, w.shared_gate_up, w.shared_down, *biases, act_tap="shared_act")
        if f.shared_gate:
            b.emit(OpKind.GATE, Stage.FFN, i, input=norm, output=branch, norm=w.shared_gate)
        b.leave(layer, branch, x, NONE, NONE, Stage.FFN)


def emit_attention(b: Builder, layer: LayerSpec, a: AttentionSpec, w: LayerWeights, norm: int) -> int:
    """Attention up to, not including, o_proj, of what a branch reads; the buffer [heads * head_dim] of its result."""
    i = layer.index
    heads = {"heads": a.num_heads, "kv_heads": a.num_kv_heads, "head_dim": a.head_dim}
    kv_group, kv_layer = b.layout.groups[i]
    kv = {**heads, "kv_group": kv_group, "kv_layer": kv_layer}
    joined, attended = b.buffer("qkv", QkvLayout.of(a).width), b.buffer("attended", a.width)
    q_in = b.quantized(norm, "norm", Stage.NORM, i)
    b.emit(OpKind.LINEAR, Stage.ATTENTION, i, input=q_in, output=joined, weight=w.qkv, bias=w.qkv_bias)
    if a.qk_norm:
        norms = {"norm": w.q_norm, "norm2": w.k_norm, "eps": b.spec.norm.eps}
        b.emit(OpKind.QK_NORM, Stage.ATTENTION, i, input=joined, **norms, **heads)
    if a.rope is not None:
        b.emit(OpKind.ROPE, Stage.ATTENTION, i, input=joined, rope=b.layout.ropes[a.rope], **heads)
    b.emit(OpKind.KV_APPEND, Stage.ATTENTION, i, input=joined, **kv)
    window = {"window": a.window or 0, "scale": a.scale, "softcap": a.softcap or 0.0}
    b.emit(OpKind.ATTENTION, Stage.ATTENTION, i, input=joined, output=attended, **kv, **window)
    return attended


def emit_layer(b: Builder, layer: LayerSpec, w: LayerWeights, x: int) -> None:
    """x += attention(norm(x)); x += ffn(norm(x))."""
    a, f, i, hidden = layer.attention, layer.ffn, layer.index, b.spec.hidden_size
    branch = b.buffer("branch", hidden)
    norm = b.enter(layer, x, w.attn_norm, w.attn_norm_bias)
    b.tap(i, "attn_norm", norm, Stage.NORM)
    if isinstance(a, MLASpec):
        attended = emit_latent_attention(b, layer, a, w, norm)
    else:
        attended = emit_attention(b, layer, a, w, norm)
    b.tap(i, "attention", attended, Stage.ATTENTION)
    o_in = b.quantized(attended, "attended", Stage.ATTENTION, i)
    b.emit(OpKind.LINEAR, Stage.ATTENTION, i, input=o_in, output=branch, weight=w.o, bias=w.o_bias)
    b.leave(layer, branch, x, w.attn_post_norm, w.attn_post_norm_bias, Stage.ATTENTION)

    if i not in b.hooks.ffn_skip:
        norm = b.enter(layer, x, w.ffn_norm, w.ffn_norm_bias)
        b.tap(i, "ffn_norm", norm, Stage.NORM)
        if isinstance(f, MoESpec):
            emit_moe(b, layer, f, w, norm, x)
        else:
            f_in = b.quantized(norm, "norm", Stage.NORM, i)
            branch = emit_ffn(b, i, f, f_in, w.gate_up, w.down, w.gate_up_bias, w.down_bias)
            b.leave(layer, branch, x, w.ffn_post_norm, w.ffn_post_norm_bias, Stage.FFN)
    b.tap(i, "hidden", x, Stage.FFN)


@dataclass
class BuiltProgram:
    """A program of the core with what Python needs to run it and to read its timers."""

    program: Program
    ops: list[Op]
    taps: tuple[tuple[int, str], ...]
    tap_widths: list[int]
    max_batch_tokens: int
    max_sequences: int
    buffers: list[tuple[bool, int, int]] = field(default_factory=list)  # (quantized, width, rows of a token) by id


def build(
    backend: Backend,
    spec: ModelSpec,
    weights: ModelWeights,
    layout: KvLayout,
    *,
    hooks: Hooks | None = None,
    fused: bool = True,
    timed: bool = True,
    max_batch_tokens: int = 512,
    max_sequences: int = 64,
) -> BuiltProgram:
    """The whole model: token ids -> logits and sampled ids."""
    hooks = hooks or Hooks()
    check_hooks(spec, hooks)
    b = Builder(backend, spec, weights.quantization.layers.is_integer, layout, hooks)
    x = b.buffer("x", spec.hidden_size)
    tables = {"weight": weights.embed, "weight2": weights.positions}
    b.emit(OpKind.EMBED, Stage.EMBED, NONE, output=x, **tables, scale=spec.embedding_scale)
    for layer, w in zip(spec.layers, weights.layers, strict=True):
        emit_layer(b, layer, w, x)
    norm = b.norm_fields(weights.final_norm, weights.final_norm_bias)
    head = {"weight": weights.lm_head, "softcap": spec.logits_softcap or 0.0}
    b.emit(OpKind.LM_HEAD, Stage.LM_HEAD, NONE, input=x, **head, **norm)
    b.emit(OpKind.SAMPLE, Stage.SAMPLE, NONE)
    return finish(b, fused=fused, timed=timed, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)


def build_layer(
    backend: Backend, spec: ModelSpec, layer: LayerSpec, w: LayerWeights, layout: KvLayout, hooks: Hooks, tokens: int
) -> BuiltProgram:
    """One layer alone, from a hidden state given in the batch; float weights. Calibration runs it."""
    b = Builder(backend, spec, False, layout, hooks)
    x = b.buffer("x", spec.hidden_size)
    b.emit(OpKind.LOAD_HIDDEN, Stage.EMBED, layer.index, output=x)
    emit_layer(b, layer, w, x)
    return finish(b, fused=True, timed=False, max_batch_tokens=tokens, max_sequences=1)


def build_expert(backend: Backend, spec: ModelSpec, f: FFNSpec, gate_up: int, down: int, tokens: int) -> BuiltProgram:
    """One expert alone, from what it reads, given in the batch; float weights. Taps: its "act" and its result."""
    b = Builder(backend, spec, False, KvLayout((), {}), Hooks(taps=((0, "act"), (0, "hidden"))))
    x = b.buffer("x", spec.hidden_size)
    b.emit(OpKind.LOAD_HIDDEN, Stage.EMBED, 0, output=x)
    b.tap(0, "hidden", emit_ffn(b, 0, f, x, gate_up, down), Stage.FFN)
    return finish(b, fused=True, timed=False, max_batch_tokens=tokens, max_sequences=1)


def finish(b: Builder, *, fused: bool, timed: bool, max_batch_tokens: int, max_sequences: int) -> BuiltProgram:
    ops = fuse(b.ops) if fused else b.ops
    program = Program(b.backend, ops, b.buffers, max_batch_tokens, max_sequences, timed)
    for mask in b.masks:  # the program holds what it uses
        b.backend.tensor_free(mask)
    return BuiltProgram(program, ops, b.hooks.taps, b.tap_widths, max_batch_tokens, max_sequences, b.buffers)
