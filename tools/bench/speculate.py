#!/usr/bin/env python3
"""Decoding with and without `speculate="ngram"`, in turn, in one process: what it gains where text repeats, and costs.

    python tools/bench/speculate.py FOLDER [--quant int4,int8] [-n 400] [-r 5] [--threads N]

Prompts, each through the model's chat template, greedily: `edit` repeats half of the standard library's `bisect` with
one function renamed; `code` asks for a class, `prose` for an explanation. Printed are the medians over the rounds, and
the median of the rounds' ratios (above 1: speculation is faster). That the tokens are the same is checked.
"""

from __future__ import annotations

import argparse
import bisect
import inspect
import statistics
from pathlib import Path

import pyengine
from pyengine.chat_template import ChatTemplate, encode_chat
from pyengine.cli.bench import number, percent, table

FILE = inspect.getsource(bisect).partition("def insort_left")[0]
PROMPTS = {
    "edit": f"Repeat this file, but rename the function bisect_right to upper_bound:\n```python\n{FILE}```",
    "code": "Write a Python class for a binary search tree with insert, delete, search and an iterator.",
    "prose": "Explain in detail why the sky is blue and why sunsets are red.",
}


def encode(engine: pyengine.Engine, prompt: str) -> list[int]:
    assert engine.tokenizer is not None, "a prompt is text; expected a folder with a tokenizer"
    template = ChatTemplate.load(engine.folder, engine.tokenizer)
    if template is None:
        return engine.tokenize(prompt)
    return encode_chat(engine.tokenizer, template, [{"role": "user", "content": prompt}])


def compete(engine: pyengine.Engine, ids: list[int], tokens: int, rounds: int) -> list[str]:
    """Cells of the table: tokens, rates without and with, their ratio, tokens per step, and the acceptance."""
    rates: dict[str | None, list[float]] = {None: [], "ngram": []}
    texts = set()
    for turn in range(rounds):
        for how in (None, "ngram") if turn % 2 == 0 else ("ngram", None):
            result = engine.generate(ids, max_tokens=tokens, speculate=how)
            rates[how].append(result.timings["predicted_per_second"])
            texts.add(tuple(result.tokens))
            if result.speculation is not None:
                drafted, accepted = result.speculation["drafted"], result.speculation["accepted"]
                per_step = result.timings["predicted_n"] / result.timings["decode_steps"]
    assert len(texts) == 1, "the tokens differ; expected the same with and without speculation"
    ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
    medians = [number(statistics.median(values)) for values in rates.values()]
    share = percent(accepted / drafted) if drafted else ""
    return [str(len(texts.pop())), *medians, number(ratio, 2), number(per_step, 2), str(drafted), share]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quant", default="int4,int8")
    parser.add_argument("--threads", type=int, help="default: pyengine's")
    parser.add_argument("-n", "--tokens", type=int, default=400)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.rounds < 1:
        parser.error("-n must be at least 2 and -r at least 1")
    body = []
    for quant in args.quant.split(","):
        with pyengine.load(args.folder, quant=quant, threads=args.threads) as engine:
            where = f"{engine.isa}, {engine.threads} threads"
            for name, prompt in PROMPTS.items():
                ids = encode(engine, prompt)
                engine.generate(ids, max_tokens=2)  # warm
                body.append([f"{name}, {quant}", str(len(ids)), *compete(engine, ids, args.tokens, args.rounds)])
    head = ["prompt", "tok", "decoded", "plain tok/s", "ngram tok/s", "ratio", "tok/step", "drafted", "accepted"]
    print(f"{args.folder.name}, {where}, medians of {args.rounds} rounds, in turn\n\n{table(head, body)}")


if __name__ == "__main__":
    main()
