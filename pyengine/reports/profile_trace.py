"""Stage 6, profile_trace: timed steps as events of a Chrome trace: phases, steps, layers and ops, nested.

The timers give each op's duration; ops run one after the other, so they are laid end to end from the step's beginning,
and what is left at its end is `other`. Times in microseconds from the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pyengine._core import OpKind
from pyengine.reports.profile_work import STAGES

if TYPE_CHECKING:
    from pyengine.decoder import BuiltProgram
    from pyengine.reports.profile_meter import Sample

KINDS = {int(kind): name.lower() for name, kind in OpKind.__members__.items()}


def events(program: BuiltProgram, phases: Sequence[tuple[str, Sequence[Sample]]]) -> list[dict[str, Any]]:
    """Complete events ("X") of all steps, in order."""
    origin = min(sample.start for _, samples in phases for sample in samples)
    out: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "pyengine"}},
    ]

    def add(name: str, category: str, start: float, duration: float, **args: Any) -> None:
        event = {"name": name, "cat": category, "ph": "X", "pid": 1, "tid": 1, "ts": start, "dur": duration}
        out.append({**event, "args": args} if args else event)

    for what, samples in phases:
        for number, sample in enumerate(samples):
            start = 1e6 * (sample.start - origin)
            add(f"{what} {number}", what, start, 1e6 * sample.wall)
            timed = zip(program.ops, (sample.ops_ns / 1e3).tolist(), strict=True)
            for layer, group in groupby(timed, key=lambda pair: pair[0]["layer"]):
                ops = list(group)
                if layer >= 0:
                    add(f"layer {layer}", "layer", start, sum(duration for _, duration in ops))
                for op, duration in ops:
                    add(KINDS[op["kind"]], STAGES[op["stage"]], start, duration)
                    start += duration
    return out
