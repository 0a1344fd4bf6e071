"""Stage 7, cli info: version, CPU features, the chosen ISA, threads and devices."""

from __future__ import annotations

import argparse
import platform
import sys
from typing import Any

from pyengine import __version__, system
from pyengine.cli import _options, _output


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="version, CPU, ISA, threads",
        description="Version, CPU features, the chosen ISA, threads and devices.",
    )
    _options.add_common(parser)
    parser.set_defaults(run=run)


def describe() -> dict[str, Any]:
    """The `info --json` object."""
    from pyengine import _core
    from pyengine.paths import cache_dir
    from pyengine.reports.machine import cpu_name

    isas = list(_core.isas())
    threads = system.environment_threads()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "compiler": _core.compiler(),
        "cpu": cpu_name(),
        "cpu_features": list(_core.cpu_features()),
        "isas": [{"name": isa["name"], "available": isa["available"]} for isa in isas],
        "isa": next((isa["name"] for isa in isas if isa["chosen"]), None),
        "threads": _core.default_threads() if threads is None else threads,
        "devices": ["cpu"],
        "cache": str(cache_dir()),
    }


def print_info(record: dict[str, Any]) -> None:
    isas = ", ".join(isa["name"] if isa["available"] else f"{isa['name']} (not on this CPU)" for isa in record["isas"])
    print(f"pyengine {record['version']}")
    print(f"python    {record['python']}, {record['platform']}")
    print(f"compiler  {record['compiler']}")
    print(f"cpu       {record['cpu']}")
    print(f"features  {' '.join(record['cpu_features'])}")
    print(f"isa       {record['isa']}, of {isas}")
    print(f"threads   {record['threads']}")
    print(f"devices   {', '.join(record['devices'])}")
    print(f"cache     {record['cache']}")


def run(args: argparse.Namespace) -> int:
    record = describe()
    if args.json:
        _output.print_json(record)
    else:
        print_info(record)
    return 0
