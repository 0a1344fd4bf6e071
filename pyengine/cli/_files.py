"""Stage 7, cli files: the files that a report is also written to, looked at before anything is measured."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from pyengine.errors import RequestError

KINDS = ("html", "png", "trace")


def add_files(group: Any) -> None:
    group.add_argument("--html", metavar="FILE", help="also write a page that needs nothing else")
    group.add_argument("--png", metavar="FILE", help="also write its pictures as PNG (needs the extra [viz])")


def wanted(args: argparse.Namespace) -> dict[str, Path]:
    return {kind: Path(getattr(args, kind)) for kind in KINDS if getattr(args, kind, None) is not None}


def check_files(args: argparse.Namespace) -> None:
    """Errors: RequestError for a file that cannot be written or is named twice, ResourceError for a missing extra."""
    from pyengine.reports import files, png

    seen: dict[str, str] = {}
    for kind, path in wanted(args).items():
        files.check_writable(path)
        other = seen.setdefault(os.path.realpath(path), kind)
        if other != kind:
            raise RequestError(f"--{other} and --{kind} are both {path}; expected two files")
    if args.png is not None:
        png.require()


def write_files(args: argparse.Namespace, result: Any) -> None:
    """Of a report with to_html, to_png and, where there is such an option, to_trace."""
    from pyengine.reports import files

    for kind, path in wanted(args).items():
        if kind == "png":
            result.to_png(path)
        else:
            files.write(path, result.to_html() if kind == "html" else json.dumps(result.to_trace()))
