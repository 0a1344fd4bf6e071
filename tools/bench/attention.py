#!/usr/bin/env python3
"""Attention alone over long contexts, KV dtypes side by side, in all layers of a model so that nothing stays in cache.

    python tools/bench/attention.py [--shape qwen] [--context 512,2048,8192] [--kv-dtype bf16,int8] [--prefill 512]

Decode: milliseconds of all layers per token, nanoseconds per (key, query head) and gigabytes of KV per second, the
median of `--steps` steps whose dtypes alternate. Prefill (`--prefill N`): N queries at the end of each context. A flop
count is 4 head_dim per query head and key seen.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from pyengine import kernels
from pyengine._core import KV_BLOCK, KvDtype, OpKind

SHAPES = {  # layers, query heads, KV heads, head_dim
    "qwen": (28, 12, 2, 128),  # Qwen2.5-1.5B
    "smollm2": (30, 9, 3, 64),  # SmolLM2-135M
    "llama": (16, 32, 8, 128),  # half of the layers of Llama-3-8B
}


class Case:
    """A cache of `context` random tokens in all layers, and the attention of `tokens` queries at its end."""

    def __init__(self, shape: str, context: int, tokens: int, kv_dtype: str, threads: int | None, isa: str | None):
        layers, heads, kv_heads, dim = SHAPES[shape]
        self.context, self.tokens = context, tokens
        b = kernels.Bench(threads, isa)
        group = b.backend.kv_create(layers, kv_heads, dim, dim, int(KvDtype.__members__[kv_dtype.upper()]))
        blocks = -(-context // KV_BLOCK)
        b.backend.kv_reserve(group, blocks)
        self.bytes = blocks * b.backend.kv_block_bytes(group)
        self.table = np.arange(blocks, dtype=np.int32).reshape(1, blocks)
        self.width = (heads + 2 * kv_heads) * dim
        cache = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "kv_group": group}
        joined, out = b.buffer(self.width), b.buffer(heads * dim)
        b.op(OpKind.LOAD_HIDDEN, output=joined)
        for layer in range(layers):
            b.op(OpKind.KV_APPEND, input=joined, kv_layer=layer, **cache)
        fill = b.program(None, 256)
        b.ops[1:] = []
        for layer in range(layers):
            b.op(OpKind.ATTENTION, input=joined, output=out, scale=dim**-0.5, kv_layer=layer, **cache)
        self.program = b.program(None, tokens)
        self.random = np.random.default_rng(1)
        for at in range(0, context, 256):
            kernels.run(fill, self.hidden(min(256, context - at)), start=at, table=self.table)
        self.queries = self.hidden(tokens)

    def hidden(self, tokens: int) -> kernels.Float32:
        return self.random.standard_normal((tokens, self.width), np.float32)

    def step(self) -> float:
        """Seconds of one run."""
        self.program.times(True)
        kernels.run(self.program, self.queries, start=self.context - self.tokens, table=self.table)
        return self.program.times()[2] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen")
    parser.add_argument("--context", default="512,2048,8192")
    parser.add_argument("--kv-dtype", default="bf16,int8")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa")
    args = parser.parse_args()
    layers, heads, _, dim = SHAPES[args.shape]
    tokens = args.prefill or 1
    for context in map(int, args.context.split(",")):
        names = args.kv_dtype.split(",")
        cases = [Case(args.shape, context, tokens, name, args.threads, args.isa) for name in names]
        for case in cases:
            case.step()
        times = [[case.step() for case in cases] for _ in range(args.steps)]
        pairs = layers * heads * sum(range(context - tokens + 1, context + 1))
        for name, case, column in zip(names, cases, zip(*times, strict=True), strict=True):
            seconds = statistics.median(column)
            print(
                f"{args.shape} {name:5} context {context:6}, {tokens} queries: {seconds * 1e3:8.3f} ms, "
                f"{seconds / pairs * 1e9:6.3f} ns per key and head, {case.bytes / seconds / 1e9:6.1f} GB/s, "
                f"{4 * dim * pairs / seconds / 1e9:6.1f} Gflop/s (fastest {min(column) * 1e3:.3f} ms)"
            )


if __name__ == "__main__":
    main()
