#!/usr/bin/env python3
"""pyengine beside other engines on the same model: prompt and decode rates, the engines in turn, each its own process.

    python tools/bench/peers.py FOLDER --quant int4,int8,bf16 --peer NAME=PYTHON [--peer ...] --gguf FILE [--gguf ...]
                                [--ctranslate2 FOLDER] [-p 512] [-n 64] [-r 11] [--threads N] [--json]

NAME is llama-cpp-python or ik-llama-cpp-python (both load every --gguf), or ctranslate2 (loads --ctranslate2); PYTHON
the interpreter of an environment that holds the package. "ik-llama-cpp-python+repack" interleaves weights while it
loads. All files should hold the model of FOLDER (gguf_from_safetensors.py makes the GGUFs).

A peer is measured against the pyengine format of its size: files below 6.5 bits per weight against int4, below 12.25
against int8, others against bf16. Each such group runs on its own: in every round each engine of the group runs once,
the prompt into an empty context, then as many decode steps of one token, while the others wait. Printed are medians
over the rounds, and for each peer the median of the rounds' ratios to pyengine (above 1: pyengine is faster). The
machine's limits are measured before, between and after the rounds (docs/benchmarking.md). A peer that cannot be
imported is listed as not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np

from pyengine._core import Backend
from pyengine.cli.bench import machine_lines, number, table
from pyengine.config import load_model_spec
from pyengine.errors import PyEngineError
from pyengine.reports import machine
from pyengine.steps import MAX_BATCH_TOKENS
from pyengine.tensors import expected_tensors

WORKER = Path(__file__).with_name("peer_worker.py")
PHASES = ("prompt", "decode")
GGUF_PEERS = ("llama-cpp-python", "ik-llama-cpp-python")
PEERS = (*GGUF_PEERS, "ik-llama-cpp-python+repack", "ctranslate2")
SIZES = ((6.5, "int4"), (12.25, "int8"), (math.inf, "bf16"))  # bits per weight below, pyengine's format
SPARE_TOKENS = 8  # of context, past prompt and steps
SETTLE_SECONDS = 0.1  # after a turn: threads of a pool spin for some ms before they sleep
ANSWER_SECONDS = 900.0  # loading a model with calibration is the longest


@dataclass
class Contender:
    """An engine with a file. `about` and `seconds` (prompt, decode; one pair a round) come from its worker."""

    name: str  # of PEERS, or "pyengine"
    python: str
    path: Path
    format: str
    against: str  # the pyengine format it is compared with
    about: dict[str, Any] = field(default_factory=dict)  # engine, build, bytes, bits_per_weight
    problem: str = ""
    seconds: list[tuple[float, float]] = field(default_factory=list)


class Worker:
    """The process of a contender; a context manager. What goes wrong there becomes the contender's `problem`."""

    def __init__(self, contender: Contender, options: dict[str, Any], log: IO[bytes]) -> None:
        self.contender, self.log = contender, log
        kind, _, option = contender.name.partition("+")
        options = options | ({option: True} if option else {})
        command = [contender.python, str(WORKER), kind, str(contender.path), json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)
        self.take()

    def take(self) -> dict[str, Any]:
        """The next answer, empty after a problem; what it says of the engine goes to the contender."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_SECONDS)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            status = self.process.wait() if ready else f"no answer in {ANSWER_SECONDS:g} s"
            self.log.seek(0)
            last = self.log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            self.contender.problem = f"ended ({status}): {''.join(last)}"
            return {}
        answer: dict[str, Any] = json.loads(line)
        self.contender.problem = answer.pop("problem", "")
        self.contender.about |= {key: value for key, value in answer.items() if key != "seconds"}
        return answer

    def run(self, prompt: list[int], steps: list[int]) -> tuple[float, float] | None:
        if self.contender.problem:
            return None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # take() says why
            self.process.stdin.write(json.dumps({"prompt": prompt, "steps": steps}).encode() + b"\n")
            self.process.stdin.flush()
        seconds = self.take().get("seconds")
        time.sleep(SETTLE_SECONDS)
        return None if seconds is None else (seconds[0], seconds[1])

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def compete(
    contenders: list[Contender],
    options: dict[str, Any],
    prompt: list[int],
    steps: list[int],
    rounds: int,
    gauge: machine.Gauge,
) -> None:
    """One group: every contender once per round, after an untimed round; fills their `seconds`."""
    with contextlib.ExitStack() as stack:
        workers = []
        for contender in contenders:
            log = stack.enter_context(tempfile.TemporaryFile())
            workers.append(stack.enter_context(Worker(contender, options | {"quant": contender.format}, log)))
        for worker in workers:
            worker.run(prompt, steps)
        gauge.sample()
        for turn in range(rounds):
            print(f"{contenders[0].against}: round {turn + 1} of {rounds}", file=sys.stderr)
            for worker in workers:
                seconds = worker.run(prompt, steps)
                if seconds is not None:
                    worker.contender.seconds.append(seconds)
            gauge.sample()
    for contender in contenders:
        if contender.problem:
            contender.seconds.clear()


def summarize(contenders: list[Contender], prompt: int, steps: int) -> list[dict[str, Any]]:
    """One record per contender: medians in tokens per second, and how much faster pyengine's format is, by rounds."""
    bases = {c.format: c.seconds for c in contenders if c.name == "pyengine"}
    records = []
    for c in contenders:
        record: dict[str, Any] = {
            "engine": c.about.get("engine", c.name) + ("+repack" if c.name.endswith("+repack") else ""),
            "build": c.about.get("build") or None,
            "file": c.path.name,
            "format": c.format,
            "bytes": c.about.get("bytes"),
            "bits_per_weight": c.about.get("bits_per_weight"),
            "against": c.against if c.against in bases else None,
            "problem": c.problem or None,
        }
        base = bases.get(c.against, []) if c.seconds else []
        for phase, (name, tokens) in enumerate(zip(PHASES, (prompt, steps), strict=True)):
            times = [pair[phase] for pair in c.seconds]
            record[f"{name}_per_second"] = tokens / statistics.median(times) if times else None
            record[f"{name}_samples"] = [tokens / s for s in times]
            ratios = [theirs[phase] / ours[phase] for theirs, ours in zip(c.seconds, base, strict=bool(base))]
            record[f"{name}_ratio"] = statistics.median(ratios) if ratios else None
        records.append(record)
    return records


def report(records: list[dict[str, Any]]) -> str:
    head = ["engine", "format", "bits", "prompt tok/s", "decode tok/s", "against", "prompt ratio", "decode ratio"]
    body = []
    for r in records:
        rates = [number(r["prompt_per_second"]), number(r["decode_per_second"])]
        ratios = [number(r["prompt_ratio"], 2), number(r["decode_ratio"], 2)]
        engine = r["engine"] + (f" ({r['build']})" if r["build"] else "")
        what = r["format"] + (f" ({r['problem']})" if r["problem"] else "")
        body.append([engine, what, number(r["bits_per_weight"], 2), *rates, r["against"] or "", *ratios])
    return table(head, body)


def of_gguf(path: Path) -> tuple[str, dict[str, Any]]:
    """The type that a GGUF says it is of, its bytes, and the bits per weight of the matrices inside its layers."""
    reader = gguf.GGUFReader(path)
    kind = reader.get_field("general.file_type")
    matrices = [t for t in reader.tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    if kind is None or not matrices:
        raise ValueError("no file type or no layers")
    bits = 8.0 * sum(t.n_bytes for t in matrices) / sum(t.n_elements for t in matrices)
    name = gguf.LlamaFileType(kind.parts[kind.data[0]][0]).name.removeprefix("MOSTLY_")
    return name, {"bytes": path.stat().st_size, "bits_per_weight": float(bits)}


def contenders_of(args: argparse.Namespace, weights: int) -> list[Contender]:
    """pyengine's formats, then each peer with each of its files. ValueError names a file that cannot be read."""
    ours = [Contender("pyengine", sys.executable, args.folder, quant, quant) for quant in args.quant.split(",")]
    ggufs = []
    for path in args.gguf:
        try:
            ggufs.append((path, *of_gguf(path)))
        except (OSError, ValueError) as error:
            raise ValueError(f"--gguf {path}: {error}; expected a GGUF of a model") from None
    peers = []
    for name, python in args.peer:
        if name == "ctranslate2":
            if args.ctranslate2 is None:
                raise ValueError("--peer ctranslate2 needs --ctranslate2 FOLDER")
            size = (args.ctranslate2 / "model.bin").stat().st_size
            about = {"bytes": size, "bits_per_weight": 8.0 * size / weights}
            peers.append(Contender(name, python, args.ctranslate2, "int8", "int8", about))
        elif not ggufs:
            raise ValueError(f"--peer {name} needs --gguf FILE")
        else:
            for path, kind, about in ggufs:
                against = next(format for below, format in SIZES if about["bits_per_weight"] < below)
                peers.append(Contender(name, python, path, kind, against, dict(about)))
    return ours + peers


def peer(text: str) -> tuple[str, str]:
    name, equals, python = text.partition("=")
    if not equals or name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text!r}; expected NAME=PYTHON, NAME one of {', '.join(PEERS)}")
    if not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: no such interpreter")
    return name, python


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--gguf", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--ctranslate2", type=Path, metavar="FOLDER", help="as its converter writes it, with int8")
    parser.add_argument("--quant", default="int4,int8,bf16", help="formats of pyengine")
    parser.add_argument("--threads", type=int, default=0, help="of every engine; 0 = pyengine's default")
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--steps", type=int, default=64)
    parser.add_argument("-r", "--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if min(args.prompt, args.steps, args.rounds) < 1:
        parser.error("-p, -n and -r must be at least 1")
    if args.gguf and not any(name.startswith(GGUF_PEERS) for name, _ in args.peer):
        parser.error("--gguf: no --peer reads it")
    if args.ctranslate2 is not None:
        if not any(name == "ctranslate2" for name, _ in args.peer):
            parser.error("--ctranslate2: no --peer reads it")
        if not (args.ctranslate2 / "model.bin").is_file():
            parser.error(f"--ctranslate2 {args.ctranslate2}: no model.bin; expected a converted model")
    return parser, args


def main(argv: list[str] | None = None) -> None:
    parser, args = parse(argv)
    try:
        spec = load_model_spec(args.folder)
        contenders = contenders_of(args, sum(math.prod(shape) for shape in expected_tensors(spec).values()))
    except (PyEngineError, ValueError) as error:
        parser.error(str(error))
    backend = Backend(args.threads, "")
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, args.prompt + args.steps).tolist()
    options = {"threads": backend.threads, "batch": MAX_BATCH_TOKENS, "context": len(ids) + SPARE_TOKENS}
    gauge = machine.Gauge.of(backend)
    date = datetime.datetime.now(datetime.timezone.utc)
    groups = {against: [c for c in contenders if c.against == against] for against in [c.against for c in contenders]}
    for group in groups.values():
        compete(group, options, ids[: args.prompt], ids[args.prompt :], args.rounds, gauge)
        failed = [c for c in group if c.name == "pyengine" and c.problem]
        if failed:
            raise SystemExit(f"pyengine {failed[0].format}: {failed[0].problem}")
    about = gauge.to_json(isa=backend.isa, threads=backend.threads)
    if about["disturbed"] is not None:
        print(f"the machine was not quiet: {about['disturbed']}", file=sys.stderr)
    contenders = [c for group in groups.values() for c in group]
    records = [{"model": args.folder.name, **r} for r in summarize(contenders, args.prompt, args.steps)]
    if args.json:
        sizes = {"prompt_tokens": args.prompt, "decode_steps": args.steps, "rounds": args.rounds}
        print(json.dumps({"date": date.isoformat(timespec="seconds"), "machine": about, **sizes, "results": records}))
        return
    print(machine_lines(about))
    print(f"{args.prompt} tokens of prompt, then {args.steps} decode steps; medians of {args.rounds} rounds, in turn")
    print(f"\n{report(records)}")


if __name__ == "__main__":
    main()
