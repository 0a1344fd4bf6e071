"""Stage 5, steps: what each request wants of one step of the model, and one step for all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pyengine.errors import ComputeError
from pyengine.kv_cache import Sequence as KvSequence

if TYPE_CHECKING:
    from pyengine.engine import Engine

MAX_BATCH_TOKENS = 512  # of a step, all sequences together
MAX_SEQUENCES = 64  # of a step, and rows that are sampled in it
ONE_ROW = np.zeros(1, np.int32)


class Chosen(NamedTuple):
    """What the core gives of the sampled rows: ids, and log softmax of the untouched logits at them [rows]; at the
    targets [rows]; the most likely ids and theirs [rows, top]. None where it was not asked for."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    target_logprobs: npt.NDArray[np.float32] | None = None
    top_ids: npt.NDArray[np.int32] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None

    def part(self, begin: int, end: int, top: int) -> Chosen:
        """Some of the rows, with fewer of the most likely ids."""
        ids, logprobs, targets, top_ids, top_logprobs = self
        return Chosen(
            ids[begin:end],
            logprobs[begin:end],
            None if targets is None else targets[begin:end],
            None if top_ids is None or top == 0 else top_ids[begin:end, :top],
            None if top_logprobs is None or top == 0 else top_logprobs[begin:end, :top],
        )


class Work(NamedTuple):
    """A request's part of a step: the next tokens of its sequence, of which the last `rows` are sampled."""

    ids: list[int]
    rows: int
    sampling: Sequence[dict[str, Any] | None] = ()  # [rows]; () = all greedy
    targets: Sequence[int] = ()  # [rows] ids, -1 for none; () = none
    top: int = 0  # most likely ids


class Job(Protocol):
    """A request, in steps until it is finished: `work` and `took` under the engine's lock, `settle` without it."""

    sequence: KvSequence
    kv_tokens: int  # that its memory was checked for

    @property
    def pending(self) -> bool:
        """Whether there is a step to run before it can settle anything."""

    @property
    def decoding(self) -> bool:
        """Whether the next step is a token after the prompt."""

    @property
    def finished(self) -> bool: ...

    def work(self, tokens: int, rows: int) -> Work:
        """What it wants of the next step: at most so many tokens and rows, both at least 1; no drafts with one row."""

    def took(self, work: Work, chosen: Chosen | None) -> None:
        """The step went well: advance the sequence, and keep what came of the rows (None where there were none)."""

    def settle(self) -> None:
        """Take in what the step gave."""

    def end(self) -> None:
        """Give the blocks back; called once it is finished."""

    def close(self) -> None:
        """The same at any time."""


def run_step(
    engine: Engine, jobs: Sequence[Job], works: Sequence[Work], *, cancel: npt.NDArray[np.int32] | None = None
) -> None:
    """One step of the model for all jobs. On an error nothing has changed."""
    if len(jobs) == 1 and works[0].rows <= 1:
        rows = ONE_ROW + np.int32(len(works[0].ids) - 1) if works[0].rows else ONE_ROW[:0]
    else:
        ends = np.cumsum([len(work.ids) for work in works])
        parts = [np.arange(end - work.rows, end) for end, work in zip(ends, works, strict=True)]
        rows = np.concatenate(parts).astype(np.int32)
    sampling = [entry for work in works for entry in (work.sampling or [None] * work.rows)]
    targets = None
    if any(work.targets for work in works):
        targets = np.array([id for work in works for id in (work.targets or [-1] * work.rows)], np.int32)
    chosen = engine.forward(
        [(job.sequence, work.ids) for job, work in zip(jobs, works, strict=True)],
        rows=rows,
        sampling=sampling if len(rows) else None,
        targets=targets,
        top=max(work.top for work in works),
        cancel=cancel,
        advance=False,
    )
    at = 0
    for job, work in zip(jobs, works, strict=True):
        job.took(work, chosen.part(at, at + work.rows, work.top) if chosen is not None and work.rows else None)
        at += work.rows


def run_step_or_without_drafts(
    engine: Engine, jobs: Sequence[Job], works: Sequence[Work], *, cancel: npt.NDArray[np.int32] | None = None
) -> None:
    """The same; but a draft's own logits must not end a request that never sees them."""
    try:
        run_step(engine, jobs, works, cancel=cancel)
    except ComputeError:
        if all(work.rows <= 1 for work in works):
            raise
        works = [job.work(len(work.ids), 1) for job, work in zip(jobs, works, strict=True)]
        run_step(engine, jobs, works, cancel=cancel)
