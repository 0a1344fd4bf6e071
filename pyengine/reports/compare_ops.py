"""Stage 6, compare_ops: an engine's programs changed op by op: inputs of matrices shown, one module taken from another.

What the family is does not matter here, only that a matrix is an op of the unfused program: LINEAR, MOE_GATE_UP and
MOE_DOWN (all experts of a layer), HEAD_LINEAR (all heads of latent attention) or LM_HEAD. Routers are never quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyengine import kernels
from pyengine._core import Format, Norm, OpKind, Program
from pyengine.decoder import BuiltProgram, Op
from pyengine.hooks import Hooks
from pyengine.pack_layer import NONE, LayerWeights

if TYPE_CHECKING:
    from pyengine.engine import Engine

Float32 = npt.NDArray[np.float32]
TAP_BYTES = 256 << 20  # of inputs held at a time
LAYER_TOKENS = 256  # run at most; the second half is looked at
HIDDEN = "hidden"
HEAD = "lm_head"
INTEGER = (Format.INT8, Format.INT4_MIN, Format.INT4_SYM)  # of weights that take int8 activations
MATRICES = {  # ops with a matrix, and the field that holds it
    int(OpKind.LINEAR): "weight",
    int(OpKind.MOE_GATE_UP): "weight",
    int(OpKind.MOE_DOWN): "weight2",
    int(OpKind.HEAD_LINEAR): "weight",
    int(OpKind.LM_HEAD): "weight",
}


@dataclass(frozen=True)
class Module:
    """An op's matrix: layer (NONE: the head), name, the field of LayerWeights and of the op that it is in, the tensor,
    and the op's place among the unfused ones.

    width: of its input, times `slots`, the rows that the input has of each token. top_k: experts of a token; 0 where
    the matrix is not one of experts. routing: the buffer that they are in.
    """

    layer: int
    name: str
    field: str
    key: str
    tensor: int
    op: int
    width: int
    slots: int = 1
    top_k: int = 0
    routing: int = NONE


# ---- programs, op by op ----------------------------------------------------------------------------------------------


def tensor_names(weights: LayerWeights) -> dict[int, str]:
    """Tensor id -> the field of LayerWeights that holds it (numbered where it is one of several)."""
    names: dict[int, str] = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, int):
            names.setdefault(value, field.name)
        elif isinstance(value, Sequence):
            names.update({tensor: f"{field.name}.{i}" for i, tensor in enumerate(value) if isinstance(tensor, int)})
    names.pop(NONE, None)
    return names


def shown_name(field: str, experts: bool) -> str:
    """How a module is called: its field, with the FFN it belongs to where a layer has several."""
    if field.startswith("shared_"):
        return f"shared_expert.{field.removeprefix('shared_')}"
    return f"experts.{field}" if experts else field


def modules_of(engine: Engine, plain: BuiltProgram) -> list[Module]:
    """The matrices of an unfused program, in order; the head is the last."""
    names = [tensor_names(weights) for weights in engine.weights.layers]
    found = []
    for index, op in enumerate(plain.ops):
        if op["kind"] not in MATRICES:
            continue
        key, layer, experts = MATRICES[op["kind"]], op["layer"], "experts" in op
        field = HEAD if layer == NONE else names[layer][op[key]]
        _, width, slots = plain.buffers[op["input"]]
        of = {"top_k": op["top_k"], "routing": op["routing"]} if experts else {}
        name = shown_name(field, experts)
        found.append(Module(layer, name, field, key, op[key], index, width * slots, slots, **of))
    return found


def float_input(plain: BuiltProgram, index: int) -> tuple[int, int]:
    """(buffer, op index in front of which it holds it) of the float values that an op with a matrix reads."""
    buffer = plain.ops[index]["input"]
    if not plain.buffers[buffer][0]:
        return buffer, index
    at = max(i for i in range(index) if plain.ops[i].get("output") == buffer)
    return int(plain.ops[at]["input"]), at


def program_of(
    engine: Engine, plain: BuiltProgram, ops: list[Op], buffers: list[tuple[bool, int, int]],
    taps: tuple[tuple[int, str], ...] = (), widths: list[int] | None = None,
) -> BuiltProgram:  # fmt: skip
    limits = plain.max_batch_tokens, plain.max_sequences
    return BuiltProgram(
        Program(engine.backend, ops, buffers, *limits, False), ops, taps, widths or [], *limits, buffers
    )


def tapped(engine: Engine, plain: BuiltProgram, modules: Sequence[Module]) -> BuiltProgram:
    """The program with the inputs of these modules shown, under (layer, name), and the routing of experts behind."""
    before: dict[int, list[Op]] = {}
    keys: list[tuple[int, str]] = []
    widths: list[int] = []

    def show(module: Module, name: str, buffer: int, at: int, width: int) -> None:
        stage = plain.ops[module.op]["stage"]
        tap = {"kind": int(OpKind.TAP), "stage": stage, "layer": module.layer, "input": buffer, "head_dim": len(keys)}
        before.setdefault(at, []).append(tap)
        keys.append((module.layer, name))
        widths.append(width)

    for module in modules:
        show(module, module.name, *float_input(plain, module.op), module.width)
        if module.top_k:
            show(module, f"routing of {module.name}", module.routing, module.op, 2 * module.top_k)
    ops = [one for i, op in enumerate(plain.ops) for one in (*before.get(i, ()), op)]
    return program_of(engine, plain, ops, plain.buffers, tuple(keys), widths)


def inputs(engine: Engine, ids: Sequence[int]) -> Iterator[tuple[Module, Float32]]:
    """Each module with its inputs [T - T // 2, width] over the second half of `ids`, a few modules at a time.

    Those of experts have the ids of a token's experts behind them, [T - T // 2, width + top_k].
    """
    plain = engine.build(fused=False, timed=False)
    half = len(ids) // 2
    batch: list[Module] = []
    every = modules_of(engine, plain)
    for index, module in enumerate(every):
        batch.append(module)
        full = sum(4 * len(ids) * one.width for one in batch) >= TAP_BYTES
        if full or index == len(every) - 1:
            taps: dict[tuple[int, str], Float32] = {}
            engine.logits(ids, rows=[], program=tapped(engine, plain, batch), taps=taps)
            for one in batch:
                x = taps.pop((one.layer, one.name))[half:]
                if one.top_k:
                    x = np.concatenate([x, taps.pop((one.layer, f"routing of {one.name}"))[half:, one.top_k :]], axis=1)
                x = np.ascontiguousarray(x)
                yield one, normed(engine, plain.ops[one.op], x) if one.layer == NONE else x
            batch = []


def normed(engine: Engine, head: Op, x: Float32) -> Float32:
    """What lm_head's matrix reads of the hidden state x [T, hidden]: the final norm is part of the op."""
    weight = engine.backend.tensor_dequantize(head["norm"])[0]
    if head["norm_kind"] == int(Norm.RMS_NORM):
        return kernels.rms_norm(x, weight, eps=head["eps"])
    bias = None if head["norm_bias"] == NONE else engine.backend.tensor_dequantize(head["norm_bias"])[0]
    return kernels.layer_norm(x, weight, bias, eps=head["eps"])


def hidden_states(engine: Engine, ids: Sequence[int]) -> list[Float32]:
    """The residual stream behind each layer [T - T // 2, hidden], over the second half of `ids`."""
    states, half = [], len(ids) // 2
    step = max(1, TAP_BYTES // (4 * len(ids) * engine.spec.hidden_size))
    for begin in range(0, engine.spec.num_layers, step):
        keys = tuple((layer, HIDDEN) for layer in range(begin, min(begin + step, engine.spec.num_layers)))
        taps: dict[tuple[int, str], Float32] = {}
        engine.logits(ids, rows=[], program=engine.build(hooks=Hooks(taps=keys), timed=False), taps=taps)
        states += [np.ascontiguousarray(taps[key][half:]) for key in keys]
    return states


# ---- one module at a time --------------------------------------------------------------------------------------------


class Swap:
    """The baseline with one module of the quantized engine in it: its packed bytes and bias, inputs as it takes them.

    Both engines have the same layers.
    """

    def __init__(self, baseline: Engine, quantized: Engine) -> None:
        self.baseline, self.quantized = baseline, quantized
        self.plain = baseline.build(fused=False, timed=False)
        self.targets = modules_of(baseline, self.plain)
        self.theirs = quantized.build(fused=False, timed=False).ops
        theirs = [op for op in self.theirs if op["kind"] in MATRICES]
        self.counterpart = dict(zip((module.op for module in self.targets), theirs, strict=True))

    def copy(self, tensor: int) -> int:
        """The same packed bytes in the baseline's backend."""
        new = self.baseline.backend.tensor_create(*self.quantized.weights.tensors[tensor])
        self.baseline.backend.tensor_write(new, self.quantized.backend.tensor_bytes(tensor))
        return new

    def logits(self, module: Module, ids: Sequence[int], rows: Sequence[int]) -> Float32:
        other = self.counterpart[module.op]
        made = {key: self.copy(other[key]) for key in (module.key, "bias") if other.get(key, NONE) != NONE}
        ops, buffers = list(self.plain.ops), list(self.plain.buffers)
        op: Op = {**ops[module.op], **made}
        ops[module.op] = op
        if module.layer != NONE:  # the head rounds its inputs itself
            op["input"], _ = float_input(self.plain, module.op)
            if Format(self.quantized.weights.tensors[other[module.key]][0]) in INTEGER:
                quantize = {"kind": int(OpKind.QUANTIZE), "stage": op["stage"], "layer": module.layer}
                ops.insert(module.op, {**quantize, "input": op["input"], "output": len(buffers)})
                _, width, slots = buffers[op["input"]]
                op["input"] = len(buffers)
                buffers.append((True, width, slots))
        try:
            program = program_of(self.baseline, self.plain, ops, buffers)
            return self.baseline.logits(ids, rows=rows, program=program)
        finally:
            for tensor in made.values():  # a program holds what it uses
                self.baseline.backend.tensor_free(tensor)
