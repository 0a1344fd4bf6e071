"""Stage 4, kernels_moe: the ops of a mixture of experts alone, on numpy arrays. Conventions and errors: kernels.py.

ids, weights = kernels_moe.route(x, router_weight, RouterSpec(num_experts=8, top_k=2, normalise=True))
y = kernels_moe.moe_ffn(x, router_weight, gate, up, down, RouterSpec(num_experts=8, top_k=2), quant="int4")
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine._core import Format, OpKind
from pyengine.decoder import ACTIVATIONS, router_fields
from pyengine.errors import RequestError
from pyengine.kernel_program import Array, Bench, Float32, matrix, values
from pyengine.packer import padded
from pyengine.quantize import PackedFormat, choose
from pyengine.spec import RouterSpec


def _router(b: Bench, x: int, weight: Array, router: RouterSpec, bias: Any) -> int:
    """The op, and its output: [weights | ids]."""
    out, scores = b.buffer(2 * router.top_k), b.buffer(router.num_experts)
    fmt = PackedFormat(Format.BF16 if weight.dtype == np.uint16 else Format.F32)
    ids = {"weight": b.tensor(fmt, len(weight), [(weight, 0, 1)])}
    if bias is not None:
        ids["bias"] = b.vector(values(bias, "bias", router.num_experts))
    b.op(OpKind.ROUTER, input=x, output=out, scratch=scores, **ids, **router_fields(router))
    return out


def route(
    x: Any, weight: Any, router: RouterSpec, bias: Any = None, *, threads: int | None = None, isa: str | None = None
) -> tuple[npt.NDArray[np.int64], Float32]:
    """(expert ids, weights), each [M, top_k], of x [M, K], router weight [experts, K], selection bias [experts].

    Best first; the lower id where scores are equal. ComputeError for a logit that is NaN or Inf.
    """
    weight = matrix(weight, "weight", router.num_experts)
    x = values(x, "x", None, weight.shape[1])
    b = Bench(threads, isa)
    source = b.buffer(weight.shape[1])
    b.op(OpKind.LOAD_HIDDEN, output=source)
    out = _router(b, source, weight, router, bias)
    chosen = b.show(b.program(out, len(x)), x, 2 * router.top_k)
    return chosen[:, router.top_k :].astype(np.int64), np.ascontiguousarray(chosen[:, : router.top_k])


class MoE:
    """Packed experts with their router, for repeated use: y = moe(x).

    router_weight [E, K]; gate, up [E, F, K]; down [E, N, F] with N = K; bias [E] or None. The other arguments: see
    moe_ffn. `routed` [E] holds how many tokens each expert has had.
    """

    def __init__(
        self,
        router_weight: Any,
        gate: Any,
        up: Any,
        down: Any,
        router: RouterSpec,
        bias: Any = None,
        *,
        quant: str = "int8",
        group_size: int | None = None,
        scheme: str | None = None,
        activation: str = "silu",
        fused: bool = True,
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise RequestError(f"activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
        experts = router.num_experts
        gates, ups, downs = (
            [matrix(m, f"{name}[{e}]") for e, m in enumerate(stack)]
            for name, stack in (("gate", gate), ("up", up), ("down", down))
        )
        if not experts == len(gates) == len(ups) == len(downs):
            raise RequestError(f"{len(gates)} gate, {len(ups)} up, {len(downs)} down matrices; expected {experts} each")
        inter, self.width = gates[0].shape
        for e in range(experts):
            matrix(gates[e], f"gate[{e}]", inter, self.width)
            matrix(ups[e], f"up[{e}]", inter, self.width)
            matrix(downs[e], f"down[{e}]", self.width, inter)
        fmt, panels = choose(quant, group_size, scheme).layers, padded(inter) // 16
        b = self._bench = Bench(threads, isa)
        gate_up_parts = [
            part for e in range(experts) for part in ((gates[e], 2 * e * panels, 2), (ups[e], 2 * e * panels + 1, 2))
        ]
        gate_up = b.tensor(fmt, 2 * experts * padded(inter), gate_up_parts)
        rows = padded(self.width)
        down_tensor = b.tensor(fmt, experts * rows, [(downs[e], e * rows // 16, 1) for e in range(experts)])
        x, self._out = b.buffer(self.width), b.buffer(self.width)
        branch, act = b.buffer(self.width), b.buffer(inter, rows=router.top_k)
        gathered = b.buffer(self.width, rows=router.top_k)
        b.op(OpKind.LOAD_HIDDEN, output=x)
        b.op(OpKind.MASK_COLUMNS, output=self._out, norm=b.vector(np.zeros(self.width, np.float32)))  # it is added to
        routing = _router(b, x, matrix(router_weight, "router_weight", experts, self.width), router, bias)
        common = {"experts": experts, "top_k": router.top_k, "routing": routing, "rows": gathered}
        b.op(
            OpKind.MOE_GATE_UP, input=b.quantized(x, fmt), output=act, weight=gate_up,
            activation=int(ACTIVATIONS[activation]), **common,
        )  # fmt: skip
        b.op(OpKind.MOE_DOWN, input=b.quantized(act, fmt), output=branch, weight2=down_tensor, **common)
        b.op(OpKind.ADD, input=branch, output=self._out)
        self._fused = fused
        self.routed = np.zeros(experts, np.uint64)

    def __call__(self, x: Any) -> Float32:
        """x [M, K] -> float32 [M, K]."""
        x = values(x, "x", None, self.width)
        program = self._bench.program(self._out, len(x), self._fused)
        y = self._bench.show(program, x, self.width)
        self.routed += program.routing()
        return y


def moe_ffn(
    x: Any, router_weight: Any, gate: Any, up: Any, down: Any, router: RouterSpec, bias: Any = None, **options: Any
) -> Float32:
    """Sum over a token's experts e of weight_e * (act(x @ gate[e].T) * (x @ up[e].T)) @ down[e].T: float32 [M, K].

    x [M, K]; router_weight [E, K], never quantized; gate, up [E, F, K]; down [E, K, F]; bias [E] or None, added to the
    scores for the choice alone. options: quant, group_size, scheme, activation, fused, threads, isa as for swiglu_ffn.
    """
    return MoE(router_weight, gate, up, down, router, bias, **options)(x)
