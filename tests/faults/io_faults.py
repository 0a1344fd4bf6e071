"""Run with fault_shim preloaded: every file operation of a load, of writing the cache and of reading it fails once.

    io_faults.py MODEL CACHE TARGET:CALL:ERRNO[:MOST] ...

TARGET: load, write or read (the cache). ERRNO: a name, or "short" for transfers that give less than they were asked
for. MOST: try no more places than that. Prints a line for every place that failed: what came of it. Exit 1 with a
reason where something else came than an error of ours, one line of the cache, or the same bits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

import numpy as np

import pyengine
from pyengine import weights_cache

SHIM = ctypes.CDLL(None)
IDS = [5, 17, 3, 80]
TEMPORARY = ("EINTR", "short")  # what a program has to live with


def arm(folder: Path | str, call: str, kind: str, at: int) -> None:
    ctypes.c_int.in_dll(SHIM, "fault_hits").value = 0
    ctypes.c_int.in_dll(SHIM, "fault_at").value = at
    ctypes.c_int.in_dll(SHIM, "fault_errno").value = 0 if kind == "short" else getattr(errno, kind)
    (ctypes.c_char * 16).in_dll(SHIM, "fault_call").value = call.encode()
    (ctypes.c_char * 4096).in_dll(SHIM, "fault_folder").value = os.fsencode(folder)


def disarm() -> int:
    (ctypes.c_char * 4096).in_dll(SHIM, "fault_folder").value = b""
    return int(ctypes.c_int.in_dll(SHIM, "fault_hits").value)


def logits(model: Path, cache: bool) -> tuple[bytes, list[str], bool]:
    """Bits of a load, the lines it logged, and whether the weights came from the cache."""
    lines: list[str] = []
    with pyengine.load(model, threads=1, calibration=False, cache=cache, log=lines.append) as one:
        return np.ascontiguousarray(one.logits(IDS)).tobytes(), lines, one.weights.cached


def need(condition: bool, *found: object) -> None:
    if not condition:
        raise SystemExit(" ".join(map(str, found)))


def check_load(model: Path, expected: bytes, kind: str, call: str, at: int) -> tuple[int, str]:
    arm(model, call, kind, at)
    try:
        got, text = logits(model, False)[0], ""
    except pyengine.PyEngineError as error:
        got, text = b"", f"{type(error).__name__}: {error}"
    hits = disarm()
    if kind in TEMPORARY or not hits:
        need(got == expected, "other bits, or an error:", text)
    else:
        wanted = ("ResourceError",) if kind in ("EMFILE", "ENOMEM") else ("ModelFormatError", "TokenizerError")
        need(text.startswith(wanted), text or "no error")
        need(str(model) in text and "\n" not in text, text)
    return hits, text


def check_cache(
    model: Path, cache: Path, expected: bytes, kind: str, call: str, at: int, *, written: bool
) -> tuple[int, str]:
    """written: the cache has the weights before, and reading them fails; else writing them."""
    for path in cache.glob("*"):
        path.unlink()
    if written:
        logits(model, True)
    arm(cache, call, kind, at)
    got, lines, cached = logits(model, True)
    said = "; ".join(lines)
    hits, files = disarm(), sorted(path.name for path in cache.iterdir())
    need(got == expected, "other bits")
    need(not any(name.endswith(".tmp") for name in files), "left behind:", files)
    if written:
        good = cached and not lines if kind in TEMPORARY or not hits else len(lines) in (0, 1, 2)
        need(good and (cached or (lines[:1] and lines[0].startswith("warning: "))), lines, cached)
    else:
        need(len(lines) == 1 or (call == "open" and lines[0].startswith("warning: ")), lines)
        refused = "not cached" in lines[-1]
        need(refused != bool(files), lines, files)
        need(not refused or (hits and kind not in TEMPORARY and str(cache) in lines[-1]), lines)
    again, lines, _ = logits(model, True)
    need(again == expected and "warning" not in "".join(lines), "the next start:", lines)
    return hits, said


def main() -> None:
    model, cache = Path(sys.argv[1]), Path(sys.argv[2])
    os.environ["PYENGINE_CACHE"] = str(cache.parent)
    weights_cache.WORTH_SECONDS = -1.0
    expected = logits(model, False)[0]
    for spec in sys.argv[3:]:
        target, call, kind, *most = spec.split(":")
        for at in range(1, int(most[0]) + 1 if most else 10**9):
            where = f"{target}: {kind} at {call} {at}"
            try:
                if target == "load":
                    hits, text = check_load(model, expected, kind, call, at)
                else:
                    hits, text = check_cache(model, cache, expected, kind, call, at, written=target == "read")
            except SystemExit as error:
                raise SystemExit(f"{where}: {error}") from None
            if hits:
                print(f"{where}: {text or 'the same bits'}")
            if not hits or kind == "short":
                break


if __name__ == "__main__":
    main()
