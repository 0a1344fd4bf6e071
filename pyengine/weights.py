"""Stage 3, weights: named tensors of a checkpoint -> packed tensors of the core, layer by layer.

At any time at most one layer's raw tensors, without its experts, or one expert's, or a part of the embedding or the
head are held beside what is packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyengine._core import Backend
from pyengine.checkpoint import Checkpoint
from pyengine.pack_layer import (
    NONE,
    Importance,
    LayerWeights,
    Raw,
    layer_weights,
    pack_expert,
    pack_layer,
    read_expert,
    read_layer,
)
from pyengine.packer import Packer, TensorDesc, pack_rows, pack_table
from pyengine.quantize import Quantization
from pyengine.spec import FFNSpec, LayerSpec, ModelSpec
from pyengine.tensors import CanonicalTensors

Progress = Callable[[int, int, str], None]
Prepare = Callable[[LayerSpec, Raw], Raw]  # changes the raw tensors of a layer before they are packed


class Observer(Protocol):
    """Calibration as the loader sees it: called with each layer's raw tensors in order, then asked for the head's."""

    def __call__(self, layer: LayerSpec, raw: Raw) -> Importance: ...

    def expert(self, layer: LayerSpec, index: int, raw: Raw) -> Importance: ...

    def head_importance(self) -> npt.NDArray[np.float32]: ...


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
            every, ffn = size(*w.matrices()), size(w.gate_up, w.down)
            self.layer_matrix_bytes += every
            self.decode_matrix_bytes += every - ffn + ffn // of * chosen + size(w.router)
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
        f = layer.ffn
        weights.layers.append(w)
        weights.layer_matrix_weights += layer_weights(layer, raw)
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
    backend.tensors_gather(list(weights.tensors))
    weights.count_bytes(backend)
    checkpoint.verify_unchanged()
    if progress is not None:
        progress(total, total, "loading")
    return weights
