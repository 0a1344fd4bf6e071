"""Stage 6, compare_layers: what quantization does to each module on its own, on the baseline's inputs.

A module is a packed tensor of a layer, or the head; joined matrices are shown by their parts (q_proj, k_proj, v_proj;
gate_proj, up_proj), all experts of a layer and all heads of latent attention together. Its inputs X are tapped from the
baseline as it runs over a text, in front of the matrix; then both engines' own packed matrices are applied to X by
pyengine.kernels, without bias, each expert's to the tokens that the baseline's router sends it. Errors are relative
Frobenius norms, sums in float64: weights |Wq - Wb| / |Wb|, outputs |Yq - Yb| / |Yb|; the cosine is the mean over rows
of Y, one a token, of experts one for each that a token goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine.balance import key_factors
from pyengine.checkpoint import as_float32
from pyengine.gguf_checkpoint import open_checkpoint
from pyengine.pack_layer import NONE
from pyengine.packer import padded
from pyengine.reports.compare_ops import Module
from pyengine.reports.compare_units import Tensors, engine_tensors, results_of, units_of
from pyengine.spec import AttentionSpec
from pyengine.tensors import CanonicalTensors

if TYPE_CHECKING:
    from pyengine.engine import Engine

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ModuleError:
    """A row of `layers` in `compare --json`."""

    layer: int | None  # None: the head
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


def balance_factors(engine: Engine, module: Module, rows: int) -> Float32 | None:
    """What loading for an int8 cache multiplied the rows of q and k by (balance.py); None where it changed nothing."""
    if engine.kv_dtype != "int8" or module.field != "qkv":
        return None
    layer = engine.spec.layers[module.layer]
    a = layer.attention
    if not isinstance(a, AttentionSpec) or not a.qkv_bias or a.qk_norm:
        return None
    with open_checkpoint(engine.folder) as checkpoint:
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


def row_dots(a: Float32, b: Float32) -> Float64:
    return np.asarray(np.einsum("ij,ij->i", a, b, dtype=np.float64))


def relative_norm(error: float, size: float) -> float:
    """sqrt(error / size) of two square sums; sqrt(error) where size is zero."""
    return float(np.sqrt(error / size)) if size else float(np.sqrt(error))


def relative(actual: Float32, expected: Float32) -> float:
    """|actual - expected| / |expected|; 0 where both are zero."""
    return relative_norm(square_sum(actual - expected), square_sum(expected))


class Sums:
    """What the errors of one module are made of, over its matrices; outputs by row."""

    def __init__(self, rows: int) -> None:
        self.weights = [0.0, 0.0]  # squares of the error, of the baseline's
        self.outputs = [0.0, 0.0]
        self.dot, self.size_a, self.size_b = (np.zeros(rows) for _ in range(3))
        self.equal = np.ones(rows, np.bool_)

    def add_weights(self, ours: Float32, theirs: Float32) -> None:
        self.weights[0] += square_sum(ours - theirs)
        self.weights[1] += square_sum(theirs)

    def add_outputs(self, ours: Float32, theirs: Float32, places: Rows) -> None:
        """places [n], none twice: the rows that the rows of ours and theirs [n, N] are part of."""
        self.outputs[0] += square_sum(ours - theirs)
        self.outputs[1] += square_sum(theirs)
        self.dot[places] += row_dots(ours, theirs)
        self.size_a[places] += row_dots(ours, ours)
        self.size_b[places] += row_dots(theirs, theirs)
        self.equal[places] &= (ours == theirs).all(axis=1)

    def cosine(self) -> float:
        """Mean over rows; a pair of equal rows has 1, also where they are zero."""
        size = self.size_a * self.size_b
        cosine = np.divide(self.dot, np.sqrt(size), out=np.zeros_like(self.dot), where=size > 0)
        cosine[self.equal] = 1.0
        return float(cosine.mean())

    def error(self, layer: int, module: str) -> ModuleError:
        found = relative_norm(*self.weights), relative_norm(*self.outputs), self.cosine()
        return ModuleError(layer if layer != NONE else None, module, *found)


def mean_cosine(a: Float32, b: Float32) -> float:
    """Of the rows of a and b."""
    sums = Sums(len(a))
    sums.add_outputs(a, b, np.arange(len(a)))
    return sums.cosine()


def module_errors(
    baseline: Callable[[int], Tensors], quantized: Engine, tapped_inputs: Iterable[tuple[Module, Float32]]
) -> Iterator[ModuleError]:
    """The parts of each module in turn. Both matrices are held in float32, one expert's, or a run of the head's, at a
    time."""
    for module, x in tapped_inputs:
        ours, theirs = engine_tensors(quantized, module.layer), baseline(module.layer)
        rows = ours.descs[ours.names[module.field]][1]
        factors = balance_factors(quantized, module, rows)
        sums: dict[str, Sums] = {}
        for unit in units_of(module, quantized.spec, rows, x):
            with ours.matrix(module.field, unit) as q, theirs.matrix(module.field, unit) as b:
                w_q, w_b = q.dequantized(), b.dequantized()
                y_q, y_b = (m.apply(unit.x) for m in (q, b)) if len(unit.x) else (None, None)
            if factors is not None:
                w_q = w_q / factors[:, None]  # powers of two: exact
                y_q = None if y_q is None else y_q / factors
            for part, of in unit.parts.items():
                part_sums = sums.setdefault(part, Sums(results_of(module, x)))
                part_sums.add_weights(w_q[of], w_b[of])
                if y_q is not None and y_b is not None:
                    part_sums.add_outputs(y_q[:, of], y_b[:, of], unit.places)
        for part, found in sums.items():
            yield found.error(module.layer, part)


def hidden_errors(baseline: Sequence[Float32], quantized: Sequence[Float32]) -> list[HiddenError]:
    pairs = zip(quantized, baseline, strict=True)
    return [HiddenError(i, relative(q, b), mean_cosine(q, b)) for i, (q, b) in enumerate(pairs)]
