"""Stage 7, cli cache: what pyengine keeps on disk (packed weights, the demo model), and how to be rid of it."""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyengine.cli import _options, _output
from pyengine.errors import ResourceError
from pyengine.paths import cache_dir

KINDS = ("weights", "demo")


@dataclass(frozen=True)
class Kept:
    """A file or folder of the cache. quant and group_size: of packed weights."""

    kind: str
    model: str
    quant: str | None
    group_size: int | None
    bytes: int
    last_used: float  # seconds since the epoch; of the demo model: when it was made
    path: Path


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="list and clear caches",
        description="What pyengine keeps on disk: packed weights and the demo model. PYENGINE_CACHE names the folder.",
    )
    parser.add_argument(
        "--clear",
        nargs="?",
        const="all",
        choices=("all", *KINDS),
        metavar="KIND",
        help="remove everything, or only: " + ", ".join(KINDS),
    )
    _options.add_common(parser)
    parser.set_defaults(run=run)


def kept() -> list[Kept]:
    """Everything in the cache, the least recently used packed weights first."""
    from pyengine import weights_cache

    found = [
        Kept("weights", one.model, one.quant, one.group_size, one.bytes, one.last_used, one.path)
        for one in weights_cache.entries()
    ]
    for folder in sorted((cache_dir() / "demo").glob("[!.]*")):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found.append(Kept("demo", folder.name, None, None, size, folder.stat().st_mtime, folder))
    return found


def remove(entry: Kept) -> None:
    """ResourceError where the system refuses it."""
    try:
        if entry.path.is_dir():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(
            f"{error.filename or entry.path}: {error.strerror}; expected a cache that can be written"
        ) from error


def show(entries: list[Kept]) -> None:
    if not entries:
        print(f"nothing in {cache_dir()}")
        return
    for entry in entries:
        quant = "" if entry.quant is None else _output.format_quant(entry.quant, entry.group_size)
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        size = _output.format_bytes(entry.bytes)
        print(f"{entry.kind:8} {quant:9} {size:>9}  {used}  {_output.one_line(entry.model)}")
    print(f"{_output.format_bytes(sum(entry.bytes for entry in entries))} in {cache_dir()}")


def run(args: argparse.Namespace) -> int:
    entries = kept()
    cleared = [entry for entry in entries if args.clear in ("all", entry.kind)]
    if args.clear is not None:
        for entry in cleared:
            remove(entry)
    if args.json:
        fields = [{**vars(entry), "path": str(entry.path)} for entry in entries]
        _output.print_json({"folder": str(cache_dir()), "entries": fields, "cleared": len(cleared)})
    elif args.clear is None:
        show(entries)
    elif not args.quiet:
        freed = _output.format_bytes(sum(entry.bytes for entry in cleared))
        _output.message(f"{len(cleared)} removed, {freed}, from {cache_dir()}")
    return 0
