"""Stage 6, compare_result: what `compare` found, as typed values, JSON, text and a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyengine.reports.compare import Float64, PositionStatistics
from pyengine.reports.compare_layers import HiddenError, ModuleError

WORST = 20  # positions listed


@dataclass(frozen=True)
class Choice:
    """A token that a model may put next, and how likely."""

    token: int
    text: str
    probability: float


@dataclass(frozen=True)
class Position:
    """A scored token: what it is and how the models differ on it. before: the text that leads to it."""

    window: int
    position: int
    token: int
    text: str
    kld: float
    delta_p: float
    baseline: tuple[Choice, ...]
    quant: tuple[Choice, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SwapRow:
    """KL that one module of the quantized model causes alone in the baseline; layer None: the head."""

    layer: int | None
    module: str
    mean_kld: float


@dataclass(frozen=True)
class Greedy:
    """Greedy texts of both for a raw prompt. first_difference: the first token and character that differ, or None."""

    prompt: str
    baseline: str
    quant: str
    first_difference: dict[str, int] | None


@dataclass(frozen=True)
class CompareResult:
    """The fields of `compare --json`. KL is KL(baseline || quant) in nats; shares are fractions 0..1.

    *_stderr: standard errors as if positions were independent (None of one). delta_p: of the probability of the token
    that follows, quant minus baseline. layers, hidden: empty where they were not asked for. swap: None likewise.
    """

    model: str
    against: str
    baseline: str
    quant: str
    group_size: int | None
    bits_per_weight: float
    text: dict[str, Any]
    tokens: int
    window: int
    scored: int
    mean_kld: float
    mean_kld_stderr: float | None
    median_kld: float
    p99_kld: float
    max_kld: float
    top1_agreement: float
    ppl_baseline: float
    ppl_baseline_stderr: float | None
    ppl_quant: float
    ppl_quant_stderr: float | None
    delta_p: dict[str, float]
    layers: tuple[ModuleError, ...]
    layers_tokens: int
    hidden: tuple[HiddenError, ...]
    swap: tuple[SwapRow, ...] | None
    swap_tokens: int
    greedy: Greedy | None
    loaded: str  # "together" or "one after the other"
    notes: tuple[str, ...]
    positions: tuple[Position, ...]

    @property
    def worst(self) -> list[Position]:
        """Where the models part most."""
        return sorted(self.positions, key=lambda p: -p.kld)[:WORST]

    def to_json(self) -> dict[str, Any]:
        record = {name: value for name, value in vars(self).items() if name != "positions"}
        record["layers"] = [row.to_json() for row in self.layers]
        record["hidden"] = [row.to_json() for row in self.hidden]
        record["swap"] = None if self.swap is None else [asdict(row) for row in self.swap]
        record["greedy"] = None if self.greedy is None else asdict(self.greedy)
        record["notes"] = list(self.notes)
        record["worst"] = [position.to_json() for position in self.worst]
        record["positions"] = {
            name: [getattr(p, name) for p in self.positions] for name in ("window", "token", "text", "kld", "delta_p")
        }
        return record

    def to_html(self) -> str:
        """One self-contained page."""
        from pyengine.reports.compare_html import page

        return page(self)

    def to_png(self, path: str | os.PathLike[str]) -> None:
        """The page's pictures as one PNG file.

        Errors: ResourceError without the extra [viz], RequestError for a path that cannot be written.
        """
        from pyengine.reports import compare_pictures, compare_text, png

        png.write(path, compare_text.title(self), compare_pictures.pictures(self))

    def _repr_html_(self) -> str:
        from pyengine.reports.compare_html import fragment

        return fragment(self)

    def __str__(self) -> str:
        from pyengine.reports.compare_text import report

        return report(self)


def stderr(values: Float64) -> float | None:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def perplexity(nll: Float64) -> tuple[float, float | None]:
    """exp of the mean, and its standard error to first order."""
    value, error = float(np.exp(nll.mean())), stderr(nll)
    return value, None if error is None else value * error


def figures(s: PositionStatistics) -> dict[str, Any]:
    """The fields of a CompareResult that follow from the positions."""
    ppl, quant_ppl, delta = perplexity(s.nll_baseline), perplexity(s.nll_quant), s.delta_p
    return {
        "scored": len(s.kld),
        "mean_kld": float(s.kld.mean()),
        "mean_kld_stderr": stderr(s.kld),
        "median_kld": float(np.median(s.kld)),
        "p99_kld": float(np.percentile(s.kld, 99)),
        "max_kld": float(s.kld.max()),
        "top1_agreement": float(s.agreement.mean()),
        "ppl_baseline": ppl[0],
        "ppl_baseline_stderr": ppl[1],
        "ppl_quant": quant_ppl[0],
        "ppl_quant_stderr": quant_ppl[1],
        "delta_p": {
            "mean": float(delta.mean()),
            "rms": float(np.sqrt(np.square(delta).mean())),
            **{f"p{q}": float(np.percentile(delta, q)) for q in (1, 5, 50, 95, 99)},
        },
    }


def first_difference(a: Sequence[int], b: Sequence[int], text_a: str, text_b: str) -> dict[str, int] | None:
    """Index of the first token, and of the first character of the texts, that differ."""
    token = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if token == len(a) == len(b):
        return None
    pairs = enumerate(zip(text_a, text_b, strict=False))
    character = next((i for i, (x, y) in pairs if x != y), min(len(text_a), len(text_b)))
    return {"token": token, "character": character}
