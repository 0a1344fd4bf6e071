"""Stage 5, engine: tokens in, tokens out. Loads a model and runs its program over sequences."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyengine import cuda, hub, quantize, system
from pyengine.balance import balance_keys
from pyengine.batching import generate_batch
from pyengine.calibrate import CALIBRATION_TOKENS, Calibrator
from pyengine.chat import ChatRequests
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.decoder import BuiltProgram, KvLayout, build
from pyengine.engine_options import choose_ctx_size, choose_kv_dtype, load_arguments, stored_quant
from pyengine.engine_reports import EngineReports
from pyengine.errors import RequestError, ResourceError, TokenizerError
from pyengine.generate import GenerationStream
from pyengine.gguf_checkpoint import default_quant, open_checkpoint, say_blocks
from pyengine.gguf_file import is_gguf
from pyengine.hooks import Hooks
from pyengine.kv_cache import KvPool, step_arrays
from pyengine.kv_cache import Sequence as KvSequence
from pyengine.prefix_cache import DEFAULT_PREFIX_BYTES
from pyengine.results import GenerationResult
from pyengine.rope_tables import RopeTables
from pyengine.routing import RoutingCounts, UInt64, by_layer
from pyengine.sampling import SamplingParams, check_token_ids, is_integer, row_indices
from pyengine.scoring import score, score_rolling
from pyengine.steps import MAX_BATCH_TOKENS, MAX_SEQUENCES, Chosen
from pyengine.tensors import check_tensors, settle_head
from pyengine.tokenizer import Tokenizer
from pyengine.tokenizer_file import has_tokenizer
from pyengine.weights import Progress
from pyengine.weights_cache import DEFAULT_LIMIT_BYTES, WeightsCache, load_through

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

EMPTY = np.empty(0, np.int32)


class Timed(Protocol):
    """Whose decode steps the program's timers count: a stream, or a batch."""

    def add_times(self, ops: list[dict[str, Any]], ops_ns: UInt64, routed: UInt64) -> None: ...


class Engine(EngineReports, ChatRequests):
    """A loaded model. Made by `load`; use as a context manager or close it.

    Calls from several threads at once are served one after the other. It belongs to the process that loaded it: in one
    forked from that, calls are RequestErrors. Attributes: spec, tokenizer (None without
    tokenizer.json), folder, quant, group_size, bits_per_weight, isa, threads, ctx_size, load_ms, notes.
    """

    def __init__(
        self, folder: Path, arguments: dict[str, Any], progress: Progress | None, log: Callable[[str], None]
    ) -> None:
        started = time.perf_counter()
        self.folder = folder
        self._arguments = arguments
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self._timed: Callable[[], Timed | None] = nobody  # whose decode steps the timers now count
        self.device = cuda.choose(arguments["device"])
        system.check_room(folder)
        self.notes: list[str] = []
        quant = default_quant(folder) if arguments["quant"] is None else arguments["quant"]
        if quant not in quantize.QUANTS:
            raise RequestError(f"quant {quant!r}; expected one of {', '.join(quantize.QUANTS)}")
        self.spec = load_model_spec(folder, strict=arguments["strict"])
        with open_checkpoint(folder) as checkpoint:
            self.spec = settle_head(self.spec, checkpoint)
            self.notes += check_tensors(self.spec, checkpoint.tensors, folder)
            quant = stored_quant(checkpoint) if quant == "none" else quant
            self.quantization = quantize.choose(quant, arguments["group_size"], arguments["int4_scheme"])
            self.quant, self.group_size = self.quantization.quant, self.quantization.group_size
            self.kv_dtype = choose_kv_dtype(arguments["kv_dtype"], self.quant, self.spec)
            self.ctx_size = choose_ctx_size(arguments["ctx_size"], self.spec)
            if is_gguf(folder):
                say_blocks(folder, self.quant, log)
            self.tokenizer = self._load_tokenizer()
            self.backend = cuda.open_backend(self.device, arguments["threads"], arguments["isa"])
            self.isa, self.threads = self.backend.isa, self.backend.threads
            self._check_memory(checkpoint)
            self.weights = load_through(
                WeightsCache(arguments["cache_limit"], log) if arguments["cache"] else None,
                self.backend,
                checkpoint,
                self.spec,
                self.quantization,
                self._calibration_ids(arguments["calibration"]),
                lambda ids: Calibrator(checkpoint, self.spec, ids, threads=self.threads, isa=self.isa),
                progress,
                prepare=balance_keys if self.kv_dtype == "int8" else None,
                strict=arguments["strict"],
            )
        self.spec = replace(self.spec, warnings=(*self.spec.warnings, *self.weights.warnings))
        self.bits_per_weight = self.weights.bits_per_weight
        self.weight_bytes_per_token = self.weights.bytes_per_token
        self.pool = KvPool(self.backend, self.spec, self.kv_dtype, arguments["prefix_cache_bytes"])
        self.ropes = RopeTables(self.backend, self.spec)
        self.program = self.build()
        self.routed = RoutingCounts(self.program.program)
        self.load_ms = (time.perf_counter() - started) * 1e3

    # ---- loading ------------------------------------------------------------------------------------------------

    def _load_tokenizer(self) -> Tokenizer | None:
        if not has_tokenizer(self.folder):
            return None
        return Tokenizer.load(self.folder, vocab_size=self.spec.vocab_size)

    def _check_memory(self, checkpoint: Checkpoint) -> None:
        """ResourceError before anything large is allocated, with bytes wanted and available."""
        bits = {"f32": 32, "bf16": 16, "int8": 8.25, "int4": 4 + 32 / (self.group_size or 32)}[self.quant]
        sizes = [int(np.prod(info.shape, dtype=object)) for info in checkpoint.tensors.values()]
        wanted = int(sum(sizes) * bits / 8)
        available = system.available_memory()
        if available is not None and wanted > available:
            raise ResourceError(
                f"{self.folder}: about {wanted} bytes of {self.quant} weights, {available} bytes of memory available; "
                "expected a smaller model or format"
            )

    def _calibration_ids(self, wanted: bool) -> list[int] | None:
        if not wanted or not self.quantization.searches:
            return None
        if self.tokenizer is None:
            self.notes.append("no tokenizer: scales are searched without calibration")
            return None
        text = (importlib.resources.files("pyengine") / "data" / "calibration.txt").read_text(encoding="utf-8")
        return self.tokenizer.encode(text)[:CALIBRATION_TOKENS]

    def build(self, *, hooks: Hooks | None = None, fused: bool = True, timed: bool = True) -> BuiltProgram:
        """A program over this engine's weights: with taps and masks, unfused, or without timers."""
        self._check_open()
        layout = KvLayout(self.pool.groups, self.ropes.ids)
        return build(
            self.backend,
            self.spec,
            self.weights,
            layout,
            hooks=hooks,
            fused=fused,
            timed=timed,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_sequences=MAX_SEQUENCES,
        )

    # ---- running ------------------------------------------------------------------------------------------------

    def forward(
        self,
        entries: Sequence[tuple[KvSequence, Sequence[int]]],
        *,
        rows: Int32 = EMPTY,
        logits: Float32 | None = None,
        sampling: list[dict[str, Any] | None] | None = None,
        taps: Sequence[Float32] = (),
        cancel: Int32 | None = None,
        program: BuiltProgram | None = None,
        advance: bool = True,
        targets: Int32 | None = None,
        top: int = 0,
    ) -> Chosen | None:
        """One step: each sequence takes its new tokens (at most MAX_BATCH_TOKENS together).

        rows: token indices of the batch whose logits are wanted, into `logits` float32 [rows, V] and for `sampling`
        (None = greedy), which gives what was chosen. targets int32 [rows] (-1 for none), top: whose log probabilities
        and how many of the most likely ids that has, too. advance=False: the caller advances each sequence by as many
        of its tokens as it keeps. On any error no sequence has changed.
        """
        built = program or self.program
        for sequence, ids in entries:
            self.ropes.grow(sequence.length + len(ids))
            sequence.reserve(len(ids))
        token_ids, positions, ends, tables = step_arrays(entries)
        interruptible = threading.get_ident() == threading.main_thread().ident
        out = built.program.run(
            token_ids, positions, ends, tables, rows, logits, sampling, None, list(taps), cancel, interruptible,
            targets, top,
        )  # fmt: skip
        if advance:
            for sequence, ids in entries:
                sequence.advance(len(ids))
        return None if out is None else Chosen(*out)

    def logits(
        self,
        ids: Sequence[int],
        rows: Sequence[int] | None = None,
        *,
        chunk: int | None = None,
        program: BuiltProgram | None = None,
        taps: dict[tuple[int, str], Float32] | None = None,
    ) -> Float32:
        """Logits float32 [len(rows), V] after the tokens at indices `rows` of `ids` (None = all), from no context.

        chunk: tokens per step (1 = as decoding does; default MAX_BATCH_TOKENS); the bits do not depend on it.
        program, taps: a program of `build(hooks=...)`, and where its taps go: filled with float32 [T, width].
        Errors: RequestError for bad ids, rows or chunk.
        """
        ids = check_token_ids(ids, self.spec.vocab_size)
        wanted = np.arange(len(ids)) if rows is None else row_indices(rows)
        if not len(ids) or len(ids) > self.ctx_size:
            raise RequestError(f"{len(ids)} tokens; expected 1 to {self.ctx_size}")
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(ids)):
            raise RequestError(f"rows of {len(ids)} tokens; expected indices 0 to {len(ids) - 1}")
        step = MAX_BATCH_TOKENS if chunk is None else chunk
        if not is_integer(step) or not 1 <= step <= MAX_BATCH_TOKENS:
            raise RequestError(f"chunk {step!r}; expected 1 to {MAX_BATCH_TOKENS}")
        out = np.empty((len(wanted), self.spec.vocab_size), np.float32)
        parts: list[list[Float32]] = []
        with self._running():
            sequence = KvSequence(self.pool)
            try:
                for at in range(0, len(ids), step):
                    part = ids[at : at + step]
                    inside = np.flatnonzero((wanted >= at) & (wanted < at + len(part)))
                    block = np.empty((len(inside), self.spec.vocab_size), np.float32)
                    tapped = [
                        np.empty((len(part), width), np.float32) for width in (program.tap_widths if program else [])
                    ]
                    local = (wanted[inside] - at).astype(np.int32)
                    self.forward([(sequence, part)], rows=local, logits=block, taps=tapped, program=program)
                    out[inside] = block
                    parts.append(tapped)
            finally:
                sequence.close()
        if taps is not None and program is not None:
            for index, key in enumerate(program.taps):
                taps[key] = np.concatenate([part[index] for part in parts])
        return out

    def logits_batch(self, prompts: Sequence[Sequence[int]]) -> list[Float32]:
        """The last token's logits float32 [V] of every prompt, all in one batch of at most MAX_BATCH_TOKENS tokens."""
        checked = [check_token_ids(ids, self.spec.vocab_size) for ids in prompts]
        total = sum(len(ids) for ids in checked)
        if not checked or len(checked) > MAX_SEQUENCES or total > MAX_BATCH_TOKENS or min(map(len, checked)) == 0:
            raise RequestError(
                f"{len(checked)} prompts of {total} tokens; expected at most {MAX_SEQUENCES} of {MAX_BATCH_TOKENS}"
            )
        rows = np.cumsum([len(ids) for ids in checked]).astype(np.int32) - 1
        out = np.empty((len(checked), self.spec.vocab_size), np.float32)
        with self._running():
            sequences = [KvSequence(self.pool) for _ in checked]
            try:
                self.forward(list(zip(sequences, checked, strict=True)), rows=rows.astype(np.int32), logits=out)
            finally:
                for sequence in sequences:
                    sequence.close()
        return list(out)

    # ---- text ---------------------------------------------------------------------------------------------------

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> GenerationStream:
        """Generate from a text (raw) or token ids; an iterator of pieces, with `result` at its end. Closing it cancels.

        Keyword arguments are those of SamplingParams (max_tokens, temperature, top_k, top_p, min_p,
        repetition_penalty, frequency_penalty, presence_penalty, logit_bias, logprobs, prompt_logprobs, seed, stop,
        ignore_eos, speculate). Errors: RequestError before any compute.
        """
        params = SamplingParams(**sampling)
        self._check_open()
        ids = self.tokenize(prompt) if isinstance(prompt, str) else check_token_ids(prompt, self.spec.vocab_size)
        return GenerationStream(self, ids, params)

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> GenerationResult:
        """The whole text at once; arguments as for `stream`. str(result) is the text."""
        return self.stream(prompt, **sampling).finish()

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_batch: int | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> list[GenerationResult]:
        """One result per prompt, the same as each would have alone; with a seed, request i uses seed + i.

        At most `max_batch` (1 to 64, default 16) run at a time, their steps together; where one ends the next begins.
        All are checked before the first computes. Errors: RequestError, ResourceError where the KV caches of max_batch
        requests do not fit, BatchError with all results where some requests met NaN or Inf.
        """
        return generate_batch(self, prompts, max_batch=max_batch, seed=seed, sampling=sampling)

    # ---- scores -------------------------------------------------------------------------------------------------

    def score(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Of each (context ids, continuation ids): the summed log probability of the continuation's tokens, and
        whether each of them is the most likely one. An empty context means [BOS], or [EOS] without one.

        Errors: RequestError naming the request: bad ids, an empty continuation, more tokens than the context takes.
        """
        self._check_open()
        return score(self, requests)

    def score_rolling(
        self, ids: Sequence[int], *, window: int | None = None, stride: int | None = None
    ) -> tuple[float, int]:
        """The summed log probability of all tokens of a text, and how many they are. [BOS], or [EOS], is before them.

        window: tokens that one is predicted from at most (default: the context). The first `window` tokens are scored
        at once, then `stride` at a time (1 to window, the default), from the `window` tokens before the last of them.
        """
        self._check_open()
        return score_rolling(self, ids, window=window, stride=stride)

    # ---- tokens -------------------------------------------------------------------------------------------------

    def eos_ids(self) -> set[int]:
        """The ids that end a text: of the config files and the tokenizer."""
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return {*self.spec.eos_token_ids, *(() if own is None else (own,))}

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a raw text, BOS and special tokens as the tokenizer's own rules say."""
        return self._need_tokenizer().encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._need_tokenizer().decode(check_token_ids(ids, self.spec.vocab_size))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(f"{self.folder}: no tokenizer.json; expected one, or token ids in place of text")
        return self.tokenizer

    # ---- life ---------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed; expected an open one")
        if self._forked():
            raise RequestError(
                f"the engine belongs to process {self._process}, from which this one was forked without its threads; "
                "expected an engine loaded in this process"
            )

    def _forked(self) -> bool:
        """Whether this is a fork's copy: it has no threads, and a thread that is not here may hold its lock."""
        return os.getpid() != self._process

    def _inside(self) -> bool:
        """Whether this thread holds the lock: it is in a step, or changes the pool."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _running(self, timed: Timed | None = None) -> _Running:
        return _Running(self, timed)

    def _time_for(self, stream: Timed | None) -> None:
        """From here on the timers count for `stream`; what they counted goes to whom it belongs. Under the lock."""
        ops_ns, _, _ = self.program.program.times(True)
        routed = self.routed.take()
        before = self._timed()
        if before is not None:
            before.add_times(self.program.ops, ops_ns, routed)
        self._timed = nobody if stream is None else weakref.ref(stream)  # a dropped stream must be free to go

    def routing(self) -> dict[int, UInt64]:
        """Layer -> tokens its experts had since loading, drafts included: uint64 [experts]; {} without experts."""
        with self._running():
            self._time_for(None)
            return by_layer(self.spec, self.routed.total)

    def close(self) -> None:
        """Give the memory back. Calls after this are RequestErrors; closing twice is not."""
        with contextlib.nullcontext() if self._forked() else self._lock:
            if self._closed:
                return
            if not self._forked():
                self._time_for(None)
            self._closed = True
            del self.routed, self.program, self.pool, self.ropes, self.weights, self.backend

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Engine], tuple[Any, ...]]:
        """Pickled as its load arguments: the copy loads the model again."""
        return _reload, (str(self.folder), self._arguments)


class _Running:
    """Holds the engine's lock for one call, and refuses a closed engine. timed: the stream whose decode step it is."""

    def __init__(self, engine: Engine, timed: Timed | None) -> None:
        self.engine = engine
        self.timed = timed

    def __enter__(self) -> None:
        self.engine._check_open()
        self.engine._lock.acquire()
        try:
            self.engine._check_open()
            if self.engine._timed() is not self.timed:
                self.engine._time_for(self.timed)
        except BaseException:
            self.engine._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.engine._lock.release()


def say(text: str) -> None:
    """One line on stderr: what was written to disk, or is damaged there, is said even where nobody asked."""
    print(f"pyengine: {text}", file=sys.stderr, flush=True)


def nobody() -> None:
    """The stream that is timed where none is."""


def _reload(folder: str, arguments: dict[str, Any]) -> Engine:
    return Engine(Path(folder), arguments, None, say)


def load(
    model: str | bytes | os.PathLike[str],
    *,
    quant: str | None = None,
    group_size: int | None = None,
    int4_scheme: str | None = None,
    kv_dtype: str | None = None,
    threads: int | None = None,
    ctx_size: int = 0,
    device: str | None = None,
    isa: str | None = None,
    calibration: bool = True,
    strict: bool = False,
    offline: bool = False,
    cache: bool = True,
    cache_limit: int = DEFAULT_LIMIT_BYTES,
    prefix_cache_bytes: int = DEFAULT_PREFIX_BYTES,
    progress: Progress | None = None,
    log: Callable[[str], None] = say,
) -> Engine:
    """Load a folder, a .gguf file or a hub model "org/name".

    quant: "none" (as stored), "f32", "bf16", "int8" (group 64) or "int4"; the default is int8, int4 for a GGUF of at
    most 5 bits per weight. group_size: 32, 64 or 128 for int4.
    int4_scheme: "minimum" or "symmetric". kv_dtype: "bf16", "f32" (the default with quant="f32") or "int8" (half of
    bf16). threads: None = PYENGINE_THREADS, else the physical cores this process may use. isa: None = PYENGINE_ISA,
    else the best; both are of the CPU, which packs the weights for every device. device: "cpu", "cuda" (the first one),
    "cuda:N", or "auto", CUDA where it can be used; None = PYENGINE_DEVICE, else auto. ctx_size: a limit, 0 = the
    model's maximum. calibration: weight the errors of int8 and int4 with E[x^2] of a short text. strict: unknown config
    keys and weights that are all zero are errors. cache: read packed weights that an earlier load left on disk, and
    leave them where this one took over 2 s; cache_limit: bytes that such files may take in all. prefix_cache_bytes:
    what KV blocks of earlier requests may take, which requests with the same beginning use again (default 256 MiB, 0 =
    none); no result depends on it. progress: called with (done, total, what). log: called with a line about the cache's
    files, and where a GGUF is quantized again; default: to stderr.
    Errors: those of pyengine.errors, each naming file, tensor, key or argument.
    """
    arguments = load_arguments(
        quant=quant,
        group_size=group_size,
        int4_scheme=int4_scheme,
        kv_dtype=kv_dtype,
        threads=threads,
        ctx_size=ctx_size,
        device=device,
        isa=isa,
        calibration=calibration,
        strict=strict,
        cache=cache,
        cache_limit=cache_limit,
        prefix_cache_bytes=prefix_cache_bytes,
    )
    return Engine(hub.resolve(os.fsdecode(model), offline=offline), arguments, progress, log)
