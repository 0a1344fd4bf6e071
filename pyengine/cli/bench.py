"""Stage 7, cli bench: tokens per second of a model, or single kernels, always beside the limits of the machine."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pyengine.cli import _options, _output
from pyengine.errors import RequestError, ResourceError, UnsupportedModelError
from pyengine.reports.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyengine.engine import Engine
    from pyengine.reports.bench import Row
    from pyengine.reports.kernel_bench import Row as KernelRow
    from pyengine.reports.machine import Gauge

MAX_REPETITIONS = 1000
MODEL_DEFAULTS = {"prompts": [512], "steps": [128], "depths": [0], "repetitions": 5}
KERNEL_DEFAULTS = {"depths": [4096], "repetitions": 5, "batch": [1, 2, 4, 8, 512]}
OF_MODELS = {
    "prompts": "-p",
    "steps": "-n",
    "quant": "--quant",
    "group_size": "--group-size",
    "int4_scheme": "--int4-scheme",
    "no_calibration": "--no-calibration",
    "no_cache": "--no-cache",
    "cache_limit": "--cache-limit",
}
OF_KERNELS = {"ops": "--ops", "weights": "--weights", "batch": "--batch"}


def lengths(text: str) -> list[int]:
    """'512,1024' -> [512, 1024]."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected lengths such as 512 or 0,4096")
    return values


def names(text: str) -> list[str]:
    return text.split(",")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="tokens per second, and the fraction of the machine's limits",
        description="Tokens per second of prompts and of decoding, or single kernels (--kernels), with the fraction of "
        "the machine's limits.",
    )
    _options.add_model(parser)
    tests = parser.add_argument_group("tests (lists such as 0,4096)")
    tests.add_argument("-p", dest="prompts", type=lengths, metavar="N", help="prompt lengths (512); 0 = none")
    tests.add_argument("-n", dest="steps", type=lengths, metavar="N", help="decode steps (128); 0 = none")
    tests.add_argument("-d", dest="depths", type=lengths, metavar="N", help="tokens cached before decoding (0)")
    tests.add_argument("-r", dest="repetitions", type=int, metavar="N", help="rounds, every test once in each (5)")
    tests.add_argument("--isa", metavar="NAME", help="instruction set, as `info` lists them; also PYENGINE_ISA")
    single = parser.add_argument_group("single kernels")
    single.add_argument(
        "--kernels", action="store_true", help="ops alone, in MODEL's shapes or those of two known models; --isa all"
    )
    single.add_argument("--ops", type=names, metavar="LIST", help="linear, ffn, ffn_naive, lm_head, attention, ...")
    single.add_argument("--weights", type=names, metavar="LIST", help="bf16, int8, int4-32, int4-sym-64, ... (all)")
    single.add_argument(
        "--batch", type=lengths, metavar="M", help="tokens at once (1,2,4,8,512); attention at -d (4096)"
    )
    _options.add_engine(parser)
    _options.add_common(parser)
    parser.set_defaults(run=run)


def fill_in(args: argparse.Namespace) -> None:
    """Options that were not given get their default; one that would do nothing is refused."""
    for name, option in (OF_MODELS if args.kernels else OF_KERNELS).items():
        if getattr(args, name):
            expected = "--ops, --weights and --batch" if args.kernels else "--kernels with it"
            raise RequestError(f"{option} {'with' if args.kernels else 'without'} --kernels; expected {expected}")
    defaults = KERNEL_DEFAULTS if args.kernels else MODEL_DEFAULTS
    if not args.kernels and args.depths is not None and args.steps == [0]:
        raise RequestError("-d without decode steps; expected -n above 0 with it")
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.isa == "all" and not args.kernels:
        raise RequestError("--isa all without --kernels; expected one ISA, a model is measured on one")
    if not 1 <= args.repetitions <= MAX_REPETITIONS:
        raise RequestError(f"-r {args.repetitions}; expected 1 to {MAX_REPETITIONS}")


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def rounds(row: Row | KernelRow, of: int) -> str:
    """Rounds that the row's fraction uses."""
    return "" if row.rounds_used is None else f"{row.rounds_used}/{of}" + ("" if row.steady else " unsteady")


def made_of(rows: Sequence[Row | KernelRow]) -> str:
    """How the table's fractions are made, in lines below it."""
    lines = [
        "A fraction is the median over the rounds of the rate over the mean of the limits measured right before and",
        "right after the run; rounds in which those two differ by more than 10 % are left out (column rounds).",
    ]
    if any(row.steady is False for row in rows):
        lines.append("unsteady: no round was left, and all are used.")
    return "\n".join(lines)


def machine_lines(machine: dict[str, Any]) -> str:
    from pyengine.reports.machine import hop_text, processor

    samples = machine["read_samples"]
    return (
        f"{processor(machine)}; "
        f"commit {machine['commit'] or 'unknown'}, {machine['compiler']}\n"
        f"limits: read {machine['read_gb_per_s']:.1f} GB/s ({min(samples):.1f} to {max(samples):.1f} in "
        f"{len(samples)} samples), int8 {machine['int8_gops']:.0f} Gop/s, float32 {machine['f32_gflops']:.0f} GFLOP/s"
        f"{hop_text(machine)}"
    )


def model_table(rows: list[Row], repetitions: int) -> str:
    head = ["test", "tok/s", "stdev", "p10", "p90", "GB/s", "of read", "Gop/s", "of int8", "of f32", "rounds"]
    body = []
    for row in rows:
        rates = [number(x) for x in (row.tokens_per_second, row.stdev, row.p10, row.p90, row.gb_per_s)]
        compute = [number(row.gops, 0), percent(row.int8_fraction), percent(row.f32_fraction), rounds(row, repetitions)]
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


def keep(device: str, threads: int, gauge: Gauge, *, quiet: bool) -> None:
    """Store the read bandwidth for `generate` if the machine was quiet; else, or if it cannot be written, a warning."""
    from pyengine.reports.machine import reader, remember_read

    disturbed = gauge.disturbed(threads)
    problem = f"the machine was not quiet: {disturbed}; its bandwidth is not kept"
    if disturbed is None:
        try:
            count, name = reader(device, threads)
            remember_read(count, gauge.limits.read_gb_per_s, name)
            return
        except ResourceError as error:
            problem = f"the read bandwidth is not kept: {error}"
    if not quiet:
        _output.warning(problem)


def run_model(args: argparse.Namespace) -> int:
    from pyengine.reports import bench, machine

    tests = bench.plan(args.prompts, args.steps, args.depths)
    _options.engine_arguments(args)
    with _options.open_engine(args, _options.model_folder(args)) as engine:
        gauge = machine.Gauge.of(engine.backend)
        progress = _output.Progress(quiet=args.quiet)
        with contextlib.closing(bench.ModelRunner(engine)) as runner, contextlib.closing(progress):
            runner.check(tests)
            rows = bench.run(runner, gauge, tests, repetitions=args.repetitions, progress=progress)
        about = gauge.to_json(isa=engine.isa, threads=engine.threads, device=engine.device)
        model = describe_model(engine)
    keep(about["device"], about["threads"], gauge, quiet=args.quiet)
    if args.json:
        _output.print_json({"machine": about, **model, "results": [row.to_json() for row in rows]})
    else:
        quant = _output.format_quant(model["quant"], model["group_size"])
        print(machine_lines(about))
        print(
            f"model: {model['model']}, {quant}, {model['bits_per_weight']:.2f} bits per weight, {model['kv_dtype']} KV"
        )
        print(f"\n{model_table(rows, args.repetitions)}\n\n{made_of(rows)}")
    return 0


def chosen_isas(name: str | None) -> list[str]:
    """The ISAs that --isa means: all the CPU has, best first, or one (None: the best)."""
    from pyengine import _core

    known = [isa["name"] for isa in reversed(_core.isas()) if isa["available"]]
    if name == "all":
        return known
    return [_core.Backend(1, name or "").isa]  # which refuses a name it lacks


def kernel_table(rows: list[KernelRow], repetitions: int) -> str:
    head = ["op", "model", "isa", "weights", "m", "n", "k", "us", "of ffn", "GB/s", "Gop/s", "of limit", "bound"]
    head += ["rounds", "barriers", "MB weights", "kB activations"]
    body = []
    for row in rows:
        sizes = [row.weights or "", str(row.m), str(row.n), str(row.k)]
        times = [number(row.microseconds), number(row.ratio_to_ffn, 2)]
        rates = [number(row.gb_per_s), number(row.gops, 0), percent(row.fraction), row.bound or ""]
        moved = [number(row.weight_bytes / 1e6, 2), number(row.activation_bytes / 1e3)]
        used = [rounds(row, repetitions), number(row.barriers, 0)]
        body.append([row.op, row.model, row.isa, *sizes, *times, *rates, *used, *moved])
    return table(head, body)


def run_kernels(args: argparse.Namespace) -> int:
    from pyengine import _core
    from pyengine.config import load_model_spec
    from pyengine.reports import kernel_bench, kernel_ops

    if _options.device(args).startswith("cuda"):
        raise UnsupportedModelError("--kernels times the kernels of the CPU; expected --device cpu")
    threads = _options.threads(args) or _core.default_threads()
    isas = chosen_isas(args.isa or os.environ.get("PYENGINE_ISA") or None)
    ops = list(kernel_ops.OPS) if args.ops is None else args.ops
    weights = list(kernel_ops.DEFAULT_WEIGHTS) if args.weights is None else args.weights
    shapes: tuple[kernel_ops.Shape, ...] = kernel_ops.SHAPES
    list(kernel_ops.jobs(shapes, ops, weights, args.batch, args.depths))  # refused before a model is looked for
    if args.kv_dtype is not None and "attention" not in ops:
        raise RequestError("--kv-dtype without attention among --ops; expected it there")
    if args.model is not None or args.model_positional is not None:
        folder = _options.model_folder(args)
        shapes = (kernel_ops.Shape.of(folder.name, load_model_spec(folder, strict=args.strict)),)
    elif args.strict or args.offline:
        raise RequestError(f"{'--strict' if args.strict else '--offline'} with --kernels; expected a MODEL to read")
    wanted = list(kernel_ops.jobs(shapes, ops, weights, args.batch, args.depths))
    if not wanted:
        raise RequestError("no kernel is left with these --ops, --weights and --batch; expected at least one")
    progress = _output.Progress(quiet=args.quiet)
    with contextlib.closing(progress):
        rows, gauges = kernel_bench.run(
            wanted,
            isas=isas,
            threads=threads,
            repetitions=args.repetitions,
            kv_dtype=args.kv_dtype or "bf16",
            progress=progress,
            note=None if args.quiet else _output.warning,
        )
    machines = [gauge.to_json(isa=isa, threads=threads) for isa, gauge in gauges.items()]
    keep("cpu", threads, gauges[isas[0]], quiet=args.quiet)
    if args.json:
        limits = {isa: asdict(gauge.limits) for isa, gauge in gauges.items()}
        _output.print_json({"machine": machines[0], "limits": limits, "results": [row.to_json() for row in rows]})
    else:
        print("\n".join(machine_lines(machine) for machine in machines))
        print(f"\n{kernel_table(rows, args.repetitions)}\n\n{made_of(rows)}")
    return 0


def run(args: argparse.Namespace) -> int:
    fill_in(args)
    return run_kernels(args) if args.kernels else run_model(args)
