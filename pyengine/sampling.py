"""Stage 5, sampling: the values of one request, checked at the door, before anything is computed."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.errors import RequestError
from pyengine.strict_json import shown

MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
SPECULATIONS = ("ngram",)
# The core computes in float32. Above the first, temperatures are one and the same uniform choice; below the second,
# logits divided by the penalty would leave float32's range.
MAX_TEMPERATURE = 1e30
MIN_PENALTY, MAX_PENALTY = 1e-30, 1e30


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and when it stops. Greedy unless told.

    max_tokens: at least 0; -1 = until EOS or a full context. More than the context has room for means that room.
    temperature: 0 = greedy (exact argmax, lowest id on ties), else above 0; over 1e30 it is taken as 1e30.
    top_k: 0 or -1 = off, as is anything from the vocabulary's size on. top_p: 0 to 1; 1 = off, 0 keeps one token.
    min_p: 0 to 1; 0 = off. repetition_penalty: 1e-30 to 1e30; 1 = off.
    seed: 0 to 2^64 - 1; None = one is drawn. stop: at most 16 strings of 1 to 1024 characters (or one string).
    ignore_eos: go on after an end-of-sequence token. speculate: "ngram" drafts tokens from repetitions in the text and
    checks several in a step; the tokens stay the same, only the time differs. None = off.

    Integers of numpy are integers; True, "1" and 1.0 are not. Errors: RequestError naming value and range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    speculate: str | None = None

    def __post_init__(self) -> None:
        top_k = _integer("top_k", self.top_k, -1, None)
        temperature = min(_real("temperature", self.temperature, 0.0, None), MAX_TEMPERATURE)
        values: dict[str, Any] = {
            "max_tokens": _integer("max_tokens", self.max_tokens, -1, None),
            "temperature": temperature,
            "top_k": min(max(top_k, 0), MAX_TOP_K),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _real("repetition_penalty", self.repetition_penalty, MIN_PENALTY, MAX_PENALTY),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, MAX_SEED),
            "stop": _stops(self.stop),
        }
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise RequestError(f"ignore_eos {shown(self.ignore_eos)}; expected True or False")
        values["ignore_eos"] = bool(self.ignore_eos)
        if self.speculate is not None and not (isinstance(self.speculate, str) and self.speculate in SPECULATIONS):
            raise RequestError(f"speculate {shown(self.speculate)}; expected None or one of {', '.join(SPECULATIONS)}")
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _range(low: float, high: float | None) -> str:
    return f"at least {low:g}" if high is None else f"{low} to {high}"


def _integer(name: str, value: object, low: int, high: int | None) -> int:
    if not is_integer(value):
        raise RequestError(f"{name} {shown(value)}; expected an integer, {_range(low, high)}")
    number = operator.index(value)  # type: ignore[arg-type]
    if number < low or (high is not None and number > high):
        raise RequestError(f"{name} {number}; expected an integer, {_range(low, high)}")
    return number


def _real(name: str, value: object, low: float, high: float | None) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name} {shown(value)}; expected a number, {_range(low, high)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= low and (high is None or number <= high)):
        raise RequestError(f"{name} {number:g}; expected a finite number, {_range(low, high)}")
    return number


def _stops(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise RequestError(f"stop {shown(stop)}; expected strings")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{len(stops)} stop strings; expected at most {MAX_STOPS}")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(f"a stop string of {len(text)} characters; expected 1 to {MAX_STOP_CHARACTERS}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError(f"stop {shown(text)} has an unpaired surrogate; expected text") from None
    return tuple(stops)


def is_integer(value: object) -> bool:
    """Whether `value` is an int or a numpy integer; booleans are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def check_token_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """`ids` (integers of Python or numpy, or an integer array [T]) as a list of Python ints, each 0 to vocab_size - 1.

    The range is the model's vocabulary, not the tokenizer's: ids of padding rows are accepted, a model can produce
    them. Errors: RequestError naming the first wrong id and its index.
    """
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable):
        raise RequestError(f"token ids {shown(ids)}; expected a list of integers")
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise RequestError(f"token ids of shape {ids.shape}, {ids.dtype}; expected one row of integers")
        ids = ids.tolist()
    checked = []
    for index, value in enumerate(ids):
        if not is_integer(value):
            raise RequestError(f"token id {shown(value)} at index {index}; expected an integer, 0 to {vocab_size - 1}")
        if not 0 <= value < vocab_size:
            raise RequestError(f"token id {value} at index {index}; expected 0 to {vocab_size - 1}")
        checked.append(int(value))
    return checked


def row_indices(rows: Sequence[int]) -> npt.NDArray[np.int64]:
    """`rows` [R] as integers. RequestError for anything else: a float or a mask would be read as other rows."""
    if not all(is_integer(row) for row in rows):
        raise RequestError("rows are not integers; expected indices of tokens")
    return np.array([int(row) for row in rows], np.int64)
