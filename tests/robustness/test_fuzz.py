"""The fuzz targets of tests/fuzz, a few cases each; every target runs for any time from its command line."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from fuzz import config, fuzzing, generate, header, matmul, text
from tool_scripts import TOOLS

TARGETS = {"header": (header, 300), "config": (config, 300), "text": (text, 300), "matmul": (matmul, 60),
           "generate": (generate, 25)}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_some_cases(name: str) -> None:
    module, count = TARGETS[name]
    assert fuzzing.run_many(module.case, count=count, corpus=module.CORPUS) == count + len(module.CORPUS)


def test_a_defect_is_shown_with_its_case() -> None:
    def case(rng: random.Random) -> None:
        assert rng.randrange(10) != 3, "three"

    with pytest.raises(fuzzing.CaseError, match=r"^--seed 0 --case \d+: AssertionError: three") as caught:
        fuzzing.run_many(case, count=100)
    number = int(str(caught.value).split()[3].rstrip(":"))
    assert fuzzing.run_many(case, count=number) == number
    with pytest.raises(fuzzing.CaseError, match="three"):
        fuzzing.run_many(case, count=0, corpus=[number])


@pytest.mark.parametrize("name", TARGETS)
def test_from_the_command_line(name: str) -> None:
    command = [sys.executable, str(TOOLS.parent / "tests" / "fuzz" / f"{name}.py"), "--seconds", "0.2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}: "), done.stdout
    assert "executions" in done.stdout
