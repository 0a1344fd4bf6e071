"""For tests of attention on the device: a cache behind a driver of tests/cuda, ragged batches, the float64 oracle."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from kernel_cases import EPS, to_bfloat16
from numpy.typing import NDArray

from pyengine import reference
from pyengine.packer import padded

Array = NDArray[Any]
Span = tuple[int, int, int]  # sequence, first position, one past the last

F32, BF16, INT8 = range(3)
ROUNDED: dict[int, Callable[[Array], Array]] = {
    F32: lambda x: x,
    BF16: to_bfloat16,
    INT8: lambda x: np.asarray(reference.round_int8(x), np.float32),
}
PARTITION, BLOCK = 256, 32
SOURCES = ("tests/cuda/attention_driver.cc", "csrc/cuda/attention.cu", "csrc/cuda/attention_tiles.cu",
           "csrc/cuda/heads.cu", "csrc/cuda/kv_layout.cc", "csrc/cuda/rows.cu", "csrc/runtime/kv_cache.cc",
           "csrc/core/memory.cc")  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("tokens", "sequences", "table_width")] + [
        (name, ctypes.c_void_p) for name in ("positions", "sequence_of", "query_start", "table")
    ]


class HeadsCase(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "whole_norms")]
        + [(name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "rope", "q_scales")]
        + [(name, ctypes.c_int64) for name in ("rope_positions", "rotary_dim")]
    )


class HostQuant(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "q",
            "scale",
            "scaled_sum64",
            "scaled_sum32",
            "negative_sum64",
            "negative_sum32",
            "outlier_value",
            "outlier_column",
        )
    ]


def structure(kind: type[ctypes.Structure], **fields: Any) -> Any:
    """An instance that keeps its arrays alive; None is a null pointer."""
    made: Any = kind()
    made.arrays = []
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value)
            made.arrays.append(value)
            value = value.ctypes.data
        setattr(made, name, value)
    return made


class DeviceCache:
    """Sequences in blocks that lie out of order; block 0 is no one's and stays NaN."""

    def __init__(
        self, call: Any, lengths: Sequence[int], kv_heads: int, k_dim: int, v_dim: int, dtype: int, layers: int = 1
    ) -> None:
        self.call, self.kv_heads, self.k_dim, self.v_dim, self.dtype = call, kv_heads, k_dim, v_dim, dtype
        self.layers = layers
        self.width = max(-(-n // BLOCK) for n in lengths) + 1
        ids = iter(np.random.default_rng(len(lengths)).permutation(sum(-(-n // BLOCK) for n in lengths)) + 1)
        self.table = np.zeros((len(lengths), self.width), np.int32)
        for s, n in enumerate(lengths):
            for i in range(-(-n // BLOCK)):
                self.table[s, i] = next(ids)
        self.blocks = int(self.table.max()) + 1
        handle = np.zeros(1, np.int64)
        call("attention_cache", layers, kv_heads, k_dim, v_dim, dtype, self.blocks, handle)
        self.handle = int(handle[0])

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self.call("attention_free", self.handle)

    def batch(self, spans: Sequence[Span]) -> Any:
        counts = [end - begin for _, begin, end in spans]
        return structure(
            Batch,
            tokens=sum(counts),
            sequences=len(spans),
            table_width=self.width,
            positions=np.concatenate([np.arange(begin, end, dtype=np.int32) for _, begin, end in spans]),
            sequence_of=np.repeat(np.arange(len(spans), dtype=np.int32), counts),
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            table=self.table[[s for s, _, _ in spans]],
        )

    def append(self, spans: Sequence[Span], k: Array, v: Array, layer: int = 0) -> None:
        """k, v [T, kv_heads, dim] of the spans' tokens."""
        columns = padded(self.kv_heads * self.k_dim)
        qkv = np.full((len(k), columns + columns + self.kv_heads * self.v_dim), np.nan, np.float32)
        qkv[:, columns : columns + self.kv_heads * self.k_dim] = k.reshape(len(k), -1)
        qkv[:, 2 * columns :] = v.reshape(len(k), -1)
        case = structure(HeadsCase, heads=self.kv_heads, kv_heads=self.kv_heads, head_dim=self.k_dim)
        self.call("attention_heads", self.handle, layer, case, 0.0, qkv, qkv.shape[1], self.batch(spans))

    def attend(
        self,
        spans: Sequence[Span],
        q: Array,
        *,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        partitions: int | None = None,
        quant: Any = None,
        layer: int = 0,
    ) -> Array:
        """q [T, heads, k_dim] -> [T, heads, v_dim]."""
        heads = q.shape[1]
        out = np.zeros((len(q), heads, self.v_dim), np.float32)
        needed = max((end - 1) // PARTITION + 1 for _, _, end in spans)
        numbers = (window or 0, self.k_dim**-0.5 if scale is None else scale, softcap or 0.0)
        self.call(
            "attention_run",
            *(self.handle, layer, heads, *numbers),
            *(np.ascontiguousarray(q), out, quant, partitions or needed, self.batch(spans)),
        )
        return out

    def pool(self) -> Array:
        """[blocks, layers, kv_heads, bytes of a head]"""
        size = np.zeros(1, np.int64)
        self.call("attention_pool", self.handle, None, size)
        out = np.zeros((self.blocks, self.layers, self.kv_heads, int(size[0])), np.uint8)
        self.call("attention_pool", self.handle, out, size)
        return out


def oracle(
    q: Array,
    k: Array,
    v: Array,
    spans: Sequence[Span],
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    pieces: bool = False,
) -> tuple[Array, Array]:
    """float64 over ragged spans, and how far float32 may be off. q [T, heads, d]; k, v [sequence][keys, kv_heads, d].

    A score is wrong by at most delta = (d + 2) eps |q| |k| scale, and the 8 roundings of a cap; so a weight by a factor
    within exp(+-2 delta), and the roundings of one exp, one product and sum per key, and of a merge per partition.
    pieces: q and the weights are two pieces of bfloat16 each, which leaves out 2^-16 of them.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    exact, bounds, at = [], [], 0
    for s, begin, end in spans:
        mine = q[at : at + end - begin].astype(np.float64)
        at += end - begin
        keys, values = k[s][:end].astype(np.float64), v[s][:end].astype(np.float64)
        exact.append(
            reference.attention(mine, keys, values, scale, begin, window, softcap).reshape(*mine.shape[:2], -1)
        )
        norms = float(np.linalg.norm(mine, axis=2).max()) * float(np.linalg.norm(keys, axis=2).max())
        left_out = 2.0**-16 if pieces else 0
        delta = ((q.shape[2] + 2) * EPS + left_out) * norms * abs(scale) + 8 * EPS * (softcap or 0)
        bounds.append(
            np.full(
                exact[-1].shape,
                (2 * delta + left_out + (min(end, window or end) + 16) * EPS) * float(np.abs(values).max()),
            )
        )
    return np.concatenate(exact), np.concatenate(bounds)


def in_pieces(spans: Sequence[Span], dtype: int) -> bool:
    """Whether the tensor cores get a batch: many tokens, not one or two of each of many sequences."""
    tokens = sum(end - begin for _, begin, end in spans)
    return dtype != F32 and tokens > 8 and tokens >= 4 * len(spans)
