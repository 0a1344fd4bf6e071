"""Stage 7, cli compare: a quantized model against its stored precision; exit 7 when a quality gate fails."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from pyengine.cli import _files, _options, _output
from pyengine.errors import RequestError
from pyengine.paths import SOURCE_MARK

EXIT_QUALITY_GATE = 7


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="quantized against the stored precision",
        description="KL(stored precision || quantized), top-1 agreement and perplexity over a text, and the error of "
        "each module.",
    )
    _options.add_model(parser)
    measure = add_measurement(parser)
    measure.add_argument(
        "--against", default="none", metavar="BASELINE", help="a format, or another model in its own (none = as stored)"
    )
    measure.add_argument("--no-layers", action="store_true", help="no errors by layer and module")
    measure.add_argument("--swap", action="store_true", help="quantize one module at a time, rank them by their KL")
    measure.add_argument("-p", "--prompt", metavar="TEXT", help="greedy texts of both for this raw prompt")
    measure.add_argument("-n", "--max-tokens", type=int, metavar="N", help="tokens of those (64)")
    _files.add_files(measure)
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
    from pyengine.gguf_checkpoint import INT4_BITS, block_types
    from pyengine.gguf_file import is_gguf

    folder = _options.model_folder(args, degrid_demo=True)
    coarse = is_gguf(folder) and block_types(folder)[0] <= INT4_BITS
    if (coarse or (folder / SOURCE_MARK).exists()) and not args.quiet:
        _output.warning(
            f"{folder} is, or was made from, a 4-bit file: its weights lie on a 4-bit grid, which flatters int4; "
            f"without MODEL, {args.command} measures on an off-grid twin"
        )
    return folder


def baseline_arguments(args: argparse.Namespace, quant: str) -> argparse.Namespace:
    """The same options for the baseline: its own format, and the KV cache that goes with it."""
    changes = {"quant": quant, "group_size": None, "int4_scheme": None, "kv_dtype": None, "no_calibration": False}
    return argparse.Namespace(**{**vars(args), **changes})


def baseline_of(args: argparse.Namespace, folder: Path) -> tuple[Path, str]:
    """The folder and format that --against means."""
    if args.against in _options.QUANTS:
        return folder, args.against
    from pyengine import hub

    return hub.resolve(args.against, offline=args.offline, log=_options.log(args), bar=not args.quiet), "none"


def check(args: argparse.Namespace) -> None:
    """RequestError for options that mean nothing, before anything is loaded."""
    if args.max_kld is not None and not (math.isfinite(args.max_kld) and args.max_kld >= 0):
        raise RequestError(f"--max-kld {args.max_kld}; expected a finite number of at least 0")
    if args.max_tokens is not None and args.prompt is None:
        raise RequestError("--max-tokens without --prompt; expected a prompt for the greedy texts")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise RequestError(f"--max-tokens {args.max_tokens}; expected at least 1")
    _files.check_files(args)
    _options.engine_arguments(args)


def run(args: argparse.Namespace) -> int:
    from pyengine.reports import compare as report
    from pyengine.reports import compare_models
    from pyengine.reports.compare_baseline import Options, Side

    check(args)
    text = report.read_text(None if args.text is None else Path(args.text), offset=args.text_offset)
    folder = measured_folder(args)
    other, quant = baseline_of(args, folder)
    baseline_args = baseline_arguments(args, quant)
    sides = (
        Side(other, quant, None, lambda: _options.open_engine(baseline_args, other, warn=False)),
        Side(folder, args.quant, args.group_size, lambda: _options.open_engine(args, folder)),
    )
    options = Options(args.tokens, args.window, not args.no_layers, args.swap, args.prompt, args.max_tokens or 64)
    progress = _output.Progress(quiet=args.quiet)
    try:
        result = compare_models.compare_sides(*sides, text, options, progress)
    finally:
        progress.close()
    _files.write_files(args, result)
    if args.json:
        _output.print_json(result.to_json())
    else:
        print(result)
    if args.max_kld is not None and not result.mean_kld <= args.max_kld:
        _output.message(f"quality gate: mean KL {result.mean_kld:.5f} nats; expected at most {args.max_kld:g}")
        return EXIT_QUALITY_GATE
    return 0
