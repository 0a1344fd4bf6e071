"""limits.cu: the probes compute what they check, whatever the work; the rates themselves are the device's affair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("tests/cuda/limits_driver.cc", "csrc/cuda/limits.cu")
READ, INT8, F32, HOP = range(4)


@pytest.fixture(scope="module")
def limits(build: Callable[..., Any]) -> Any:
    return build(*SOURCES)


@pytest.mark.parametrize(("limit", "work"), [(READ, 1), (READ, 1 << 20), (INT8, 1), (F32, 1)])
def test_a_measurement(limits: Any, limit: int, work: int) -> None:
    rates = np.zeros(3)
    limits("limits_measure", limit, work, 3, rates)
    assert (rates > 0).all()
    assert np.isfinite(rates).all()


@pytest.mark.parametrize(
    ("limit", "work", "passes", "text"),
    [(4, 1, 1, "limit 4 is unknown"), (HOP, 1, 1, "limit 3 is one between threads"),
     (READ, 0, 1, "work 0 in 1 passes"), (F32, 1, 0, "work 1 in 0 passes"),
     (READ, (1 << 32) + 1, 1, "expected 1 to 4294967296")],
)  # fmt: skip
def test_what_cannot_be_measured(limits: Any, limit: int, work: int, passes: int, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        limits("limits_measure", limit, work, passes, np.zeros(1))


@pytest.mark.parametrize(
    ("limit", "old", "new"),
    [
        (INT8, "32 * rounds", "31 * rounds"),
        (READ, "step += gridDim.x", "step += 1"),
    ],
)
def test_a_probe_that_leaves_something_out_is_an_error(
    build: Callable[..., Any], limit: int, old: str, new: str
) -> None:
    text = (ROOT / "csrc/cuda/limits.cu").read_text()
    assert text.count(old) == 1
    wrong = build(*SOURCES, changed={"csrc/cuda/limits.cu": text.replace(old, new)})
    with pytest.raises(RuntimeError, match="status 7: a probe"):
        wrong("limits_measure", limit, 1 << 20 if limit == READ else 1, 1, np.zeros(1))
