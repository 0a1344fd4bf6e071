"""Stage 6, compare_baseline: the two models of a comparison before it: whether memory holds both, and what the baseline
gives: while it stays loaded, or from a temporary file without a name once it is closed. The bits are the same.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine import quantize
from pyengine.errors import ResourceError
from pyengine.gguf_checkpoint import default_quant
from pyengine.gguf_file import is_gguf
from pyengine.reports import compare_ops, compare_units
from pyengine.reports.account_read import read_anatomy
from pyengine.reports.compare import Float32
from pyengine.reports.memory import memory_room

if TYPE_CHECKING:
    from pyengine.engine import Engine

ROOM = 1.1  # of the packed weights: activations, the KV cache and the like


@dataclass(frozen=True)
class Side:
    """A model to be loaded: where it is, in which format, and how."""

    folder: Path
    quant: str | None  # None: the default of the model
    group_size: int | None
    open: Callable[[], Engine]


@dataclass(frozen=True)
class Options:
    """What to measure. layers: module by module. swap: one module at a time. prompt: greedy texts of both."""

    tokens: int = 4096
    window: int = 512
    layers: bool = True
    swap: bool = False
    prompt: str | None = None
    max_tokens: int = 64
    together: bool | None = None  # None: if memory holds both


class Spool:
    """Arrays in a file without a name: gone with the process, whatever ends it."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()

    def put(self, array: npt.NDArray[Any]) -> Callable[[], npt.NDArray[Any]]:
        """Store it; the call that comes back reads it again."""
        at = self.file.seek(0, os.SEEK_END)
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if array.nbytes > free:
            raise ResourceError(
                f"{tempfile.gettempdir()}: {free} bytes free, {array.nbytes} more of logits and inputs to keep; "
                "expected room for them (TMPDIR), fewer --tokens, or memory for both models"
            )
        shape, dtype, size = array.shape, array.dtype, array.nbytes
        self.file.write(array.tobytes())

        def read() -> npt.NDArray[Any]:
            self.file.seek(at)
            return np.frombuffer(bytearray(self.file.read(size)), dtype).reshape(shape)

        return read

    def close(self) -> None:
        self.file.close()


# ---- whether both fit ------------------------------------------------------------------------------------------------


def needed_bytes(side: Side) -> int:
    """About what a loaded model takes, from its config.json."""
    anatomy = read_anatomy(side.folder if is_gguf(side.folder) else side.folder / "config.json")
    quant = side.quant or default_quant(side.folder)
    if quant == "none":
        quant = "bf16" if anatomy.stored == "bfloat16" else "f32"
    return int(ROOM * anatomy.weight_bytes(quantize.choose(quant, side.group_size)))


def fit_together(baseline: Side, quantized: Side) -> bool:
    available = memory_room().available
    return available is None or needed_bytes(baseline) + needed_bytes(quantized) <= available


# ---- the baseline, loaded or remembered ------------------------------------------------------------------------------


def shapes(engine: Engine) -> list[dict[str, tuple[int, int]]]:
    """[rows, cols] of each layer's tensors by name."""
    names = [compare_ops.tensor_names(w) for w in engine.weights.layers]
    return [{name: engine.weights.tensors[t][1:3] for t, name in layer.items()} for layer in names]


class Live:
    """A baseline that stays loaded."""

    def __init__(self, engine: Engine, windows: list[list[int]], rows: list[int], ids: list[int], o: Options) -> None:
        self.engine = engine
        self.windows, self.rows, self.ids, self.options = windows, rows, ids, o
        self.quant = engine.quant
        self.shapes = shapes(engine) if o.layers or o.swap else []

    def logits(self, index: int) -> Float32:
        return self.engine.logits(self.windows[index], self.rows)

    def inputs(self) -> Iterator[tuple[compare_ops.Module, Float32]]:
        return compare_ops.inputs(self.engine, self.ids)

    def tensors(self, layer: int) -> compare_units.Tensors:
        return compare_units.engine_tensors(self.engine, layer)

    def hidden(self) -> list[Float32]:
        return compare_ops.hidden_states(self.engine, self.ids)

    def greedy(self, prompt: str) -> Any:
        return self.engine.generate(prompt, max_tokens=self.options.max_tokens)


class Remembered:
    """What a baseline gave before it was closed."""

    def __init__(self, live: Live, spool: Spool, step: Callable[[str], None]) -> None:
        o, engine = live.options, live.engine
        self.quant = engine.quant
        self.kept = []
        for index in range(len(live.windows)):
            step("baseline")
            self.kept.append(spool.put(live.logits(index)))
        self.modules = [(m, spool.put(x)) for m, x in live.inputs()] if o.layers else []
        self.states = [spool.put(x) for x in live.hidden()] if o.layers else []
        self.tensors = compare_units.StoredLayers(engine, engine.quantization)
        self.text = live.greedy(o.prompt) if o.prompt is not None else None

    def logits(self, index: int) -> Float32:
        return self.kept[index]()

    def inputs(self) -> Iterator[tuple[compare_ops.Module, Float32]]:
        return ((module, read()) for module, read in self.modules)

    def hidden(self) -> list[Float32]:
        return [read() for read in self.states]

    def greedy(self, prompt: str) -> Any:
        return self.text
