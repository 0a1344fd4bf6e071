"""Stage 5, scoring: log probabilities of given tokens, as evaluation harnesses ask for them.

All are log softmax of the raw logits. What is scored is added up in float64, token after token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyengine.batching import Batch, check_batch_memory
from pyengine.errors import RequestError
from pyengine.kv_cache import Sequence as KvSequence
from pyengine.sampling import check_token_ids, is_integer
from pyengine.steps import Chosen, Work
from pyengine.strict_json import shown

if TYPE_CHECKING:
    from pyengine.engine import Engine

SCORED_AT_A_TIME = 8


class Score:
    """The log probabilities of the last `scored` of `ids`, each after all before it: a Job without a text."""

    def __init__(self, engine: Engine, ids: list[int], scored: int) -> None:
        self.ids = ids
        self.first = len(ids) - scored - 1  # the first token whose row is wanted; the last token is not run
        self.kv_tokens = len(ids) - 1
        self.sequence = KvSequence(engine.pool, resumable=True)
        self.engine = engine
        self.started = self.finished = False
        self.logprob = 0.0
        self.greedy = True

    @property
    def pending(self) -> bool:
        return not self.finished

    @property
    def decoding(self) -> bool:
        return False

    def work(self, tokens: int, rows: int) -> Work:
        if not self.started:
            self.started = True
            self.sequence.resume(self.ids[: self.first + 1])
        at = self.sequence.length
        end = min(at + tokens, max(at, self.first) + rows, len(self.ids) - 1)
        wanted = max(end - max(at, self.first), 0)
        return Work(self.ids[at:end], wanted, (), self.ids[end - wanted + 1 : end + 1])

    def took(self, work: Work, chosen: Chosen | None) -> None:
        before = self.sequence.length
        self.sequence.advance(len(work.ids))
        self.finished = self.sequence.length == len(self.ids) - 1
        if before <= self.first < self.sequence.length:
            self.sequence.keep(self.ids[: self.first + 1])
        if chosen is not None and chosen.target_logprobs is not None:
            self.greedy = self.greedy and chosen.ids.tolist() == list(work.targets)
            for logprob in chosen.target_logprobs.tolist():
                self.logprob += logprob

    def settle(self) -> None:
        """Nothing is left to do: `took` has added it up."""

    def end(self) -> None:
        self.close()

    def close(self) -> None:
        with self.engine._lock:
            self.sequence.close()


def score(engine: Engine, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """Engine.score."""
    engine._check_open()
    jobs: list[Score] = []
    for index, request in enumerate(requests):
        if not isinstance(request, Sequence) or isinstance(request, str) or len(request) != 2:
            raise RequestError(f"request {index}: {shown(request)}; expected (context ids, continuation ids)")
        context, continuation = request
        try:
            before = check_token_ids(context, engine.spec.vocab_size) or [start_id(engine)]
            after = check_token_ids(continuation, engine.spec.vocab_size)
        except RequestError as error:
            raise RequestError(f"request {index}: {error}") from None
        if not after:
            raise RequestError(f"request {index}: an empty continuation; expected at least one token")
        if len(before) + len(after) - 1 > engine.ctx_size:
            raise RequestError(
                f"request {index}: {len(before)} and {len(after)} tokens, the context takes {engine.ctx_size}; "
                "expected all but the last to fit"
            )
        jobs.append(Score(engine, before + after, len(after)))
    run(engine, jobs)
    return [(job.logprob, job.greedy) for job in jobs]


def score_rolling(engine: Engine, ids: Sequence[int], *, window: int | None, stride: int | None) -> tuple[float, int]:
    """Engine.score_rolling."""
    engine._check_open()
    text = [start_id(engine), *check_token_ids(ids, engine.spec.vocab_size)]
    window = size_of("window", window, engine.ctx_size, engine.ctx_size)
    stride = size_of("stride", stride, window, window)
    jobs: list[Score] = []
    done, count = 0, len(text) - 1  # scored, of all
    while done < count:
        end = min(done + (stride if done else window), count)
        jobs.append(Score(engine, text[max(0, end - window) : end + 1], end - done))
        done = end
    run(engine, jobs)
    return sum(job.logprob for job in jobs), count


def run(engine: Engine, jobs: Sequence[Score]) -> None:
    """All of them; where several have the same context, one goes ahead and leaves it to the others."""
    groups: dict[tuple[int, ...], list[Score]] = {}
    for job in jobs:
        groups.setdefault(tuple(job.ids[: job.first + 1]), []).append(job)
    check_batch_memory(engine, jobs, SCORED_AT_A_TIME)
    batch = Batch(engine, SCORED_AT_A_TIME)

    def scored(part: Sequence[Score]) -> None:
        batch.run(part)
        for error in batch.errors.values():
            raise error

    if len(groups) == len(jobs):
        scored(jobs)
        return
    shared = list(groups.values())
    for at in range(0, len(shared), SCORED_AT_A_TIME):
        part = shared[at : at + SCORED_AT_A_TIME]
        scored([group[0] for group in part])
        scored([job for group in part for job in group[1:]])


def start_id(engine: Engine) -> int:
    """What stands for an empty context: BOS, else EOS."""
    spec, tokenizer = engine.spec, engine.tokenizer
    own = () if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    for token in (*own, spec.bos_token_id, *spec.eos_token_ids):
        if token is not None:
            return int(token)
    raise RequestError("an empty context, and a model without BOS and EOS; expected a token before what is scored")


def size_of(name: str, value: int | None, default: int, most: int) -> int:
    if value is None:
        return default
    if not is_integer(value) or not 1 <= value <= most:
        raise RequestError(f"{name} {value!r}; expected 1 to {most}")
    return int(value)
