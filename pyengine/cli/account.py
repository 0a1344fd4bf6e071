"""Stage 7, cli account: parameters, FLOPs, bytes, memory and speed to expect, from config.json alone."""

from __future__ import annotations

import argparse
from typing import Any

from pyengine.cli import _files, _options, _output


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "account",
        help="parameters, FLOPs and bytes from config.json alone",
        description="Parameters, FLOPs, bytes, memory and the speed to expect of a model, from its config.json alone: "
        "no weights are needed, and the model need not be one that runs here.",
    )
    _options.add_model(parser)
    what = parser.add_argument_group("account")
    what.add_argument("--context", type=int, metavar="N", help="tokens that the last one sees (4096, or the maximum)")
    what.add_argument("--batch", type=int, default=1, metavar="N", help="sequences decoded at once (1)")
    what.add_argument("--quant", choices=_options.QUANTS, default="int8", help="weight format; none = as stored (int8)")
    what.add_argument("--kv-dtype", choices=_options.KV_DTYPES, help="KV cache (default bf16; f32 under --quant f32)")
    what.add_argument(
        "-t", "--threads", type=int, metavar="N", help="threads whose limits count; also PYENGINE_THREADS"
    )
    what.add_argument("--explain", action="store_true", help="the arithmetic, line by line")
    _files.add_files(what)
    _options.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pyengine.reports.account import account

    _files.check_files(args)
    result = account(
        _options.config_file(args),
        context=args.context,
        batch=args.batch,
        quant=args.quant,
        kv_dtype=args.kv_dtype,
        threads=_options.threads(args),
        strict=args.strict,
        offline=args.offline,
    )
    if not args.quiet:
        for note in result.notes:
            _output.warning(note)
    if args.verbose and result.anatomy.not_run is not None:
        _output.message(f"does not run here: {result.anatomy.not_run}")
    _files.write_files(args, result)
    if args.json:
        _output.print_json({**result.to_json(), **({"explain": result.explain()} if args.explain else {})})
        return 0
    print(result)
    if args.explain:
        print("\n" + "\n".join(result.explain()))
    return 0
