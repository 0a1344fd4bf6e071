#!/usr/bin/env python3
"""pyengine beside other engines on the same model: prompt and decode rates in turn, A B A B, in one process.

    python tools/bench/peers.py FOLDER --gguf FILE [--llama SITE_PACKAGES] [--quant int4,int8] [-p 512] [-n 64] [-r 11]

FOLDER (for pyengine) and the GGUF files (for llama.cpp; repeatable) should hold the same model. --llama is where
llama-cpp-python lies if not beside pyengine: the site-packages folder of a scratch environment. Every round runs every
engine once: the prompt into an empty context, then as many decode steps of one token. Printed are medians over the
rounds, and for each peer the median of the rounds' ratios to the first pyengine format (above 1: pyengine is faster).
The machine's limits are measured before, between and after the rounds (docs/benchmarking.md). A peer that cannot be
imported is listed as not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import pyengine
from pyengine._core import Backend
from pyengine.cli.bench import machine_lines, number, table
from pyengine.engine import MAX_BATCH_TOKENS
from pyengine.kv_cache import Sequence
from pyengine.reports import machine

Run = Callable[[list[int], list[int]], tuple[float, float]]
PHASES = ("prompt", "decode")


@dataclass
class Contender:
    """An engine with a format; run gives the seconds of prompt and decode. Without run it is not installed."""

    engine: str
    model: str
    run: Run | None
    problem: str = ""
    seconds: list[tuple[float, float]] = field(default_factory=list)


def pyengine_run(engine: pyengine.Engine) -> Run:
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


def llama_contender(path: Path, packages: Path | None, threads: int, context: int) -> Contender:
    if packages is not None and str(packages) not in sys.path:
        sys.path.append(str(packages))  # behind our own packages
    try:
        library = importlib.import_module("llama_cpp")
    except ImportError as error:
        return Contender("llama-cpp-python", path.name, None, f"not installed: {error}")
    model = library.Llama(
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

    return Contender(f"llama-cpp-python {library.__version__}", path.name, run)


def compete(
    contenders: list[Contender], prompt: list[int], steps: list[int], rounds: int, gauge: machine.Gauge
) -> None:
    """Every installed contender once per round, after an untimed round; fills their `seconds`."""
    able = [(c, c.run) for c in contenders if c.run is not None]
    for _, run in able:
        run(prompt, steps)
    gauge.sample()
    for _ in range(rounds):
        for contender, run in able:
            contender.seconds.append(run(prompt, steps))
        gauge.sample()


def summarize(contenders: list[Contender], prompt: int, steps: int) -> list[dict[str, Any]]:
    """One record per contender: medians in tokens per second, and how much faster the first one is, by rounds."""
    first, records = contenders[0], []
    for c in contenders:
        record: dict[str, Any] = {"engine": c.engine, "model": c.model, "problem": c.problem or None}
        for phase, (name, tokens) in enumerate(zip(PHASES, (prompt, steps), strict=True)):
            times = [pair[phase] for pair in c.seconds]
            record[f"{name}_per_second"] = tokens / statistics.median(times) if times else None
            record[f"{name}_samples"] = [tokens / s for s in times]
            ratios = [mine[phase] / base[phase] for mine, base in zip(c.seconds, first.seconds, strict=bool(times))]
            record[f"{name}_ratio"] = statistics.median(ratios) if ratios else None
        records.append(record)
    return records


def report(records: list[dict[str, Any]]) -> str:
    head = ["engine", "model", "prompt tok/s", "decode tok/s", "prompt ratio", "decode ratio"]
    body = []
    for r in records:
        rates = [number(r["prompt_per_second"]), number(r["decode_per_second"])]
        ratios = [number(r["prompt_ratio"], 2), number(r["decode_ratio"], 2)]
        body.append([r["engine"], r["model"] + (f" ({r['problem']})" if r["problem"] else ""), *rates, *ratios])
    return table(head, body)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, action="append", required=True)
    parser.add_argument("--llama", type=Path, metavar="SITE_PACKAGES")
    parser.add_argument("--quant", default="int4,int8", help="formats of pyengine; ratios are to the first")
    parser.add_argument("--threads", type=int, default=0, help="of every engine; 0 = pyengine's default")
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--steps", type=int, default=64)
    parser.add_argument("-r", "--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if min(args.prompt, args.steps, args.rounds) < 1:
        parser.error("-p, -n and -r must be at least 1")
    if args.llama is not None and not args.llama.is_dir():
        parser.error(f"--llama {args.llama}: no such folder")
    backend = Backend(args.threads, "")
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(pyengine.load(args.folder, quant=quant, threads=backend.threads))
            for quant in args.quant.split(",")
        ]
        tokens = args.prompt + args.steps
        ids = np.random.default_rng(0).integers(0, engines[0].spec.vocab_size, tokens).tolist()
        name = f"pyengine {pyengine.__version__}"
        contenders = [Contender(name, f"{e.quant}, {e.bits_per_weight:.2f} bits", pyengine_run(e)) for e in engines] + [
            llama_contender(path, args.llama, backend.threads, tokens + 8) for path in args.gguf
        ]
        gauge = machine.Gauge(lambda: machine.measure(backend))
        compete(contenders, ids[: args.prompt], ids[args.prompt :], args.rounds, gauge)
        about = gauge.to_json(isa=backend.isa, threads=backend.threads)
    if about["disturbed"] is not None:
        print(f"the machine was not quiet: {about['disturbed']}", file=sys.stderr)
    records = summarize(contenders, args.prompt, args.steps)
    if args.json:
        sizes = {"prompt_tokens": args.prompt, "decode_steps": args.steps, "rounds": args.rounds}
        print(json.dumps({"machine": about, **sizes, "results": records}))
    else:
        print(machine_lines(about))
        print(
            f"{args.prompt} tokens of prompt, then {args.steps} decode steps; medians of {args.rounds} rounds, in turn"
        )
        print(f"\n{report(records)}")


if __name__ == "__main__":
    main()
