"""Stage 7, cli bench: tokens per second of a model, always beside the limits of the machine."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from pyengine.cli import _options, _output
from pyengine.errors import RequestError, ResourceError

if TYPE_CHECKING:
    from pyengine.engine import Engine
    from pyengine.reports.bench import Row

MAX_REPETITIONS = 1000
MODEL_DEFAULTS = {"prompts": [512], "steps": [128], "depths": [0], "repetitions": 5}


def lengths(text: str) -> list[int]:
    """'512,1024' -> [512, 1024]."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected lengths such as 512 or 0,4096")
    return values


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="tokens per second, and the fraction of the machine's limits",
        description="Tokens per second of prompts and of decoding, with the fraction of the machine's limits.",
    )
    _options.add_model(parser)
    tests = parser.add_argument_group("tests (lists such as 0,4096)")
    tests.add_argument("-p", dest="prompts", type=lengths, metavar="N", help="prompt lengths (512); 0 = none")
    tests.add_argument("-n", dest="steps", type=lengths, metavar="N", help="decode steps (128); 0 = none")
    tests.add_argument("-d", dest="depths", type=lengths, metavar="N", help="tokens cached before decoding (0)")
    tests.add_argument("-r", dest="repetitions", type=int, metavar="N", help="rounds, every test once in each (5)")
    tests.add_argument("--isa", metavar="NAME", help="instruction set, as `info` lists them; also PYENGINE_ISA")
    _options.add_engine(parser)
    _options.add_common(parser)
    parser.set_defaults(run=run)


def fill_in(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Options that were not given get their default; what contradicts another is refused."""
    if args.depths is not None and args.steps == [0]:
        raise RequestError("-d without decode steps; expected -n above 0 with it")
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not 1 <= args.repetitions <= MAX_REPETITIONS:
        raise RequestError(f"-r {args.repetitions}; expected 1 to {MAX_REPETITIONS}")


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table, the first column to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def machine_lines(machine: dict[str, Any]) -> str:
    samples = machine["read_samples"]
    threads = machine["threads"]
    return (
        f"{machine['cpu']}, {machine['isa']}, {threads} thread{'' if threads == 1 else 's'}; "
        f"commit {machine['commit'] or 'unknown'}, {machine['compiler']}\n"
        f"limits: read {machine['read_gb_per_s']:.1f} GB/s ({min(samples):.1f} to {max(samples):.1f} in "
        f"{len(samples)} samples), int8 {machine['int8_gops']:.0f} Gop/s, float32 {machine['f32_gflops']:.0f} GFLOP/s"
    )


def model_table(rows: list[Row]) -> str:
    head = ["test", "tok/s", "stdev", "p10", "p90", "GB/s", "of read", "Gop/s", "of int8", "of f32"]
    body = []
    for row in rows:
        rates = [number(x) for x in (row.tokens_per_second, row.stdev, row.p10, row.p90, row.gb_per_s)]
        compute = [number(row.gops, 0), percent(row.int8_fraction), percent(row.f32_fraction)]
        body.append([row.test, *rates, percent(row.bandwidth_fraction), *compute])
    return table(head, body)


def describe_model(engine: Engine) -> dict[str, Any]:
    return {
        "model": str(engine.folder),
        "family": engine.spec.family,
        "quant": engine.quant,
        "group_size": engine.group_size,
        "bits_per_weight": engine.bits_per_weight,
        "kv_dtype": engine.kv_dtype,
    }


def keep(threads: int, gb_per_s: float) -> None:
    """Store the read bandwidth for `generate`; a cache folder that cannot be written does not spoil the report."""
    from pyengine.reports.machine import remember_read

    try:
        remember_read(threads, gb_per_s)
    except ResourceError as error:
        _output.warning(f"the read bandwidth is not kept: {error}")


def run_model(args: argparse.Namespace) -> int:
    from pyengine.reports import bench, machine

    tests = bench.plan(args.prompts, args.steps, args.depths)
    _options.engine_arguments(args)
    with _options.open_engine(args, _options.model_folder(args)) as engine:
        backend = engine.backend
        gauge = machine.Gauge(lambda: machine.measure(backend))
        progress = _output.Progress(quiet=args.quiet)
        with contextlib.closing(bench.ModelRunner(engine)) as runner, contextlib.closing(progress):
            runner.check(tests)
            rows = bench.run(runner, gauge, tests, repetitions=args.repetitions, progress=progress)
        about = gauge.to_json(isa=engine.isa, threads=engine.threads)
        model = describe_model(engine)
    keep(about["threads"], about["read_gb_per_s"])
    if args.json:
        _output.print_json({"machine": about, **model, "results": [row.to_json() for row in rows]})
    else:
        quant = _output.format_quant(model["quant"], model["group_size"])
        print(machine_lines(about))
        print(
            f"model: {model['model']}, {quant}, {model['bits_per_weight']:.2f} bits per weight, {model['kv_dtype']} KV"
        )
        print(f"\n{model_table(rows)}")
    return 0


def run(args: argparse.Namespace) -> int:
    fill_in(args, MODEL_DEFAULTS)
    return run_model(args)
