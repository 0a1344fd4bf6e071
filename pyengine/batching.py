"""Stage 5, batching: many requests in steps that they share. One that ends leaves, and the next one joins."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import BatchError, ComputeError, ContextFullError, RequestError
from pyengine.generate import GenerationStream
from pyengine.results import GenerationResult
from pyengine.sampling import MAX_SEED, SamplingParams, is_integer
from pyengine.steps import MAX_BATCH_TOKENS, MAX_SEQUENCES, Job, Work, run_step_or_without_drafts

if TYPE_CHECKING:
    from pyengine.engine import Engine

DEFAULT_BATCH = 16  # requests at a time


class Batch:
    """Requests that run together, at most `max_batch` at a time, the others in the order they came.

    A step holds the next token of every request that decodes (and its drafts), and what fits beside them of the
    prompts. What a request gives does not depend on its company, to the bit: no op looks from one sequence at another.
    """

    def __init__(self, engine: Engine, max_batch: int) -> None:
        self.engine = engine
        self.max_batch = max_batch
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self.errors: dict[Job, ComputeError] = {}  # of those that ended with one
        self.cancel = np.zeros(1, np.int32)
        self._decoding: list[GenerationStream] = []  # in the step whose times are counted

    def run(self, requests: Iterable[Job]) -> None:
        """All of them to their end, or a ComputeError in `errors`. On another error (also Ctrl-C) all are closed, with
        what they have."""
        self.waiting.extend(requests)
        try:
            while self.waiting or self.active:
                self.step()
        finally:
            with contextlib.ExitStack() as closing:  # all of them, also if Ctrl-C comes in between
                for request in (*self.active, *self.waiting):
                    closing.callback(request.close)

    def step(self) -> None:
        """Those who wait join while there is room; one step of the model; those who are done leave."""
        while self.waiting and len(self.active) < self.max_batch:
            self.active.append(self.waiting.popleft())
        pending = [request for request in self.active if request.pending]
        if pending:
            with self.engine._running(self):
                jobs, works = self._plan(pending)
                self._decoding = [job for job in jobs if isinstance(job, GenerationStream) and job.decoding]
                try:
                    self._run(jobs, works)
                finally:
                    self.engine._time_for(self)
        for request in self.active:
            if request in self.errors:
                request.close()
                continue
            request.settle()
            if request.finished:
                request.end()
        self.active = [request for request in self.active if not (request.finished or request in self.errors)]

    def _run(self, jobs: Sequence[Job], works: Sequence[Work]) -> None:
        """One step for all; after NaN or Inf for each alone, so that those who have none go on."""
        try:
            run_step_or_without_drafts(self.engine, jobs, works, cancel=self.cancel)
        except ComputeError as error:
            if len(jobs) == 1:
                self.errors[jobs[0]] = error
                return
            for job, work in zip(jobs, works, strict=True):
                self._run([job], [work])

    def _plan(self, pending: Sequence[Job]) -> tuple[list[Job], list[Work]]:
        """Who takes part in the next step, and with what: first those who decode, each with its share of the rows, then
        prompts, as far as there is room."""
        jobs: list[Job] = []
        works: list[Work] = []
        tokens, rows = MAX_BATCH_TOKENS, MAX_SEQUENCES
        ordered = sorted(pending, key=lambda request: not request.decoding)
        for left, request in zip(range(len(ordered), 0, -1), ordered, strict=True):
            if tokens == 0:
                break
            work = request.work(tokens, rows // left)
            tokens, rows = tokens - len(work.ids), rows - work.rows
            jobs.append(request)
            works.append(work)
        return jobs, works

    def add_times(
        self, ops: list[dict[str, Any]], ops_ns: npt.NDArray[np.uint64], routed: npt.NDArray[np.uint64]
    ) -> None:
        """The step's times, in full for everyone who decoded in it; what it routed belongs to no one alone."""
        for stream in self._decoding:
            stream.add_times(ops, ops_ns, np.zeros_like(routed))
        self._decoding = []


def generate_batch(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_batch: int | None,
    seed: int | None,
    sampling: dict[str, Any],
) -> list[GenerationResult]:
    """Engine.generate_batch."""
    if isinstance(prompts, str):
        raise RequestError("prompts are one text; expected a list of prompts")
    most = check_max_batch(max_batch)
    engine._check_open()
    SamplingParams(**sampling)  # what is wrong with all of them is said without the number of one
    seeds = [int(seed) + i if seed is not None and is_integer(seed) else seed for i in range(len(prompts))]
    if prompts and seeds[-1] != seed and 0 <= int(seed or 0) <= MAX_SEED < int(seeds[-1] or 0):
        raise RequestError(
            f"seed {seed} for {len(prompts)} prompts; expected at most {MAX_SEED - len(prompts) + 1}, one for each"
        )
    streams = []
    for index, (prompt, one) in enumerate(zip(prompts, seeds, strict=True)):
        try:
            streams.append(engine.stream(prompt, seed=one, **sampling))
        except ContextFullError as error:
            raise ContextFullError(f"prompt {index}: {error}", error.tokens) from None
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from None
    if len(streams) == 1:
        return [streams[0].finish()]
    errors: dict[Job, ComputeError] = {}
    if most == 1:
        for stream in streams:
            try:
                stream.finish()
            except ComputeError as error:
                errors[stream] = error
    else:
        check_batch_memory(engine, streams, most)
        for stream in streams:
            stream.batched = True
        batch = Batch(engine, most)
        batch.run(streams)
        errors = batch.errors
    results = [stream.finish() for stream in streams]
    if errors:
        failed = [index for index, stream in enumerate(streams) if stream in errors]
        more = f"; and {len(failed) - 1} more of {len(streams)} prompts" if len(failed) > 1 else ""
        raise BatchError(f"prompt {failed[0]}: {errors[streams[failed[0]]]}{more}", results)
    return results


def check_max_batch(max_batch: int | None) -> int:
    if max_batch is None:
        return DEFAULT_BATCH
    if not is_integer(max_batch) or not 1 <= max_batch <= MAX_SEQUENCES:
        raise RequestError(f"max_batch {max_batch!r}; expected 1 to {MAX_SEQUENCES}")
    return int(max_batch)


def check_batch_memory(engine: Engine, requests: Sequence[Job], most: int) -> None:
    """ResourceError where those that may run at a time do not fit together."""
    with engine._lock:
        engine._check_open()
        engine.pool.check_memory(sum(sorted((request.kv_tokens for request in requests), reverse=True)[:most]))
