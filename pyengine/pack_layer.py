"""Stage 3, pack_layer: the tensors of one layer, read and packed.

q, k and v become one tensor [q | k | v], each part from a panel border; gate and up one tensor whose panels of 16 rows
alternate gate0, up0, gate1, up1 ..., so that one pass over it gives both sums of the same neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine._core import Format
from pyengine.checkpoint import as_float32
from pyengine.packer import PANEL, Packer, padded
from pyengine.quantize import PackedFormat
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, MLASpec, MoESpec
from pyengine.tensors import CanonicalTensors, layer_tensors

NONE = -1  # the id of a tensor that is not there

Raw = dict[str, npt.NDArray[Any]]  # by short name: "q_proj.weight", "input_layernorm.weight" ...
Importance = Mapping[
    str, npt.NDArray[np.float32]
]  # E[x^2] of the input channels by matrix: "qkv", "o", "gate_up", "down"


@dataclass(frozen=True)
class QkvLayout:
    """Columns of [q | k | v], the output of the joined projection."""

    k: int
    v: int
    width: int

    @classmethod
    def of(cls, a: AttentionSpec) -> QkvLayout:
        k = padded(a.num_heads * a.head_dim)
        v = k + padded(a.num_kv_heads * a.head_dim)
        return cls(k, v, v + a.num_kv_heads * a.head_dim)


@dataclass
class LayerWeights:
    """Tensor ids of one layer; NONE where the layer has no such tensor."""

    attn_norm: int = NONE
    attn_norm_bias: int = NONE
    qkv: int = NONE
    o: int = NONE
    attn_post_norm: int = NONE
    attn_post_norm_bias: int = NONE
    ffn_norm: int = NONE
    ffn_norm_bias: int = NONE
    gate_up: int = NONE
    down: int = NONE
    ffn_post_norm: int = NONE
    ffn_post_norm_bias: int = NONE
    qkv_bias: int = NONE
    o_bias: int = NONE
    q_norm: int = NONE
    k_norm: int = NONE
    gate_up_bias: int = NONE
    down_bias: int = NONE
    router: int = NONE  # layers of experts: gate_up and down hold all of them, one behind the other
    router_bias: int = NONE
    shared_gate_up: int = NONE
    shared_down: int = NONE
    shared_gate_up_bias: int = NONE
    shared_down_bias: int = NONE
    shared_gate: int = NONE
    # of latent attention: to the latent of q and its norm, to q, to [latent | key] of k and v and the latent's norm;
    # by head from q to the latent's columns, and from the latent to v
    q_a: int = NONE
    q_a_bias: int = NONE
    q_a_norm: int = NONE
    q: int = NONE
    kv_a: int = NONE
    kv_a_bias: int = NONE
    kv_a_norm: int = NONE
    k_up: int = NONE
    v_up: int = NONE

    def matrices(self) -> list[int]:
        """Quantized or split by head: all but the router."""
        attention = (self.qkv, self.q_a, self.q, self.kv_a, self.k_up, self.v_up, self.o)
        every = (*attention, self.gate_up, self.down, self.shared_gate_up, self.shared_down)
        return [tensor for tensor in every if tensor != NONE]


def read_layer(source: CanonicalTensors, layer: LayerSpec) -> Raw:
    """The tensors of a layer as stored, by the canonical name behind `model.layers.<n>.`."""
    names = layer_tensors(source.spec, layer)
    wanted = [name for name in names if not name.startswith("mlp.experts.")]
    return {name: source.read(f"model.layers.{layer.index}.{name}") for name in wanted}


def read_expert(source: CanonicalTensors, layer: LayerSpec, index: int) -> Raw:
    """One expert's matrices as stored: gate_proj.weight, up_proj.weight, down_proj.weight."""
    names = [f"{side}_proj.weight" for side in ("gate", "up", "down")]
    return {name: source.read(f"model.layers.{layer.index}.mlp.experts.{index}.{name}") for name in names}


def pack_expert(
    packer: Packer, layer: LayerSpec, w: LayerWeights, index: int, raw: Raw, importance: Importance
) -> None:
    """Pack an expert into its panels of w.gate_up and w.down."""
    prefix = f"model.layers.{layer.index}.mlp.experts.{index}."
    inter, hidden = (padded(len(raw[name])) // PANEL for name in ("gate_proj.weight", "down_proj.weight"))
    for tensor, name, offset, stride, key in (
        (w.gate_up, "gate_proj.weight", 2 * index * inter, 2, "gate_up"),
        (w.gate_up, "up_proj.weight", 2 * index * inter + 1, 2, "gate_up"),
        (w.down, "down_proj.weight", index * hidden, 1, "down"),
    ):
        packer.fill(tensor, prefix + name, raw[name], offset, stride, importance.get(key))


def layer_weights(layer: LayerSpec, raw: Raw) -> int:
    """Weights of a layer's matrices, experts included and the router not. raw: as read_layer gives it."""
    routers = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
    count = sum(tensor.size for name, tensor in raw.items() if tensor.ndim == 2 and name not in routers)
    if isinstance(layer.ffn, MoESpec):
        expert, hidden = layer.ffn.expert, len(raw["self_attn.o_proj.weight"])
        count += layer.ffn.router.num_experts * (3 if expert.gated else 2) * expert.intermediate_size * hidden
    return count


def pack_router(packer: Packer, f: MoESpec, raw: Raw, prefix: str, w: LayerWeights) -> None:
    """The router and the gate of a shared expert, never quantized."""
    name = "mlp.gate.weight"
    router = PackedFormat(Format.BF16 if raw[name].dtype == np.uint16 else Format.F32)
    w.router = packer.create(router, *raw[name].shape)
    packer.fill(w.router, prefix + name, raw[name])
    if f.router.selection_bias:
        name = "mlp.gate.e_score_correction_bias"
        w.router_bias = packer.row(prefix + name, raw[name])
    if f.shared_gate:
        name = "mlp.shared_expert_gate.weight"
        w.shared_gate = packer.row(prefix + name, raw[name][0])


def first_sides(f: FFNSpec, name: str) -> list[tuple[str, int, int]]:
    """What the first matrix of the FFN `name` is made of: gate and up by turns, or up alone."""
    return [(f"{name}.gate_proj", 0, 2), (f"{name}.up_proj", 1, 2)] if f.gated else [(f"{name}.up_proj", 0, 1)]


def ffn_matrices(
    matrix: Callable[[int, list[tuple[str, int, int]], str], int], f: FFNSpec, hidden: int, name: str, key: str = ""
) -> tuple[int, int]:
    """gate_up and down of the FFN `name`, by `matrix` of pack_layer; `key` begins their names in the importance."""
    rows = 2 * padded(f.intermediate_size) if f.gated else f.intermediate_size
    gate_up = matrix(rows, first_sides(f, name), key + "gate_up")
    return gate_up, matrix(hidden, [(f"{name}.down_proj", 0, 1)], key + "down")


def ffn_biases(
    bias: Callable[[list[tuple[str, int, int]], int], int], f: FFNSpec, hidden: int, name: str
) -> tuple[int, int]:
    """Those of gate_up and down, by `bias` of pack_layer; NONE where there are none."""
    if not f.bias:
        return NONE, NONE
    gate_up = bias(first_sides(f, name), (2 if f.gated else 1) * padded(f.intermediate_size))
    return gate_up, bias([(f"{name}.down_proj", 0, 1)], hidden)


def pack_layer(
    packer: Packer, layer: LayerSpec, raw: Raw, fmt: PackedFormat, importance: Importance, *, experts: bool = True
) -> LayerWeights:
    """Quantize and pack one layer's tensors. Experts get room (not with experts=False), which pack_expert fills."""
    prefix = f"model.layers.{layer.index}."
    a, f = layer.attention, layer.ffn

    def matrix(rows: int, parts: list[tuple[str, int, int]], key: str) -> int:
        cols = raw[parts[0][0] + ".weight"].shape[1]
        tensor = packer.create(fmt, rows, cols)
        for name, offset, stride in parts:
            full = name + ".weight"
            packer.fill(tensor, prefix + full, raw[full], offset, stride, importance.get(key))
        return tensor

    def norm(name: str) -> int:
        return packer.norm(f"{prefix}{name}.weight", raw[name + ".weight"])

    def bias(parts: list[tuple[str, int, int]], size: int) -> int:
        """Parts (name, offset, stride), both in panels, as for `matrix`."""
        placed = []
        for name, offset, stride in parts:
            values = raw[name + ".bias"]
            row = np.arange(len(values))
            placed.append((f"{prefix}{name}.bias", values, (offset + row // PANEL * stride) * PANEL + row % PANEL))
        return packer.vector(placed, padded(size))

    def norm_bias(name: str) -> int:
        full = name + ".bias"
        return packer.row(prefix + full, raw[full]) if full in raw else NONE

    hidden = len(raw["self_attn.o_proj.weight"])
    o = [("self_attn.o_proj", 0, 1)]
    w = LayerWeights()
    if layer.norm_before:
        w.attn_norm, w.attn_norm_bias = norm("input_layernorm"), norm_bias("input_layernorm")
        w.ffn_norm, w.ffn_norm_bias = norm("post_attention_layernorm"), norm_bias("post_attention_layernorm")
    if layer.norm_after:
        w.attn_post_norm, w.attn_post_norm_bias = (
            norm("post_self_attn_layernorm"),
            norm_bias("post_self_attn_layernorm"),
        )
        w.ffn_post_norm, w.ffn_post_norm_bias = norm("post_mlp_layernorm"), norm_bias("post_mlp_layernorm")
    if isinstance(a, MLASpec):
        q, q_a, kv_a = ([(f"self_attn.{name}", 0, 1)] for name in (a.q_name, "q_a_proj", "kv_a_proj_with_mqa"))
        if a.q_lora_rank is not None:
            w.q_a, w.q_a_norm = matrix(a.q_lora_rank, q_a, "qkv"), norm("self_attn.q_a_layernorm")
        w.q = matrix(a.num_heads * a.head_dim, q, "qkv" if a.q_lora_rank is None else "q_b")
        w.kv_a, w.kv_a_norm = matrix(a.k_dim, kv_a, "qkv"), norm("self_attn.kv_a_layernorm")
        w.k_up, w.v_up = pack_heads(packer, prefix, a, raw["self_attn.kv_b_proj.weight"], fmt)
        if a.bias:
            w.kv_a_bias = bias(kv_a, a.k_dim)
            w.q_a_bias = NONE if a.q_lora_rank is None else bias(q_a, a.q_lora_rank)
    else:
        layout = QkvLayout.of(a)
        begins = {"q": 0, "k": layout.k // PANEL, "v": layout.v // PANEL}
        qkv = [(f"self_attn.{name}_proj", begin, 1) for name, begin in begins.items()]
        w.qkv = matrix(layout.width, qkv, "qkv")
        w.qkv_bias = bias(qkv, layout.width) if a.qkv_bias else NONE
        if a.qk_norm:
            w.q_norm, w.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
    w.o = matrix(hidden, o, "o")
    if a.o_bias:
        w.o_bias = bias(o, hidden)
    if isinstance(f, FFNSpec):
        w.gate_up, w.down = ffn_matrices(matrix, f, hidden, "mlp")
        w.gate_up_bias, w.down_bias = ffn_biases(bias, f, hidden, "mlp")
        return w
    pack_router(packer, f, raw, prefix, w)
    if f.shared is not None:
        w.shared_gate_up, w.shared_down = ffn_matrices(matrix, f.shared, hidden, "mlp.shared_expert", "shared_")
        w.shared_gate_up_bias, w.shared_down_bias = ffn_biases(bias, f.shared, hidden, "mlp.shared_expert")
    if experts:
        count, inter = f.router.num_experts, f.expert.intermediate_size
        w.gate_up = packer.create(fmt, 2 * count * padded(inter), hidden)
        w.down = packer.create(fmt, count * padded(hidden), inter)
    return w


def pack_heads(packer: Packer, prefix: str, a: MLASpec, raw: npt.NDArray[Any], fmt: PackedFormat) -> tuple[int, int]:
    """kv_b_proj [heads * (nope + v), rank] as two tensors of one small matrix a head, each from a panel border.

    W_UK transposed, [rank, nope], takes the first part of q to the latent's columns; W_UV [v, rank] takes the latent to
    v. Their inputs are float: they stay float32 under f32, and are bfloat16 otherwise.
    """
    name = prefix + "self_attn.kv_b_proj.weight"
    packer.check_not_zero(name, raw)
    if not np.isfinite(as_float32(raw)).all():
        raise packer.not_finite(name, raw)
    nope, rank = a.qk_nope_head_dim, a.kv_lora_rank
    heads = raw.reshape(a.num_heads, nope + a.v_head_dim, rank)
    kind = PackedFormat(Format.F32 if fmt.format == Format.F32 else Format.BF16)
    k_up = packer.create(kind, a.num_heads * padded(rank), nope)
    v_up = packer.create(kind, a.num_heads * padded(a.v_head_dim), rank)
    for h, head in enumerate(heads):
        packer.pack(k_up, name, np.ascontiguousarray(head[:nope].T), h * padded(rank) // PANEL, 1, None)
        packer.pack(v_up, name, head[nope:], h * padded(a.v_head_dim) // PANEL, 1, None)
    return k_up, v_up
