"""Stage 6, profile_pictures: what a profile draws: bars, a roofline, the share against the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.reports import charts
from pyengine.reports.charts import Axis, Bar, Series
from pyengine.reports.drawing import Drawing

if TYPE_CHECKING:
    from pyengine.reports.profile_result import Phase, Profile

# The same colour for the same stage in every picture.
COLOURS = {
    "ffn": 0, "attention": 1, "lm_head": 3, "norm": 6, "embed": 4, "router": 5, "sample": 2, "other": 7,
}  # fmt: skip


def pictures(p: Profile) -> list[Drawing]:
    """All of them, in the order of the page."""
    found = [stages("Decode", p.decode), roofline("Decode", p.decode)]
    found += [stages("Prefill", p.prefill), roofline("Prefill", p.prefill), layers(p), sweep(p)]
    return [one for one in found if one is not None]


def stages(title: str, phase: Phase) -> Drawing:
    """The time of a phase as one bar."""
    bar = Bar(title.lower(), {s: max(ms, 0.0) for s, ms in phase.stages.items()}, f"{phase.wall_ms:.3f} ms")
    what = (
        f"{title} at context {phase.context:,}: {phase.tokens_per_second:.1f} tok/s, FFN {100 * phase.ffn_share:.1f} %"
    )
    return charts.stacked_bars(f"{title} time by stage", COLOURS, [bar], caption=what)


def roofline(title: str, phase: Phase) -> Drawing | None:
    """Operations per byte against Gop/s: what each stage does, under what the machine gives."""
    rows = [row for row in phase.roofline() if row["gops"] and row["bytes"]]
    if not rows:
        return None
    rates = phase.rates
    at = [(row["operations"] / row["bytes"], row["gops"]) for row in rows]
    x = charts.log_axis("operations per byte", [*(p[0] for p in at), rates.matrix / rates.read])
    y = charts.log_axis("Gop/s", [*(p[1] for p in at), rates.matrix, rates.read * x.low])

    def roof(top: float) -> list[tuple[float, float]]:
        knee = min(max(top / rates.read, x.low), x.high)
        return [(at, min(top, at * rates.read)) for at in (x.low, knee, x.high)]

    series = [
        Series(f"read {rates.read:.1f} GB/s, matrices {rates.matrix:.0f} Gop/s", 6, roof(rates.matrix), dashed=True)
    ]
    if rates.score < rates.matrix:
        name = f"attention scores {rates.score:.0f} Gop/s"
        series.append(Series(name, COLOURS["attention"], roof(rates.score), dashed=True))
    series += [
        Series(row["stage"], COLOURS[row["stage"]], [point], line=False, labels=[row["stage"]])
        for row, point in zip(rows, at, strict=True)
    ]
    return charts.plot(f"{title}: roofline", x, y, series, caption=f"Roofline of {title.lower()}")


def layers(p: Profile) -> Drawing:
    bars = [Bar(f"layer {i}", layer, f"{sum(layer.values()):.3f} ms") for i, layer in enumerate(p.decode.layers)]
    caption = f"A decode step at context {p.decode.context:,}, layer by layer"
    return charts.stacked_bars("A decode step by layer", COLOURS, bars, caption=caption)


def sweep(p: Profile) -> Drawing | None:
    """The FFN's share against the context, beside what its bytes predict; of one context there is no curve."""
    if len(p.sweep) < 2:
        return None
    contexts = [q.context for q in p.sweep]
    x = Axis("context, tokens", contexts[0], contexts[-1], log=True)
    measured = Series("measured", 0, [(q.context, 100 * q.ffn_share) for q in p.sweep])
    predicted = Series("by bytes, as account counts them", 1, [(q.context, 100 * q.byte_share) for q in p.sweep])
    y = Axis("FFN share, %", 0, 100)
    title = "FFN share of decode against context"
    return charts.plot(title, x, y, [measured, predicted], x_ticks=contexts, caption=title)
