#!/usr/bin/env python3
"""What the per-op timers cost: decode steps of a timed and an untimed program, A B A B.

    python tools/bench/timer_cost.py FOLDER [--quant int4] [--rounds 20] [--steps 32]

Prints the median of the rounds' ratios timed / untimed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import pyengine
from pyengine.decoder import BuiltProgram
from pyengine.kv_cache import Sequence

PROMPT = 8


def seconds(engine: pyengine.Engine, program: BuiltProgram, steps: int) -> float:
    """Wall time of `steps` decode steps after a short prompt."""
    sequence = Sequence(engine.pool)
    rows = np.zeros(1, np.int32)
    try:
        engine.forward([(sequence, list(range(PROMPT)))], program=program)
        started = time.perf_counter()
        for step in range(steps):
            engine.forward([(sequence, [step])], rows=rows, sampling=[None], program=program)
        return time.perf_counter() - started
    finally:
        sequence.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    with pyengine.load(args.folder, quant=args.quant) as engine:
        timed, untimed = engine.program, engine.build(timed=False)
        seconds(engine, timed, args.steps), seconds(engine, untimed, args.steps)
        ratios = []
        for _ in range(args.rounds):
            first, second = seconds(engine, timed, args.steps), seconds(engine, untimed, args.steps)
            third, fourth = seconds(engine, timed, args.steps), seconds(engine, untimed, args.steps)
            ratios.append((first + third) / (second + fourth))
        ratios.sort()
        low, high = ratios[len(ratios) // 10], ratios[-(len(ratios) // 10) - 1]
        print(f"{engine.quant}, {engine.isa}, {engine.threads} threads, {args.rounds} rounds of A B A B:")
        print(f"timed / untimed median {statistics.median(ratios):.4f} (p10 {low:.4f}, p90 {high:.4f})")


if __name__ == "__main__":
    main()
