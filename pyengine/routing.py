"""Stage 5, routing: how many tokens each expert had. The core counts them while it sorts; reading is all that costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine._core import Program
from pyengine.spec import ModelSpec, MoESpec

UInt64 = npt.NDArray[np.uint64]


class RoutingCounts:
    """Counts of one program: [experts of all routers], router by router in the order of the layers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.total = program.routing()

    def take(self) -> UInt64:
        """What was counted since the last call; it is in `total`, too."""
        counts = self.program.routing(True)
        self.total += counts
        return counts


def by_layer(spec: ModelSpec, counts: UInt64) -> dict[int, UInt64]:
    """Layer -> tokens of its experts, uint64 [experts]."""
    layers = [(layer.index, layer.ffn.router.num_experts) for layer in spec.layers if isinstance(layer.ffn, MoESpec)]
    ends = np.cumsum([experts for _, experts in layers])
    return {index: counts[end - experts : end].copy() for (index, experts), end in zip(layers, ends, strict=True)}


def entropy(counts: UInt64) -> float | None:
    """Of the shares that `counts` [N] make, in nats; None where all are 0."""
    total = counts.sum()
    if not total:
        return None
    shares = counts[counts > 0] / total
    return float(-(shares * np.log(shares)).sum())


def record(spec: ModelSpec, counts: UInt64) -> dict[str, Any] | None:
    """`routing` of a result; None of a model without experts."""
    top_k = next((layer.ffn.router.top_k for layer in spec.layers if isinstance(layer.ffn, MoESpec)), None)
    if top_k is None:
        return None
    rows = [
        {"layer": layer, "tokens_per_expert": tokens.tolist(), "entropy": entropy(tokens)}
        for layer, tokens in by_layer(spec, counts).items()
    ]
    return {"top_k": top_k, "layers": rows}
