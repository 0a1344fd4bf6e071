"""Stage 6, compare_html: a comparison as a page: heat maps of layer x module, a strip of the text's tokens, tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pyengine.reports import charts, html
from pyengine.reports import compare_text as text
from pyengine.reports.html import Bar

if TYPE_CHECKING:
    from pyengine.reports.compare_result import CompareResult

FAINT = 0.001  # nats: KL up to here leaves a token uncoloured; 1 nat and more colours it fully


def page(r: CompareResult) -> str:
    return html.page(f"{r.model}: {r.quant} against {r.baseline}", _body(r))


def fragment(r: CompareResult) -> str:
    return html.fragment(_body(r))


def _body(r: CompareResult) -> str:
    head = f"<h1>{html.escape(r.model)}: {html.escape(r.quant)} against {html.escape(r.baseline)}</h1>"
    return "".join([head, html.preformatted(text.summary_lines(r)), _layers(r), _swap(r), _tokens(r), _greedy(r)])


def _layers(r: CompareResult) -> str:
    if not r.layers:
        return ""
    modules, found = text.modules_of(r), {(row.layer, row.module): row for row in r.layers}
    layers = [state.layer for state in r.hidden]
    parts = [html.paragraph(f"Each module on the baseline's inputs, {r.layers_tokens} tokens, one at a time.")]
    for title, name in (("Output error", "output_rel_error"), ("Weight error", "weight_rel_error")):
        values = [
            [getattr(found[layer, m], name) if (layer, m) in found else None for m in modules] for layer in layers
        ]
        parts.append(html.paragraph(f"{title}, relative"))
        parts.append(
            charts.heat_map(f"{title} by layer and module", modules, [f"{i}" for i in layers], values, "{:.4f}".format)
        )
    parts += [html.table(*text.layer_table(r)), html.table(*text.module_table(r))]
    return html.section("Errors by layer and module", *parts)


def _swap(r: CompareResult) -> str:
    if r.swap is None:
        return ""
    head, rows = text.swap_table(r)
    bars = [Bar(row[0], {"KL": max(one.mean_kld, 0.0)}, row[1]) for row, one in zip(rows, r.swap, strict=True)]
    chart = html.stacked_bars("KL caused by each module alone", {"KL": 1}, bars[: text.SHOWN * 2])
    what = f"KL of the baseline with one module quantized, {r.swap_tokens} tokens"
    return html.section("One module at a time", html.paragraph(what), chart, html.table(head, rows))


def _tokens(r: CompareResult) -> str:
    """The scored text, the deeper the larger its KL; pointing at a token shows what either model expected there."""
    spans: list[str] = []
    window = -1
    for p in r.positions:
        if p.window != window:
            window = p.window
            spans.append(f'{"</p>" if spans else ""}<p class="strip">')
        depth = min(max(math.log(p.kld / FAINT) / math.log(1 / FAINT), 0.0), 1.0) if p.kld > 0 else 0.0
        style = f' style="background:rgba(214,110,40,{0.75 * depth:.2f})"' if depth else ""
        spans.append(f'<span{style} title="{html.escape(text.title_of(p, r))}">{html.escape(p.text)}</span>')
    note = f"Second half of each window; from no colour ({FAINT:g} nats and less) to full (1 and more)."
    strip = "".join(spans) + "</p>"
    worst = html.table(*text.worst_table(r))
    return html.section("Token by token", html.paragraph(note), strip, html.paragraph("Where they part most"), worst)


def _greedy(r: CompareResult) -> str:
    if r.greedy is None:
        return ""
    g, parts = r.greedy, [html.paragraph(f"Prompt: {r.greedy.prompt}")]
    for name, whole in ((r.baseline, g.baseline), (r.quant, g.quant)):
        at = len(whole) if g.first_difference is None else g.first_difference["character"]
        marked = f"<mark>{html.escape(whole[at:])}</mark>" if at < len(whole) else ""
        parts.append(f"<p><strong>{html.escape(name)}</strong> {html.escape(whole[:at])}{marked}</p>")
    same = "the same text" if g.first_difference is None else f"they part at token {g.first_difference['token']}"
    return html.section("Greedy texts", html.paragraph(same), *parts)
