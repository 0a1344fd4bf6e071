"""Stage 6, profile: where decode and prefill time goes, by stage and layer, beside bytes, operations and limits.

A decode step at context c is the one of the token that sees c tokens, itself included; `steps` steps end there. Every
step runs twice, by the engine's own program and by one without timers, in turns which is first: their ratio is what
measuring costs. The machine's limits are sampled before, in between and after. Times are wall time around the engine's
step, Python included; `other` is wall minus all stages. Shown is the mean over the quicker half of the steps, since the
system and other processes can only make a step longer; percentiles over all of them show what that leaves out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine._core import Format
from pyengine.errors import RequestError, ResourceError
from pyengine.kv_cache import Sequence as KvSequence
from pyengine.reports.account_read import of_spec
from pyengine.reports.machine import Gauge, median
from pyengine.reports.profile_work import STAGES, Model, Rates, Work, byte_share
from pyengine.sampling import is_integer
from pyengine.steps import MAX_BATCH_TOKENS
from pyengine.system import available_memory

if TYPE_CHECKING:
    from pyengine.decoder import BuiltProgram
    from pyengine.engine import Engine

DEFAULT_CONTEXT, DEFAULT_STEPS = 512, 32
MAX_STEPS = 1 << 16
PARTS = 4  # of the decode steps, the limits sampled between any two
PREFILL_RUNS, PREFILL_SECONDS = 3, 2.0  # a prompt is run so often, but not again once it has taken so long
SEED = 0  # of the token ids
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Sample:
    """One timed step: when it began (perf_counter, s), its wall time (s), its ops (ns)."""

    start: float
    wall: float
    ops_ns: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Phase:
    """A kind of step: times in ms, of one decode step (the mean), or of a whole prompt.

    stages: of STAGES, then other. layers: of each layer, the stages that it has. work: of the same stages.
    all_steps_ms: p10, median and p90 of the wall time of all steps, the slower half too; empty for a prompt.
    """

    context: int
    tokens: int  # a decode step has one
    steps: int
    steps_used: int
    wall_ms: float
    all_steps_ms: dict[str, float]
    stages: dict[str, float]
    layers: list[dict[str, float]]
    work: dict[str, Work]
    rates: Rates

    @property
    def stage_sum_ms(self) -> float:
        return self.wall_ms - self.stages["other"]

    @property
    def ffn_share(self) -> float:
        return self.stages["ffn"] / self.wall_ms

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.wall_ms

    @property
    def byte_share(self) -> float:
        """What account predicts of the FFN: its share of the bytes of a step."""
        return byte_share(self.work)

    def rate(self, amount: float, stage: str) -> float | None:
        """1e9 per second."""
        return amount / self.stages[stage] / 1e6 if amount and self.stages[stage] > 0 else None

    def roofline(self) -> list[dict[str, Any]]:
        """Of each stage that ran: rates, and which part of its time reading or computing at the limits would take."""
        rows = []
        for stage, work in self.work.items():
            seconds = self.stages[stage] / 1e3
            if seconds <= 0:
                continue
            read, compute = self.rates.read_seconds(work), self.rates.compute_seconds(work)
            rows.append(
                {
                    "stage": stage,
                    "ms": self.stages[stage],
                    "bytes": work.bytes,
                    "operations": work.ops,
                    "gb_per_s": self.rate(work.bytes, stage),
                    "gops": self.rate(work.ops, stage),
                    "read_fraction": read / seconds,
                    "compute_fraction": compute / seconds,
                    "bound": "read" if read >= compute else "compute",
                    "fraction": max(read, compute) / seconds,
                }
            )
        return rows

    def differences(self) -> list[dict[str, Any]]:
        """Why the FFN's share is not its share of the bytes: each stage's time beside that of its bytes at the rate at
        which the FFN reads; `points` of the share that this takes. All points: byte_share - ffn_share.

        From meas = ffn / wall and byte_share = ffn / (time of all bytes at the FFN's rate) = ffn / (wall - excess):
        byte_share - meas = byte_share x excess / wall, and excess is a sum over stages.
        """
        per_byte = self.stages["ffn"] / self.work["ffn"].bytes
        rows = []
        for stage, ms in self.stages.items():
            if stage == "ffn":
                continue
            counted = stage in ("attention", "router", "lm_head")  # whose bytes the prediction has
            expected = self.work[stage].bytes * per_byte if counted else 0.0
            rows.append(
                {"stage": stage, "ms": ms, "ms_at_ffn_rate": expected,
                 "points": 100 * self.byte_share * (ms - expected) / self.wall_ms}
            )  # fmt: skip
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "tokens": self.tokens,
            "steps": self.steps,
            "steps_used": self.steps_used,
            "wall_ms": self.wall_ms,
            "stage_sum_ms": self.stage_sum_ms,
            "tokens_per_second": self.tokens_per_second,
            "ffn_share": self.ffn_share,
            "stages": self.stages,
            "layers": [{"layer": i, "ms": sum(s.values()), "stages": s} for i, s in enumerate(self.layers)],
            "roofline": self.roofline(),
        }


@dataclass(frozen=True)
class Cost:
    """Of the timers: the median of timed / untimed - 1 over pairs of the same step, and its standard error."""

    value: float
    error: float
    pairs: int


@dataclass(frozen=True)
class Profile:
    """What `profile` found; the fields of `profile --json`."""

    model: str
    quant: str
    group_size: int | None
    bits_per_weight: float
    kv_dtype: str
    decode: Phase
    prefill: Phase
    sweep: tuple[Phase, ...]  # decode at each context, ascending, that of `decode` among them
    cost: Cost
    machine: dict[str, Any]
    trace: tuple[dict[str, Any], ...]  # events of a Chrome trace

    def to_json(self) -> dict[str, Any]:
        read = {row["stage"]: row["gb_per_s"] for row in self.decode.roofline()}
        decode = {
            **self.decode.to_json(),
            "all_steps_ms": self.decode.all_steps_ms,
            "byte_share": self.decode.byte_share,
            "differences": self.decode.differences(),
        }
        return {
            "model": self.model,
            "quant": self.quant,
            "group_size": self.group_size,
            "bits_per_weight": self.bits_per_weight,
            "kv_dtype": self.kv_dtype,
            "decode": decode,
            "prefill": self.prefill.to_json(),
            "bytes_per_stage": {stage: work.bytes for stage, work in self.decode.work.items()},
            "gb_per_s_per_stage": {stage: read.get(stage) for stage in STAGES},
            "contexts": [
                {"context": p.context, "wall_ms": p.wall_ms, "all_steps_ms": p.all_steps_ms,
                 "ffn_share": p.ffn_share, "byte_share": p.byte_share, "stages": p.stages}
                for p in self.sweep
            ],
            "timer_cost": vars(self.cost),
            "machine": self.machine,
        }  # fmt: skip

    def to_html(self) -> str:
        """One self-contained page."""
        from pyengine.reports.profile_html import page

        return page(self)

    def to_png(self, path: str | os.PathLike[str]) -> None:
        """The page's pictures as one PNG file.

        Errors: ResourceError without the extra [viz], RequestError for a path that cannot be written.
        """
        from pyengine.reports import png, profile_pictures, profile_text

        png.write(path, profile_text.title(self), profile_pictures.pictures(self))

    def to_trace(self) -> dict[str, Any]:
        """A Chrome trace (chrome://tracing, Perfetto) of the prompt and the decode steps at the chosen context."""
        return {"traceEvents": list(self.trace), "displayTimeUnit": "ms"}

    def _repr_html_(self) -> str:
        from pyengine.reports.profile_html import fragment

        return fragment(self)

    def __str__(self) -> str:
        from pyengine.reports.profile_text import report

        return report(self)


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


def check(engine: Engine, context: Any, steps: Any, contexts: Sequence[Any]) -> list[int]:
    """All contexts, ascending. RequestError for what does not fit, ResourceError for more KV cache than memory."""
    if not is_integer(steps) or not 1 <= steps <= MAX_STEPS:
        raise RequestError(f"steps {steps!r}; expected 1 to {MAX_STEPS}")
    for value in (context, *contexts):
        if not is_integer(value) or not steps < value <= engine.ctx_size:
            raise RequestError(
                f"context {value!r} with {steps} steps; expected {steps + 1} (all steps and a token before them) to "
                f"{engine.ctx_size}, the model's"
            )
    longest = max(context, *contexts) if contexts else context
    wanted, available = int(longest * engine.pool.bytes_per_token), available_memory()
    if available is not None and wanted > available:
        raise ResourceError(
            f"a KV cache of {longest} tokens takes {wanted} bytes, {available} are available; expected a shorter one"
        )
    return sorted({int(context), *map(int, contexts)})


def profile(
    engine: Engine,
    *,
    context: int | None = None,
    steps: int = DEFAULT_STEPS,
    contexts: Sequence[int] = (),
    progress: Progress | None = None,
) -> Profile:
    """Profile an engine: a prompt of `context` tokens and the `steps` decode steps that end there (default context 512,
    or the model's maximum), and decode at each of `contexts`.

    Errors: RequestError for a bad argument, ResourceError for more KV cache than there is memory.
    """
    from pyengine.reports.profile_trace import events

    context = min(DEFAULT_CONTEXT, engine.ctx_size) if context is None else context
    wanted = check(engine, context, steps, contexts)
    stored = "bfloat16" if engine.weights.tensors[engine.weights.embed][0] == int(Format.ROWS_BF16) else None
    model = Model(of_spec(engine.spec, stored), engine.quantization, engine.kv_dtype, engine.spec.vocab_size)
    gauge = Gauge.of(engine.backend)
    done, total = 0, (len(wanted) + 1) * (PARTS + 1)

    def rates(since: int) -> Rates:
        return Rates.of(median(gauge.samples[since:]), engine.quantization, engine.kv_dtype)

    def between(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(min(done, total), total, what)
        done += 1
        gauge.sample()

    with closing(Meter(engine)) as meter:
        between("prompt")
        prompt = meter.prompt(context)
        between("prompt")
        ends = [min(at + MAX_BATCH_TOKENS, context) for at in range(0, context, MAX_BATCH_TOKENS)]
        chunks = [(end - (ends[i - 1] if i else 0), end, int(end == context)) for i, end in enumerate(ends)]
        program, layers = meter.timed, engine.spec.num_layers
        prefill = phase(
            program,
            layers,
            prompt,
            mean=False,
            context=context,
            tokens=context,
            work=model.whole(chunks),
            rates=rates(0),
        )
        sweep: list[Phase] = []
        every: list[Sample] = []
        pairs: tuple[list[Sample], list[Sample]] = ([], [])
        for one in wanted:
            since = len(gauge.samples)
            timed, untimed = meter.decode(one, steps, partial(between, f"decode at {one}"))
            work = model.mean((1, end, 1) for end in range(one - steps + 1, one + 1))
            sweep.append(phase(program, layers, timed, mean=True, context=one, tokens=1, work=work, rates=rates(since)))
            pairs[0].extend(timed)
            pairs[1].extend(untimed)
            if one == context:
                every = timed
    return Profile(
        model=str(engine.folder),
        quant=engine.quant,
        group_size=engine.group_size,
        bits_per_weight=engine.bits_per_weight,
        kv_dtype=engine.kv_dtype,
        decode=next(p for p in sweep if p.context == context),
        prefill=prefill,
        sweep=tuple(sweep),
        cost=timer_cost(*pairs),
        machine=gauge.to_json(isa=engine.isa, threads=engine.threads),
        trace=tuple(events(program, [("prompt", prompt), ("decode", every)])),
    )
