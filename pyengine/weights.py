"""Stage 3, weights: named tensors of a checkpoint -> packed tensors of the core, layer by layer.

q, k and v become one tensor [q | k | v], each part from a panel border; gate and up one tensor whose panels of 16 rows
alternate gate0, up0, gate1, up1 ..., so that one pass over it gives both sums of the same neuron. At any time at most
one layer's raw tensors (or a part of the embedding or the head) are held beside what is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyengine._core import Backend, Format
from pyengine.checkpoint import Checkpoint, as_float32
from pyengine.errors import ModelFormatError
from pyengine.quantize import PackedFormat, Quantization
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, ModelSpec, MoESpec
from pyengine.tensors import CanonicalTensors, layer_tensors

PANEL = 16
CHUNK_BYTES = 32 << 20  # of the embedding and the head, as float32, read at a time
NONE = -1  # the id of a tensor that is not there

Raw = dict[str, npt.NDArray[Any]]  # by short name: "q_proj.weight", "input_layernorm.weight" ...
Importance = Mapping[
    str, npt.NDArray[np.float32]
]  # E[x^2] of the input channels by matrix: "qkv", "o", "gate_up", "down"
Progress = Callable[[int, int, str], None]
Prepare = Callable[[LayerSpec, Raw], Raw]  # changes the raw tensors of a layer before they are packed
TensorDesc = tuple[int, int, int, int]  # format, rows, cols, group size


class Observer(Protocol):
    """Calibration as the loader sees it: called with each layer's raw tensors in order, then asked for the head's."""

    def __call__(self, layer: LayerSpec, raw: Raw) -> Importance: ...

    def expert(self, layer: LayerSpec, index: int, raw: Raw) -> Importance: ...

    def head_importance(self) -> npt.NDArray[np.float32]: ...


def padded(n: int) -> int:
    """n rounded up to whole panels."""
    return -(-n // PANEL) * PANEL


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

    qkv: int
    o: int
    gate_up: int  # up alone where the FFN has no gate
    down: int
    attn_norm: int = NONE
    attn_norm_bias: int = NONE
    attn_post_norm: int = NONE
    attn_post_norm_bias: int = NONE
    ffn_norm: int = NONE
    ffn_norm_bias: int = NONE
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
    shared_gate: int = NONE


@dataclass
class ModelWeights:
    """Tensor ids of a model, and what they take."""

    embed: int
    lm_head: int  # the same id as embed where they are tied
    final_norm: int
    final_norm_bias: int
    positions: int  # of learned positions
    layers: list[LayerWeights]
    quantization: Quantization
    tensors: dict[int, TensorDesc] = field(default_factory=dict)  # all of them, in the order they were made
    layer_matrix_bytes: int = 0  # packed matrices inside the layers, headers not counted
    layer_matrix_weights: int = 0
    chosen_experts: list[tuple[int, int]] = field(default_factory=list)  # by layer: a token's, of how many; dense: 1, 1
    decode_matrix_bytes: int = 0  # of the layers' matrices, what one token needs; routers count here alone
    head_bytes: int = 0
    packed_bytes: int = 0  # everything
    warnings: list[str] = field(default_factory=list)
    cached: bool = False  # mapped from what an earlier load left on disk

    def count_bytes(self, backend: Backend) -> None:
        """Fill in the sizes, from the tensors."""

        def size(*tensors: int) -> int:
            return sum(backend.tensor_size(tensor) - 64 for tensor in tensors if tensor != NONE)

        self.layer_matrix_bytes = self.decode_matrix_bytes = 0
        for w, (chosen, of) in zip(self.layers, self.chosen_experts, strict=True):
            always, ffn = size(w.qkv, w.o, w.shared_gate_up, w.shared_down), size(w.gate_up, w.down)
            self.layer_matrix_bytes += always + ffn
            self.decode_matrix_bytes += always + ffn // of * chosen + size(w.router)
        self.head_bytes = backend.tensor_size(self.lm_head) - 64
        self.packed_bytes = sum(backend.tensor_size(tensor) for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Of the matrices inside the layers, scales and padding included."""
        return 8.0 * self.layer_matrix_bytes / self.layer_matrix_weights

    @property
    def bytes_per_token(self) -> int:
        """What one decode step reads: of all layers what a token needs, and the head (an embedding row is nothing)."""
        return self.decode_matrix_bytes + self.head_bytes


class Packer:
    """Creates tensors in one backend from arrays of one checkpoint; errors name the tensor as it is on disk."""

    def __init__(self, backend: Backend, source: CanonicalTensors, *, strict: bool = False) -> None:
        self.backend = backend
        self.source = source
        self.strict = strict
        self.made: dict[int, TensorDesc] = {}
        self.warnings: list[str] = []

    def create(self, fmt: PackedFormat, rows: int, cols: int) -> int:
        tensor = self.backend.tensor_create(int(fmt.format), rows, cols, fmt.group)
        self.made[tensor] = (int(fmt.format), rows, cols, fmt.group)
        return tensor

    def fill(
        self,
        tensor: int,
        name: str,
        source: npt.NDArray[Any],
        offset: int = 0,
        stride: int = 1,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Pack `source` into panels offset, offset + stride, ... ModelFormatError names tensor and place of a NaN."""
        if source.ndim == 2:
            self.check_not_zero(name, source)
        self.pack(tensor, name, source, offset, stride, importance)

    def fill_rows(self, tensor: int, name: str, unit: int, importance: npt.NDArray[np.float32] | None = None) -> None:
        """Read and pack a matrix CHUNK_BYTES at a time, so that it is never held whole beside what it becomes.

        unit: rows that one step of the tensor's offset covers (16 for panels, 1 for rows).
        """
        info = self.source.tensors[name]
        rows, cols = info.shape
        step = max(1, CHUNK_BYTES // (4 * cols * unit)) * unit
        zero = True
        for begin in range(0, rows, step):
            source = self.source.read_range(name, begin, min(begin + step, rows))
            if source.dtype != np.uint16 and unit == 1:
                source = as_float32(source)
            zero = zero and is_zero(source)
            self.pack(tensor, name, source, begin // unit, 1, importance, first_row=begin)
        if zero:
            self.note_zero(name)

    def pack(
        self,
        tensor: int,
        name: str,
        source: npt.NDArray[Any],
        offset: int,
        stride: int,
        importance: npt.NDArray[np.float32] | None,
        first_row: int = 0,
    ) -> None:
        try:
            self.backend.tensor_pack(tensor, source, offset, stride, importance)
        except ModelFormatError:
            raise self.not_finite(name, source, first_row) from None

    def not_finite(self, name: str, source: npt.NDArray[Any], first_row: int = 0) -> ModelFormatError:
        """The error that names the first NaN or Inf of `source`, which holds the tensor's rows from first_row on."""
        at = int(np.flatnonzero(~np.isfinite(as_float32(source)))[0])
        value, info = as_float32(source).reshape(-1)[at], self.source.tensors[name]
        flat = self.source.flat_on_disk(name, first_row * source.shape[-1] + at)
        return ModelFormatError(
            f"{info.file}: tensor '{info.name}': {value} at flat index {flat}; expected finite values"
        )

    def check_not_zero(self, name: str, source: npt.NDArray[Any]) -> None:
        if is_zero(source[:4]) and is_zero(source):
            self.note_zero(name)

    def note_zero(self, name: str) -> None:
        """Warn of a tensor that is all zero: a file that was laid out and never filled. ModelFormatError if strict."""
        info = self.source.tensors[name]
        text = f"{info.file}: tensor '{info.name}' is all zero"
        if self.strict:
            raise ModelFormatError(f"{text}; expected weights")
        self.warnings.append(text)

    def vector(self, parts: list[tuple[str, npt.NDArray[Any], npt.NDArray[np.int64]]], size: int) -> int:
        """float32 [size], zero but for each part (name, values, where they go)."""
        values = np.zeros(size, np.float32)
        for name, raw, places in parts:
            part = as_float32(raw)
            if not np.isfinite(part).all():
                raise self.not_finite(name, part)
            values[places] = part
        tensor = self.create(PackedFormat(Format.VECTOR_F32), 1, size)
        self.backend.tensor_pack(tensor, values)
        return tensor

    def norm(self, name: str, raw: npt.NDArray[Any], divisor: float = 1.0) -> int:
        """The weight of a norm as it multiplies (1 + what is stored where the spec says so), over `divisor`."""
        if self.source.spec.norm.plus_one:
            raw = np.float32(1) + as_float32(raw)
        else:
            self.check_not_zero(name, raw)
        return self.row(name, raw, divisor)

    def row(self, name: str, raw: npt.NDArray[Any], divisor: float = 1.0) -> int:
        """A vector as it is stored, over `divisor`."""
        return self.vector([(name, as_float32(raw) / np.float32(divisor), np.arange(len(raw)))], len(raw))


def is_zero(raw: npt.NDArray[Any]) -> bool:
    """Whether every value of a raw array is zero, of either sign."""
    return not (np.bitwise_and(raw, 0x7FFF) if raw.dtype == np.uint16 else raw).any()


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


def ffn_weights(f: FFNSpec | MoESpec, hidden: int) -> int:
    """Weights of an FFN's matrices; of all experts, without the router."""
    if isinstance(f, FFNSpec):
        return (3 if f.gated else 2) * f.intermediate_size * hidden
    shared = 0 if f.shared is None else ffn_weights(f.shared, hidden)
    return f.router.num_experts * ffn_weights(f.expert, hidden) + shared


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


def pack_layer(
    packer: Packer, layer: LayerSpec, raw: Raw, fmt: PackedFormat, importance: Importance, *, experts: bool = True
) -> LayerWeights:
    """Quantize and pack one layer's tensors. Experts get room (not with experts=False), which pack_expert fills."""
    prefix = f"model.layers.{layer.index}."
    a, f = layer.attention, layer.ffn
    layout = QkvLayout.of(a)

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
    qkv = [
        ("self_attn.q_proj", 0, 1),
        ("self_attn.k_proj", layout.k // PANEL, 1),
        ("self_attn.v_proj", layout.v // PANEL, 1),
    ]
    o = [("self_attn.o_proj", 0, 1)]
    w = LayerWeights(qkv=matrix(layout.width, qkv, "qkv"), o=matrix(hidden, o, "o"), gate_up=NONE, down=NONE)

    if isinstance(f, FFNSpec):
        w.gate_up, w.down = ffn_matrices(matrix, f, hidden, "mlp")
        if f.bias:
            w.gate_up_bias = bias(first_sides(f, "mlp"), (2 if f.gated else 1) * padded(f.intermediate_size))
            w.down_bias = bias([("mlp.down_proj", 0, 1)], hidden)
    else:
        pack_router(packer, f, raw, prefix, w)
        if f.shared is not None:
            w.shared_gate_up, w.shared_down = ffn_matrices(matrix, f.shared, hidden, "mlp.shared_expert", "shared_")
        if experts:
            count, inter = f.router.num_experts, f.expert.intermediate_size
            w.gate_up = packer.create(fmt, 2 * count * padded(inter), hidden)
            w.down = packer.create(fmt, count * padded(hidden), inter)
    if layer.norm_before:
        w.attn_norm, w.attn_norm_bias = norm("input_layernorm"), norm_bias("input_layernorm")
        w.ffn_norm, w.ffn_norm_bias = norm("post_attention_layernorm"), norm_bias("post_attention_layernorm")
    if layer.norm_after:
        w.attn_post_norm, w.attn_post_norm_bias = (
            norm("post_self_attn_layernorm"),
            norm_bias("post_self_attn_layernorm"),
        )
        w.ffn_post_norm, w.ffn_post_norm_bias = norm("post_mlp_layernorm"), norm_bias("post_mlp_layernorm")
    if a.qkv_bias:
        w.qkv_bias = bias(qkv, layout.width)
    if a.o_bias:
        w.o_bias = bias(o, hidden)
    if a.qk_norm:
        w.q_norm, w.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
    return w


def pack_table(packer: Packer, name: str, fmt: PackedFormat, importance: npt.NDArray[np.float32] | None = None) -> int:
    """One [vocab, hidden] tensor, packed."""
    tensor = packer.create(fmt, *packer.source.tensors[name].shape)
    packer.fill_rows(tensor, name, PANEL, importance)
    return tensor


def pack_rows(packer: Packer, name: str) -> int:
    """An untied embedding, or a table of positions, stays row-major: bfloat16 as stored, everything else float32."""
    info = packer.source.tensors[name]
    fmt = Format.ROWS_BF16 if info.dtype == "BF16" else Format.ROWS_F32
    tensor = packer.create(PackedFormat(fmt), *info.shape)
    packer.fill_rows(tensor, name, 1)
    return tensor


def load_weights(
    backend: Backend,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    quantization: Quantization,
    observe: Observer | None = None,
    progress: Progress | None = None,
    *,
    prepare: Prepare | None = None,
    strict: bool = False,
) -> ModelWeights:
    """Read, quantize and pack a whole model.

    observe: says how much each input channel of each matrix matters (calibration); None leaves all the same. prepare:
    what becomes of a layer's tensors before they are packed. strict: matrices and norms that are all zero are errors;
    else they are in `warnings`.
    Errors: ModelFormatError for NaN/Inf or a file that changed, ResourceError when memory runs out.
    """
    source = CanonicalTensors(checkpoint, spec)
    packer = Packer(backend, source, strict=strict)
    total = spec.num_layers + 1
    weights = ModelWeights(NONE, NONE, NONE, NONE, NONE, [], quantization, packer.made, warnings=packer.warnings)
    for layer in spec.layers:
        if progress is not None:
            progress(layer.index, total, "loading")
        raw = read_layer(source, layer)
        importance: Importance = observe(layer, raw) if observe is not None else {}
        if prepare is not None:
            raw = prepare(layer, raw)
        w = pack_layer(packer, layer, raw, quantization.layers, importance)
        weights.layers.append(w)
        a, f, h = layer.attention, layer.ffn, spec.hidden_size
        weights.layer_matrix_weights += 2 * (a.num_heads + a.num_kv_heads) * a.head_dim * h + ffn_weights(f, h)
        weights.chosen_experts.append((1, 1) if isinstance(f, FFNSpec) else (f.router.top_k, f.router.num_experts))
        for index in range(0 if isinstance(f, FFNSpec) else f.router.num_experts):
            raw = read_expert(source, layer, index)
            pack_expert(packer, layer, w, index, raw, {} if observe is None else observe.expert(layer, index, raw))
        del raw
    if progress is not None:
        progress(spec.num_layers, total, "loading")
    # only the head reads the final norm: its weight carries what divides the logits
    weights.final_norm = packer.norm("model.norm.weight", source.read("model.norm.weight"), spec.logits_scale)
    if spec.norm.bias:
        weights.final_norm_bias = packer.row("model.norm.bias", source.read("model.norm.bias"), spec.logits_scale)
    if spec.learned_positions:
        weights.positions = pack_rows(packer, "model.embed_positions.weight")
    importance_of_head = observe.head_importance() if observe is not None else None
    if spec.tie_word_embeddings:
        name = "model.embed_tokens.weight"
        weights.embed = weights.lm_head = pack_table(packer, name, quantization.head, importance_of_head)
    else:
        weights.embed = pack_rows(packer, "model.embed_tokens.weight")
        weights.lm_head = pack_table(packer, "lm_head.weight", quantization.head, importance_of_head)
    weights.count_bytes(backend)
    checkpoint.verify_unchanged()
    if progress is not None:
        progress(total, total, "loading")
    return weights
