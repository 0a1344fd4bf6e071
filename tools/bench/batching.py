#!/usr/bin/env python3
"""Requests together beside the same requests one after the other, in turn, with the same texts at the end.

    python tools/bench/batching.py FOLDER [--quant int8] [--requests 8] [--max-batch 8 16] [-n 64] [-r 3]

Prompts are pieces of the calibration text, of 20 to 160 tokens. Prints tokens per second of all requests together,
prompts included, and the median over the rounds of each ratio to the first column.
"""

from __future__ import annotations

import argparse
import importlib.resources
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pyengine


def prompts_of(engine: pyengine.Engine, count: int) -> list[list[int]]:
    text = (importlib.resources.files("pyengine") / "data" / "calibration.txt").read_text(encoding="utf-8")
    ids = engine.tokenize(text)
    lengths = [20 + 140 * i // max(count - 1, 1) for i in range(count)]
    starts = [97 * i % (len(ids) - 200) for i in range(count)]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def timed(engine: pyengine.Engine, prompts: list[list[int]], **options: Any) -> tuple[float, list[list[int]]]:
    started = time.perf_counter()
    results = engine.generate_batch(prompts, ignore_eos=True, **options)
    return time.perf_counter() - started, [result.tokens for result in results]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-batch", type=int, nargs="+", default=[8])
    parser.add_argument("-n", "--max-tokens", type=int, default=64)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()
    with pyengine.load(args.folder, quant=args.quant, threads=args.threads, prefix_cache_bytes=0) as engine:
        prompts = prompts_of(engine, args.requests)
        columns = [1, *args.max_batch]
        seconds: dict[int, list[float]] = {most: [] for most in columns}
        expected = None
        for _ in range(args.repetitions):
            for most in columns:
                took, tokens = timed(engine, prompts, max_batch=most, max_tokens=args.max_tokens)
                expected = expected or tokens
                if tokens != expected:
                    raise SystemExit(f"max_batch {most}: other tokens than one after the other")
                seconds[most].append(took)
        count = args.requests * args.max_tokens
        print(f"{args.folder.name}, {engine.quant}, {engine.threads} threads, {engine.isa}: {args.requests} requests")
        for most in columns:
            ratio = statistics.median(one / took for one, took in zip(seconds[1], seconds[most], strict=True))
            rate = count / statistics.median(seconds[most])
            print(f"max_batch {most:3d}: {rate:8.1f} tok/s  {ratio:5.2f} times one after the other")
    return 0


if __name__ == "__main__":
    sys.exit(main())
