"""Stage 7, cli info: version, CPU features, the chosen ISA, threads and devices."""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import asdict
from typing import Any

from pyengine import __version__, cuda, system
from pyengine.cli import _options, _output
from pyengine.errors import ResourceError


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
        "devices": devices(),
        "cache": str(cache_dir()),
    }


def devices() -> list[dict[str, Any]]:
    """What a model can run on, and why not on CUDA where that is so."""
    found: list[dict[str, Any]] = [{"name": "cpu", "available": True}]
    try:
        found += [{**asdict(device), "available": True} for device in cuda.devices()]
    except ResourceError as error:
        found.append({"name": "cuda", "available": False, "reason": str(error)})
    return found


def device_line(device: dict[str, Any]) -> str:
    if not device["available"]:
        return f"{device['name']}: not used: {device['reason']}"
    if "model" not in device:
        return str(device["name"])
    free, total = device["free_bytes"] / 1e9, device["total_bytes"] / 1e9
    return f"{device['name']}: {device['model']}, {free:.1f} of {total:.1f} GB free"


def print_info(record: dict[str, Any]) -> None:
    isas = ", ".join(isa["name"] if isa["available"] else f"{isa['name']} (not on this CPU)" for isa in record["isas"])
    print(f"pyengine {record['version']}")
    print(f"python    {record['python']}, {record['platform']}")
    print(f"compiler  {record['compiler']}")
    print(f"cpu       {record['cpu']}")
    print(f"features  {' '.join(record['cpu_features'])}")
    print(f"isa       {record['isa']}, of {isas}")
    print(f"threads   {record['threads']}")
    for at, device in enumerate(record["devices"]):
        print(f"{'' if at else 'devices':9} {device_line(device)}")
    print(f"cache     {record['cache']}")


def run(args: argparse.Namespace) -> int:
    record = describe()
    if args.json:
        _output.print_json(record)
    else:
        print_info(record)
    return 0
