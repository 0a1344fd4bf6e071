"""Stage 6, compare_html: a comparison as a page: its pictures, and the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.reports import compare_pictures as pictures
from pyengine.reports import compare_text as text
from pyengine.reports import html

if TYPE_CHECKING:
    from pyengine.reports.compare_result import CompareResult


def page(r: CompareResult) -> str:
    return html.page(f"{r.model}: {r.quant} against {r.baseline}", _body(r))


def fragment(r: CompareResult) -> str:
    return html.fragment(_body(r))


def _body(r: CompareResult) -> str:
    head = f"<h1>{html.escape(r.model)}: {html.escape(r.quant)} against {html.escape(r.baseline)}</h1>"
    return "".join([head, html.facts(text.summary(r)), _layers(r), _swap(r), _tokens(r), _greedy(r)])


def _layers(r: CompareResult) -> str:
    if not r.layers:
        return ""
    what = html.paragraph(f"Each module on the baseline's inputs, {r.layers_tokens} tokens, one at a time.")
    tables = [html.table(*text.layer_table(r)), html.table(*text.module_table(r))]
    return html.section("Errors by layer and module", what, *map(html.figure, pictures.layers(r)), *tables)


def _swap(r: CompareResult) -> str:
    drawing = pictures.swap(r)
    if drawing is None:
        return ""
    return html.section("One module at a time", html.figure(drawing), html.table(*text.swap_table(r)))


def _tokens(r: CompareResult) -> str:
    """The scored text; pointing at a token shows what either model expected there."""
    strip = pictures.tokens(r)
    worst = html.table(*text.worst_table(r))
    return html.section(strip.title, html.strip(strip), html.paragraph("Where they part most"), worst)


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
