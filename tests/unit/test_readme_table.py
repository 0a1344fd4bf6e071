"""tools/bench/readme_table.py: the README's tables are those of the stored figures, and say what the JSON says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tool_scripts import load_tool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("bench/readme_table")


def machine(**changes: Any) -> dict[str, Any]:
    return {
        "cpu": "A CPU",
        "isa": "avx2",
        "threads": 2,
        "version": "1.2",
        "date": "2030-01-02",
        "disturbed": None,
        "read_samples": [39.6, 40.1],
    } | changes


def bench_row(test: str, rate: float, **fraction: float) -> dict[str, Any]:
    fractions = dict.fromkeys(("bandwidth_fraction", "int8_fraction", "f32_fraction")) | fraction
    return {"test": test, "tokens_per_second": rate, "steady": True, **fractions}


BENCH = {
    "machine": machine(),
    "model": "some/where/Small-1B",
    "quant": "int4",
    "results": [bench_row("pp512", 1409.4, int8_fraction=0.81), bench_row("tg128", 283.0, bandwidth_fraction=0.659)],
}
PEERS = {
    "machine": machine(),
    "prompt_tokens": 512,
    "decode_steps": 64,
    "rounds": 11,
    "results": [
        {"engine": "pyengine 1.2", "model": "Small", "format": "int4", "prompt_per_second": 1400.0}
        | {"decode_per_second": 280.4, "prompt_ratio": 1.0, "decode_ratio": 1.0, "problem": None},
        {"engine": "other", "model": "Small", "format": "Q4_1", "prompt_per_second": 271.0}
        | {"decode_per_second": 96.0, "prompt_ratio": 5.199, "decode_ratio": 2.95, "problem": None},
        {"engine": "third", "model": "Small", "format": "int8", "prompt_per_second": None}
        | {"decode_per_second": None, "prompt_ratio": None, "decode_ratio": None, "problem": "not installed"},
    ],
}


def stored(tool: ModuleType, folder: Path, *records: dict[str, Any]) -> list[dict[str, Any]]:
    made = []
    for i, record in enumerate(records):
        path = folder / f"{i}.json"
        path.write_text(json.dumps(record))
        made.append(tool.read(path))
    return made


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_the_readme_shows_the_stored_figures(tool: ModuleType) -> None:
    files = sorted(tool.STORED.glob("*.json"))
    assert files
    readme = tool.README.read_text(encoding="utf-8")
    assert tool.replaced(readme, tool.block([tool.read(path) for path in files])) == readme
    assert sum(path.stat().st_size for path in files) < 100_000
    for path in files:  # of a name that says something, and no path of the machine that measured
        assert not re.search(r'"/[\w.]+/', path.read_text(encoding="utf-8"))


def test_rows_are_models_and_engines(tool: ModuleType, tmp_path: Path) -> None:
    text = tool.block(stored(tool, tmp_path, PEERS, BENCH))
    assert text.startswith(
        "pyengine 1.2, 2030-01-02: A CPU, avx2, 2 threads. Read bandwidth meanwhile: 40 to 40 GB/s.\n"
    )
    assert text.count("A CPU") == 1
    assert "512 tokens of prompt, then 64 decode steps, engines in turn, medians of 11 rounds; ratios" in text
    rows = cells(text)
    assert rows[0] == ["model", "pp512, tok/s", "tg128, tok/s"]
    assert rows[2] == ["Small-1B, int4", "1409 (81 % of int8)", "283 (66 % of read)"]
    assert rows[5:] == [
        ["pyengine 1.2: Small, int4", "1400", "280", "", ""],
        ["other: Small, Q4_1", "271", "96", "5.20", "2.95"],
        ["third: Small, int8 (not installed)", "", "", "", ""],
    ]


def test_machines_days_and_what_was_not_steady_are_told_apart(tool: ModuleType, tmp_path: Path) -> None:
    later = {
        **BENCH,
        "machine": machine(date="2030-01-03", threads=1, disturbed="3 other threads were running"),
    }
    later["results"] = [{**bench_row("tg128@64", 5.0, bandwidth_fraction=0.5), "steady": False}]
    text = tool.block(stored(tool, tmp_path, BENCH, later))
    first, second = text.split("pyengine 1.2, 2030-01-03: A CPU, avx2, 1 thread.")
    assert "ot quiet" not in first
    assert "GB/s. Not quiet: 3 other threads were running.\n" in second
    assert cells(second)[-1] == ["Small-1B, int4", "5 (50 % of read, unsteady)"]


def test_a_file_of_something_else_is_named(tool: ModuleType, tmp_path: Path) -> None:
    without = {key: value for key, value in machine().items() if key != "date"}
    for record in ({}, {**BENCH, "results": [{"op": "ffn"}]}, {**BENCH, "machine": without}, {**BENCH, "results": []}):
        with pytest.raises(SystemExit, match=r"0\.json: KeyError.*expected the JSON of"):
            stored(tool, tmp_path, record)
    with pytest.raises(SystemExit, match=r"nothing\.json: FileNotFoundError"):
        tool.read(tmp_path / "nothing.json")


def test_only_what_stands_between_the_markers_changes(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
    monkeypatch.setattr(tool, "README", readme)
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(BENCH))
    tool.main([str(file), "--print"])
    printed = capsys.readouterr().out
    assert "old" in readme.read_text()
    tool.main([str(file)])
    assert readme.read_text() == f"before\n{tool.BEGIN}\n{printed}{tool.END}\nafter\n"
    for wrong in ("no markers", f"{tool.END} {tool.BEGIN}", f"{tool.BEGIN}{tool.END}{tool.END}"):
        with pytest.raises(SystemExit, match="once each"):
            tool.replaced(wrong, "text")
