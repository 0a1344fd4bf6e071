"""Stage 6, profile_meter: steps of an engine, run and timed one by one, and what their times come to.

Every decode step runs twice, by the engine's own program and by one without timers: their ratio is what measuring
costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import RequestError
from pyengine.kv_cache import Sequence as KvSequence
from pyengine.reports.profile_result import Cost, Phase
from pyengine.reports.profile_work import STAGES
from pyengine.steps import MAX_BATCH_TOKENS

if TYPE_CHECKING:
    from pyengine.decoder import BuiltProgram
    from pyengine.engine import Engine

PARTS = 4  # of the decode steps, the limits sampled between any two
PREFILL_RUNS, PREFILL_SECONDS = 3, 2.0  # a prompt is run so often, but not again once it has taken so long
SEED = 0  # of the token ids


@dataclass(frozen=True)
class Sample:
    """One timed step: when it began (perf_counter, s), its wall time (s), its ops (ns)."""

    start: float
    wall: float
    ops_ns: npt.NDArray[np.uint64]


class Meter:
    """Runs and times steps of an engine. Close it: it holds KV blocks."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine = engine
        self.clock = clock
        self.timed = engine.program
        self.untimed = engine.build(timed=False)
        self.sequence = KvSequence(engine.pool)
        self.random = np.random.default_rng(SEED)

    def ids(self, count: int) -> list[int]:
        ids: list[int] = self.random.integers(0, self.engine.spec.vocab_size, count).tolist()
        return ids

    def step(self, ids: list[int], *, timed: bool = True, advance: bool = True, sample: bool = True) -> Sample:
        """One step; the ops of an untimed one are zeros."""
        program = self.timed if timed else self.untimed
        rows = np.array([len(ids) - 1] if sample else [], np.int32)
        with self.engine._running():
            program.program.times(True)
            start = self.clock()
            self.engine.forward(
                [(self.sequence, ids)], rows=rows, sampling=[None] if sample else None, program=program, advance=advance
            )
            wall = self.clock() - start
            return Sample(start, wall, program.program.times(True)[0])

    def fill(self, tokens: int) -> list[Sample]:
        """`tokens` more tokens in chunks; the last one samples."""
        ids = self.ids(tokens)
        chunks = [ids[at : at + MAX_BATCH_TOKENS] for at in range(0, tokens, MAX_BATCH_TOKENS)]
        return [self.step(chunk, sample=i == len(chunks) - 1) for i, chunk in enumerate(chunks)]

    def reach(self, tokens: int) -> None:
        """So many tokens in the cache."""
        try:
            self.sequence.truncate(tokens)
        except RequestError:  # a window has given back what it would take
            self.sequence.close()
        if self.sequence.length < tokens:
            self.fill(tokens - self.sequence.length)

    def prompt(self, tokens: int) -> list[Sample]:
        """The chunks of a prompt, from an empty context: of the run whose wall time is the median."""
        self.sequence.close()
        self.fill(min(tokens, MAX_BATCH_TOKENS))  # warm
        runs: list[list[Sample]] = []
        while len(runs) < PREFILL_RUNS and sum(s.wall for run in runs for s in run) < PREFILL_SECONDS:
            self.sequence.close()
            runs.append(self.fill(tokens))
        return sorted(runs, key=lambda run: sum(s.wall for s in run))[(len(runs) - 1) // 2]

    def decode(self, context: int, steps: int, between: Callable[[], None]) -> tuple[list[Sample], list[Sample]]:
        """The timed and the untimed steps that end at `context`; between() is called now and then."""
        self.reach(context - steps)
        pairs: tuple[list[Sample], list[Sample]] = ([], [])
        part = -(-steps // PARTS)
        for index, token in enumerate(self.ids(steps)):
            if index % part == 0:
                between()
                for timed in (True, False):  # what ran between has emptied the caches
                    self.step([token], timed=timed, advance=False)
            first = index % 2 == 0
            for timed, advance in ((first, False), (not first, True)):
                pairs[0 if timed else 1].append(self.step([token], timed=timed, advance=advance))
        between()
        return pairs

    def close(self) -> None:
        self.sequence.close()


def quicker_half(samples: Sequence[Sample]) -> list[Sample]:
    """Those of equal steps that took no longer than the median."""
    limit = sorted(sample.wall for sample in samples)[(len(samples) - 1) // 2]
    return [sample for sample in samples if sample.wall <= limit]


def all_steps(samples: Sequence[Sample]) -> dict[str, float]:
    """Percentiles of the wall time in ms."""
    percentiles = np.percentile([1e3 * sample.wall for sample in samples], (10, 50, 90)).tolist()
    return dict(zip(("p10", "median", "p90"), percentiles, strict=True))


def timer_cost(timed: Sequence[Sample], untimed: Sequence[Sample]) -> Cost:
    """Of pairs of the same step. Error of a median of n: 1.25 x 1.48 x the median deviation / sqrt(n)."""
    ratios = np.array([a.wall / b.wall for a, b in zip(timed, untimed, strict=True)])
    middle = float(np.median(ratios))
    spread = float(np.median(np.abs(ratios - middle)))
    return Cost(middle - 1, 1.2533 * 1.4826 * spread / len(ratios) ** 0.5, len(ratios))


def phase(program: BuiltProgram, layers: int, samples: Sequence[Sample], *, mean: bool, **known: Any) -> Phase:
    """The mean over the quicker half of equal steps, or the sum of the chunks of a prompt."""
    used = quicker_half(samples) if mean else list(samples)
    ns = np.sum([sample.ops_ns for sample in used], axis=0, dtype=np.float64)
    scale = 1e-6 / (len(used) if mean else 1)
    wall = 1e9 * scale * sum(sample.wall for sample in used)
    stage = np.array([op["stage"] for op in program.ops])
    layer = np.array([op["layer"] for op in program.ops])
    times = np.zeros((layers + 1, len(STAGES)))  # the last row: ops of no layer, which have -1
    np.add.at(times, (layer, stage), ns * scale)
    stages = {name: float(times[:, i].sum()) for i, name in enumerate(STAGES)}
    stages["other"] = wall - sum(stages.values())
    each = [{name: float(row[i]) for i, name in enumerate(STAGES) if row[i]} for row in times[:layers]]
    spread = all_steps(samples) if mean else {}
    return Phase(
        steps=len(samples),
        steps_used=len(used),
        wall_ms=wall,
        all_steps_ms=spread,
        stages=stages,
        layers=each,
        **known,
    )
