"""Stage 6, compare_units: a packed tensor as the matrices it is made of, one at a time: an engine's, or packed again.

A tensor is one matrix of joined parts (q, k and v; gate and up), all experts of a layer, the small matrices of the
heads of latent attention, or the head of the model, which is taken in runs of rows: as float32 it can be larger than
all the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyengine import kernels
from pyengine._core import Backend, Format
from pyengine.checkpoint import Checkpoint
from pyengine.gguf_checkpoint import open_checkpoint
from pyengine.pack_layer import NONE, QkvLayout, pack_layer, read_layer
from pyengine.packer import PANEL, Packer, TensorDesc, padded
from pyengine.quantize import PackedFormat, Quantization
from pyengine.reports.compare_ops import HEAD, Module, tensor_names
from pyengine.spec import AttentionSpec, FFNSpec, MLASpec, ModelSpec, MoESpec
from pyengine.tensors import CanonicalTensors

if TYPE_CHECKING:
    from pyengine.engine import Engine

Float32 = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

HEAD_BYTES = 64 << 20  # of the head, as float32, at a time


@dataclass(frozen=True)
class Unit:
    """One matrix of a module, and what it is multiplied with.

    Panels first .. first + panels - 1 of the tensor, `rows` rows. index: of the expert or head. parts: names of joined
    matrices, with their rows. x [n, K]; places [n]: which of the module's `results` rows each row of x counts to.
    """

    index: int
    first: int
    panels: int
    rows: int
    parts: dict[str, Rows]
    x: Float32
    places: Rows


def gate_up_parts(f: FFNSpec, prefix: str) -> dict[str, Rows]:
    row = np.arange(f.intermediate_size)
    if not f.gated:
        return {f"{prefix}up_proj": row}
    gate = row // PANEL * 2 * PANEL + row % PANEL
    return {f"{prefix}gate_proj": gate, f"{prefix}up_proj": gate + PANEL}


def parts_of(module: Module, spec: ModelSpec, rows: int) -> dict[str, Rows]:
    """The parts of one matrix of a module by their names on disk (of experts without the number), with their rows."""
    if module.layer == NONE:
        return {HEAD: np.arange(rows)}
    layer, field = spec.layers[module.layer], module.field
    a, f = layer.attention, layer.ffn
    if field == "qkv" and isinstance(a, AttentionSpec):
        layout = QkvLayout.of(a)
        kv = np.arange(a.num_kv_heads * a.head_dim)
        return {"q_proj": np.arange(a.num_heads * a.head_dim), "k_proj": layout.k + kv, "v_proj": layout.v + kv}
    if field == "gate_up":
        return gate_up_parts(f, "") if isinstance(f, FFNSpec) else gate_up_parts(f.expert, "experts.")
    if field == "shared_gate_up" and isinstance(f, MoESpec) and f.shared is not None:
        return gate_up_parts(f.shared, "shared_expert.")
    if isinstance(a, MLASpec) and field in ("k_up", "v_up"):
        side, size = ("keys", a.kv_lora_rank) if field == "k_up" else ("values", a.v_head_dim)
        return {f"kv_b_proj.{side}": np.arange(size)}
    names = {"o": "o_proj", "shared_down": "shared_expert.down_proj", "q_a": "q_a_proj", "kv_a": "kv_a_proj_with_mqa"}
    names["down"] = "down_proj" if isinstance(f, FFNSpec) else "experts.down_proj"
    if isinstance(a, MLASpec):
        names["q"] = a.q_name
    return {names.get(field, field): np.arange(spec.hidden_size if field == "down" else rows)}


def results_of(module: Module, x: Float32) -> int:
    """Rows of results that a module's inputs give: one a token, of experts one for each that a token goes to."""
    return len(x) * max(module.top_k, 1)


def units_of(module: Module, spec: ModelSpec, rows: int, x: Float32) -> Iterator[Unit]:
    """The matrices of a module, a tensor of `rows` rows. x: its inputs, as compare_ops.inputs gives them."""
    every, panels = np.arange(len(x)), padded(rows) // PANEL
    if module.layer == NONE:
        step = max(1, HEAD_BYTES // (4 * PANEL * module.width))
        for index, first in enumerate(range(0, panels, step)):
            count = min(step, panels - first)
            size = min(count * PANEL, rows - first * PANEL)
            yield Unit(index, first, count, size, parts_of(module, spec, size), x, every)
        return
    a, f = spec.layers[module.layer].attention, spec.layers[module.layer].ffn
    if module.top_k:
        assert isinstance(f, MoESpec)
        each, ids = panels // f.router.num_experts, x[:, -module.top_k :].astype(np.int64)
        parts = parts_of(module, spec, each * PANEL)
        inputs = x[:, : -module.top_k].reshape(len(x), module.slots, -1)
        for index in range(f.router.num_experts):
            token, slot = np.nonzero(ids == index)
            mine = np.ascontiguousarray(inputs[token, slot if module.slots > 1 else 0])
            yield Unit(index, index * each, each, each * PANEL, parts, mine, token * module.top_k + slot)
        return
    if isinstance(a, MLASpec) and module.field in ("k_up", "v_up"):
        each, used = panels // a.num_heads, a.qk_nope_head_dim if module.field == "k_up" else a.kv_lora_rank
        by_head = x.reshape(len(x), a.num_heads, -1)
        parts = parts_of(module, spec, each * PANEL)
        for h in range(a.num_heads):
            yield Unit(h, h * each, each, each * PANEL, parts, np.ascontiguousarray(by_head[:, h, :used]), every)
        return
    yield Unit(0, 0, panels, rows, parts_of(module, spec, rows), x, every)


# ---- where the matrices are ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A packed matrix [rows, cols] in a backend."""

    backend: Backend
    tensor: int
    desc: TensorDesc

    def apply(self, x: Float32) -> Float32:
        kind, rows, cols, group = self.desc
        return kernels.packed_linear(self.backend, self.tensor, PackedFormat(Format(kind), group), (rows, cols), x)

    def dequantized(self) -> Float32:
        return self.backend.tensor_dequantize(self.tensor)


class Tensors:
    """The packed tensors of a layer, or the head, in a backend, by field of LayerWeights."""

    def __init__(self, backend: Backend, names: dict[str, int], descs: dict[int, TensorDesc]) -> None:
        self.backend, self.names, self.descs = backend, names, descs
        self.copied: tuple[int, npt.NDArray[np.uint8]] | None = None  # the bytes of the tensor in use

    @contextmanager
    def matrix(self, field: str, unit: Unit) -> Iterator[Matrix]:
        """The unit as a tensor of its own, while it is used."""
        tensor = self.names[field]
        kind, rows, cols, group = self.descs[tensor]
        if unit.panels == padded(rows) // PANEL:
            yield Matrix(self.backend, tensor, self.descs[tensor])
            return
        if self.copied is None or self.copied[0] != tensor:
            self.copied = tensor, self.backend.tensor_bytes(tensor)
        panel_bytes = (len(self.copied[1]) - 64) // (padded(rows) // PANEL)
        own = self.backend.tensor_create(kind, unit.rows, cols, group)
        try:
            raw = self.backend.tensor_bytes(own)
            begin = 64 + unit.first * panel_bytes
            raw[64:] = self.copied[1][begin : begin + unit.panels * panel_bytes]
            self.backend.tensor_write(own, raw)
            yield Matrix(self.backend, own, (kind, unit.rows, cols, group))
        finally:
            self.backend.tensor_free(own)


def engine_tensors(engine: Engine, layer: int) -> Tensors:
    if layer == NONE:
        return Tensors(engine.backend, {HEAD: engine.weights.lm_head}, engine.weights.tensors)
    names = {name: tensor for tensor, name in tensor_names(engine.weights.layers[layer]).items()}
    return Tensors(engine.backend, names, engine.weights.tensors)


class StoredTensors(Tensors):
    """A layer, or the head, of a checkpoint packed again in a float format: experts one by one, the head in parts."""

    def __init__(self, source: CanonicalTensors, backend: Backend, quantization: Quantization, layer: int) -> None:
        self.source, self.fmt, self.layer = source, quantization, layer
        self.packer = Packer(backend, source)
        names: dict[str, int] = {}
        if layer != NONE:
            spec = source.spec.layers[layer]
            weights = pack_layer(self.packer, spec, read_layer(source, spec), quantization.layers, {}, experts=False)
            names = {name: tensor for tensor, name in tensor_names(weights).items()}
        super().__init__(backend, names, self.packer.made)

    @contextmanager
    def matrix(self, field: str, unit: Unit) -> Iterator[Matrix]:
        if field in self.names:
            with super().matrix(field, unit) as found:
                yield found
            return
        if self.layer == NONE:
            name = "model.embed_tokens.weight" if self.source.spec.tie_word_embeddings else "lm_head.weight"
            begin, fmt = unit.first * PANEL, self.fmt.head
            parts = [(name, self.source.read_range(name, begin, begin + unit.rows), 0, 1)]
        else:
            prefix, fmt = f"model.layers.{self.layer}.mlp.experts.{unit.index}.", self.fmt.layers
            names = [f"{prefix}{side}_proj.weight" for side in (("down",) if field == "down" else ("gate", "up"))]
            parts = [(name, self.source.read(name), side, len(names)) for side, name in enumerate(names)]
        tensor = self.packer.create(fmt, unit.rows, parts[0][1].shape[1])
        try:
            for name, raw, offset, stride in parts:
                self.packer.pack(tensor, name, raw, offset, stride, None)
            yield Matrix(self.backend, tensor, self.descs[tensor])
        finally:
            self.backend.tensor_free(tensor)
            del self.packer.made[tensor]


class StoredLayers:
    """The tensors of a closed engine's checkpoint by layer, the last one kept."""

    def __init__(self, engine: Engine, quantization: Quantization) -> None:
        self.engine, self.quantization = engine, quantization
        self.checkpoint: Checkpoint | None = None  # open from the first use to close()
        self.current: StoredTensors | None = None

    def __call__(self, layer: int) -> StoredTensors:
        if self.checkpoint is None:
            self.checkpoint = open_checkpoint(self.engine.folder)
        if self.current is None or self.current.layer != layer:
            source = CanonicalTensors(self.checkpoint, self.engine.spec)
            backend = Backend(self.engine.threads, self.engine.isa)
            self.current = StoredTensors(source, backend, self.quantization, layer)
        return self.current

    def close(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.close()
