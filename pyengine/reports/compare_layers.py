"""Stage 6, compare_layers: what quantization does to each module on its own, on the baseline's inputs.

A module is a packed matrix of a layer; joined ones are shown by their parts (q_proj, k_proj, v_proj; gate_proj,
up_proj). Its inputs X are tapped from the baseline as it runs over a text, in front of the matrix; then both engines'
own packed tensors are applied to X by pyengine.kernels, without bias. Errors are relative Frobenius norms, sums in
float64: weights |Wq - Wb| / |Wb|, outputs |Yq - Yb| / |Yb|; the cosine is the mean over tokens of that of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine import kernels
from pyengine._core import Backend, Format
from pyengine.balance import key_factors
from pyengine.checkpoint import Checkpoint, as_float32
from pyengine.pack_layer import LayerWeights, QkvLayout, pack_layer, read_layer
from pyengine.packer import PANEL, Packer, TensorDesc, padded
from pyengine.quantize import PackedFormat, Quantization
from pyengine.reports.compare_ops import Module, tensor_names
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec
from pyengine.tensors import CanonicalTensors

if TYPE_CHECKING:
    from pyengine.engine import Engine

Float32 = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ModuleError:
    """A row of `layers` in `compare --json`."""

    layer: int
    module: str
    weight_rel_error: float
    output_rel_error: float
    cosine: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class HiddenError:
    """Of the residual stream behind a layer, each model on its own states: errors of all layers before add up."""

    layer: int
    rel_error: float
    cosine: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# ---- weights by part -------------------------------------------------------------------------------------------------


def parts_of(layer: LayerSpec, name: str, rows: int) -> dict[str, Rows]:
    """The parts of a packed matrix by their names on disk, with the rows of the tensor that each has."""
    a, f = layer.attention, layer.ffn
    if name == "qkv" and isinstance(a, AttentionSpec):
        layout = QkvLayout.of(a)
        kv = np.arange(a.num_kv_heads * a.head_dim)
        return {"q_proj": np.arange(a.num_heads * a.head_dim), "k_proj": layout.k + kv, "v_proj": layout.v + kv}
    if name == "gate_up" and isinstance(f, FFNSpec):
        row = np.arange(f.intermediate_size)
        if not f.gated:
            return {"up_proj": row}
        gate = row // PANEL * 2 * PANEL + row % PANEL
        return {"gate_proj": gate, "up_proj": gate + PANEL}
    return {{"o": "o_proj", "down": "down_proj"}.get(name, name): np.arange(rows)}


@dataclass(frozen=True)
class LayerTensors:
    """One layer's tensors in a backend: those of an engine, or packed for the moment."""

    backend: Backend
    weights: LayerWeights
    descs: dict[int, TensorDesc]

    def tensor(self, name: str) -> int:
        return next(tensor for tensor, known in tensor_names(self.weights).items() if known == name)

    def apply(self, name: str, x: Float32) -> Float32:
        tensor = self.tensor(name)
        kind, rows, cols, group = self.descs[tensor]
        fmt = PackedFormat(Format(kind), group)
        return kernels.packed_linear(self.backend, tensor, fmt, (rows, cols), x)

    def dequantized(self, name: str) -> Float32:
        return self.backend.tensor_dequantize(self.tensor(name))


def engine_tensors(engine: Engine, layer: int) -> LayerTensors:
    return LayerTensors(engine.backend, engine.weights.layers[layer], engine.weights.tensors)


class StoredLayers:
    """A checkpoint's layers in a float format, one at a time, for an engine that is no longer loaded."""

    def __init__(self, engine: Engine, quantization: Quantization) -> None:
        self.engine = engine
        self.quantization = quantization
        self.layer = -1
        self.current: LayerTensors | None = None

    def __call__(self, layer: int) -> LayerTensors:
        if layer != self.layer or self.current is None:
            backend, spec = Backend(self.engine.threads, self.engine.isa), self.engine.spec
            with Checkpoint.open(self.engine.folder) as checkpoint:
                source = CanonicalTensors(checkpoint, spec)
                packer, raw = Packer(backend, source), read_layer(source, spec.layers[layer])
                weights = pack_layer(packer, spec.layers[layer], raw, self.quantization.layers, {}, experts=False)
            self.layer, self.current = layer, LayerTensors(backend, weights, packer.made)
        return self.current


def balance_factors(engine: Engine, layer: LayerSpec, name: str, rows: int) -> Float32 | None:
    """What loading for an int8 cache multiplied the rows of q and k by (balance.py); None where it changed nothing."""
    a = layer.attention
    if engine.kv_dtype != "int8" or name != "qkv" or not isinstance(a, AttentionSpec) or not a.qkv_bias or a.qk_norm:
        return None
    with Checkpoint.open(engine.folder) as checkpoint:
        source = CanonicalTensors(checkpoint, engine.spec)
        bias = as_float32(source.read(f"model.layers.{layer.index}.self_attn.k_proj.bias"))
    factors = key_factors(a, bias)
    out = np.ones(rows, np.float32)
    out[: a.num_heads * a.head_dim] = np.repeat(factors, a.num_heads // a.num_kv_heads, axis=0).reshape(-1)
    k = padded(a.num_heads * a.head_dim)
    out[k : k + factors.size] = 1 / factors.reshape(-1)
    return out


# ---- errors ----------------------------------------------------------------------------------------------------------


def square_sum(x: Float32) -> float:
    return float(np.einsum("ij,ij->", x, x, dtype=np.float64))


def relative(actual: Float32, expected: Float32) -> float:
    """|actual - expected| / |expected|; 0 where both are zero."""
    error, size = square_sum(actual - expected), square_sum(expected)
    return float(np.sqrt(error / size)) if size else float(np.sqrt(error))


def mean_cosine(a: Float32, b: Float32) -> float:
    """Mean over rows; a pair of equal rows has 1, also where they are zero."""
    dot = np.einsum("ij,ij->i", a, b, dtype=np.float64)
    size = np.einsum("ij,ij->i", a, a, dtype=np.float64) * np.einsum("ij,ij->i", b, b, dtype=np.float64)
    cosine = np.divide(dot, np.sqrt(size), out=np.zeros_like(dot), where=size > 0)
    cosine[(a == b).all(axis=1)] = 1.0
    return float(cosine.mean())


def module_errors(
    baseline: Callable[[int], LayerTensors], quantized: Engine, tapped_inputs: Iterable[tuple[Module, Float32]]
) -> Iterator[ModuleError]:
    """The parts of each module in turn. Both matrices are held in float32, one module at a time."""
    for module, x in tapped_inputs:
        spec = quantized.spec.layers[module.layer]
        ours, theirs = engine_tensors(quantized, module.layer), baseline(module.layer)
        y_q, y_b = ours.apply(module.name, x), theirs.apply(module.name, x)
        w_q, w_b = ours.dequantized(module.name), theirs.dequantized(module.name)
        factors = balance_factors(quantized, spec, module.name, len(w_b))
        if factors is not None:
            y_q, w_q = y_q / factors, w_q / factors[:, None]  # powers of two: exact
        for part, rows in parts_of(spec, module.name, len(w_b)).items():
            yield ModuleError(
                module.layer, part, relative(w_q[rows], w_b[rows]), relative(y_q[:, rows], y_b[:, rows]),
                mean_cosine(y_q[:, rows], y_b[:, rows]),
            )  # fmt: skip


def hidden_errors(baseline: Sequence[Float32], quantized: Sequence[Float32]) -> list[HiddenError]:
    pairs = zip(quantized, baseline, strict=True)
    return [HiddenError(i, relative(q, b), mean_cosine(q, b)) for i, (q, b) in enumerate(pairs)]
