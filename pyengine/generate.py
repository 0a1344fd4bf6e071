"""Stage 5, generate: one request from its prompt to its result; pieces of text as they come."""

from __future__ import annotations

import os
import resource
import secrets
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyengine import __version__, system
from pyengine._core import Stage
from pyengine.errors import ComputeError, ContextFullError, RequestError, ResourceError
from pyengine.kv_cache import Sequence as KvSequence
from pyengine.routing import record as routing_record
from pyengine.sampling import SamplingParams
from pyengine.speculate import NgramDrafter
from pyengine.tokenizer import StopMatcher

if TYPE_CHECKING:
    from pyengine.engine import Engine

STAGES = ("embed", "norm", "attention", "router", "ffn", "lm_head", "sample")
MAX_SEED = 2**64 - 1
ONE_ROW = np.zeros(1, np.int32)


class Piece(NamedTuple):
    """A step's new text (maybe empty: an unfinished character is held back), its token and log probability."""

    text: str
    token: int | None
    logprob: float | None
    finish_reason: str | None


@dataclass
class GenerationResult:
    """The fields of `generate --json`; str() is the text. Times in ms, shares 0..1, None where nothing was decoded.

    speculation: tokens that were drafted and those of them that the model agreed with; None, and not in the JSON, where
    it was not asked for. routing: of a model with experts, else None and not in the JSON: `top_k`, and `layers` with
    `layer`, `tokens_per_expert` (prompt included) and their `entropy` in nats, from 0 (one expert has all) to
    ln(experts).
    """

    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length" or "cancelled"
    stop_reason: str | int | None  # the stop string, or the EOS id
    prompt_format: str
    seed: int
    model: str
    family: str
    quant: str
    group_size: int | None
    device: str
    isa: str
    threads: int
    version: str
    usage: dict[str, int]
    timings: dict[str, Any]
    ffn_share: float | None
    decode_breakdown: dict[str, float] | None
    weight_bytes_per_token: int
    peak_rss_bytes: int
    speculation: dict[str, int] | None = None
    routing: dict[str, Any] | None = None
    logprobs: list[float] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """The JSON object; `logprobs` is for Python alone."""
        record = asdict(self)
        del record["logprobs"]
        for name in ("speculation", "routing"):
            if record[name] is None:
                del record[name]
        return record


def peak_rss_bytes() -> int:
    """The most memory this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


class GenerationStream:
    """The iterator of Engine.stream. `result` is set when it ends, is closed, or Ctrl-C stops it."""

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
        self.limit = room if params.max_tokens < 0 else min(params.max_tokens, room)
        self._check_memory(len(ids) + (0 if params.max_tokens < 0 else self.limit))
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self.greedy = params.temperature == 0 and params.repetition_penalty == 1
        self.eos = frozenset() if params.ignore_eos else frozenset(self._eos_ids())
        self.result: GenerationResult | None = None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.completion = 0
        self.prompt_ms = self.predicted_ms = 0.0
        self.decode_steps = 0
        self.drafter: NgramDrafter | None = None
        self.drafted = self.drafts_accepted = 0
        self.stage_ns = np.zeros(len(STAGES), np.int64)
        self.routed = np.zeros_like(engine.routed.total)
        self.decoder = engine.tokenizer.stream() if engine.tokenizer is not None else None
        if params.stop and self.decoder is None:
            raise RequestError("stop strings need a tokenizer; expected a model folder with tokenizer.json")
        self.stops = StopMatcher(params.stop)
        self.sequence = KvSequence(engine.pool)
        self.cancel = np.zeros(1, np.int32)
        self._pieces = self._run()

    def _eos_ids(self) -> set[int]:
        ids = set(self.engine.spec.eos_token_ids)
        if self.engine.tokenizer is not None and self.engine.tokenizer.eos_token_id is not None:
            ids.add(self.engine.tokenizer.eos_token_id)
        return ids

    def _check_memory(self, tokens: int) -> None:
        wanted, available = int(tokens * self.engine.pool.bytes_per_token), system.available_memory()
        if available is not None and wanted > available:
            raise ResourceError(
                f"a KV cache of {tokens} tokens takes {wanted} bytes, {available} are available; "
                "expected a shorter prompt, fewer tokens or a smaller context"
            )

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Stop computing; what was generated stays in `result`."""
        self._pieces.close()
        if self.result is None:
            self._end("cancelled")

    def finish(self) -> GenerationResult:
        """Run to the end; the result."""
        for _ in self:
            pass
        assert self.result is not None
        return self.result

    # ---- the request ----------------------------------------------------------------------------------------------

    def _run(self) -> Generator[Piece, None, None]:
        try:
            if self.limit == 0:
                self.finish_reason = "length"
                yield Piece("", None, None, "length")
                return
            chosen = self._prefill()
            started = time.perf_counter()
            while True:
                for token, logprob in chosen:
                    piece = self._accept(token, logprob)
                    self.predicted_ms = (time.perf_counter() - started) * 1e3
                    yield piece
                    if piece.finish_reason is not None:
                        return
                try:
                    chosen = self._step([token], self._draft(), timed=self)
                finally:  # the timers have counted a step that was cancelled, too
                    self.predicted_ms = (time.perf_counter() - started) * 1e3
                self.decode_steps += 1
        finally:
            self._end(self.finish_reason or "cancelled")

    def _prefill(self) -> list[tuple[int, float]]:
        from pyengine.engine import MAX_BATCH_TOKENS

        started = time.perf_counter()
        if self.params.speculate is not None:
            self.drafter = NgramDrafter(self.prompt)
        with self.engine._running():
            self.engine.routed.take()  # what others computed before
            for at in range(0, len(self.prompt), MAX_BATCH_TOKENS):
                part = self.prompt[at : at + MAX_BATCH_TOKENS]
                last = at + len(part) == len(self.prompt)
                if not last:
                    self.engine.forward([(self.sequence, part)], cancel=self.cancel)
            chosen = self._step(part)
            self.routed += self.engine.routed.take()
        self.prompt_ms = (time.perf_counter() - started) * 1e3
        return chosen

    def _draft(self) -> list[int]:
        """Guesses to check beside the next step: none that would be past the end of the request."""
        if self.drafter is None:
            return []
        return list(
            takewhile(lambda token: token not in self.eos, self.drafter.draft(self.limit - self.completion - 1))
        )

    def _step(
        self, ids: list[int], drafts: Sequence[int] = (), *, timed: GenerationStream | None = None
    ) -> list[tuple[int, float]]:
        """The tokens after `ids` and their log probabilities: one, and one more for every draft that was right.

        Each row is sampled as if its drafts were the text, with its own step of the random key; so a row whose drafts
        are right gives the very token that a step of its own would have given, and the first wrong draft ends them.
        """
        last = len(ids) + len(drafts)
        rows = np.arange(len(ids) - 1, last, dtype=np.int32) if last > 1 else ONE_ROW
        sampling = (
            [self._sampling(drafts[:count]) for count in range(len(drafts) + 1)] if drafts else [self._sampling(())]
        )
        try:
            with self.engine._running(timed):
                out = self.engine.forward(
                    [(self.sequence, [*ids, *drafts])], rows=rows, sampling=sampling, cancel=self.cancel, advance=False
                )
                assert out is not None
                tokens, logprobs = out[0].tolist(), out[1].tolist()
                right = 0
                while right < len(drafts) and drafts[right] == tokens[right]:
                    right += 1
                self.sequence.advance(len(ids) + right)
        except ComputeError:
            if not drafts:
                raise
            return self._step(ids, timed=timed)  # a draft's own logits must not end a request that never sees them
        self.drafted += len(drafts)
        self.drafts_accepted += right
        return list(zip(tokens, logprobs, strict=True))[: right + 1]

    def _sampling(self, drafts: Sequence[int]) -> dict[str, Any] | None:
        """The sampling values of the row after `drafts`."""
        if self.greedy:
            return None
        p = self.params
        values: dict[str, Any] = {
            "temperature": p.temperature,
            "top_k": p.top_k,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "repetition_penalty": p.repetition_penalty,
            "seed": self.seed,
            "step": len(self.tokens) + len(drafts),
        }
        if p.repetition_penalty != 1:
            values["penalty_ids"] = np.array(sorted({*self.prompt, *self.tokens, *drafts}), np.int32)
        return values

    def _accept(self, token: int, logprob: float) -> Piece:
        """Take a token: its text as far as it is safe to show, and whether it ends the request."""
        self.completion += 1
        if token in self.eos:
            self.finish_reason, self.stop_reason = "stop", token
            return Piece(self._flush(), token, logprob, "stop")
        self.tokens.append(token)
        if self.drafter is not None:
            self.drafter.push(token)
        self.logprobs.append(logprob)
        text, stopped = "", False
        if self.decoder is not None:
            text, stopped = self.stops.push(self.decoder.push(token))
        if stopped:
            self.finish_reason, self.stop_reason = "stop", self.stops.matched
        elif self.completion >= self.limit:
            self.finish_reason = "length"
            text += self._flush(count=False)
        self.text.append(text)
        return Piece(text, token, logprob, self.finish_reason)

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
        """Count decode steps of this stream: nanoseconds per op [len(ops)], tokens per expert of all routers."""
        self.routed += routed
        stages = [op["stage"] for op in ops]
        self.stage_ns += np.bincount(stages, weights=ops_ns, minlength=len(STAGES)).astype(np.int64)

    def _end(self, reason: str) -> None:
        if self.result is not None or self.engine._forked():  # a fork's copy of a request is not this process's to end
            return
        engine, predicted = self.engine, max(self.completion - 1, 0)
        with engine._lock:
            self.sequence.close()
            if engine._timed() is self:
                engine._time_for(None)
            routing = routing_record(engine.spec, self.routed)
        breakdown, share = None, None
        if predicted and self.predicted_ms:
            stage_ms = self.stage_ns / (1e6 * predicted)
            breakdown = {name: float(stage_ms[int(getattr(Stage, name.upper()))]) for name in STAGES}
            breakdown["other"] = self.predicted_ms / predicted - sum(breakdown.values())
            share = breakdown["ffn"] * predicted / self.predicted_ms
        prompt_n = len(self.prompt) if self.prompt_ms else 0
        self.result = GenerationResult(
            text="".join(self.text),
            tokens=self.tokens,
            finish_reason=reason,
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
                "cache_n": 0,
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
        )
