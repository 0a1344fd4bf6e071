"""Stop strings: found across the borders of pieces, never shown, nothing else held back for long."""

from __future__ import annotations

import time

import pytest

from pyengine.tokenizer import StopMatcher


def matched(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out.append(text)
        if stopped:
            assert matcher.push("more") == ("", True)
            assert matcher.finish() == ""
            return out, matcher.matched
    return [*out, matcher.finish()], matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["a", "b"], (["a", "b", ""], None)),
        (["END"], ["text E", "N", "D more"], (["text ", "", ""], "END")),
        (["END"], ["E", "N", "x"], (["", "", "ENx", ""], None)),
        (["END"], ["EN", "EN", "D"], (["", "EN", ""], "END")),
        (["END"], ["ab", "EN"], (["ab", "", "EN"], None)),
        (["aab"], ["a", "a", "a", "b"], (["", "", "a", ""], "aab")),
        (["DEFG"], ["ABCDEFGHIJ"], (["ABC"], "DEFG")),
        (["b", "abc"], ["abc"], (["a"], "b")),
        (["bc", "abc"], ["ab", "c"], (["", ""], "abc")),
        (["abcd", "bc"], ["a", "b", "c"], (["", "", "a"], "bc")),
        (["\n\n"], ["x\n", "y\n", "\nz"], (["x", "\ny", ""], "\n\n")),
        (["x"], ["", "x"], (["", ""], "x")),
    ],
)
def test_malformed_g21_report_f20_f21_stop_strings(
    stops: list[str], pieces: list[str], expected: tuple[list[str], str | None]
) -> None:
    assert matched(stops, pieces) == expected


def test_stop_strings_cost_time_in_the_length_of_the_text_alone() -> None:
    matcher = StopMatcher(["a" * 1023 + "b"])
    started = time.monotonic()
    for _ in range(20_000):
        matcher.push("a")
    assert matcher.finish() == "a" * 1023
    assert time.monotonic() - started < 10
