"""Stage 7, cli output: the statistics line, progress on a terminal, messages to stderr, JSON to stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

PROGRESS_AFTER_SECONDS = 1.0
PROGRESS_EVERY_SECONDS = 0.1


def one_line(text: object) -> str:
    """`text` as a single line: line breaks become spaces, other control characters are escaped."""
    line = " ".join(part.strip() for part in str(text).splitlines() if part.strip())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def message(text: object) -> None:
    """One line to stderr; stdout belongs to the text or the JSON object."""
    print(f"pyengine: {one_line(text)}", file=sys.stderr, flush=True)


def warning(text: object) -> None:
    message(f"warning: {one_line(text)}")


def print_json(record: Mapping[str, Any]) -> None:
    """Exactly one object on stdout. ASCII escapes, so that no locale can damage it; NaN and Inf are refused."""
    print(json.dumps(record, allow_nan=False), flush=True)


def format_bytes(count: float) -> str:
    """1234567890 -> '1.2 GB' (decimal units, as the statistics line uses them)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_quant(quant: str, group_size: int | None) -> str:
    """'int4 g64', or just 'bf16' for a format without groups."""
    return quant if group_size is None else f"{quant} g{group_size}"


def _seconds(milliseconds: float) -> str:
    seconds = milliseconds / 1e3
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"


def _phase(name: str, count: int, milliseconds: float, per_second: float | None) -> str:
    if per_second is None:
        return f"{name} {count} tok"
    return f"{name} {count} tok {_seconds(milliseconds)} {per_second:.1f} tok/s"


def statistics_line(record: Mapping[str, Any], *, sampled: bool, limit_gb_per_s: float | None = None) -> str:
    """The last line of `generate`, from the fields of `generate --json`.

    A part whose number is null (nothing was decoded, say) is left out rather than shown as zero. `sampled` adds the
    seed, with which the text can be repeated; a greedy text does not depend on it. limit_gb_per_s: the read bandwidth
    of this machine, if `bench` has measured it.
    """
    timings = record["timings"]
    rate = timings["predicted_per_second"]
    parts = [
        _phase("prompt", timings["prompt_n"], timings["prompt_ms"], timings["prompt_per_second"]),
        *([f"{timings['cache_n']} tok cached"] if timings["cache_n"] else []),
        _phase("decode", timings["predicted_n"], timings["predicted_ms"], rate),
    ]
    if record["ffn_share"] is not None:
        parts.append(f"FFN {100 * record['ffn_share']:.1f} % of decode")
    speculation = record.get("speculation")
    if speculation is not None:
        drafted, accepted = speculation["drafted"], speculation["accepted"]
        share = f", {accepted} accepted ({100 * accepted / drafted:.0f} %)" if drafted else ""
        parts.append(f"{drafted} tok drafted{share}")
    if rate is not None:  # the weights are read once a step, whatever the number of tokens
        read = timings["decode_steps"] / timings["predicted_ms"] * record["weight_bytes_per_token"] / 1e6
        fraction = f" ({100 * read / limit_gb_per_s:.0f} % of this machine)" if limit_gb_per_s else ""
        parts.append(f"{read:.1f} GB/s{fraction}")
    how = [
        format_quant(record["quant"], record["group_size"]),
        *processor(record["device"], record["threads"], record["isa"]),
        record["prompt_format"],
    ]
    if sampled:
        how.append(f"seed {record['seed']}")
    parts.append(", ".join(how))
    parts.append(f"peak {format_bytes(record['peak_rss_bytes'])}")
    return " | ".join(parts)


def processor(device: str, threads: int, isa: str) -> list[str]:
    """What computes: of the CPU its threads and ISA."""
    return [f"{threads} thread{'' if threads == 1 else 's'}", isa] if device == "cpu" else [device]


class Progress:
    """A progress bar on stderr: only on a terminal, only once something has taken longer than a second.

    Call it with (done, total, what); it may be called as often as the caller likes. The time left is what
    the rest takes at the pace so far. `close` wipes the bar.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._active = not quiet and sys.stderr.isatty()
        self._start = time.monotonic()
        self._last = 0.0
        self._first: tuple[float, int] | None = None  # when it was first called, and with what
        self._width = 0

    def __call__(self, done: int, total: int, what: str = "loading") -> None:
        now = time.monotonic()
        began, first = self._first = self._first or (now, done)
        if not self._active or total <= 0 or now - self._start < PROGRESS_AFTER_SECONDS:
            return
        if now - self._last < PROGRESS_EVERY_SECONDS and done < total:
            return
        self._last = now
        fraction = min(max(done / total, 0.0), 1.0)
        filled = round(30 * fraction)
        line = f"{one_line(what)} [{'#' * filled}{'.' * (30 - filled)}] {100 * fraction:3.0f} %"
        if first < done < total:
            left = round((now - began) * (total - done) / (done - first))
            line += f", {left // 60}:{left % 60:02} left"
        self._write(line)

    def close(self) -> None:
        if self._width:
            self._write("")
            self._width = 0

    def _write(self, line: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._width) + ("\r" if not line else ""))
        sys.stderr.flush()
        self._width = len(line)
