"""Stage 5, generate: one request from its prompt to its result; pieces of text as they come."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Generator, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyengine import __version__
from pyengine._core import Stage
from pyengine.errors import ContextFullError, RequestError
from pyengine.kv_cache import Sequence as KvSequence
from pyengine.results import GenerationResult, Piece, TopLogprobs, peak_rss_bytes
from pyengine.routing import record as routing_record
from pyengine.sampling import RowSampling, SamplingParams
from pyengine.speculate import NgramDrafter
from pyengine.steps import MAX_BATCH_TOKENS, MAX_SEQUENCES, Chosen, Work, run_step_or_without_drafts
from pyengine.tokenizer import StopMatcher

if TYPE_CHECKING:
    from pyengine.engine import Engine

STAGES = ("embed", "norm", "attention", "router", "ffn", "lm_head", "sample")


class GenerationStream:
    """The iterator of Engine.stream. `result` is set when it ends, is closed, or Ctrl-C stops it. Also a Job: a batch
    takes its steps together with those of others (batching.py)."""

    def __init__(self, engine: Engine, ids: list[int], params: SamplingParams) -> None:
        self.engine = engine
        self.params = params
        self.prompt = ids
        self.prompt_format = "raw"
        room = engine.ctx_size - len(ids)
        if not ids:
            raise RequestError("empty prompt; expected at least one token")
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise ContextFullError(
                f"prompt of {len(ids)} tokens, no room in a context of {engine.ctx_size}; expected fewer", len(ids)
            )
        params.check_ids(engine.spec.vocab_size)
        self.limit = room if params.max_tokens < 0 else min(params.max_tokens, room)
        self.kv_tokens = len(ids) + (0 if params.max_tokens < 0 else self.limit)  # memory is checked for so many
        with engine._lock:
            engine._check_open()  # another thread may have closed it while this one waited
            pool, routed = engine.pool, engine.routed.total
            pool.check_memory(self.kv_tokens)
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self.sampling = RowSampling(params, self.seed, ids)
        self.eos = frozenset() if params.ignore_eos else frozenset(engine.eos_ids())
        self.result: GenerationResult | None = None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: list[float | None] = [None]
        self.prompt_top: list[TopLogprobs | None] = [None]
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.completion = 0
        self.last = ids[-1]  # the token that the next step begins with
        # tokens of the prompt to run: its last one's logits are wanted for a first token alone
        self.prefill = len(ids) if self.limit else len(ids) - 1 if params.prompt_logprobs else 0
        self.ready: deque[tuple[int, float, TopLogprobs | None]] = deque()  # computed, not yet part of the text
        self.began: float | None = None  # the first step, on time.perf_counter()
        self.decode_began: float | None = None
        self.prompt_ms = self.predicted_ms = 0.0
        self.decode_steps = 0
        self.cache_n = 0
        self.drafter: NgramDrafter | None = None
        self.drafted = self.drafts_accepted = 0
        self.stage_ns = np.zeros(len(STAGES), np.int64)
        self.routed = np.zeros_like(routed)
        self.batched = False  # ran beside others
        self.decoder = engine.tokenizer.stream() if engine.tokenizer is not None else None
        if params.stop and self.decoder is None:
            raise RequestError("stop strings need a tokenizer; expected a model folder with tokenizer.json")
        self.stops = StopMatcher(params.stop)
        self.sequence = KvSequence(pool, resumable=True)
        self.cancel = np.zeros(1, np.int32)
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Stop computing; what was generated stays in `result`."""
        self._pieces.close()
        if self.result is None:
            self.end()

    def finish(self) -> GenerationResult:
        """Run to the end; the result."""
        for _ in self:
            pass
        assert self.result is not None
        return self.result

    def _run(self) -> Generator[Piece, None, None]:
        try:
            while not self.finished:
                if self.pending:
                    self._step()
                yield from self.pieces()
        finally:
            self.end()

    def _step(self) -> None:
        """A step of this request alone."""
        engine, decoding = self.engine, self.decoding
        try:
            with engine._running(self if decoding else None):
                if not decoding:  # what others computed before; a decode step's own is handed over with its times
                    engine.routed.take()
                works = [self.work(MAX_BATCH_TOKENS, MAX_SEQUENCES)]
                run_step_or_without_drafts(engine, [self], works, cancel=self.cancel)
                if not decoding:
                    self.routed += engine.routed.take()
        finally:  # the timers have counted a step that was cancelled, too
            self.clock()

    # ---- steps, under the engine's lock -----------------------------------------------------------------------------

    @property
    def decoding(self) -> bool:
        return self.decode_began is not None

    @property
    def pending(self) -> bool:
        """Whether a step has to run before there are pieces."""
        return self.limit > 0 or self.sequence.length < self.prefill

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def work(self, tokens: int, rows: int) -> Work:
        """Of the prompt what is not yet computed, else the last token and guesses at what follows.

        Each row is sampled as if its drafts were the text, with its own step of the random key; so a row whose drafts
        are right gives the very token that a step of its own would have given, and the first wrong draft ends them.
        """
        p = self.params
        if self.began is None:
            self._begin()
        if self.decoding:
            drafts = self._draft(rows - 1)
            entries = [self.sampling.row(drafts[:count]) for count in range(len(drafts) + 1)]
            return Work([self.last, *drafts], len(entries), entries, top=p.logprobs)
        at = self.sequence.length
        ids = self.prompt[at : min(at + (min(tokens, rows) if p.prompt_logprobs else tokens), self.prefill)]
        end = at + len(ids)
        last = [self.sampling.row()] if end == len(self.prompt) else []
        if not p.prompt_logprobs:
            return Work(ids, len(last), last, top=p.logprobs if last else 0)
        targets = [*self.prompt[at + 1 : end + 1], *([-1] if last else [])]
        return Work(ids, len(ids), [*[None] * (len(ids) - len(last)), *last], targets, p.logprobs)

    def _begin(self) -> None:
        self.began = time.perf_counter()
        if self.params.speculate is not None:
            self.drafter = NgramDrafter(self.prompt)
        if not self.params.prompt_logprobs:  # those need the logits of every token
            self.cache_n = self.sequence.resume(self.prompt)

    def _draft(self, most: int) -> list[int]:
        """Guesses to check beside the next step: none that would be past the end of the request."""
        if self.drafter is None or most <= 0:
            return []
        guesses = self.drafter.draft(min(most, self.limit - self.completion - 1))
        return list(takewhile(lambda token: token not in self.eos, guesses))

    def took(self, work: Work, chosen: Chosen | None) -> None:
        if not self.decoding:
            self._took_prompt(work, chosen)
            return
        assert chosen is not None
        drafts, right = work.ids[1:], 0
        while right < len(drafts) and drafts[right] == chosen.ids[right]:
            right += 1
        self.sequence.advance(1 + right)
        self.decode_steps += 1
        self.drafted += len(drafts)
        self.drafts_accepted += right
        self._give(chosen, 0, right + 1)

    def _took_prompt(self, work: Work, chosen: Chosen | None) -> None:
        at = self.sequence.length
        self.sequence.advance(len(work.ids))
        if chosen is not None and chosen.target_logprobs is not None:
            known = min(len(work.ids), len(self.prompt) - 1 - at)
            self.prompt_logprobs += chosen.target_logprobs[:known].tolist()
            self.prompt_top += [top_of(chosen, row) for row in range(known)]
        if self.sequence.length < self.prefill:
            return
        now = time.perf_counter()
        assert self.began is not None
        self.prompt_ms = (now - self.began) * 1e3
        self.sequence.keep(self.prompt)
        if self.limit:
            assert chosen is not None
            self.decode_began = now
            self._give(chosen, work.rows - 1, work.rows)

    def _give(self, chosen: Chosen, begin: int, end: int) -> None:
        for row in range(begin, end):
            self.ready.append((int(chosen.ids[row]), float(chosen.logprobs[row]), top_of(chosen, row)))

    # ---- text -------------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Piece]:
        """Those of the tokens that were computed, up to the one that ends the request."""
        while self.ready and not self.finished:
            piece = self._accept(*self.ready.popleft())
            self.clock()
            yield piece
        if self.limit == 0 and not self.pending:
            self.finish_reason = "length"
            yield Piece("", None, None, "length")

    def settle(self) -> None:
        """In a batch: the pieces go into the result."""
        for _ in self.pieces():
            pass

    def clock(self) -> None:
        if self.decode_began is not None:
            self.predicted_ms = (time.perf_counter() - self.decode_began) * 1e3

    def _accept(self, token: int, logprob: float, top: TopLogprobs | None) -> Piece:
        """Take a token: its text as far as it is safe to show, and whether it ends the request."""
        self.completion += 1
        if token in self.eos:
            self.finish_reason, self.stop_reason = "stop", token
            return Piece(self._flush(), token, logprob, "stop", top)
        self.tokens.append(token)
        self.last = token
        self.sampling.push(token)
        if self.drafter is not None:
            self.drafter.push(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top_logprobs.append(top)
        text, stopped = "", False
        if self.decoder is not None:
            text, stopped = self.stops.push(self.decoder.push(token))
        if stopped:
            self.finish_reason, self.stop_reason = "stop", self.stops.matched
        elif self.completion >= self.limit:
            self.finish_reason = "length"
            text += self._flush(count=False)
        self.text.append(text)
        return Piece(text, token, logprob, self.finish_reason, top)

    def _flush(self, *, count: bool = True) -> str:
        """What was held back, at the end."""
        if self.decoder is None:
            return ""
        text, stopped = self.stops.push(self.decoder.finish())
        if stopped:
            self.finish_reason, self.stop_reason = "stop", self.stops.matched
        else:
            text += self.stops.finish()
        if count:
            self.text.append(text)
        return text

    # ---- the end ----------------------------------------------------------------------------------------------

    def add_times(
        self, ops: list[dict[str, Any]], ops_ns: npt.NDArray[np.uint64], routed: npt.NDArray[np.uint64]
    ) -> None:
        """Count decode steps of this stream: nanoseconds per op [len(ops)], tokens per expert of all routers. A step
        that it shared with others counts in full: it waited for all of it."""
        self.routed += routed
        stages = [op["stage"] for op in ops]
        self.stage_ns += np.bincount(stages, weights=ops_ns, minlength=len(STAGES)).astype(np.int64)

    def end(self) -> None:
        """Give the blocks back, whole ones to the prefix cache, and make the result."""
        if self.result is not None or self.engine._forked():  # a fork's copy of a request is not this process's to end
            return
        engine, predicted = self.engine, max(self.completion - 1, 0)
        inside = engine._inside()  # collected as garbage while this thread changes the pool: only give back then
        with engine._lock:
            try:
                if not inside:
                    self.sequence.keep([*self.prompt, *self.tokens])
            finally:
                self.sequence.close()
            if engine._timed() is self:
                engine._time_for(None)
            routing = None if self.batched else routing_record(engine.spec, self.routed)
        breakdown, share = None, None
        if predicted and self.predicted_ms:
            stage_ms = self.stage_ns / (1e6 * predicted)
            breakdown = {name: float(stage_ms[int(getattr(Stage, name.upper()))]) for name in STAGES}
            breakdown["other"] = self.predicted_ms / predicted - sum(breakdown.values())
            share = breakdown["ffn"] * predicted / self.predicted_ms
        prompt_n = self.prefill - self.cache_n if self.prompt_ms else 0
        self.result = GenerationResult(
            text="".join(self.text),
            tokens=self.tokens,
            finish_reason=self.finish_reason or "cancelled",
            stop_reason=self.stop_reason,
            prompt_format=self.prompt_format,
            seed=self.seed,
            model=os.fspath(engine.folder),
            family=engine.spec.family,
            quant=engine.quant,
            group_size=engine.group_size,
            device=engine.device,
            isa=engine.isa,
            threads=engine.threads,
            version=__version__,
            usage={
                "prompt_tokens": len(self.prompt),
                "completion_tokens": self.completion,
                "total_tokens": len(self.prompt) + self.completion,
            },
            timings={
                "load_ms": engine.load_ms,
                "prompt_n": prompt_n,
                "prompt_ms": self.prompt_ms,
                "prompt_per_second": prompt_n / self.prompt_ms * 1e3 if self.prompt_ms else None,
                "predicted_n": predicted,
                "predicted_ms": self.predicted_ms,
                "predicted_per_second": predicted / self.predicted_ms * 1e3 if breakdown else None,
                "decode_steps": self.decode_steps,
                "cache_n": self.cache_n,
            },
            ffn_share=share,
            decode_breakdown=breakdown,
            weight_bytes_per_token=engine.weight_bytes_per_token,
            peak_rss_bytes=peak_rss_bytes(),
            speculation=(
                None if self.params.speculate is None else {"drafted": self.drafted, "accepted": self.drafts_accepted}
            ),
            routing=routing,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.params.logprobs else None,
            prompt_logprobs=self.prompt_logprobs if self.params.prompt_logprobs else None,
            prompt_top_logprobs=self.prompt_top if self.params.prompt_logprobs and self.params.logprobs else None,
        )


def top_of(chosen: Chosen, row: int) -> TopLogprobs | None:
    if chosen.top_ids is None or chosen.top_logprobs is None:
        return None
    return list(zip(chosen.top_ids[row].tolist(), chosen.top_logprobs[row].tolist(), strict=True))
