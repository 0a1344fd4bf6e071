"""Stage 7, cli perplexity: how well one model, in one format, predicts a text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.cli import _options, _output
from pyengine.cli.compare import add_measurement, measured_folder
from pyengine.errors import TokenizerError

if TYPE_CHECKING:
    from pyengine.reports.perplexity import PerplexityResult


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "perplexity",
        help="how well a model predicts a text",
        description="exp of the mean negative log-likelihood of a text's tokens, in compare's windows.",
    )
    _options.add_model(parser)
    measure = add_measurement(parser)
    measure.add_argument(
        "--stride", type=int, metavar="N", help="tokens of text from one window to the next (default: a window's)"
    )
    _options.add_engine(parser)
    _options.add_common(parser)
    parser.set_defaults(run=run)


def print_report(model: Path, bits: str, result: PerplexityResult) -> None:
    text = result.text
    error = "" if result.nll_stderr is None else f" +- {result.nll_stderr:.4f}"
    per_window = result.scored * result.window // result.tokens
    print(f"model       {model}")
    print(f"format      {bits}, {result.bits_per_weight:.2f} bits per weight")
    print(f"text        {text['name']}, {text['bytes']} bytes, sha256 {text['sha256'][:16]}")
    print(
        f"tokens      {result.tokens} in windows of {result.window}, stride {result.stride}; "
        f"the last {per_window} of each scored, {result.scored} in all"
    )
    print(f"mean NLL    {result.nll:.5f}{error} nats")
    print(f"perplexity  {result.ppl:.4f}")


def run(args: argparse.Namespace) -> int:
    from pyengine.reports import compare, perplexity

    _options.engine_arguments(args)
    text = compare.read_text(None if args.text is None else Path(args.text), offset=args.text_offset)
    folder = measured_folder(args)
    with _options.open_engine(args, folder) as engine:
        if engine.tokenizer is None:
            raise TokenizerError(f"{folder}: no tokenizer.json; expected one, perplexity measures on text")
        progress = _output.Progress(quiet=args.quiet)
        try:
            result = perplexity.perplexity(
                engine,
                engine.tokenizer,
                text,
                tokens=args.tokens,
                window=args.window,
                stride=args.stride,
                progress=progress,
            )
        finally:
            progress.close()
        bits = _output.format_quant(engine.quant, engine.group_size)
    if args.json:
        _output.print_json(result.to_json())
    else:
        print_report(folder, bits, result)
    return 0
