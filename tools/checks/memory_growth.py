#!/usr/bin/env python3
"""Whether memory grows with requests: 1,000 of them and 10,000 tokens must leave less than 8 MiB.

    python tools/checks/memory_growth.py [FOLDER] [--quant int8] [--requests 1000] [--tokens 11] [--limit-mib 8]

FOLDER: the demo model unless given. Requests of all kinds in turn: alone, drafted, cancelled, with log probabilities,
scored, in a batch. Resident memory is compared after a first tenth of them, which fills the pools and the prefix cache
(1 MiB), and at the end. Exit 1 if it grew more.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np

import pyengine
from pyengine import demo

BATCH = 8


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def serve(engine: pyengine.Engine, first: int, count: int, tokens: int) -> int:
    """Requests first .. first + count - 1, of `tokens` tokens each; how many tokens they generated."""
    made = 0
    vocab = engine.spec.vocab_size

    def prompt(i: int) -> list[int]:
        rng = np.random.default_rng(i)
        return [
            *np.random.default_rng(i % 3).integers(0, vocab, 40).tolist(),
            *rng.integers(0, vocab, 1 + i % 70).tolist(),
        ]

    at, end = first, first + count
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    while at < end:
        kind = at // BATCH % 5
        part = [prompt(i) for i in range(at, min(at + BATCH, end))]
        if kind == 0:
            made += sum(len(result.tokens) for result in engine.generate_batch(part, temperature=1.0, **options))
        for ids in part if kind else ():
            if kind == 1:
                made += len(engine.generate(ids, frequency_penalty=0.5, logit_bias={1: -1.0}, **options).tokens)
            elif kind == 2:
                made += len(engine.generate(ids, speculate="ngram", **options).tokens)
            elif kind == 3:
                made += len(engine.generate(ids, logprobs=5, prompt_logprobs=True, **options).tokens)
            else:
                stream = engine.stream(ids, **options)
                made += sum(1 for _, piece in zip(range(tokens - 1), stream, strict=False) if piece)
                stream.close()
                engine.score([(ids, [5, 6]), (ids, [7])])
        at += len(part)
    return made


def growth(engine: pyengine.Engine, requests: int, tokens: int) -> tuple[int, int]:
    """Bytes by which resident memory grew, and the tokens that were generated meanwhile."""
    warm = max(requests // 10, 5 * BATCH)
    serve(engine, 0, warm, tokens)
    gc.collect()
    before = resident_bytes()
    made = serve(engine, warm, requests, tokens)
    gc.collect()
    return resident_bytes() - before, made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=11)
    parser.add_argument("--limit-mib", type=float, default=8.0)
    args = parser.parse_args()
    folder = args.folder or demo.demo_folder(log=lambda text: print(text, file=sys.stderr))
    with pyengine.load(folder, quant=args.quant, prefix_cache_bytes=1 << 20) as engine:
        grew, made = growth(engine, args.requests, args.tokens)
    print(f"{args.requests} requests, {made} tokens: resident memory grew by {grew / 2**20:.2f} MiB")
    return 0 if grew < args.limit_mib * 2**20 else 1


if __name__ == "__main__":
    sys.exit(main())
