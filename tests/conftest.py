"""Shared by all tests: a clean environment, and summaries: which ISAs ran, which cases of the lists have a test."""

from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from case_ids import summary

from pyengine import _core, weights_cache

# A shell that starts something in the background lets it ignore Ctrl-C, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

ISAS = [entry["name"] for entry in _core.isas()]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the user's shell changes what a test sees."""
    for name in ("PYENGINE_THREADS", "PYENGINE_DEVICE", "PYENGINE_ISA"):
        monkeypatch.delenv(name, raising=False)
    # nothing is left in the user's cache, and nothing is read that another version of the quantizer left there
    monkeypatch.setattr(weights_cache, "WORTH_SECONDS", float("inf"))
    monkeypatch.setattr(weights_cache, "weights_cache_dir", lambda: Path("/nonexistent/weights"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line per ISA: how many tests named it, or that this CPU lacks it. A line per section of the case lists."""
    passed: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        parameters = re.search(r"\[(.*)\]", report.nodeid)
        words = set(re.split(r"[-\W]+", parameters.group(1))) if parameters else set()
        passed.update(words.intersection(ISAS))
    terminalreporter.section("ISAs")
    for entry in _core.isas():
        state = f"{passed[entry['name']]} tests passed" if entry["available"] else "not on this CPU"
        terminalreporter.write_line(f"{entry['name']}: {state}")
    terminalreporter.section("cases")
    for line in summary():
        terminalreporter.write_line(line)
