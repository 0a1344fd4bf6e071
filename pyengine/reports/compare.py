"""Stage 6, compare: how far a quantized engine's next-token distributions are from the stored precision's.

For each scored position: KL(baseline || quantized) in nats, whether the two most likely tokens agree, and the negative
log-likelihood of the token that follows under either, whose mean gives the perplexity exp(mean NLL).

The text is cut into windows of `window` tokens. Each starts from an empty context, with the model's own BOS in its
first place if the tokenizer adds one. Only the tokens of a window's second half are scored, each with all of the window
before it as context, so that every figure is one for tokens with at least window / 2 tokens of context.

Numerics: exponentials are float32 (as the logits are), every sum over the vocabulary and over positions is float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyengine import text_file
from pyengine.errors import ComputeError, RequestError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

DEFAULT_TEXT = "compare.txt"
TOP = 5
BLOCK_ELEMENTS = 1 << 18  # rows are taken in blocks of about this many logits: 1 MiB per temporary stays in cache


class LogitsEngine(Protocol):
    """What compare needs of an engine; Engine has it."""

    quant: str
    bits_per_weight: float

    def logits(self, ids: Sequence[int], rows: Sequence[int] | None = None) -> Float32:
        """Logits [len(rows), V] after the tokens at positions `rows` of `ids`, from an empty context."""


class TextTokenizer(Protocol):
    """What compare needs of a tokenizer; Tokenizer has it."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class TextSource:
    """The text measured on. `bytes` and `sha256` are of the bytes read, from the offset to the end of the file."""

    name: str
    sha256: str
    bytes: int
    content: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "bytes": self.bytes}


@dataclass(frozen=True)
class PositionStatistics:
    """Per scored position, float64 [R] (agreement bool [R]); top_*: ids [R, 5] by falling probability, and those."""

    kld: Float64
    nll_baseline: Float64
    nll_quant: Float64
    agreement: npt.NDArray[np.bool_]
    top_baseline: tuple[Int64, Float64]
    top_quant: tuple[Int64, Float64]

    @property
    def delta_p(self) -> Float64:
        """Change of the probability of the token that follows: quantized minus baseline."""
        return np.asarray(np.exp(-self.nll_quant) - np.exp(-self.nll_baseline), np.float64)


def read_text(path: Path | None, *, offset: int = 0) -> TextSource:
    """The text of `path`, or the one shipped with pyengine, from byte `offset` on. UTF-8.

    Errors: RequestError for an unreadable file, one over 64 MiB, an offset outside it or inside a character;
    ResourceError: `system.lacking`.
    """
    if path is None:
        data = (resources.files("pyengine") / "data" / DEFAULT_TEXT).read_bytes()
        name = DEFAULT_TEXT
    else:
        data, name = text_file.read(path), path.name
    if not 0 <= offset < max(len(data), 1):
        raise RequestError(f"{name}: offset {offset} in {len(data)} bytes; expected one inside the text")
    data = data[offset:]
    content = text_file.decode(data, name, offset=offset)
    if offset:
        name = f"{name} from byte {offset}"
    return TextSource(name=name, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), content=content)


def make_windows(
    tokenizer: TextTokenizer, text: str, *, tokens: int, window: int, stride: int | None = None
) -> tuple[list[list[int]], int]:
    """The text as tokens / window lists of `window` ids, the model's own BOS first where it has one; and the stride.

    stride: tokens of text from one window to the next; None leaves no gap and no overlap. Special tokens in the text
    are ordinary text. Errors: RequestError if the sizes do not fit each other or the text.
    """
    if window < 2 or window % 2:
        raise RequestError(f"window {window}; expected an even number of at least 2")
    if tokens < window or tokens % window:
        raise RequestError(f"{tokens} tokens in windows of {window}; expected a multiple of the window")
    added = tokenizer.encode("", add_special_tokens=True)
    bos = added[:1] if added and added[0] == tokenizer.bos_token_id else []
    size = window - len(bos)
    step = size if stride is None else stride
    if not 1 <= step <= size:
        raise RequestError(f"stride {step}; expected 1 to {size}, the tokens of text in a window")
    count = tokens // window
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    needed = (count - 1) * step + size
    if len(ids) < needed:
        raise RequestError(f"the text has {len(ids)} tokens; expected at least {needed} (or fewer --tokens)")
    return [bos + ids[i * step : i * step + size] for i in range(count)], step


def softmax_parts(rows: Float32) -> tuple[Float32, Float32, Float64]:
    """(x - max, exp of that, its sum) of each row of logits [R, V]."""
    shifted = rows - rows.max(axis=1, keepdims=True)
    exp = np.exp(shifted)
    return shifted, exp, exp.sum(axis=1, dtype=np.float64)


def top_tokens(shifted: Float32, total: Float64) -> tuple[Int64, Float64]:
    """Ids [R, TOP] of the most likely tokens, the likeliest first, equal ones by id, and probabilities.

    shifted, total: x - max and the sum of its exp, as softmax_parts gives them. A smaller vocabulary has fewer.
    """
    count = min(TOP, shifted.shape[1])
    ids = np.sort(np.argpartition(shifted, -count, axis=1)[:, -count:], axis=1)
    values = np.take_along_axis(shifted, ids, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    probability = np.exp(np.take_along_axis(values, order, axis=1).astype(np.float64)) / total[:, None]
    return np.take_along_axis(ids, order, axis=1).astype(np.int64), probability


def position_nll(logits: Float32, targets: Sequence[int]) -> Float64:
    """-log softmax(logits)[target] of each row, float64 [R], of logits float32 [R, V].

    Errors: ValueError if the shapes differ, ComputeError if a logit is NaN or infinite.
    """
    if logits.ndim != 2 or len(targets) != len(logits):
        raise ValueError(f"logits {logits.shape}, {len(targets)} targets; expected a target for each row")
    target = np.asarray(targets, dtype=np.int64)
    nll = np.empty(len(logits), np.float64)
    step = max(1, BLOCK_ELEMENTS // max(logits.shape[1], 1))
    for begin in range(0, len(logits), step):
        block = slice(begin, begin + step)
        shifted, _, total = softmax_parts(logits[block])
        nll[block] = np.log(total) - shifted[np.arange(len(shifted)), target[block]]
    if not np.isfinite(nll).all():
        raise ComputeError("perplexity: NaN or Inf in the logits; expected finite numbers")
    return nll


def compare_rows(baseline: Float32, quantized: Float32, targets: Sequence[int]) -> PositionStatistics:
    """Compare logits float32 [R, V] row by row; targets [R] are the ids that follow.

    Errors: ValueError if the shapes differ, ComputeError if a logit is NaN or infinite.
    """
    if baseline.ndim != 2 or baseline.shape != quantized.shape or len(targets) != len(baseline):
        raise ValueError(
            f"logits {baseline.shape} and {quantized.shape}, {len(targets)} targets; expected equal shapes"
        )
    rows, vocab = baseline.shape
    target = np.asarray(targets, dtype=np.int64)
    kld, nll_p, nll_q = (np.empty(rows, np.float64) for _ in range(3))
    agreement = np.empty(rows, np.bool_)
    count = min(TOP, vocab)
    top_p, top_q = ((np.empty((rows, count), np.int64), np.empty((rows, count), np.float64)) for _ in range(2))
    step = max(1, BLOCK_ELEMENTS // max(vocab, 1))
    for begin in range(0, rows, step):
        block = slice(begin, begin + step)
        p, q = baseline[block], quantized[block]
        at = np.arange(len(p)), target[block]
        agreement[block] = p.argmax(axis=1) == q.argmax(axis=1)
        (p, exp_p, sum_p), (q, _, sum_q) = softmax_parts(p), softmax_parts(q)
        log_p, log_q = np.log(sum_p), np.log(sum_q)
        top_p[0][block], top_p[1][block] = top_tokens(p, sum_p)
        top_q[0][block], top_q[1][block] = top_tokens(q, sum_q)
        nll_p[block], nll_q[block] = log_p - p[at], log_q - q[at]
        # sum_v P (log P - log Q) = sum_v P (p - q) - log sum exp p + log sum exp q, with P = exp(p) / sum exp p
        np.subtract(p, q, out=p)
        np.multiply(p, exp_p, out=p)
        kld[block] = p.sum(axis=1, dtype=np.float64) / sum_p - log_p + log_q
    if not (np.isfinite(kld).all() and np.isfinite(nll_p).all() and np.isfinite(nll_q).all()):
        raise ComputeError("compare: NaN or Inf in the logits; expected finite numbers")
    # KL is never negative; rounding of equal distributions can leave -1e-9
    return PositionStatistics(np.maximum(kld, 0.0), nll_p, nll_q, agreement, top_p, top_q)


def joined(parts: Sequence[PositionStatistics]) -> PositionStatistics:
    """The positions of several windows as one."""

    def pair(name: str) -> tuple[Int64, Float64]:
        both = [getattr(part, name) for part in parts]
        return np.concatenate([ids for ids, _ in both]), np.concatenate([p for _, p in both])

    return PositionStatistics(
        kld=np.concatenate([part.kld for part in parts]),
        nll_baseline=np.concatenate([part.nll_baseline for part in parts]),
        nll_quant=np.concatenate([part.nll_quant for part in parts]),
        agreement=np.concatenate([part.agreement for part in parts]),
        top_baseline=pair("top_baseline"),
        top_quant=pair("top_quant"),
    )
