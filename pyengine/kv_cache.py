"""Stage 5, kv_cache: which blocks of the core's KV pools belong to which sequence.

Layers with the same (KV heads, columns of K and V, window) form a group with one pool of blocks of 32 tokens and one
block table per sequence; a window group gives back the blocks that no later token can see.
"""

from __future__ import annotations

import collections.abc

import numpy as np
import numpy.typing as npt

from pyengine._core import KV_BLOCK, Backend, KvDtype
from pyengine.errors import RequestError
from pyengine.spec import ModelSpec

Int32 = npt.NDArray[np.int32]
KV_DTYPES = ("bf16", "f32", "int8")


def token_bytes(kv_heads: int, k_dim: int, v_dim: int, kv_dtype: str) -> int:
    """Of one token in one layer: K [k_dim], V [v_dim rounded up to 16] per head, and in int8 a scale for each."""
    element = {"f32": 4, "bf16": 2, "int8": 1}[kv_dtype]
    scale, step = (4, 4) if kv_dtype == "int8" else (0, 1)
    k, v = -(-k_dim // step) * step, -(-v_dim // 16) * 16
    return kv_heads * (k * element + v * element + (scale if k else 0) + (scale if v else 0))


class KvPool:
    """The pools of one engine: free blocks by group, grown as needed. kv_dtype: one of KV_DTYPES."""

    def __init__(self, backend: Backend, spec: ModelSpec, kv_dtype: str) -> None:
        self.backend = backend
        dtype = int(KvDtype.__members__[kv_dtype.upper()])
        shapes: dict[tuple[int, int, int, int | None], list[int]] = {}
        for layer in spec.layers:
            a = layer.attention
            shapes.setdefault((a.num_kv_heads, a.k_dim, a.v_dim, a.window), []).append(layer.index)
        self.windows: list[int | None] = []
        self.ids: list[int] = []
        self.free: list[list[int]] = []
        self.size: list[int] = []
        places: dict[int, tuple[int, int]] = {}
        for (kv_heads, k_dim, v_dim, window), layers in shapes.items():
            group = backend.kv_create(len(layers), kv_heads, k_dim, v_dim, dtype)
            places.update({layer: (group, at) for at, layer in enumerate(layers)})
            self.ids.append(group)
            self.windows.append(window)
            self.free.append([])
            self.size.append(0)
        self.groups = tuple(places[layer.index] for layer in spec.layers)

    @property
    def bytes_per_token(self) -> float:
        """Of all groups together, for tokens inside every window."""
        return sum(self.backend.kv_block_bytes(group) for group in self.ids) / KV_BLOCK

    def take(self, group: int) -> int:
        if not self.free[group]:
            grown = self.size[group] + max(4, self.size[group] // 4)
            self.backend.kv_reserve(self.ids[group], grown)
            self.free[group] = list(range(grown - 1, self.size[group] - 1, -1))
            self.size[group] = grown
        return self.free[group].pop()

    def give_back(self, group: int, block: int) -> None:
        self.free[group].append(block)


def first_seen(length: int, window: int | None) -> int:
    """The first block that the token at position `length` looks into."""
    return 0 if window is None else max(0, length + 1 - window) // KV_BLOCK


class Sequence:
    """The tokens of one sequence in the pools: `length` tokens are cached."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.length = 0
        self._owned_to = 0  # positions from `length` up to here have their blocks
        self.owned: list[dict[int, int]] = [{} for _ in pool.ids]  # block index -> block
        self.tables: list[Int32] = [np.zeros(16, np.int32) for _ in pool.ids]
        self._rows = [table.reshape(1, -1) for table in self.tables]
        # what a step of one token passes to the core, made once
        self._one = (np.array((0, 1), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))

    def reserve(self, tokens: int) -> None:
        """Own the blocks of positions length .. length + tokens - 1."""
        if self.length + tokens <= self._owned_to:
            return
        last = (self.length + tokens - 1) // KV_BLOCK
        for group, table in enumerate(self.tables):
            if last >= len(table):
                self.tables[group] = table = np.concatenate([table, np.zeros(max(last + 1, len(table)), np.int32)])
                self._rows[group] = table.reshape(1, -1)
            for index in range(self.length // KV_BLOCK, last + 1):
                if index not in self.owned[group]:
                    table[index] = self.owned[group][index] = self.pool.take(group)
        self._owned_to = (last + 1) * KV_BLOCK

    def step(self, ids: collections.abc.Sequence[int]) -> tuple[Int32, Int32, Int32, list[Int32]]:
        """A batch of this sequence's next tokens alone, reserved before: query_start [2], token_ids and positions [T],
        block tables [1, blocks] by group. Overwritten by the next call."""
        if len(ids) > 1:
            positions = np.arange(self.length, self.length + len(ids), dtype=np.int32)
            return np.array((0, len(ids)), np.int32), np.array(ids, np.int32), positions, self._rows
        start, token_ids, positions = self._one
        token_ids[0], positions[0] = ids[0], self.length
        return start, token_ids, positions, self._rows

    def advance(self, tokens: int) -> None:
        """The run went well: its tokens count. Blocks that fell out of a window go back to the pool."""
        self.length += tokens
        for group, window in enumerate(self.pool.windows):
            if window is None:
                continue
            first = first_seen(self.length, window)
            for index in [i for i in self.owned[group] if i < first]:
                self.pool.give_back(group, self.owned[group].pop(index))
                self.tables[group][index] = 0  # any valid block: never read

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on. RequestError, and nothing changes, where a window has given back blocks
        that the next token would see."""
        length = min(self.length, length)
        keep = -(-length // KV_BLOCK)
        for owned, window in zip(self.owned, self.pool.windows, strict=True):
            if not owned.keys() >= set(range(first_seen(length, window), keep)):
                raise RequestError(f"{length} of {self.length} tokens; expected as many as the window still holds")
        for group, owned in enumerate(self.owned):
            for index in [i for i in owned if i >= keep]:
                self.pool.give_back(group, owned.pop(index))
        self.length = length
        self._owned_to = min(self._owned_to, keep * KV_BLOCK)

    def close(self) -> None:
        for group, owned in enumerate(self.owned):
            for block in owned.values():
                self.pool.give_back(group, block)
            owned.clear()
        self.length = self._owned_to = 0
