"""Stage 6, kernel_bench: single ops of the core alone, each beside the limit of the machine that binds it.

A row is the median over its rounds. In a round each of the ops that share weights and a number of tokens runs once, the
limits measured between any two, so that fractions and ratios are of runs that stood side by side.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from pyengine import kernels
from pyengine.errors import ResourceError
from pyengine.packer import padded
from pyengine.reports.kernel_ops import (
    BUSY_BYTES,
    FFN,
    HEAD_ROWS,
    KV_BYTES,
    RUN_BYTES,
    WEIGHTS,
    Bed,
    Job,
    Timer,
    bits,
    lay,
)
from pyengine.reports.machine import Gauge, Limits, Timed, fraction, take_turns
from pyengine.system import available_memory

MAX_SECONDS = 10.0  # a row whose single run would take longer at the machine's best rate is left empty

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """A row of `bench --kernels --json`. m tokens; n, k: the matrix (ffn: hidden, FFN size; attention: columns, keys).

    gb_per_s counts `weight_bytes` (weights, of experts those that are chosen, or keys and values), of rms_norm and
    quantize `activation_bytes`. fraction is the larger of bytes over the read limit and operations over the rate of
    `bound` (machine.Fraction, which has rounds_used and steady too); None where activations in the cache are all there
    is. ratio_to_ffn is the median of the rounds' times over those of `ffn` on the same weights. Times and what follows
    from them are None if the op would take too long.
    """

    model: str
    op: str
    isa: str
    weights: str | None
    m: int
    n: int
    k: int
    microseconds: float | None
    gb_per_s: float | None
    gops: float | None
    fraction: float | None
    bound: str | None
    rounds_used: int | None
    steady: bool | None
    ratio_to_ffn: float | None
    weight_bytes: int
    activation_bytes: int
    barriers: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def conclude(row: Row, job: Job, timed: list[Timed], base: list[Timed] | None) -> Row:
    """The row with what follows from its runs and, of an FFN, from those of `ffn` in the same rounds."""
    seconds = statistics.median(run.seconds for run in timed)
    moved = row.weight_bytes or row.activation_bytes
    row = replace(row, microseconds=seconds * 1e6, gb_per_s=moved / seconds / 1e9)
    if base is not None:
        ratios = [run.seconds / other.seconds for run, other in zip(timed, base, strict=True)]
        row = replace(row, ratio_to_ffn=statistics.median(ratios))
    if job.rate is None:
        return row
    fractions = {
        "read": fraction("read_gb_per_s", moved / 1e9, timed),
        job.rate.split("_")[0]: fraction(job.rate, job.operations / 1e9, timed),
    }
    bound, of = max(fractions.items(), key=lambda item: item[1].value)
    gops = job.operations / seconds / 1e9
    return replace(row, gops=gops, fraction=of.value, bound=bound, rounds_used=of.rounds_used, steady=of.steady)


def check_memory(group: list[Job], kv_dtype: str) -> None:
    """ResourceError before matrices that do not fit are made."""
    job = group[0]
    weights = {"moe": 3 * job.shape.experts}.get(job.op, 3 if job.op in FFN else 1) * job.n * job.k
    wanted = 2 * weights * bits(WEIGHTS[job.weights]) / 8 if job.weights is not None else 0.0
    if job.op == "attention":
        wanted = 4 * job.shape.kv_heads * padded(job.shape.head_dim) * job.k * KV_BYTES[kv_dtype]
    if any(job.op == "ffn_naive" for job in group):
        wanted += 4 * weights
    available = available_memory()
    if available is not None and wanted + RUN_BYTES + BUSY_BYTES > available:
        raise ResourceError(
            f"{job.op} {job.n} x {job.k} in {job.weights} takes {int(wanted)} bytes, {available} are available"
        )


def run(
    wanted: list[Job],
    *,
    isas: list[str],
    threads: int,
    repetitions: int,
    kv_dtype: str = "bf16",
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> tuple[list[Row], dict[str, Gauge]]:
    """Every job on every ISA, and each ISA's gauge."""
    rows: list[Row] = []
    gauges: dict[str, Gauge] = {}
    done, total = 0, len(wanted) * len(isas)
    for isa in isas:
        gauge = gauges[isa] = Gauge.of(kernels.Bench(threads, isa).backend)
        gauge.sample()
        for _, group in itertools.groupby(wanted, key=lambda job: (job.shape, job.op in FFN or job.op, *job.matrix)):
            some = list(group)
            if progress is not None:
                progress(done, total, f"{some[0].op} {some[0].weights or ''} {isa}")
            done += len(some)
            able = [job for job in some if not too_long(job, gauge.limits)]
            made = time_jobs(able, gauge, isa, threads, repetitions, kv_dtype) if able else {}
            for job in some:
                if job not in made and note is not None:
                    what = f"{job.op} {job.weights or ''} m {job.m} on {isa}"
                    note(f"{what} would take over {MAX_SECONDS:g} s; left empty")
                rows.append(made.get(job, empty_row(job, isa)))
    if progress is not None:
        progress(total, total, "done")
    return rows, gauges


def empty_row(job: Job, isa: str) -> Row:
    return Row(
        model=job.shape.name,
        op=job.op,
        isa=isa,
        weights=job.weights,
        m=job.m,
        n=job.n,
        k=job.k,
        microseconds=None,
        gb_per_s=None,
        gops=None,
        fraction=None,
        bound=None,
        rounds_used=None,
        steady=None,
        ratio_to_ffn=None,
        weight_bytes=0,
        activation_bytes=0,
        barriers=None,
    )


def too_long(job: Job, limits: Limits) -> bool:
    """Whether a single run takes MAX_SECONDS even at the machine's best."""
    return job.rate is not None and job.operations / 1e9 / getattr(limits, job.rate) > MAX_SECONDS


def time_jobs(
    group: list[Job], gauge: Gauge, isa: str, threads: int, repetitions: int, kv_dtype: str
) -> dict[Job, Row]:
    """The rows of jobs that share their weights. Those of one m take turns, after an untimed run of each."""
    check_memory(group, kv_dtype)
    bed = Bed(threads, isa, max(job.m for job in group))
    laid = lay(bed, group, kv_dtype)
    made: dict[Job, Row] = {}
    for m, same in itertools.groupby(group, key=lambda job: job.m):
        timers: list[Timer] = []
        for job in same:
            copies = laid[job.op]
            used = copies[:1] if m > HEAD_ROWS and job.op not in ("rms_norm", "quantize") else copies
            timers.append(Timer(bed, job, used))
            timers[-1].seconds()
        turns = take_turns(gauge, [timer.seconds for timer in timers], repetitions)
        timed = {timer.job.op: runs for timer, runs in zip(timers, turns, strict=True)}
        for timer in timers:
            row = replace(
                empty_row(timer.job, isa),
                weight_bytes=timer.weight_bytes,
                activation_bytes=bed.traffic(laid[timer.job.op][0], m),
                barriers=timer.barriers,
            )
            base = timed.get("ffn") if timer.job.op != "ffn" else None
            made[timer.job] = conclude(row, timer.job, timed[timer.job.op], base)
    return made
