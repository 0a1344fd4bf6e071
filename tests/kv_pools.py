"""That no block of a KV pool is lost: each is free, or kept by the prefix cache and nobody else."""

from __future__ import annotations

from pyengine.kv_cache import KvPool


def kept_blocks(pool: KvPool, group: int) -> list[int]:
    return [node.blocks[group] for node in pool.prefixes.order if group in node.blocks]


def nothing_lost(pool: KvPool) -> bool:
    """Also that the cache's count of bytes is right and within its limit."""
    for group, (free, size) in enumerate(zip(pool.free, pool.size, strict=True)):
        kept = kept_blocks(pool, group)
        if sorted(free + kept) != list(range(size)):
            return False
        if any(pool.owners[group][block] != (block in kept) for block in range(size)):
            return False
    return counted_bytes(pool) == pool.prefixes.bytes <= pool.prefixes.limit


def counted_bytes(pool: KvPool) -> int:
    blocks = sum(len(kept_blocks(pool, group)) * size for group, size in enumerate(pool.block_bytes))
    return blocks + 1024 * len(pool.prefixes.order)
