"""Stage 7, cli compare: a quantized model against its stored precision; exit 7 when a quality gate fails."""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.cli import _options, _output
from pyengine.errors import RequestError, TokenizerError

if TYPE_CHECKING:
    from pyengine.reports.compare import CompareResult

EXIT_QUALITY_GATE = 7
SOURCE_MARK = "pyengine_source.json"  # written by demo.py into a folder made from a 4-bit file


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="quantized against the stored precision",
        description="KL(stored precision || quantized), top-1 agreement and perplexity over a text.",
    )
    _options.add_model(parser)
    measure = add_measurement(parser)
    measure.add_argument("--max-kld", type=float, metavar="X", help="exit 7 if the mean KL is above X nats")
    _options.add_engine(parser)
    _options.add_common(parser)
    parser.set_defaults(run=run)


def add_measurement(parser: argparse.ArgumentParser) -> Any:
    """The options of the text and its windows; returns their group."""
    measure = parser.add_argument_group("measurement")
    measure.add_argument("--text", metavar="FILE", help="UTF-8 text to measure on (default: the one shipped)")
    measure.add_argument(
        "--text-offset", type=int, default=0, metavar="BYTES", help="start of the text in the file (0)"
    )
    measure.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens run in all (4096)")
    measure.add_argument("--window", type=int, default=512, metavar="N", help="tokens with one context (512)")
    return measure


def measured_folder(args: argparse.Namespace) -> Path:
    """The folder of MODEL, or the demo's off-grid twin; a warning if it was made from a 4-bit file."""
    folder = _options.model_folder(args, degrid_demo=True)
    if (folder / SOURCE_MARK).exists() and not args.quiet:
        _output.warning(
            f"{folder} was made from a 4-bit file: its weights lie on a 4-bit grid, which flatters int4; "
            f"without MODEL, {args.command} measures on an off-grid twin"
        )
    return folder


def stored_precision(args: argparse.Namespace) -> argparse.Namespace:
    """The same options for the baseline: the format on disk, and the KV cache that goes with it."""
    changes = {"quant": "none", "group_size": None, "int4_scheme": None, "kv_dtype": None, "no_calibration": False}
    return argparse.Namespace(**{**vars(args), **changes})


def print_report(model: Path, bits: str, result: CompareResult) -> None:
    text = result.text
    print(f"model       {model}")
    print(f"formats     {bits}, {result.bits_per_weight:.2f} bits per weight, against {result.baseline}")
    print(f"text        {text['name']}, {text['bytes']} bytes, sha256 {text['sha256'][:16]}")
    print(f"tokens      {result.tokens} in windows of {result.window}, second half scored")
    print(
        f"KL          mean {result.mean_kld:.5f}  median {result.median_kld:.5f}  p99 {result.p99_kld:.4f}  "
        f"max {result.max_kld:.4f} nats"
    )
    print(f"top-1       {100 * result.top1_agreement:.2f} % agree")
    print(f"perplexity  {result.ppl_baseline:.4f} -> {result.ppl_quant:.4f}")


def run(args: argparse.Namespace) -> int:
    from pyengine.reports import compare as report

    if args.max_kld is not None and not (math.isfinite(args.max_kld) and args.max_kld >= 0):
        raise RequestError(f"--max-kld {args.max_kld}; expected a finite number of at least 0")
    _options.engine_arguments(args)
    text = report.read_text(None if args.text is None else Path(args.text), offset=args.text_offset)
    folder = measured_folder(args)
    with contextlib.ExitStack() as stack:
        baseline = stack.enter_context(_options.open_engine(stored_precision(args), folder, warn=False))
        quantized = stack.enter_context(_options.open_engine(args, folder))
        if baseline.tokenizer is None:
            raise TokenizerError(f"{folder}: no tokenizer.json; expected one, compare measures on text")
        progress = _output.Progress(quiet=args.quiet)
        try:
            result = report.compare(
                baseline, quantized, baseline.tokenizer, text, tokens=args.tokens, window=args.window, progress=progress
            )
        finally:
            progress.close()
        bits = _output.format_quant(quantized.quant, quantized.group_size)
    if args.json:
        _output.print_json(result.to_json())
    else:
        print_report(folder, bits, result)
    if args.max_kld is not None and not result.mean_kld <= args.max_kld:
        _output.message(f"quality gate: mean KL {result.mean_kld:.5f} nats; expected at most {args.max_kld:g}")
        return EXIT_QUALITY_GATE
    return 0
