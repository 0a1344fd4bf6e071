#!/usr/bin/env python3
"""Peak memory while loading a model, against the bound: packed size + 10 % + the largest tensor + 64 MiB.

    python tools/checks/load_memory.py FOLDER [--quant int4] [--threads N] [--cached]

What a process with pyengine imported takes before loading is not counted. --cached: from packed weights on disk, which
an earlier load (of over 2 s, by any command) must have left; else they are neither read nor written. Exit 1 if the
bound is broken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyengine
from pyengine import engine as _engine  # the imports that every load needs, before the first reading
from pyengine.checkpoint import Checkpoint


def status_kb(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {key}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cached", action="store_true")
    args = parser.parse_args()
    assert _engine is not None
    before = status_kb("VmRSS") * 1024
    with Checkpoint.open(args.folder) as checkpoint:
        largest = max(info.end - info.begin for info in checkpoint.tensors.values())
    with pyengine.load(args.folder, quant=args.quant, threads=args.threads, cache=args.cached) as engine:
        if args.cached and not engine.weights.cached:
            raise SystemExit(f"{args.folder}: no packed weights on disk; run a load of it with the cache first")
        packed = engine.weights.packed_bytes
        peak = status_kb("VmHWM") * 1024 - before
        bound = int(1.1 * packed) + largest + (64 << 20)
        print(
            f"{engine.quant}, {'cached' if args.cached else 'fresh'}: peak {peak / 1e6:.0f} MB, "
            f"packed {packed / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB, "
            f"bound {bound / 1e6:.0f} MB, loaded in {engine.load_ms / 1e3:.1f} s"
        )
    return 0 if peak <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
