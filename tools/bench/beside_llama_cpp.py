#!/usr/bin/env python3
"""pyengine beside llama.cpp on the same model: prefill and decode rates, in turn, in one process.

    python tools/bench/beside_llama_cpp.py FOLDER GGUF [--quant int4] [--threads 2] [--rounds 11]

FOLDER and GGUF should hold the same model. Needs llama-cpp-python (in a scratch environment). Prints the medians of the
rounds and the median of the per-round ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pyengine
from pyengine.engine import MAX_BATCH_TOKENS
from pyengine.kv_cache import Sequence

Run = Callable[[list[int], list[int]], tuple[float, float]]


def pyengine_run(engine: pyengine.Engine) -> Run:
    """Seconds of the prompt (its last token sampled) and of the decode steps, one token each."""

    def run(prompt: list[int], steps: list[int]) -> tuple[float, float]:
        sequence = Sequence(engine.pool)
        try:
            started = time.perf_counter()
            for at in range(0, len(prompt), MAX_BATCH_TOKENS):
                part = prompt[at : at + MAX_BATCH_TOKENS]
                engine.forward([(sequence, part)], rows=np.array([len(part) - 1], np.int32), sampling=[None])
            middle = time.perf_counter()
            for token in steps:
                engine.forward([(sequence, [token])], rows=np.zeros(1, np.int32), sampling=[None])
            return middle - started, time.perf_counter() - middle
        finally:
            sequence.close()

    return run


def llama_run(path: Path, threads: int, context: int) -> Run:
    from llama_cpp import Llama

    model = Llama(
        str(path), n_ctx=context, n_batch=MAX_BATCH_TOKENS, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def run(prompt: list[int], steps: list[int]) -> tuple[float, float]:
        model.reset()
        started = time.perf_counter()
        model.eval(prompt)
        middle = time.perf_counter()
        for token in steps:
            model.eval([token])
        return middle - started, time.perf_counter() - middle

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    with pyengine.load(args.folder, quant=args.quant, threads=args.threads) as engine:
        ids = np.random.default_rng(0).integers(0, engine.spec.vocab_size, args.prompt + args.decode).tolist()
        prompt, steps = ids[: args.prompt], ids[args.prompt :]
        theirs, ours = llama_run(args.gguf, args.threads, len(ids) + 8), pyengine_run(engine)
        theirs(prompt, steps), ours(prompt, steps)
        rounds = [(theirs(prompt, steps), ours(prompt, steps)) for _ in range(args.rounds)]
        for phase, tokens in enumerate((args.prompt, args.decode)):
            rates = [tokens / statistics.median(pair[who][phase] for pair in rounds) for who in (0, 1)]
            ratio = statistics.median(a[phase] / b[phase] for a, b in rounds)
            name = ("prefill", "decode")[phase]
            rate = f"llama.cpp {rates[0]:.1f} tok/s, pyengine {engine.quant} {rates[1]:.1f} tok/s"
            print(f"{name}: {rate}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
