"""Every case of case_ids.txt has a test that names it, and every id that a test names is in the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_ids import TESTS, in_source, listed, named, summary


def test_every_case_has_a_test() -> None:
    cases = listed()
    assert len(cases) > 300
    missing = sorted(set(cases) - in_source() - {case for case, why in cases.items() if why})
    assert missing == [], "cases of case_ids.txt that no test names"


def test_every_id_is_in_the_list() -> None:
    assert sorted(in_source() - set(listed())) == []


def test_what_is_open_has_no_test() -> None:
    done = sorted(case for case, why in listed().items() if why and case in in_source())
    assert done == [], "these have a test: take [open: ...] out of their lines"


def test_ids_in_the_source_are_ids_of_tests(request: pytest.FixtureRequest) -> None:
    """A string that is no parameter of any test would count as one. Judged by the files that this run has collected."""
    items = [item for item in request.session.items if Path(item.path).is_relative_to(TESTS)]
    always = {path for path in TESTS.rglob("test_*.py") if path.parent.name != "parity"}  # that needs torch
    whole = always <= {Path(item.path) for item in items}
    if not whole or request.config.option.keyword or request.config.option.markexpr:
        pytest.skip("only a run of the whole suite collects all of them")
    collected = {case for item in items for case in named(item.name)}
    assert sorted(in_source() - collected) == []
    assert sorted(collected - in_source()) == []


def test_names_are_read(tmp_path: Path) -> None:
    assert named("test_malformed_a01_a02_report_b30_empty") == {
        ("malformed", "A01"),
        ("malformed", "A02"),
        ("report", "B30"),
    }
    assert named("test_x[malformed-A01-empty-report-C07]") == {("malformed", "A01"), ("report", "C07")}
    assert named("test_x[malformed-P14-f32]") == {("malformed", "P14")}
    assert named("test_a01_report_of_a0_and_b123") == named("a malformed A01") == set()
    source = tmp_path / "test_x.py"
    source.write_text(
        'NAMES = ["malformed-A03-x", "says malformed-A04"]  # malformed-A05\ndef test_report_b01_y(): ...\n'
    )
    assert in_source((source,)) == {("malformed", "A03"), ("report", "B01")}


def test_the_summary_has_a_line_for_each_section() -> None:
    lines = summary()
    assert len(lines) == 15
    assert sum(int(line.split("/")[1].split(",")[0]) for line in lines) == len(listed())
