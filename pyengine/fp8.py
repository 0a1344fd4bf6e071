"""Stage 2, fp8: matrices stored as float8 (E4M3) with a float32 scale per block, read as float32.

The scale is a tensor beside the matrix, `<name>_scale_inv`, and multiplies: w[i, k] = value[i, k] *
scale[i // b, k // c] for blocks [b, c] (DeepSeek-AI 2024, section 3.3). Blocks at the edges are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.checkpoint import Checkpoint, TensorInfo, as_float32
from pyengine.config_values import ConfigValues

SCALE = "_scale_inv"  # what the name of a matrix becomes
KEYS = {"quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt"}
INERT_KEYS = {"modules_to_not_convert", "ignored_layers", "dequantize"}  # the files' own dtypes say what is float8
WHOLE = (0, 0)  # one block

Block = tuple[int, int]


def fp8_block(config: ConfigValues, quantization: Mapping[str, Any]) -> Block:
    """Rows and columns of a block, from a quantization_config whose quant_method is fp8.

    How activations would be rounded (activation_scheme) does not matter: they are not rounded to float8 here. Errors:
    ModelFormatError for a bad value, UnsupportedModelError for a key or value that is not implemented.
    """
    for key, value in quantization.items():
        if key not in KEYS and key not in INERT_KEYS and value is not None:
            raise config.unsupported(f"quantization_config.{key}", value, f"for fp8: {', '.join(sorted(KEYS))}")
    form = quantization.get("fmt")
    if form not in (None, "e4m3"):
        raise config.unsupported("quantization_config.fmt", form, "e4m3")
    scheme = quantization.get("activation_scheme")
    if scheme not in (None, "dynamic", "static"):
        raise config.unsupported("quantization_config.activation_scheme", scheme, "dynamic or static")
    block = quantization.get("weight_block_size")
    if block is None:
        return WHOLE
    whole = isinstance(block, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in block)
    if not whole or len(block) != 2 or min(block) < 1:
        raise config.bad("quantization_config.weight_block_size", block, "two whole numbers, at least 1")
    return block[0], block[1]


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Of the scales of a matrix: one for each block, or one number. Of experts in one tensor [E, N, K]: each's."""
    return () if block == WHOLE else (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True)))


class Fp8Checkpoint:
    """Reads like a `Checkpoint`; what is stored as float8 comes as float32."""

    def __init__(self, checkpoint: Checkpoint, block: Block) -> None:
        self.checkpoint = checkpoint
        self.block = block
        self.tensors: Mapping[str, TensorInfo] = checkpoint.tensors

    def read(self, name: str) -> npt.NDArray[Any]:
        """As `Checkpoint.read`."""
        return self._scaled(name, self.checkpoint.read(name), 0)

    def read_range(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """As `Checkpoint.read_range`."""
        return self._scaled(name, self.checkpoint.read_range(name, begin, end), begin)

    def read_rows(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """As `Checkpoint.read_rows`."""
        if self.tensors[name].dtype != "F8_E4M3":
            return self.checkpoint.read_rows(name, rows)
        return as_float32(self.read(name)[rows])

    def _scaled(self, name: str, raw: npt.NDArray[Any], first: int) -> npt.NDArray[Any]:
        """Rows from `first` on of a tensor as stored, with their scales, block by block; of [E, N, K] one expert's."""
        info = self.tensors[name]
        if info.dtype != "F8_E4M3":
            return raw
        values = as_float32(raw)
        if len(info.shape) == 3:
            expert, first = divmod(first, info.shape[1])
            blocks = self.tensors[name + SCALE].shape[1]
            scales = as_float32(self.checkpoint.read_range(name + SCALE, expert * blocks, (expert + 1) * blocks))
        else:
            scales = as_float32(self.checkpoint.read(name + SCALE))
        if self.block == WHOLE:
            values *= scales.reshape(-1)[0]
            return values
        rows, columns = self.block
        for at in range(first // rows, -(-(first + len(values)) // rows)):
            part = values[max(at * rows - first, 0) : (at + 1) * rows - first]
            part *= np.repeat(scales[at], columns)[: values.shape[1]]
        return values
