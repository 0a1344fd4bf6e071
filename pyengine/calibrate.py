"""Stage 4, calibrate: E[x^2] of every matrix's input channels, from a short text run layer by layer while loading.

Each layer runs in its stored precision on the hidden state that the layers before it left, then is quantized with what
was seen; beside the packed weights only one layer in float is held. The importance of channel k weights the squared
error of column k of the matrix (docs/packed_formats.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyengine import rope
from pyengine._core import KV_BLOCK, Backend, Format, KvDtype
from pyengine.checkpoint import Checkpoint
from pyengine.decoder import KvLayout, build_expert, build_layer
from pyengine.hooks import Hooks, taps_of
from pyengine.pack_layer import Importance, LayerWeights, Raw, pack_expert, pack_layer
from pyengine.packer import Packer, TensorDesc, padded
from pyengine.quantize import PackedFormat
from pyengine.reference import normalize
from pyengine.spec import LayerSpec, ModelSpec, MoESpec
from pyengine.tensors import CanonicalTensors

CALIBRATION_TOKENS = 512
FEW = 16  # tokens of an expert that tell too little of its channels
ATTENTION_TAPS = {"qkv": "attn_norm", "o": "attention"}
TAP_OF = {**ATTENTION_TAPS, "gate_up": "ffn_norm", "down": "act"}
SHARED_TAPS = {"shared_gate_up": "ffn_norm", "shared_down": "shared_act"}

Float32 = npt.NDArray[np.float32]


def mean_square(x: Float32) -> Float32:
    """E[x^2] over tokens of x [T, K], with a floor of 1e-4 of the mean, so that no channel is free: float32 [K].

    Only its ratios matter, so values whose squares float32 cannot hold are divided by the largest. Where x is zero or
    not finite (weights of that kind get their own error or warning), it tells nothing: all channels are the same.
    """
    top = max(x.max(), -x.min())
    if not 0 < top < np.inf:
        return np.ones(x.shape[1], np.float32)
    if not 1e-15 <= top <= 1e15:
        x = x / top
    square = np.einsum("tk,tk->k", x, x) / np.float32(len(x))
    return np.asarray(np.maximum(square, 1e-4 * square.mean()), np.float32)


class ReusingPacker(Packer):
    """Gives a new layer the memory of the one before: fresh pages cost more than packing into them."""

    def __init__(self, backend: Backend, source: CanonicalTensors) -> None:
        super().__init__(backend, source)
        self.idle: dict[TensorDesc, list[int]] = {}

    def create(self, fmt: PackedFormat, rows: int, cols: int) -> int:
        """A tensor of any contents: whoever packs a layer fills every panel."""
        idle = self.idle.get((int(fmt.format), rows, cols, fmt.group))
        return idle.pop() if idle else super().create(fmt, rows, cols)

    def finish_layer(self) -> None:
        """What the layer took is free for the next. Its warnings are the other packer's to give."""
        self.idle = {}
        for tensor, desc in self.made.items():
            self.idle.setdefault(desc, []).append(tensor)
        self.warnings.clear()

    def free(self) -> None:
        for tensor in self.made:
            self.backend.tensor_free(tensor)
        self.made.clear()
        self.idle.clear()


class Routed(NamedTuple):
    """What a layer's experts read: x [T, K], routing [T, weights and ids of top_k]; the importance over all of x."""

    x: Float32
    routing: Float32
    everyone: Float32


def stored_format(raw: Raw) -> PackedFormat:
    """BF16 where every matrix is stored so, else float32."""
    stored = all(raw[name].dtype == np.uint16 for name in raw if name.endswith("_proj.weight"))
    return PackedFormat(Format.BF16 if stored else Format.F32)


class Calibrator:
    """Carries the hidden state of the calibration text through the layers; call it with each layer in order."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, ids: list[int], *, threads: int, isa: str) -> None:
        """ids: token ids of the text, one sequence; the backend made here lives until the object does."""
        self.source = CanonicalTensors(checkpoint, spec)
        self.spec = spec
        rows = self.source.read_rows("model.embed_tokens.weight", np.asarray(ids))
        self.hidden = rows * np.float32(spec.embedding_scale)
        if spec.learned_positions:
            ids = ids[: spec.learned_positions]
            places = self.source.read_rows("model.embed_positions.weight", np.arange(len(ids)))
            self.hidden = self.hidden[: len(ids)] + places
        self.backend = Backend(threads, isa)
        self.packer = ReusingPacker(self.backend, self.source)
        self.taps: list[Float32] = []
        self.routed: Routed | None = None  # of the layer whose experts come now
        self.tokens = len(ids)
        blocks = -(-self.tokens // KV_BLOCK)
        self.table = np.arange(blocks, dtype=np.int32).reshape(1, blocks)
        self.groups: dict[tuple[int, int, int], int] = {}
        self.ropes: dict[Any, int] = {}

    def _layout(self, layer: LayerSpec) -> KvLayout:
        a = layer.attention
        shape = (a.num_kv_heads, a.k_dim, a.v_dim)
        if shape not in self.groups:
            self.groups[shape] = self.backend.kv_create(1, *shape, int(KvDtype.F32))
            self.backend.kv_reserve(self.groups[shape], self.table.size)
        if a.rope is not None and a.rope not in self.ropes:
            self.ropes[a.rope] = self.backend.rope_set(-1, *rope.tables(a.rope, self.tokens))
        return KvLayout(((self.groups[shape], 0),) * (layer.index + 1), self.ropes)

    def __call__(self, layer: LayerSpec, raw: Raw) -> Importance:
        """Run the layer on the hidden state; returns the importance of its matrices' input channels.

        Of a layer with experts all but them runs; `expert` is then called with each of them.
        """
        weights = pack_layer(self.packer, layer, raw, stored_format(raw), {}, experts=False)
        taps = TAP_OF
        if isinstance(layer.ffn, MoESpec):
            taps = {**ATTENTION_TAPS, "experts": "ffn_norm", "routing": "routing"}
            taps |= SHARED_TAPS if layer.ffn.shared is not None else {}
        taps = taps | ({"q_b": "q_latent"} if "q_latent" in taps_of(layer) else {})
        names = (*dict.fromkeys(taps.values()), "hidden")
        hooks = Hooks(taps=tuple((layer.index, name) for name in names))
        built = build_layer(self.backend, self.spec, layer, weights, self._layout(layer), hooks, self.tokens)
        if [tap.shape[1] for tap in self.taps] != built.tap_widths:
            self.taps = [np.empty((self.tokens, width), np.float32) for width in built.tap_widths]
        positions = np.arange(self.tokens, dtype=np.int32)
        empty = np.empty(0, np.int32)
        ends = np.array([0, self.tokens], np.int32)
        tables = [self.table] * len(self.groups)
        built.program.run(empty, positions, ends, tables, empty, None, None, self.hidden, self.taps, None, True)
        self.packer.finish_layer()
        self.hidden, self.taps[-1] = self.taps[-1], self.hidden  # the next layer's input, and where its output goes
        seen = dict(zip(names[:-1], self.taps[:-1], strict=True))
        if isinstance(layer.ffn, MoESpec):
            self.routed = Routed(seen["ffn_norm"], seen["routing"], mean_square(seen["ffn_norm"]))
            taps = {matrix: tap for matrix, tap in taps.items() if matrix not in ("experts", "routing")}
        return {matrix: mean_square(seen[tap]) for matrix, tap in taps.items()}

    def expert(self, layer: LayerSpec, index: int, raw: Raw) -> Importance:
        """Run one expert on its tokens and add what it gives to the hidden state; the importance of its matrices.

        Of fewer than FEW tokens: what all tokens put into gate and up counts, because those channels mean the same to
        every expert; into down none more than another, because neurons of other experts are other neurons.
        """
        assert isinstance(layer.ffn, MoESpec)
        assert self.routed is not None
        spec, seen, top_k = layer.ffn.expert, self.routed, layer.ffn.router.top_k
        tokens, slots = np.nonzero(seen.routing[:, top_k:] == index)
        x, few = np.ascontiguousarray(seen.x[tokens]), len(tokens) < FEW
        importance = {"gate_up": seen.everyone if few else mean_square(x)}
        if not len(tokens):
            return importance
        fmt, inter, hidden = stored_format(raw), padded(spec.intermediate_size), self.spec.hidden_size
        w = LayerWeights(gate_up=self.packer.create(fmt, 2 * inter, hidden))
        w.down = self.packer.create(fmt, hidden, spec.intermediate_size)
        pack_expert(self.packer, layer, w, 0, raw, {})
        built = build_expert(self.backend, self.spec, spec, w.gate_up, w.down, len(tokens))
        act, result = (np.empty((len(tokens), width), np.float32) for width in built.tap_widths)
        positions, empty = np.arange(len(tokens), dtype=np.int32), np.empty(0, np.int32)
        ends = np.array([0, len(tokens)], np.int32)
        built.program.run(empty, positions, ends, [], empty, None, None, x, [act, result], None, True)
        self.packer.finish_layer()
        weights = seen.routing[tokens, slots] * np.float32(self.spec.residual_scale)
        self.hidden[tokens] += weights[:, None] * result
        return importance if few else {**importance, "down": mean_square(act)}

    def head_importance(self) -> Float32:
        """The same for lm_head, after the last layer: the input is the final norm's output."""
        self.packer.free()
        self.taps.clear()
        spec = self.spec.norm
        bias = self.source.read_float32("model.norm.bias") if spec.bias else None
        with np.errstate(invalid="ignore"):  # of a hidden state that holds Inf
            x = normalize(self.hidden.astype(np.float64), spec, self.source.read_float32("model.norm.weight"), bias)
        return mean_square(x.astype(np.float32))
