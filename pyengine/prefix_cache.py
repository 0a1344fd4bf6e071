"""Stage 5, prefix_cache: KV blocks of earlier sequences, found again by the exact tokens before and in them.

What a block holds depends on its tokens and those before it alone, to the bit: not on the batch, the chunks, threads
or drafts it was computed with. So a sequence that begins with the same tokens takes the block over and computes none of
it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pyengine._core import KV_BLOCK

if TYPE_CHECKING:
    from pyengine.kv_cache import KvPool

DEFAULT_PREFIX_BYTES = 256 << 20
NODE_BYTES = 1024  # of a node itself: its tokens, dicts and place in the order


def surely(act: Callable[[], None]) -> None:
    """What may be done twice, and is done again where Ctrl-C came in between."""
    try:
        act()
    except BaseException:
        act()
        raise


def first_seen(length: int, window: int | None) -> int:
    """The first block that the token at position `length` looks into."""
    return 0 if window is None else max(0, length + 1 - window) // KV_BLOCK


class Node:
    """One block's tokens after those of its parents; the blocks of the groups that have one. A window group has not
    where the block was given back before the sequence left it."""

    def __init__(self, parent: Node | None, tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[bytes, Node] = {}
        self.blocks: dict[int, int] = {}  # group -> block


class PrefixCache:
    """A tree of blocks of at most `limit` bytes; the least recently used leaf goes first.

    In `order` a node stands before its parent: whatever is used moves to the end, the deepest first. So the first of
    all is a leaf, and evicting it needs no search.
    """

    def __init__(self, pool: KvPool, limit: int) -> None:
        self.pool: KvPool = weakref.proxy(pool)  # a cycle would keep the core's memory until it is collected
        self.limit = limit
        self.bytes = 0  # of blocks and nodes
        self.root = Node(None, b"")
        self.order: OrderedDict[Node, None] = OrderedDict()

    def find(self, ids: Sequence[int]) -> tuple[int, list[dict[int, int]]]:
        """The most blocks that a sequence of `ids` can begin with, its last token left to compute, and for every group
        those that the next token sees: index -> block."""
        windows = self.pool.windows
        path = self._path(_keys(ids[: len(ids) - 1])) if self.order else []
        for depth in range(len(path), 0, -1):
            seen = [range(first_seen(depth * KV_BLOCK, window), depth) for window in windows]
            # the narrowest window and the last block first: where one is missing, that is soon found
            narrow = sorted(range(len(windows)), key=lambda group: len(seen[group]))
            if all(group in path[index].blocks for group in narrow for index in reversed(seen[group])):
                self._use(path[:depth])
                return depth, [
                    {index: path[index].blocks[group] for index in indices} for group, indices in enumerate(seen)
                ]
        return 0, [{} for _ in windows]

    def keep(self, ids: Sequence[int], owned: Sequence[dict[int, int]]) -> None:
        """Share the whole blocks of a sequence: its tokens, and what it owns of each group (index -> block)."""
        keys = _keys(ids) if self.limit else []
        path = self._path(keys)
        try:
            for node in path:  # what is on the path cannot be evicted for it
                self.order.pop(node, None)
            for index, key in enumerate(keys):
                if not self._keep_block(path, index, key, owned):
                    break
        finally:  # also where Ctrl-C came in between
            surely(lambda: self._put_back(path))

    def _put_back(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            self.order[node] = None

    def _keep_block(self, path: list[Node], index: int, key: bytes, owned: Sequence[dict[int, int]]) -> bool:
        """Share one block, behind those of the path; whether there was room."""
        parent = path[index - 1] if index else self.root
        new = index == len(path)
        node = Node(parent, key) if new else path[index]
        missing = {
            group: blocks[index] for group, blocks in enumerate(owned) if index in blocks and group not in node.blocks
        }
        size = sum(self.pool.block_bytes[group] for group in missing) + (NODE_BYTES if new else 0)
        while self.bytes + size > self.limit and self.evict():
            pass
        if self.bytes + size > self.limit:
            return False
        # Ctrl-C comes where a call begins or a loop turns, so whatever has got an owner, or a place, is counted by then
        if new:
            parent.children[key] = node
            self.bytes += NODE_BYTES
            path.append(node)
        for group, block in missing.items():
            node.blocks[group] = self.pool.share(group, block)
            self.bytes += self.pool.block_bytes[group]
        return True

    def evict(self) -> bool:
        """Give back the blocks of the least recently used leaf; False where there is none."""
        if not self.order:
            return False
        node = next(iter(self.order))
        assert node.parent is not None
        assert not node.children
        for group in list(node.blocks):  # after Ctrl-C in between the next call goes on here
            self.pool.give_back(group, node.blocks[group])
            del node.blocks[group]
            self.bytes -= self.pool.block_bytes[group]
        del node.parent.children[node.tokens]
        self.bytes -= NODE_BYTES
        del self.order[node]
        return True

    def _path(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of as many blocks, from the first, as are there."""
        path, node = [], self.root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _use(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            self.order.move_to_end(node)


def _keys(ids: Sequence[int]) -> list[bytes]:
    """The tokens of every whole block, as they are compared."""
    packed = np.array(ids, np.int32).tobytes()
    size = 4 * KV_BLOCK
    return [packed[at : at + size] for at in range(0, len(packed) - size + 1, size)]
