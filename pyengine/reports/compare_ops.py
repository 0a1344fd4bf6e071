"""Stage 6, compare_ops: an engine's programs changed op by op: inputs of matrices shown, one module taken from another.

What the family is does not matter here, only that a matrix inside a layer is a LINEAR op of the unfused program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyengine._core import OpKind, Program
from pyengine.decoder import BuiltProgram, Hooks, Op
from pyengine.pack_layer import NONE, LayerWeights

if TYPE_CHECKING:
    from pyengine.engine import Engine

Float32 = npt.NDArray[np.float32]
TAP_BYTES = 256 << 20  # of inputs held at a time
LAYER_TOKENS = 256  # run at most; the second half is looked at
HIDDEN = "hidden"


@dataclass(frozen=True)
class Module:
    """A LINEAR op: layer, the name its tensor has in LayerWeights, the tensor, its place among the unfused ops."""

    layer: int
    name: str
    tensor: int
    op: int
    width: int  # of its input


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


def modules_of(engine: Engine, plain: BuiltProgram) -> list[Module]:
    """The matrices of an unfused program, in order."""
    names = [tensor_names(weights) for weights in engine.weights.layers]
    found = []
    for index, op in enumerate(plain.ops):
        if op["kind"] == int(OpKind.LINEAR) and op["layer"] >= 0:
            name = names[op["layer"]].get(op["weight"], f"linear {index}")
            width = plain.buffers[op["input"]][1]
            found.append(Module(op["layer"], name, op["weight"], index, width))
    return found


def float_input(plain: BuiltProgram, index: int) -> tuple[int, int]:
    """(buffer, op index in front of which it holds it) of the float values that a LINEAR op reads."""
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
    """The program with the inputs of these modules shown, under (layer, name)."""
    before: dict[int, list[Op]] = {}
    for number, module in enumerate(modules):
        buffer, at = float_input(plain, module.op)
        stage = plain.ops[module.op]["stage"]
        tap = {"kind": int(OpKind.TAP), "stage": stage, "layer": module.layer, "input": buffer, "head_dim": number}
        before.setdefault(at, []).append(tap)
    ops = [one for i, op in enumerate(plain.ops) for one in (*before.get(i, ()), op)]
    keys = tuple((module.layer, module.name) for module in modules)
    return program_of(engine, plain, ops, plain.buffers, keys, [module.width for module in modules])


def inputs(engine: Engine, ids: Sequence[int]) -> Iterator[tuple[Module, Float32]]:
    """Each module with its inputs [T - T // 2, K] over the second half of `ids`, a few modules at a time."""
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
                yield one, np.ascontiguousarray(taps.pop((one.layer, one.name))[half:])
            batch = []


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


def swap_targets(engine: Engine, plain: BuiltProgram) -> list[Module]:
    """Everything that can be quantized on its own: each module, and the head."""
    head = next(i for i, op in enumerate(plain.ops) if op["kind"] == int(OpKind.LM_HEAD))
    width = plain.buffers[plain.ops[head]["input"]][1]
    return [*modules_of(engine, plain), Module(NONE, "lm_head", plain.ops[head]["weight"], head, width)]


class Swap:
    """The baseline with one module of the quantized engine in it: its packed bytes and bias, inputs as it takes them.

    Both engines have the same layers.
    """

    def __init__(self, baseline: Engine, quantized: Engine) -> None:
        self.baseline, self.quantized = baseline, quantized
        self.plain = baseline.build(fused=False, timed=False)
        self.targets = swap_targets(baseline, self.plain)
        self.theirs = quantized.build(fused=False, timed=False).ops
        theirs = [op for op in self.theirs if op["kind"] in (int(OpKind.LINEAR), int(OpKind.LM_HEAD))]
        self.counterpart = dict(zip((module.op for module in self.targets), theirs, strict=True))

    def copy(self, tensor: int) -> int:
        """The same packed bytes in the baseline's backend."""
        new = self.baseline.backend.tensor_create(*self.quantized.weights.tensors[tensor])
        self.baseline.backend.tensor_write(new, self.quantized.backend.tensor_bytes(tensor))
        return new

    def logits(self, module: Module, ids: Sequence[int], rows: Sequence[int]) -> Float32:
        other = self.counterpart[module.op]
        made = {key: self.copy(other[key]) for key in ("weight", "bias") if other.get(key, NONE) != NONE}
        ops, buffers = list(self.plain.ops), list(self.plain.buffers)
        op: Op = {**ops[module.op], **made}
        ops[module.op] = op
        if module.layer != NONE:  # the head rounds its inputs itself
            op["input"], _ = float_input(self.plain, module.op)
            if self.quantized.quantization.layers.is_integer:
                quantize = {"kind": int(OpKind.QUANTIZE), "stage": op["stage"], "layer": module.layer}
                ops.insert(module.op, {**quantize, "input": op["input"], "output": len(buffers)})
                op["input"] = len(buffers)
                buffers.append((True, module.width, 1))
        try:
            program = program_of(self.baseline, self.plain, ops, buffers)
            return self.baseline.logits(ids, rows=rows, program=program)
        finally:
            for tensor in made.values():  # a program holds what it uses
                self.baseline.backend.tensor_free(tensor)
