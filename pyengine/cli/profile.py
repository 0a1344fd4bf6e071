"""Stage 7, cli profile: where decode and prefill time goes, by stage and layer, against the machine's limits."""

from __future__ import annotations

import argparse
from typing import Any

from pyengine.cli import _files, _options, _output


def lengths(text: str) -> list[int]:
    """'128,1024' -> [128, 1024]."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected contexts such as 128 or 128,1024")
    return values


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="where decode and prefill time goes, by stage and layer",
        description="Decode and prefill time by stage and layer, with bytes, operations and the fraction of the "
        "machine's limits; the FFN's share beside the one that account predicts.",
    )
    _options.add_model(parser)
    what = parser.add_argument_group("measurement")
    what.add_argument("--steps", type=int, default=32, metavar="N", help="decode steps timed at each context (32)")
    what.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that the last step sees, and the prompt's (512, or the maximum)",
    )
    what.add_argument(
        "--contexts", type=lengths, default=[], metavar="LIST", help="decode there too, such as 128,1024,8192"
    )
    what.add_argument("--trace", metavar="FILE", help="also write a Chrome trace of the prompt and the steps (JSON)")
    _files.add_files(what)
    _options.add_engine(parser)
    _options.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pyengine.reports.profile import profile

    _options.engine_arguments(args)
    _files.check_files(args)
    with _options.open_engine(args, _options.model_folder(args)) as engine:
        progress = _output.Progress(quiet=args.quiet)
        try:
            result = profile(engine, context=args.context, steps=args.steps, contexts=args.contexts, progress=progress)
        finally:
            progress.close()
    _files.write_files(args, result)
    if args.json:
        _output.print_json(result.to_json())
    else:
        print(result)
    return 0
