"""Stage 7, cli fetch-demo: get the demo model and its off-grid twin; prints their folders."""

from __future__ import annotations

import argparse
from typing import Any

from pyengine.cli import _options, _output


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "fetch-demo",
        help="get the demo model",
        description="Get the demo model and its off-grid twin; prints their folders.",
    )
    parser.add_argument("--offline", action="store_true", help="never download: fail unless it is there")
    _options.add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pyengine import demo

    log = _options.log(args)
    record = {
        "demo": str(demo.demo_folder(offline=args.offline, log=log)),
        "degrid": str(demo.demo_folder(degrid=True, offline=args.offline, log=log)),
    }
    if args.json:
        _output.print_json(record)
    else:
        print(record["demo"])
        print(record["degrid"])
    return 0
