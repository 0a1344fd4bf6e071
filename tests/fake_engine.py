"""A small engine with fixed answers, for tests of what lies above the engine: it knows no weights and no kernels."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyengine.cli import _options
from pyengine.errors import RequestError
from pyengine.reports import machine

VOCAB = 256


class ByteTokenizer:
    """One token per UTF-8 byte; optionally a BOS in front, as a post-processor would add it."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos
        self.adds_bos = bos is not None
        self.calls: list[dict[str, Any]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        self.calls.append({"text": text, "add_special_tokens": add_special_tokens, "parse_special": parse_special})
        bos = [self.bos_token_id] if add_special_tokens and self.adds_bos else []
        return bos + list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")

    def stream(self) -> Any:
        return SimpleNamespace(push=lambda token: self.decode([token]))


@dataclass
class FakeResult:
    text: str
    finish_reason: str
    seed: int
    count: int
    speculation: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        rate = 20.0 if self.count > 1 else None
        optional = {} if self.speculation is None else {"speculation": self.speculation}
        return {
            **optional,
            "text": self.text,
            "tokens": list(range(self.count)),
            "finish_reason": self.finish_reason,
            "stop_reason": None,
            "prompt_format": "raw",
            "seed": self.seed,
            "model": "fake",
            "family": "llama",
            "quant": "int8",
            "group_size": 64,
            "device": "cpu",
            "isa": "scalar",
            "threads": 2,
            "version": "0",
            "usage": {"prompt_tokens": 21, "completion_tokens": self.count, "total_tokens": 21 + self.count},
            "timings": {
                "load_ms": 1.0,
                "prompt_n": 21,
                "prompt_ms": 350.0,
                "prompt_per_second": 60.0,
                "predicted_n": max(self.count - 1, 0),
                "predicted_ms": 50.0 * max(self.count - 1, 0),
                "predicted_per_second": rate,
                "decode_steps": max(self.count - 1, 0),
                "cache_n": 0,
            },
            "ffn_share": 0.7125 if rate else None,
            "decode_breakdown": None,
            "weight_bytes_per_token": 1_500_000_000,
            "peak_rss_bytes": 1_200_000_000,
        }


class FakeStream:
    """The iterator of Engine.stream: pieces, then `result`; close() cancels."""

    def __init__(self, pieces: Sequence[str | BaseException], seed: int | None, delay: float) -> None:
        self._delay = delay
        self._pieces = list(pieces)
        self._seed = 7 if seed is None else seed
        self._shown: list[str] = []
        self.speculation: dict[str, int] | None = None
        self.result: FakeResult | None = None
        self.closed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._pieces:
            self._finish("stop")
            raise StopIteration
        if self._delay:
            if not self._shown:
                print("the first step", file=sys.stderr, flush=True)
            time.sleep(self._delay)
        piece = self._pieces.pop(0)
        if isinstance(piece, BaseException):
            if isinstance(piece, KeyboardInterrupt):
                self._finish("cancelled")
            raise piece
        self._shown.append(piece)
        return SimpleNamespace(text=piece, token=len(self._shown), logprob=None, finish_reason=None)

    def _finish(self, reason: str) -> None:
        if self.result is None:
            text = "".join(self._shown)
            self.result = FakeResult(text, reason, self._seed, len(self._shown), self.speculation)

    def close(self) -> None:
        self.closed = True
        self._finish("cancelled")


@dataclass
class FakeEngine:
    """What the command line asks of an engine, recorded in `requests`."""

    pieces: Sequence[str | BaseException] = ("Hel", "lo")
    tokenizer: ByteTokenizer | None = field(default_factory=ByteTokenizer)
    folder: Path = Path("fake")
    quant: str = "int8"
    group_size: int | None = 64
    bits_per_weight: float = 8.5
    noise: float = 0.0
    delay: float = 0.0  # seconds before each piece, the first announced on stderr
    speculation: tuple[int, int] = (0, 0)  # tokens drafted and accepted, where a request asks for it
    requests: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    isa: str = "scalar"
    threads: int = 2
    ctx_size: int = 128
    load_ms: float = 1.0
    spec: Any = field(
        default_factory=lambda: SimpleNamespace(
            warnings=("an odd key",), family="llama", vocab_size=VOCAB, max_context=4096
        )
    )

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def stream(self, ids: list[int], **sampling: Any) -> FakeStream:
        if not ids:
            raise RequestError("empty prompt; expected at least one token")
        stream = FakeStream(self.pieces, sampling["seed"], self.delay)
        if sampling["speculate"] is not None:
            stream.speculation = dict(zip(("drafted", "accepted"), self.speculation, strict=True))
        self.requests.append({"ids": ids, "stream": stream, **sampling})
        return stream

    def logits(self, ids: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
        """Float32 [rows, 256] that depend on every token before the row, plus this engine's noise."""
        self.requests.append({"ids": list(ids), "rows": None if rows is None else list(rows)})
        table = np.random.default_rng(5).standard_normal((VOCAB, VOCAB)).astype(np.float32)
        context = np.cumsum(table[np.asarray(ids)], axis=0) / np.sqrt(np.arange(1, len(ids) + 1))[:, None]
        noisy = context + self.noise * np.random.default_rng(len(self.requests)).standard_normal(context.shape)
        return noisy[slice(None) if rows is None else rows].astype(np.float32)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, engine: Any = None) -> Any:
    """Make every command open this engine (a FakeEngine), in an environment without pyengine's variables."""
    fake = engine or FakeEngine(folder=folder)
    monkeypatch.setattr(_options, "model_folder", lambda args, **_: folder)
    monkeypatch.setattr(_options, "open_engine", lambda args, folder, **_: fake)
    monkeypatch.setattr(machine, "known_read", lambda *_: None)
    for name in ("PYENGINE_THREADS", "PYENGINE_DEVICE", "PYENGINE_ISA"):
        monkeypatch.delenv(name, raising=False)
    return fake


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True
