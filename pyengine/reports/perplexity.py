"""Stage 6, perplexity: how well a model predicts a text: exp of the mean negative log-likelihood of its tokens.

Windows, context and arithmetic are compare's: with the same text, tokens and window, and the default stride, the
result is its ppl_baseline or ppl_quant to the bit. A window starts from an empty context, with the model's own BOS if
it has one, and the next one `stride` tokens of text later; the default stride leaves no gap and no overlap. Scored are
the last tokens of each window: half of it, or as many as are new where the stride is less. So with a stride of
half a window or less each token after the first window's is scored once, with at least window - stride tokens of
context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyengine.errors import ComputeError
from pyengine.reports.compare import LogitsEngine, TextSource, TextTokenizer, make_windows, position_nll


@dataclass(frozen=True)
class PerplexityResult:
    """The fields of `perplexity --json`.

    tokens: run in all, in windows of `window`. stride: tokens of text between the beginnings of two windows. scored: of
    all windows together. nll: mean over them, in nats, and the standard error of that mean as if they were independent
    (None of one token).
    """

    quant: str
    bits_per_weight: float
    text: dict[str, Any]
    tokens: int
    window: int
    stride: int
    scored: int
    nll: float
    nll_stderr: float | None
    ppl: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def perplexity(
    engine: LogitsEngine,
    tokenizer: TextTokenizer,
    text: TextSource,
    *,
    tokens: int = 4096,
    window: int = 512,
    stride: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> PerplexityResult:
    """Run an engine over the windows and score them.

    Errors: RequestError if sizes do not fit each other or the text, ComputeError if a logit is NaN or infinite.
    """
    windows, step = make_windows(tokenizer, text.content, tokens=tokens, window=window, stride=stride)
    scored = min(window // 2, step)
    rows = list(range(window - scored - 1, window - 1))  # the logits after token i score token i + 1
    parts = []
    for index, ids in enumerate(windows):
        if progress is not None:
            progress(index, len(windows), "scoring")
        parts.append(position_nll(engine.logits(ids, rows), ids[window - scored :]))
    nll = np.concatenate(parts)
    mean = float(nll.mean())
    if mean > np.log(np.finfo(np.float64).max):
        raise ComputeError(f"perplexity: mean negative log-likelihood {mean:.1f} nats; expected a finite perplexity")
    return PerplexityResult(
        quant=engine.quant,
        bits_per_weight=engine.bits_per_weight,
        text=text.to_json(),
        tokens=tokens,
        window=window,
        stride=step,
        scored=len(nll),
        nll=mean,
        nll_stderr=float(nll.std(ddof=1) / np.sqrt(len(nll))) if len(nll) > 1 else None,
        ppl=float(np.exp(nll.mean())),
    )
