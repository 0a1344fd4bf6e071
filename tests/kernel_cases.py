"""What the kernel tests share: instruction sets, formats, data, and float64 models of the quantized arithmetic.

`unpack` reads packed bytes by docs/packed_formats.md alone, in plain numpy: it shares no code with the core.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyengine import _core

Array = NDArray[Any]
EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # below it the kernels flush to zero

ISAS = [isa["name"] for isa in _core.isas() if isa["available"]]
BEST = ISAS[-1]
THREADS = (1, 2, 3, 7)

# keyword arguments of pyengine.kernels, one for each way of storing a matrix
FORMATS: dict[str, dict[str, Any]] = {
    "f32": {"quant": "f32"},
    "bf16": {"quant": "bf16"},
    "int8": {"quant": "int8"},
}
for _scheme in ("minimum", "symmetric"):
    for _group in (32, 64, 128):
        FORMATS[f"int4_{_scheme}_{_group}"] = {"quant": "int4", "scheme": _scheme, "group_size": _group}
INTEGER = {name: options for name, options in FORMATS.items() if name.startswith("int")}

FORMAT_IDS = {0: "f32", 1: "bf16", 2: "int8", 3: "int4 symmetric", 4: "int4 minimum"}
STEP = {"f32": 1, "bf16": 2, "int8": 4, "int4 symmetric": 8, "int4 minimum": 8}  # columns in 64 bytes of data


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def to_bfloat16(x: Array) -> Array:
    """float32 rounded to bfloat16, nearest even, as float32; finite input."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def bfloat16_bits(x: Array) -> Array:
    """The same as uint16, the form in which checkpoints hand bfloat16 over."""
    return (to_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16)


# ---- activations ---------------------------------------------------------------------------------------------------


def quantize_activations(x: Array) -> tuple[Array, Array, Array]:
    """Rows of x [M, K] in groups of 64, the last shorter: q, its scale, and what is kept apart, each float64 [M, K].

    A value over 4 times every other of its group is kept apart in float. For the others scale = max |x| / 127 and
    q = x * (127 / max |x|) to the nearest even, every step in float32. x stands for q * scale + apart.
    """
    q, scales, apart = (np.zeros(x.shape) for _ in range(3))
    for start in range(0, x.shape[1], 64):
        part = x[:, start : start + 64].astype(np.float32)
        part = np.where(np.abs(part) < TINY, np.float32(0), part)
        sizes = np.sort(np.abs(part), axis=1)
        second = sizes[:, -2] if part.shape[1] > 1 else np.zeros(len(part), np.float32)
        alone = (sizes[:, -1] > np.float32(4) * second)[:, None] & (np.abs(part) == sizes[:, -1:])
        apart[:, start : start + 64] = np.where(alone, part, 0)
        part = np.where(alone, np.float32(0), part)
        top = np.abs(part).max(axis=1, keepdims=True)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(top > 0, np.float32(127) / top, np.float32(0)).astype(np.float32)
        usable = inverse < np.float32(3e38)
        q[:, start : start + 64] = np.rint(part * np.where(usable, inverse, np.float32(0)))
        scales[:, start : start + 64] = np.where(usable, top / np.float32(127), np.float32(0))
    return q, scales, apart


# ---- packed weights --------------------------------------------------------------------------------------------------


@dataclass
class Unpacked:
    """Matrix [N, K] = scale * q + minimum, elementwise in float64; q is what is stored less its offset.

    group: columns of a group, 0 for float formats. units [N, 2]: of which scales and minimums are multiples.
    """

    kind: str
    q: Array
    scale: Array
    minimum: Array
    group: int
    units: Array

    @property
    def values(self) -> Array:
        return self.scale * self.q + self.minimum

    @property
    def parts(self) -> Array:
        """|scale q| + |minimum|: what the rounding errors of a sum are relative to."""
        return np.abs(self.scale * self.q) + np.abs(self.minimum)


def up(n: int, to: int) -> int:
    return -(-n // to) * to


def unpack(raw: Array, mutate: str = "") -> Unpacked:
    """A packed tensor's bytes. mutate names a deliberate mistake, which every test of this function must find."""
    magic, version, code, group, _, n, k, size, _, _ = struct.unpack("<8siiiiqqQQQ", raw[:64].tobytes())
    assert magic == b"PYENGP16"
    assert version == 1
    assert size == len(raw) - 64
    kind = FORMAT_IDS[code]
    groups = -(-k // group) if group else 0
    head = {
        "f32": 0,
        "bf16": 0,
        "int8": 64 + up(32 * groups, 64),
        "int4 symmetric": 64 + up(32 * groups, 64),
        "int4 minimum": 128 + 2 * up(16 * groups, 64),
    }[kind]
    step = STEP[kind]
    steps = -(-k // step)
    panel_bytes = head + 64 * steps
    panels = raw[64 : 64 + size].reshape(-1, panel_bytes)
    data = np.ascontiguousarray(panels[:, head:]).reshape(len(panels), steps, 64)
    rows = up(n, 16)
    if kind == "f32":
        q = data.view(np.float32).transpose(0, 2, 1).reshape(rows, -1)[:n, :k].astype(np.float64)
        return Unpacked(kind, q, np.ones((n, k)), np.zeros((n, k)), 0, np.zeros((n, 2)))
    if kind == "bf16":
        bits = data.view(np.uint16).reshape(len(panels), steps, 16, 2).astype(np.uint32) << 16
        q = bits.view(np.float32).transpose(0, 2, 1, 3).reshape(rows, -1)[:n, :k].astype(np.float64)
        return Unpacked(kind, q, np.ones((n, k)), np.zeros((n, k)), 0, np.zeros((n, 2)))
    quads = data.reshape(len(panels), steps, 16, 4)  # [panel, step, row, column of a quad]
    if kind == "int8":
        stored = quads.transpose(0, 2, 1, 3).reshape(rows, -1)
    else:
        halves = [quads & 15, quads >> 4]
        if mutate == "nibbles swapped":
            halves.reverse()
        stored = np.stack(halves, axis=3).transpose(0, 2, 1, 3, 4).reshape(rows, -1)
    offset = {"int8": 128, "int4 symmetric": 8, "int4 minimum": 0}[kind]
    q = stored[:n, :k].astype(np.float64) - offset
    scale, minimum, units = _group_values(panels, kind, groups)
    at = np.arange(k) // group
    if mutate == "scale of the neighbour group":
        at = (at + 1) % groups
    result = Unpacked(kind, q, scale[:n, at], minimum[:n, at], group, units[:n])
    if mutate == "last column dropped":
        result.q[:, -1] = result.minimum[:, -1] = 0
    return result


def _group_values(panels: Array, kind: str, groups: int) -> tuple[Array, Array, Array]:
    """(scale, minimum) float64 [rows, groups], as the core rounds them: stored number times the unit of its row.

    And the units [rows, 2]; where there are no minimums theirs is 0.
    """
    width = 128 if kind == "int4 minimum" else 64
    units = np.ascontiguousarray(panels[:, :width]).view(np.float32)  # [panels, 16 or 32]
    by_row = np.zeros((16 * len(panels), 2))
    by_row[:, : width // 64] = units.reshape(len(panels), -1, 16).transpose(0, 2, 1).reshape(len(by_row), -1)

    def numbers(start: int, dtype: Any) -> Array:
        width = 16 * np.dtype(dtype).itemsize * groups
        return np.ascontiguousarray(panels[:, start : start + width]).view(dtype).reshape(len(panels), groups, 16)

    def times(stored: Array, unit: Array) -> Array:
        product = stored.astype(np.float32) * unit[:, None, :]  # rounded to float32
        return product.transpose(0, 2, 1).reshape(-1, groups).astype(np.float64)

    if kind != "int4 minimum":
        scale = times(numbers(64, np.int16), units[:, :16])
        return scale, np.zeros_like(scale), by_row
    scale = times(numbers(128, np.uint8), units[:, :16])
    minimum = times(numbers(128 + up(16 * groups, 64), np.int8), units[:, 16:])
    return scale, minimum, by_row


# ---- linear layers ---------------------------------------------------------------------------------------------------


def linear_oracle(x: Array, w: Unpacked) -> tuple[Array, Array]:
    """(x @ w.T in float64 [M, N], the largest rounding error of the float32 kernel [M, N]).

    Integer formats: exact inside a sub-block of 32 or 64 columns, then at most two float32 multiply-adds and a product
    of scales per block and per value kept apart; float formats: one multiply-add per column.
    """
    if w.kind in ("f32", "bf16"):
        inputs, terms = x.astype(np.float64), x.shape[1]
    else:
        q, scale, apart = quantize_activations(x)
        inputs, terms = q * scale + apart, 3 * -(-x.shape[1] // 32) + 3 * -(-x.shape[1] // 64) + 4
    bound = (terms + 1) * EPS * (np.abs(inputs) @ w.parts.T) + x.shape[1] * TINY
    return inputs @ w.values.T, bound
