"""Stage 6, profile_html: a profile as a page: its pictures, and the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.reports import html
from pyengine.reports import profile_pictures as pictures
from pyengine.reports import profile_text as text

if TYPE_CHECKING:
    from pyengine.reports.drawing import Drawing
    from pyengine.reports.profile_result import Phase, Profile


def page(p: Profile) -> str:
    return html.page(f"{p.model}: where the time goes", _body(p))


def fragment(p: Profile) -> str:
    return html.fragment(_body(p))


def _body(p: Profile) -> str:
    why = text.explanation(p)
    head = [
        f"<h1>{html.escape(p.model)}</h1>",
        f"<p><strong>{html.escape(text.first_line(p))}</strong></p>",
        *map(html.paragraph, why[:1]),
        html.items(why[1:]),
        html.facts(text.about(p)),
    ]
    layers = html.section("Layers", html.figure(pictures.layers(p)), html.table(*text.layer_table(p)))
    sweep = html.section("FFN share against context", _figure(pictures.sweep(p)), html.table(*text.sweep_table(p)))
    return "".join([*head, _phase("Decode", p.decode), _phase("Prefill", p.prefill), layers, sweep])


def _phase(title: str, phase: Phase) -> str:
    bar, roofline = pictures.stages(title, phase), pictures.roofline(title, phase)
    return html.section(title, html.figure(bar), _figure(roofline), html.table(*text.stage_table(phase)))


def _figure(drawing: Drawing | None) -> str:
    return "" if drawing is None else html.figure(drawing)
