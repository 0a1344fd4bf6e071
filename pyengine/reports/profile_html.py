"""Stage 6, profile_html: a profile as a page: bars, a roofline, the share against the context; and the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.reports import charts, html
from pyengine.reports import profile_text as text
from pyengine.reports.charts import Axis, Series
from pyengine.reports.html import Bar

if TYPE_CHECKING:
    from pyengine.reports.profile import Phase, Profile

# The same colour for the same stage in every picture.
COLOURS = {
    "ffn": 0, "attention": 1, "lm_head": 3, "norm": 6, "embed": 4, "router": 5, "sample": 2, "other": 7,
}  # fmt: skip


def page(p: Profile) -> str:
    return html.page(f"{p.model}: where the time goes", _body(p))


def fragment(p: Profile) -> str:
    return html.fragment(_body(p))


def _body(p: Profile) -> str:
    head = [
        f"<h1>{html.escape(p.model)}</h1>",
        f"<p><strong>{html.escape(text.first_line(p))}</strong></p>",
        html.preformatted(text.explanation(p)),
        html.preformatted(text.about_lines(p)),
    ]
    return "".join([*head, _phase("Decode", p.decode), _phase("Prefill", p.prefill), _layers(p), _sweep(p)])


def _phase(title: str, phase: Phase) -> str:
    bar = Bar(title.lower(), {s: max(ms, 0.0) for s, ms in phase.stages.items()}, f"{phase.wall_ms:.3f} ms")
    what = (
        f"{title} at context {phase.context:,}: {phase.tokens_per_second:.1f} tok/s, FFN {100 * phase.ffn_share:.1f} %"
    )
    return html.section(
        title,
        html.paragraph(what),
        html.stacked_bars(f"{title} time by stage", COLOURS, [bar]),
        _roofline(title, phase),
        html.table(*text.stage_table(phase)),
    )


def _roofline(title: str, phase: Phase) -> str:
    """Operations per byte against Gop/s: what each stage does, under what the machine gives."""
    rows = [row for row in phase.roofline() if row["gops"] and row["bytes"]]
    if not rows:
        return ""
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
        series.append(Series(f"attention scores {rates.score:.0f} Gop/s", 7, roof(rates.score), dashed=True))
    series += [
        Series(row["stage"], COLOURS[row["stage"]], [point], line=False, labels=[row["stage"]])
        for row, point in zip(rows, at, strict=True)
    ]
    return charts.plot(f"{title}: roofline", x, y, series)


def _layers(p: Profile) -> str:
    bars = [Bar(f"layer {i}", layer, f"{sum(layer.values()):.3f} ms") for i, layer in enumerate(p.decode.layers)]
    chart = html.stacked_bars("A decode step by layer", COLOURS, bars)
    return html.section("Layers", chart, html.table(*text.layer_table(p)))


def _sweep(p: Profile) -> str:
    table = html.table(*text.sweep_table(p))
    if len(p.sweep) < 2:
        return html.section("FFN share against context", table)
    contexts = [q.context for q in p.sweep]
    x = Axis("context, tokens", contexts[0], contexts[-1], log=True)
    measured = Series("measured", 0, [(q.context, 100 * q.ffn_share) for q in p.sweep])
    predicted = Series("by bytes, as account counts them", 1, [(q.context, 100 * q.byte_share) for q in p.sweep])
    y = Axis("FFN share, %", 0, 100)
    chart = charts.plot("FFN share of decode against context", x, y, [measured, predicted], x_ticks=contexts)
    return html.section("FFN share against context", chart, table)
