"""Stage 4, fuse: runs of neighbouring ops -> the fused ops of the core, which give the same bits with less traffic.

A pattern is a list of kinds that must stand side by side and hand their buffer on; anything between them (a tap, a
mask) keeps them apart. Patterns are tried in order at each place, the longest first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from pyengine._core import OpKind

Op = dict[str, Any]
PANEL = 16


def _chained(ops: list[Op]) -> bool:
    """Whether each op reads what the one before wrote. Ops on a buffer in place name it as input only."""
    return all(b["input"] == a.get("output", a["input"]) for a, b in pairwise(ops))


def _norm_quantize(ops: list[Op]) -> Op | None:
    norm, quantize = ops
    return {**norm, "kind": int(OpKind.NORM_QUANTIZE), "output": quantize["output"]}


def _qkv(ops: list[Op]) -> Op | None:
    linear, append = ops[0], ops[-1]
    if append["head_dim"] % PANEL:
        return None  # a head would share a panel with its neighbour
    merged: Op = {}
    for op in ops[1:]:
        merged.update(op)
    del merged["input"]
    return {**merged, **linear, "kind": int(OpKind.QKV_ROPE_APPEND)}


def _attention_quantize(ops: list[Op]) -> Op | None:
    attention, quantize = ops
    kind = int(OpKind.ATTENTION_QUANTIZE)
    return {**attention, "kind": kind, "output": quantize["output"], "scratch": attention["output"]}


def _ffn(ops: list[Op]) -> Op | None:
    """Both matrices with the activation between them, and the add behind them if there is one."""
    first, act, residual = ops[0], ops[1], ops[-1]["kind"] == int(OpKind.ADD)
    down = ops[-2] if residual else ops[-1]
    gated = act["kind"] == int(OpKind.ACT_MUL)
    with_add, alone = (OpKind.GATED_FFN_RESIDUAL, OpKind.GATED_FFN) if gated else (OpKind.FFN_RESIDUAL, OpKind.FFN)
    return {
        **first,
        "kind": int(with_add if residual else alone),
        "activation": act["activation"],
        "scratch": down["input"],
        "weight2": down["weight"],
        **({"bias2": down["bias"]} if "bias" in down else {}),
        "output": ops[-1]["output"],
        "scale": ops[-1].get("scale", 1.0),
    }


def _moe_ffn(ops: list[Op]) -> Op | None:
    gate_up, down, add = ops[0], ops[-2], ops[-1]
    return {
        **gate_up,
        "kind": int(OpKind.MOE_FFN_RESIDUAL),
        "scratch": down["input"],
        "weight2": down["weight2"],
        "output": add["output"],
        "scale": add.get("scale", 1.0),
    }


def _linear_residual(ops: list[Op]) -> Op | None:
    linear, add = ops
    return {**linear, **add, "kind": int(OpKind.LINEAR_RESIDUAL), "input": linear["input"]}


def _norm_residual(ops: list[Op]) -> Op | None:
    norm, add = ops
    return {**norm, "kind": int(OpKind.NORM_RESIDUAL), "output": add["output"], "scale": add.get("scale", 1.0)}


K = OpKind
PATTERNS: list[tuple[list[OpKind], Callable[[list[Op]], Op | None]]] = [
    *(
        ([K.LINEAR, act, *quantize, K.LINEAR, *add], _ffn)
        for act in (K.ACT_MUL, K.ACT)
        for quantize in ([K.QUANTIZE], [])
        for add in ([K.ADD], [])
    ),
    ([K.MOE_GATE_UP, K.QUANTIZE, K.MOE_DOWN, K.ADD], _moe_ffn),
    ([K.MOE_GATE_UP, K.MOE_DOWN, K.ADD], _moe_ffn),
    ([K.LINEAR, K.QK_NORM, K.ROPE, K.KV_APPEND], _qkv),
    ([K.LINEAR, K.ROPE, K.KV_APPEND], _qkv),
    ([K.LINEAR, K.QK_NORM, K.KV_APPEND], _qkv),
    ([K.LINEAR, K.KV_APPEND], _qkv),
    ([K.ATTENTION, K.QUANTIZE], _attention_quantize),
    ([K.NORM, K.QUANTIZE], _norm_quantize),
    ([K.NORM, K.ADD], _norm_residual),
    ([K.LINEAR, K.ADD], _linear_residual),
]


def fuse(ops: list[Op]) -> list[Op]:
    """The same program with every pattern replaced by its fused op."""
    out: list[Op] = []
    i = 0
    while i < len(ops):
        for kinds, make in PATTERNS:
            run = ops[i : i + len(kinds)]
            if [op["kind"] for op in run] != [int(kind) for kind in kinds] or not _chained(run):
                continue
            fused = make(run)
            if fused is not None:
                out.append(fused)
                i += len(kinds)
                break
        else:
            out.append(ops[i])
            i += 1
    return out
