"""Stage 5, sampling: the values of one request, checked at the door, and what the core gets of them row by row."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
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
MAX_BIAS = 1e6
MAX_LOGPROBS = 20

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and when it stops. Greedy unless told.

    max_tokens: at least 0; -1 = until EOS or a full context. More than the context has room for means that room.
    temperature: 0 = greedy (exact argmax, lowest id on ties), else above 0; over 1e30 it is taken as 1e30.
    top_k: 0 or -1 = off, as is anything from the vocabulary's size on. top_p: 0 to 1; 1 = off, 0 keeps one token.
    min_p: 0 to 1; 0 = off. seed: 0 to 2^64 - 1; None = one is drawn.
    stop: at most 16 strings of 1 to 1024 characters (or one string).
    ignore_eos: go on after an end-of-sequence token. speculate: "ngram" drafts tokens from repetitions in the text and
    checks several in a step; the tokens stay the same, only the time differs. None = off.

    Applied to the logits in this order, before the temperature:
    logit_bias: {id: value}, added; a value is -inf (never chosen) or -1e6 to 1e6. Not all ids can be -inf.
    repetition_penalty: 1e-30 to 1e30, 1 = off; of each id in the prompt or the text so far, a logit above 0 is divided
    by it and any other multiplied. frequency_penalty: -2 to 2, 0 = off; times how often the id was generated so far,
    subtracted. presence_penalty: -2 to 2, 0 = off; subtracted once for each id generated so far.

    logprobs: 0 to 20; how many of the most likely ids are reported beside each token's own log probability. These are
    of the raw logits (log softmax before bias, penalties and temperature). prompt_logprobs: the same for the prompt.

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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int = 0
    prompt_logprobs: bool = False

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
            "ignore_eos": _switch("ignore_eos", self.ignore_eos),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "logit_bias": None if self.logit_bias is None else _bias(self.logit_bias),
            "logprobs": _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": _switch("prompt_logprobs", self.prompt_logprobs),
        }
        if self.speculate is not None and not (isinstance(self.speculate, str) and self.speculate in SPECULATIONS):
            raise RequestError(f"speculate {shown(self.speculate)}; expected None or one of {', '.join(SPECULATIONS)}")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def penalises(self) -> bool:
        """Whether what was said before changes a logit."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def check_ids(self, vocab_size: int) -> None:
        """RequestError for a biased id outside of the model's vocabulary, or where no id can be chosen."""
        bias = self.logit_bias or {}
        for token in bias:
            if not 0 <= token < vocab_size:
                raise RequestError(f"logit_bias of token id {token}; expected 0 to {vocab_size - 1}")
        if sum(value == -math.inf for value in bias.values()) == vocab_size:
            raise RequestError(f"logit_bias is -inf for all {vocab_size} token ids; expected one that can be chosen")


class RowSampling:
    """What the core is told of each row of one request: the values, the step of the random key, what was said."""

    def __init__(self, params: SamplingParams, seed: int, prompt: Sequence[int]) -> None:
        p = params
        self.greedy = p.temperature == 0 and not p.penalises and not p.logit_bias
        self.steps = 0  # tokens generated
        self.values: dict[str, Any] = {
            "temperature": p.temperature,
            "top_k": p.top_k,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "seed": seed,
        }
        if p.logit_bias:
            self.values["bias_ids"] = np.array(list(p.logit_bias), np.int32)
            self.values["bias_values"] = np.array(list(p.logit_bias.values()), np.float32)
        self.said: SaidTokens | None = None
        if p.penalises:
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
                self.values[name] = getattr(p, name)
            self.said = SaidTokens(prompt)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        self.steps += 1
        if self.said is not None:
            self.said.push(token)

    def row(self, drafts: Sequence[int] = ()) -> dict[str, Any] | None:
        """The values of the row after `drafts`, as if these were the text; None is greedy."""
        if self.greedy:
            return None
        values = {**self.values, "step": self.steps + len(drafts)}
        if self.said is not None:
            values["penalty_ids"], values["penalty_counts"] = self.said.after(drafts)
        return values


class SaidTokens:
    """The ids of a text, each once, and how often each was generated (0: in the prompt alone). O(1) per token."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.place = {token: at for at, token in enumerate(dict.fromkeys(prompt))}
        self.ids: Int32 = np.array(list(self.place), np.int32)
        self.counts: Int32 = np.zeros(len(self.ids), np.int32)

    def push(self, token: int) -> None:
        at = self.place.setdefault(token, len(self.place))
        if at == len(self.ids):
            more = np.zeros(max(16, at), np.int32)
            self.ids, self.counts = np.concatenate([self.ids, more]), np.concatenate([self.counts, more])
        self.ids[at] = token
        self.counts[at] += 1

    def after(self, drafts: Sequence[int]) -> tuple[Int32, Int32]:
        """Ids and counts, int32 [ids], as if `drafts` were generated too; valid until the next push."""
        used = len(self.place)
        if not drafts:
            return self.ids[:used], self.counts[:used]
        counts = self.counts[:used].copy()
        new: dict[int, int] = {}
        for token in drafts:
            if token in self.place:
                counts[self.place[token]] += 1
            else:
                new[token] = new.get(token, 0) + 1
        ids = np.concatenate([self.ids[:used], np.array(list(new), np.int32)])
        return ids, np.concatenate([counts, np.array(list(new.values()), np.int32)])


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise RequestError(f"{name} {shown(value)}; expected True or False")
    return bool(value)


def _bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias {shown(bias)}; expected {{token id: value}}")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        if not is_integer(token):
            raise RequestError(f"logit_bias of token id {shown(token)}; expected an integer")
        never = isinstance(value, numbers.Real) and value == -math.inf
        checked[int(token)] = -math.inf if never else _real(f"logit_bias of {token}:", value, -MAX_BIAS, MAX_BIAS)
    return checked


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
