#!/usr/bin/env python3
"""The README's speed tables from the JSON of `pyengine bench --json` and of tools/bench/peers.py --json.

    python tools/bench/readme_table.py [FILE...] [--print]

FILEs default to docs/speed/*.json, the ones that the README shows; a test compares the two. The tables replace what
stands between the two markers in README.md, or are printed. Files of one machine, version and day share a heading;
each bench file is a row, so all should have the same tests.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pyengine.cli.bench import number, percent, table

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
STORED = ROOT / "docs" / "speed"
BEGIN, END = "<!-- speed: made by tools/bench/readme_table.py -->", "<!-- end of speed -->"
FRACTIONS = {"bandwidth_fraction": "read", "int8_fraction": "int8", "f32_fraction": "float32"}

Record = dict[str, Any]


def read(path: Path) -> Record:
    """A record of bench or peers; SystemExit names a file that is neither."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        names = {name for row in record["results"] for name in ("test", "engine") if name in row}
        record["kind"] = {"test": "bench", "engine": "peers"}[names.pop()]
        machine = record["machine"]
        record["heading"] = (
            f"pyengine {machine['version']}, {machine['date']}: {machine['cpu']}, {machine['isa']}, "
            f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SystemExit(
            f"{path}: {error!r}; expected the JSON of `pyengine bench --json` or of tools/bench/peers.py --json"
        ) from error
    return record


def bench_table(records: list[Record]) -> str:
    """A row for each model and format, a column for each test: tokens per second and the fraction of the limit."""
    tests = list(dict.fromkeys(row["test"] for record in records for row in record["results"]))
    body = []
    for record in records:
        cells = dict.fromkeys(tests, "")
        for row in record["results"]:
            name = next(name for name in FRACTIONS if row[name] is not None)
            unsteady = "" if row["steady"] else ", unsteady"
            fraction = f"{percent(row[name])} of {FRACTIONS[name]}{unsteady}"
            cells[row["test"]] = f"{number(row['tokens_per_second'], 0)} ({fraction})"
        body.append([f"{Path(record['model']).name}, {record['quant']}", *cells.values()])
    return table(["model", *(f"{test}, tok/s" for test in tests)], body)


def peers_table(record: Record) -> str:
    """A row for each engine and format; of the others, how much faster pyengine was in the same rounds."""
    body = []
    for row in record["results"]:
        ratios = [row["prompt_ratio"], row["decode_ratio"]]
        if row["engine"].startswith("pyengine"):
            ratios = [None, None]
        name = ", ".join(row[key] for key in ("model", "format") if row.get(key))
        name += f" ({row['problem']})" if row["problem"] else ""
        rates = [number(row["prompt_per_second"], 0), number(row["decode_per_second"], 0)]
        body.append([f"{row['engine']}: {name}", *rates, *(number(ratio, 2) for ratio in ratios)])
    head = ["engine", "prompt tok/s", "decode tok/s", "pyengine faster, prompt", "decode"]
    return table(head, body)


def block(records: list[Record]) -> str:
    """What stands between the markers."""
    parts = []
    for heading in dict.fromkeys(record["heading"] for record in records):
        here = [record for record in records if record["heading"] == heading]
        reads = [sample for record in here for sample in record["machine"]["read_samples"]]
        parts.append(f"{heading}. Read bandwidth meanwhile: {min(reads):.0f} to {max(reads):.0f} GB/s.")
        others = {
            record["machine"]["disturbed"] for record in here if "other threads" in str(record["machine"]["disturbed"])
        }
        parts[-1] += "".join(f" Not quiet: {what}." for what in sorted(others))
        benches = [record for record in here if record["kind"] == "bench"]
        if benches:
            parts.append(bench_table(benches))
        for record in here:
            if record["kind"] == "peers":
                parts.append(
                    f"{record['prompt_tokens']} tokens of prompt, then {record['decode_steps']} decode steps, engines "
                    f"in turn, medians of {record['rounds']} rounds; ratios are of the same rounds:"
                )
                parts.append(peers_table(record))
    return "\n\n".join(parts)


def replaced(readme: str, text: str) -> str:
    """The README with `text` between its markers; SystemExit where they are not there once each, in order."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise SystemExit(f"README.md: expected {BEGIN} and then {END}, once each")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--print", action="store_true", help="print the tables, change nothing")
    args = parser.parse_args(argv)
    files = args.files or sorted(STORED.glob("*.json"))
    if not files:
        parser.error(f"no files, and none in {STORED}")
    text = block([read(path) for path in files])
    if args.print:
        print(text)
    else:
        README.write_text(replaced(README.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
