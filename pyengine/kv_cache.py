"""Stage 5, kv_cache: which blocks of the core's KV pools belong to which sequence.

Layers with the same (KV heads, columns of K and V, window) form a group with one pool of blocks of 32 tokens and one
block table per sequence; a window group gives back the blocks that no later token can see. A block may have several
owners, sequences and the prefix cache; it is free again when the last one gives it back.
"""

from __future__ import annotations

import collections.abc

import numpy as np
import numpy.typing as npt

from pyengine import cuda
from pyengine._core import KV_BLOCK, Backend, KvDtype
from pyengine.errors import RequestError, ResourceError
from pyengine.prefix_cache import PrefixCache, first_seen, surely
from pyengine.spec import ModelSpec

Int32 = npt.NDArray[np.int32]
StepArrays = tuple[Int32, Int32, Int32, list[Int32]]
KV_DTYPES = ("bf16", "f32", "int8")


def token_bytes(kv_heads: int, k_dim: int, v_dim: int, kv_dtype: str) -> int:
    """Of one token in one layer: K [k_dim], V [v_dim rounded up to 16] per head, and in int8 a scale for each."""
    element = {"f32": 4, "bf16": 2, "int8": 1}[kv_dtype]
    scale, step = (4, 4) if kv_dtype == "int8" else (0, 1)
    k, v = -(-k_dim // step) * step, -(-v_dim // 16) * 16
    return kv_heads * (k * element + v * element + (scale if k else 0) + (scale if v else 0))


class KvPool:
    """The pools of one engine: free blocks by group, grown as needed. kv_dtype: one of KV_DTYPES.

    prefix_bytes: what `prefixes`, the blocks kept of earlier sequences, may take in all; 0 keeps none.
    """

    def __init__(self, backend: Backend, spec: ModelSpec, kv_dtype: str, prefix_bytes: int = 0) -> None:
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
        self.owners: list[list[int]] = []  # of each block
        places: dict[int, tuple[int, int]] = {}
        for (kv_heads, k_dim, v_dim, window), layers in shapes.items():
            group = backend.kv_create(len(layers), kv_heads, k_dim, v_dim, dtype)
            places.update({layer: (group, at) for at, layer in enumerate(layers)})
            self.ids.append(group)
            self.windows.append(window)
            self.free.append([])
            self.size.append(0)
            self.owners.append([])
        self.groups = tuple(places[layer.index] for layer in spec.layers)
        self.block_bytes = [backend.kv_block_bytes(group) for group in self.ids]
        self.prefixes = PrefixCache(self, prefix_bytes)

    @property
    def bytes_per_token(self) -> float:
        """Of all groups together, for tokens inside every window."""
        return sum(self.block_bytes) / KV_BLOCK

    def check_memory(self, tokens: int) -> None:
        """ResourceError where the blocks of `tokens` more tokens do not fit beside what the pools have free. What is
        kept of earlier sequences goes before that."""
        wanted, available = int(tokens * self.bytes_per_token), cuda.available_memory(self.backend.device)
        if available is None:
            return
        while wanted > available + self.free_bytes:
            if not self.prefixes.evict():
                raise ResourceError(
                    f"a KV cache of {tokens} tokens takes {wanted} bytes, {available + self.free_bytes} are available; "
                    "expected a shorter prompt, fewer tokens or a smaller context"
                )

    @property
    def free_bytes(self) -> int:
        """Of blocks that exist and belong to nobody."""
        return sum(len(free) * size for free, size in zip(self.free, self.block_bytes, strict=True))

    def take(self, group: int) -> int:
        """A block of one owner. ResourceError where there is no memory for one."""
        if not self.free[group]:
            self._grow(group)
        block = self.free[group][-1]
        del self.free[group][-1]  # pop() is a call, after which Ctrl-C could lose the block
        self.owners[group][block] = 1
        return block

    def _grow(self, group: int) -> None:
        """Have a free block. Where there is no memory, what is kept of earlier sequences goes first."""
        grown = self.size[group] + max(4, self.size[group] // 4)
        try:
            self.backend.kv_reserve(self.ids[group], grown)
        except ResourceError:
            while not self.free[group]:
                if not self.prefixes.evict():
                    raise
            return
        self.free[group] += range(grown - 1, self.size[group] - 1, -1)
        self.owners[group] += [0] * (grown - self.size[group])
        self.size[group] = grown

    def share(self, group: int, block: int) -> int:
        """One owner more; the block."""
        self.owners[group][block] += 1
        return block

    def give_back(self, group: int, block: int) -> None:
        """One owner less. Ctrl-C can come before, never after: the caller forgets the block next."""
        self.owners[group][block] -= 1
        if self.owners[group][block] == 0:
            self.free[group] += [block]


class Sequence:
    """The tokens of one sequence in the pools: `length` tokens are cached.

    resumable: a window group also keeps the blocks that the token after the last whole block would see, so that a
    later sequence can go on from there.
    """

    def __init__(self, pool: KvPool, *, resumable: bool = False) -> None:
        self.pool = pool
        self.resumable = resumable
        self.length = 0
        self._owned_to = 0  # positions from `length` up to here have their blocks
        self.owned: list[dict[int, int]] = [{} for _ in pool.ids]  # block index -> block
        self.tables: list[Int32] = [np.zeros(16, np.int32) for _ in pool.ids]
        self._rows = [table.reshape(1, -1) for table in self.tables]
        # what a step of one token passes to the core, made once
        self._one = (np.array((0, 1), np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))

    def _widen(self, blocks: int) -> None:
        """Tables of at least so many blocks."""
        for group, table in enumerate(self.tables):
            if blocks > len(table):
                self.tables[group] = table = np.concatenate([table, np.zeros(max(blocks, len(table)), np.int32)])
                self._rows[group] = table.reshape(1, -1)

    def resume(self, ids: collections.abc.Sequence[int]) -> int:
        """Begin with what the prefix cache has of `ids`, whole blocks and not the last token; how many tokens."""
        assert self.length == 0
        depth, found = self.pool.prefixes.find(ids)
        self._widen(depth)
        for group, blocks in enumerate(found):
            for index, block in blocks.items():
                self.tables[group][index] = self.owned[group][index] = self.pool.share(group, block)
        self.length = self._owned_to = depth * KV_BLOCK
        return self.length

    def keep(self, ids: collections.abc.Sequence[int]) -> None:
        """Leave the whole blocks of the first tokens, which are `ids`, to the prefix cache, too."""
        self.pool.prefixes.keep(ids[: self.length], self.owned)

    def reserve(self, tokens: int) -> None:
        """Own the blocks of positions length .. length + tokens - 1."""
        if self.length + tokens <= self._owned_to:
            return
        last = (self.length + tokens - 1) // KV_BLOCK
        self._widen(last + 1)
        for group, table in enumerate(self.tables):
            for index in range(self.length // KV_BLOCK, last + 1):
                if index not in self.owned[group]:
                    table[index] = self.owned[group][index] = self.pool.take(group)
        self._owned_to = (last + 1) * KV_BLOCK

    def step(self, ids: collections.abc.Sequence[int]) -> StepArrays:
        """Those of this sequence alone. Overwritten by the next call."""
        if len(ids) > 1:
            positions = np.arange(self.length, self.length + len(ids), dtype=np.int32)
            return np.array(ids, np.int32), positions, np.array((0, len(ids)), np.int32), self._rows
        start, token_ids, positions = self._one
        token_ids[0], positions[0] = ids[0], self.length
        return token_ids, positions, start, self._rows

    def advance(self, tokens: int) -> None:
        """The run went well: its tokens count. Blocks that fell out of a window go back to the pool."""
        self.length += tokens
        for group, window in enumerate(self.pool.windows):
            if window is None:
                continue
            seen_from = self.length - self.length % KV_BLOCK if self.resumable else self.length
            first = first_seen(seen_from, window)
            for index in [i for i in self.owned[group] if i < first]:
                self._release(group, index)
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
                self._release(group, index)
        self.length = length
        self._owned_to = min(self._owned_to, keep * KV_BLOCK)

    def close(self) -> None:
        surely(self._release_all)
        self.length = self._owned_to = 0

    def _release_all(self) -> None:
        for group, owned in enumerate(self.owned):
            for index in list(owned):
                self._release(group, index)

    def _release(self, group: int, index: int) -> None:
        self.pool.give_back(group, self.owned[group][index])
        del self.owned[group][index]


def step_arrays(entries: collections.abc.Sequence[tuple[Sequence, collections.abc.Sequence[int]]]) -> StepArrays:
    """What the core gets of a step of each sequence's next tokens, reserved before: token_ids and positions int32 [T],
    query_start [S + 1], block tables [S, blocks] by group."""
    if len(entries) == 1:
        sequence, ids = entries[0]
        return sequence.step(ids)
    ends = np.cumsum([0, *(len(ids) for _, ids in entries)]).astype(np.int32)
    token_ids = np.concatenate([np.array(ids, np.int32) for _, ids in entries])
    positions = np.concatenate([np.arange(s.length, s.length + len(ids), dtype=np.int32) for s, ids in entries])
    width = max(len(sequence.tables[0]) for sequence, _ in entries)
    tables = [np.zeros((len(entries), width), np.int32) for _ in entries[0][0].tables]
    for at, (sequence, _) in enumerate(entries):
        for group, table in enumerate(sequence.tables):
            tables[group][at, : len(table)] = table
    return token_ids, positions, ends, tables
