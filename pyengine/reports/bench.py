"""Stage 6, bench: tokens per second of prompts and of decoding, beside what the machine can do at most.

A prompt test `pp512` runs 512 tokens from an empty context and samples once. A decode test `tg128@4096` runs 128 steps
of one token with 4096 tokens in the KV cache before the first, put there untimed; every step samples greedily. Token
ids are random but always the same. Tests take turns, round by round, with the limits measured between any two runs: a
fraction compares a run with the two samples around it, so a machine that slows down slows both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pyengine import cuda
from pyengine._core import KV_BLOCK
from pyengine.errors import RequestError, ResourceError
from pyengine.kv_cache import Sequence
from pyengine.reports.machine import Gauge, Timed, fraction, take_turns
from pyengine.steps import MAX_BATCH_TOKENS

if TYPE_CHECKING:
    from pyengine.engine import Engine

WARM_STEPS = 4  # of decoding, untimed
SEED = 0  # of the token ids
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Test:
    """`tokens` of a prompt ("pp"), or decode steps ("tg") behind `depth` cached tokens."""

    kind: str
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}{self.tokens}" + (f"@{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class Work:
    """What a test computes and reads per token. A number that has no meaning for the test is None."""

    weight_bytes: int | None = None  # of a decode step
    kv_bytes: float | None = None  # of a decode step, the mean over the test's depths
    matrix_ops: int | None = None  # of the layers' matrices, per prompt token; a multiply-add is two
    integer: bool = True  # whether those are int8 dot products


@dataclass(frozen=True)
class Row:
    """A row of `results` in `bench --json`; None where not meant. Rates follow from the median of the samples.

    Fractions follow from each round and the limits around it (machine.Fraction, which has rounds_used and steady too).
    """

    test: str
    tokens_per_second: float
    stdev: float | None
    p10: float
    p90: float
    samples: list[float]
    weight_bytes_per_token: int | None
    kv_bytes_per_token: float | None
    gb_per_s: float | None
    bandwidth_fraction: float | None
    gops: float | None
    int8_fraction: float | None
    f32_fraction: float | None
    rounds_used: int  # by the fraction
    steady: bool  # whether those are rounds with equal limits before and after

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Runner(Protocol):
    """What `run` needs of a model: ModelRunner has it."""

    def prepare(self, test: Test) -> None: ...

    def seconds(self, test: Test) -> float: ...

    def work(self, test: Test) -> Work: ...


def plan(prompts: list[int], steps: list[int], depths: list[int]) -> list[Test]:
    """The tests: each prompt length, then each number of decode steps at each depth. RequestError if there is none."""
    tests = [Test("pp", n) for n in prompts if n] + [Test("tg", n, depth) for n in steps if n for depth in depths]
    if not tests:
        raise RequestError("no prompt and no decode length; expected at least one above 0")
    return list(dict.fromkeys(tests))


def summarize(test: Test, timed: list[Timed], work: Work) -> Row:
    """The row of a test from its run in each round."""
    samples = [test.tokens / run.seconds for run in timed]
    rate = statistics.median(samples)
    low, high = (float(x) for x in np.percentile(samples, (10, 90)))
    limit, each = "f32_gflops", float(work.matrix_ops or 0)
    if work.weight_bytes is not None and work.kv_bytes is not None:
        limit, each = "read_gb_per_s", work.weight_bytes + work.kv_bytes
    elif work.integer:
        limit = "int8_gops"
    of = fraction(limit, test.tokens * each / 1e9, timed)
    return Row(
        test=test.name,
        tokens_per_second=rate,
        stdev=statistics.stdev(samples) if len(samples) > 1 else None,
        p10=low,
        p90=high,
        samples=samples,
        weight_bytes_per_token=work.weight_bytes,
        kv_bytes_per_token=work.kv_bytes,
        gb_per_s=rate * each / 1e9 if limit == "read_gb_per_s" else None,
        bandwidth_fraction=of.value if limit == "read_gb_per_s" else None,
        gops=None if limit == "read_gb_per_s" else rate * each / 1e9,
        int8_fraction=of.value if limit == "int8_gops" else None,
        f32_fraction=of.value if limit == "f32_gflops" else None,
        rounds_used=of.rounds_used,
        steady=of.steady,
    )


def run(
    runner: Runner, gauge: Gauge, tests: list[Test], *, repetitions: int, progress: Progress | None = None
) -> list[Row]:
    """Every test `repetitions` times, in turn, and its row."""
    done, total = 0, len(tests) * (repetitions + 1)

    def report(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done, total, what)
        done += 1

    def seconds(test: Test) -> float:
        report(test.name)
        return runner.seconds(test)

    for test in tests:
        report(f"preparing {test.name}")
        runner.prepare(test)
    timed = take_turns(gauge, [partial(seconds, test) for test in tests], repetitions)
    if progress is not None:
        progress(total, total, "done")
    return [summarize(test, some, runner.work(test)) for test, some in zip(tests, timed, strict=True)]


class ModelRunner:
    """Runs tests on an engine. The sequences of decode tests stay filled between rounds where they can."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine = engine
        self.clock = clock
        self.filled: dict[Test, Sequence] = {}

    def check(self, tests: list[Test]) -> None:
        """RequestError for a test longer than the context, ResourceError for more KV cache than there is memory."""
        limit, wanted = self.engine.ctx_size, 0.0
        for test in tests:
            tokens = test.depth + test.tokens
            if tokens > limit:
                raise RequestError(f"{test.name}: {tokens} tokens; expected at most {limit}, the model's context")
            wanted += tokens * self.engine.pool.bytes_per_token
        available = cuda.available_memory(self.engine.device)
        if available is not None and wanted > available:
            raise ResourceError(
                f"the tests' KV caches take {int(wanted)} bytes, {available} are available; expected fewer or shorter"
            )

    def prepare(self, test: Test) -> None:
        if test.kind == "pp":
            self.prompt(min(test.tokens, MAX_BATCH_TOKENS))
        else:
            self.decode(test, min(test.tokens, WARM_STEPS))

    def seconds(self, test: Test) -> float:
        return self.prompt(test.tokens) if test.kind == "pp" else self.decode(test, test.tokens)

    def ids(self, count: int) -> list[int]:
        ids: list[int] = np.random.default_rng(SEED).integers(0, self.engine.spec.vocab_size, count).tolist()
        return ids

    def fill(self, sequence: Sequence, ids: list[int]) -> None:
        """The ids in chunks; the last one samples."""
        for at in range(0, len(ids), MAX_BATCH_TOKENS):
            part = ids[at : at + MAX_BATCH_TOKENS]
            if at + len(part) < len(ids):
                self.engine.forward([(sequence, part)])
            else:
                self.engine.forward([(sequence, part)], rows=np.array([len(part) - 1], np.int32), sampling=[None])

    def prompt(self, tokens: int) -> float:
        ids, sequence = self.ids(tokens), Sequence(self.engine.pool)
        try:
            started = self.clock()
            self.fill(sequence, ids)
            return self.clock() - started
        finally:
            sequence.close()

    def decode(self, test: Test, steps: int) -> float:
        sequence = self.at_depth(test)
        rows = np.zeros(1, np.int32)
        ids = self.ids(test.depth + steps)[test.depth :]
        started = self.clock()
        for token in ids:
            self.engine.forward([(sequence, [token])], rows=rows, sampling=[None])
        return self.clock() - started

    def at_depth(self, test: Test) -> Sequence:
        """The test's sequence at its depth; filled again where a window gave back what the first steps would see."""
        sequence = self.filled.setdefault(test, Sequence(self.engine.pool))
        try:
            if sequence.length:
                sequence.truncate(test.depth)
        except RequestError:
            sequence.close()
        if sequence.length < test.depth:
            self.fill(sequence, self.ids(test.depth))
        return sequence

    def work(self, test: Test) -> Work:
        engine = self.engine
        if test.kind == "pp":
            ops = 2 * engine.weights.layer_matrix_weights
            return Work(matrix_ops=ops, integer=engine.weights.quantization.layers.is_integer)
        seen = np.arange(test.depth, test.depth + test.tokens) + 1.0  # a step sees its own token too
        kv = 0.0
        for group, window in zip(engine.pool.ids, engine.pool.windows, strict=True):
            keys = seen if window is None else np.minimum(seen, window)
            kv += float(keys.mean()) * engine.backend.kv_block_bytes(group) / KV_BLOCK
        return Work(weight_bytes=engine.weight_bytes_per_token, kv_bytes=kv)

    def close(self) -> None:
        for sequence in self.filled.values():
            sequence.close()
        self.filled.clear()
