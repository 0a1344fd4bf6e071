"""Stage 6, profile_result: what a profile found: times of each kind of step, and rates beside the limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pyengine.reports.profile_work import STAGES, Rates, Work, byte_share


@dataclass(frozen=True)
class Phase:
    """A kind of step: times in ms, of one decode step (the mean), or of a whole prompt.

    stages: of STAGES, then other. layers: of each layer, the stages that it has. work: of the same stages.
    all_steps_ms: p10, median and p90 of the wall time of all steps, the slower half too; empty for a prompt.
    """

    context: int
    tokens: int  # a decode step has one
    steps: int
    steps_used: int
    wall_ms: float
    all_steps_ms: dict[str, float]
    stages: dict[str, float]
    layers: list[dict[str, float]]
    work: dict[str, Work]
    rates: Rates

    @property
    def stage_sum_ms(self) -> float:
        return self.wall_ms - self.stages["other"]

    @property
    def ffn_share(self) -> float:
        return self.stages["ffn"] / self.wall_ms

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.wall_ms

    @property
    def byte_share(self) -> float:
        """What account predicts of the FFN: its share of the bytes of a step."""
        return byte_share(self.work)

    def rate(self, amount: float, stage: str) -> float | None:
        """1e9 per second."""
        return amount / self.stages[stage] / 1e6 if amount and self.stages[stage] > 0 else None

    def roofline(self) -> list[dict[str, Any]]:
        """Of each stage that ran: rates, and which part of its time reading or computing at the limits would take."""
        rows = []
        for stage, work in self.work.items():
            seconds = self.stages[stage] / 1e3
            if seconds <= 0:
                continue
            read, compute = self.rates.read_seconds(work), self.rates.compute_seconds(work)
            rows.append(
                {
                    "stage": stage,
                    "ms": self.stages[stage],
                    "bytes": work.bytes,
                    "operations": work.ops,
                    "gb_per_s": self.rate(work.bytes, stage),
                    "gops": self.rate(work.ops, stage),
                    "read_fraction": read / seconds,
                    "compute_fraction": compute / seconds,
                    "bound": "read" if read >= compute else "compute",
                    "fraction": max(read, compute) / seconds,
                }
            )
        return rows

    def differences(self) -> list[dict[str, Any]]:
        """Why the FFN's share is not its share of the bytes: each stage's time beside that of its bytes at the rate at
        which the FFN reads; `points` of the share that this takes. All points: byte_share - ffn_share.

        From meas = ffn / wall and byte_share = ffn / (time of all bytes at the FFN's rate) = ffn / (wall - excess):
        byte_share - meas = byte_share x excess / wall, and excess is a sum over stages.
        """
        per_byte = self.stages["ffn"] / self.work["ffn"].bytes
        rows = []
        for stage, ms in self.stages.items():
            if stage == "ffn":
                continue
            counted = stage in ("attention", "router", "lm_head")  # whose bytes the prediction has
            expected = self.work[stage].bytes * per_byte if counted else 0.0
            rows.append(
                {"stage": stage, "ms": ms, "ms_at_ffn_rate": expected,
                 "points": 100 * self.byte_share * (ms - expected) / self.wall_ms}
            )  # fmt: skip
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "tokens": self.tokens,
            "steps": self.steps,
            "steps_used": self.steps_used,
            "wall_ms": self.wall_ms,
            "stage_sum_ms": self.stage_sum_ms,
            "tokens_per_second": self.tokens_per_second,
            "ffn_share": self.ffn_share,
            "stages": self.stages,
            "layers": [{"layer": i, "ms": sum(s.values()), "stages": s} for i, s in enumerate(self.layers)],
            "roofline": self.roofline(),
        }


@dataclass(frozen=True)
class Cost:
    """Of the timers: the median of timed / untimed - 1 over pairs of the same step, and its standard error."""

    value: float
    error: float
    pairs: int


@dataclass(frozen=True)
class Profile:
    """What `profile` found; the fields of `profile --json`."""

    model: str
    quant: str
    group_size: int | None
    bits_per_weight: float
    kv_dtype: str
    decode: Phase
    prefill: Phase
    sweep: tuple[Phase, ...]  # decode at each context, ascending, that of `decode` among them
    cost: Cost
    machine: dict[str, Any]
    trace: tuple[dict[str, Any], ...]  # events of a Chrome trace

    def to_json(self) -> dict[str, Any]:
        read = {row["stage"]: row["gb_per_s"] for row in self.decode.roofline()}
        decode = {
            **self.decode.to_json(),
            "all_steps_ms": self.decode.all_steps_ms,
            "byte_share": self.decode.byte_share,
            "differences": self.decode.differences(),
        }
        return {
            "model": self.model,
            "quant": self.quant,
            "group_size": self.group_size,
            "bits_per_weight": self.bits_per_weight,
            "kv_dtype": self.kv_dtype,
            "decode": decode,
            "prefill": self.prefill.to_json(),
            "bytes_per_stage": {stage: work.bytes for stage, work in self.decode.work.items()},
            "gb_per_s_per_stage": {stage: read.get(stage) for stage in STAGES},
            "contexts": [
                {"context": p.context, "wall_ms": p.wall_ms, "all_steps_ms": p.all_steps_ms,
                 "ffn_share": p.ffn_share, "byte_share": p.byte_share, "stages": p.stages}
                for p in self.sweep
            ],
            "timer_cost": vars(self.cost),
            "machine": self.machine,
        }  # fmt: skip

    def to_html(self) -> str:
        """One self-contained page."""
        from pyengine.reports.profile_html import page

        return page(self)

    def to_png(self, path: str | os.PathLike[str]) -> None:
        """The page's pictures as one PNG file.

        Errors: ResourceError without the extra [viz], RequestError for a path that cannot be written.
        """
        from pyengine.reports import png, profile_pictures, profile_text

        png.write(path, profile_text.title(self), profile_pictures.pictures(self))

    def to_trace(self) -> dict[str, Any]:
        """A Chrome trace (chrome://tracing, Perfetto) of the prompt and the decode steps at the chosen context."""
        return {"traceEvents": list(self.trace), "displayTimeUnit": "ms"}

    def _repr_html_(self) -> str:
        from pyengine.reports.profile_html import fragment

        return fragment(self)

    def __str__(self) -> str:
        from pyengine.reports.profile_text import report

        return report(self)
