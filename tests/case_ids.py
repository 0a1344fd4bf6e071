"""Which cases of robustness/case_ids.txt have a test: ids in the names and parameters of tests, read from their source.

A test's name holds ids as `test_malformed_a01_a02_what_it_is` or `test_report_c07_...`, a parameter as
`malformed-A01-what-it-is`; one may hold ids of both lists, one after the other.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
LINE = re.compile(r"(malformed|report) ([A-Z]\d\d) (.+?)(?: \[open: (.+)\])?")
GROUP = re.compile(r"(?<![A-Za-z])(malformed|report)((?:(?:_[a-z]|-[A-Z])\d\d(?![0-9A-Za-z]))+)")

Case = tuple[str, str]  # list, id


def listed() -> dict[Case, str | None]:
    """Every case -> why it has no test yet, None where it must have one."""
    cases: dict[Case, str | None] = {}
    for line in (TESTS / "robustness" / "case_ids.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, f"case_ids.txt: {line!r}; expected list, id, what it is"
        case = (match[1], match[2])
        assert case not in cases, f"case_ids.txt: {case} twice"
        cases[case] = match[4]
    return cases


def named(text: str) -> set[Case]:
    """The cases that a test's name or id names."""
    return {(m[1], i.upper()) for m in GROUP.finditer(text) for i in re.split("[-_]", m[2][1:])}


@cache
def in_source(files: tuple[Path, ...] = ()) -> frozenset[Case]:
    """The cases that functions and string constants of the tests (or of `files`) name, whatever part is run."""
    found: set[Case] = set()
    for path in files or (*TESTS.rglob("test_*.py"), *TESTS.rglob("variants*.py")):
        if path.name == "test_case_ids.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= named(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and GROUP.match(node.value):
                found |= named(node.value)  # of an f-string, its first part
    return frozenset(found)


def summary() -> list[str]:
    """One line per list and section: how many of its cases have a test, and which have none."""
    cases, found = listed(), in_source()
    lines = []
    for name, section in sorted({(name, i[0]) for name, i in cases}):
        own = [case for case in cases if case[0] == name and case[1][0] == section]
        absent = [f"{case[1]} ({cases[case] or 'missing'})" for case in own if case not in found]
        rest = f", without a test: {', '.join(absent)}" if absent else ""
        lines.append(f"{name} {section} {sum(case in found for case in own)}/{len(own)}{rest}")
    return lines
