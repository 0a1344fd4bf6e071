"""Shared by all tests: a clean environment, and a summary of which ISAs ran."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from pyengine import _core, weights_cache

ISAS = [entry["name"] for entry in _core.isas()]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the user's shell changes what a test sees."""
    for name in ("PYENGINE_THREADS", "PYENGINE_DEVICE", "PYENGINE_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(weights_cache, "WORTH_SECONDS", float("inf"))  # nothing is left in the user's cache


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per ISA: how many tests named it, or that this CPU lacks it."""
    passed: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        parameters = re.search(r"\[(.*)\]", report.nodeid)
        words = set(re.split(r"[-\W]+", parameters.group(1))) if parameters else set()
        passed.update(words.intersection(ISAS))
    terminalreporter.section("ISAs")
    for entry in _core.isas():
        state = f"{passed[entry['name']]} tests passed" if entry["available"] else "not on this CPU"
        terminalreporter.write_line(f"{entry['name']}: {state}")
