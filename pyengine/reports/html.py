"""Stage 6, html: what reports share as HTML: one self-contained page, tables, and drawings as inline SVG.

No script, no network: style is in the page, light or dark as the reader's system says, and plain when printed. Every
number of a picture is also in a table beside it. A page, or the cell of a notebook, that is narrow shows the pictures'
narrow layouts, and each row of a table that does not fit as a block of named values: nothing scrolls sideways.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from pyengine.reports import drawing
from pyengine.reports.drawing import DARK, LIGHT, STRIP_OPACITY, STRIP_RGB, Drawing, Layout, Palette, Strip

CLASS = "pyengine-report"
LONG = 40  # characters of a cell that may be broken into lines
NARROW_PIXELS = math.ceil(drawing.WIDTH * drawing.READABLE / drawing.TEXT)  # a page of less is narrow
# Pixels of tables on a narrow page: text, a character's width, between columns, and what a table may take of 400.
SMALL, DIGIT, BLANK, SPACE = 12, 7.5, 8, 368


def _style() -> str:
    def variables(palette: Palette, light: str, dark: str) -> str:
        """light, dark: of text on a colour where only the light, or the dark, palette's `on` reads better."""
        p = palette
        series = "".join(f"--s{i}:{value};" for i, value in enumerate(p.series))
        return (
            f"--text:{p.text};--faint:{p.faint};--line:{p.line};--page:{p.page};--on:{p.on};"
            f"--onl:{light};--ond:{dark};{series}"
        )

    bright, dim = variables(LIGHT, LIGHT.on, LIGHT.text), variables(DARK, DARK.text, DARK.on)
    c, count = "." + CLASS, range(len(LIGHT.series))
    fills = "".join(f"{c} .s{i}{{fill:var(--s{i});background:var(--s{i});border-color:var(--s{i})}}" for i in count)
    lines = "".join(f"{c} .l{i}{{stroke:var(--s{i});stroke-width:2;fill:none}}" for i in count)
    on = "".join(f"{c} svg text.{name}{{fill:var(--{name})}}" for name in ("on", "onl", "ond"))
    return (
        f"{c}{{{bright}color:var(--text);background:var(--page);font:15px/1.5 system-ui,sans-serif;max-width:62rem;"
        f"margin:0 auto;padding:1rem;overflow-wrap:anywhere}}@media(prefers-color-scheme:dark){{{c}{{{dim}}}}}"
        f"{c} table{{border-collapse:collapse;margin:.5rem 0;font-variant-numeric:tabular-nums;display:block;"
        f"overflow-x:auto}}"
        f"{c} th,{c} td{{border-bottom:1px solid var(--line);padding:.15rem .6rem;text-align:right;color:var(--text);"
        f"white-space:nowrap}}{c} .long{{white-space:normal;min-width:16rem;text-align:left}}"
        f"{c} .long span{{display:inline-block;margin-right:.4em}}"
        f"{c} th:first-child,{c} td:first-child{{text-align:left}}"
        f"{c} .facts th,{c} .facts td{{border:0;padding:.05rem 1rem .05rem 0;text-align:left;vertical-align:top}}"
        f"{c} .facts th{{font-weight:normal;color:var(--faint)}}{c} .facts td{{white-space:normal}}"
        f"{c} h1{{font-size:1.5rem}}{c} h2{{font-size:1.15rem;margin-top:1.6rem}}{c} p{{margin:.4rem 0}}"
        f"{c} ul{{margin:.4rem 0;padding-left:1.4rem}}"
        f"{c} pre{{white-space:pre-wrap;font-size:.82rem;color:var(--text);background:none}}"
        f"{c}{{container-type:inline-size}}{c} svg{{width:100%;height:auto;display:block}}"
        f"{c} svg.narrow{{display:none;max-width:{drawing.NARROW * 1.5:g}px}}"
        f"{c} svg text{{fill:var(--text);font:13px system-ui,sans-serif}}{on}"
        f"{c} .keys span{{display:inline-block;margin-right:1em}}"
        f"{c} .keys i{{display:inline-block;width:.8em;height:.8em;margin-right:.3em}}"
        f"{c} .keys i.dash{{height:0;vertical-align:middle;width:1.4em;border-width:2px 0 0;border-style:dashed}}"
        f"{c} .faint{{color:var(--faint)}}{fills}{lines}"
        f"{c} .keys i.dash{{background:none}}"
        f"{c} .grid{{stroke:var(--line);fill:none}}{c} .dashed{{stroke-dasharray:6 4}}"
        f"{c} .strip{{white-space:pre-wrap}}{c} mark{{background:#f6ad55;color:#1a202c}}"
        f"@media screen{{@container(width<{NARROW_PIXELS}px){{{_narrow(c)}}}}}"
        f"@media print{{{c}{{{bright}font-size:10pt;max-width:none}}{c} section{{break-inside:avoid}}"
        f"{c} *{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}}}"
    )


def _narrow(c: str) -> str:
    """Of a narrow page."""
    cards = f"{c} table.cards"
    return (
        f"{c} svg.wide{{display:none}}{c} svg.narrow{{display:block}}{c} table{{font-size:{SMALL}px}}"
        f"{c} .facts{{font-size:inherit}}{c} th,{c} td{{padding:.15rem {BLANK // 2}px}}"
        f"{c} th,{c} td:first-child{{white-space:normal;overflow-wrap:normal;vertical-align:bottom}}"
        f"{cards} thead{{display:none}}{cards} tbody{{display:block}}"
        f"{cards} tr{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--cell)),1fr));"
        f"gap:0 .8rem;border-bottom:1px solid var(--line);padding:.3rem 0}}"
        f"{cards} td{{display:flex;justify-content:space-between;gap:.6em;border:0;padding:0}}"
        f"{cards} td::before{{content:attr(data-head);color:var(--faint);white-space:normal;text-align:left}}"
        f"{cards} td:first-child{{grid-column:1/-1;justify-content:start;font-weight:600;overflow-wrap:anywhere}}"
        f"{cards} td:first-child::before{{font-weight:normal}}{cards} td:empty{{display:none}}"
        f"{cards} .long{{display:block;grid-column:1/-1;min-width:0}}{cards} .long::before{{display:block}}"
    )


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def fragment(body: str) -> str:
    """`body` with the style of a report, to be shown inside another page (a notebook)."""
    return f'<div class="{CLASS}"><style>{_style()}</style>{body}</div>'


def page(title: str, body: str) -> str:
    """A whole file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>html{{background:#fff}}body{{margin:0}}"
        "@media(prefers-color-scheme:dark){html{background:#171923}}@media print{html{background:#fff}}</style></head>"
        f"<body>{fragment(body)}</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(text: object) -> str:
    return f"<p>{escape(text)}</p>"


def preformatted(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names, and what there is to say of each."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in pairs)
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells as text, the first column and columns of long texts to the left. Two blanks: a good place for a break."""
    long = {i for row in rows for i, cell in enumerate(row) if len(cell) > LONG}
    longest = [max((len(row[i]) for row in rows), default=0) for i in range(len(head))]
    least = [max(map(len, name.split()), default=0) for name in head]  # the head and the first column may be broken
    least[1:] = map(max, least[1:], longest[1:])
    least[0] = max([least[0], *(len(word) for row in rows for word in row[0].split())])
    fits = not long and DIGIT * sum(least) + BLANK * len(head) <= SPACE

    def cell(i: int, text: str) -> str:
        said = "" if fits else f' data-head="{escape(head[i])}"'
        if i not in long:
            return f"<td{said}>{escape(text)}</td>"
        return f'<td class="long"{said}>{"  ".join(f"<span>{escape(part)}</span>" for part in text.split("  "))}</td>'

    names = "".join(
        f'<th class="long">{escape(name)}</th>' if i in long else f"<th>{escape(name)}</th>"
        for i, name in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(cell(i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    width = max((len(head[i]) + n for i, n in enumerate(longest) if i and i not in long), default=0)
    kind = "" if fits else f' class="cards" style="--cell:{width}ch"'
    return f"<table{kind}><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _shape(shape: drawing.Shape) -> str:
    title = f"<title>{escape(shape.title)}</title>" if isinstance(shape, drawing.Rect | drawing.Circle) else ""
    match shape:
        case drawing.Rect(x, y, width, height, colour, _, opacity):
            pale = f' style="fill-opacity:{opacity:.3f}"' if opacity < 1 else ""
            at = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:g}"'
            return f'<rect class="s{colour}" {at}{pale}>{title}</rect>'
        case drawing.Circle(x, y, colour, _, radius):
            return f'<circle class="s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{title}</circle>'
        case drawing.Line(points, colour, dashed):
            name = "grid" if colour is None else f"l{colour}"
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            return f'<path class="{name}{" dashed" if dashed else ""}" d="M{path}"/>'
        case drawing.Text(x, y, text, anchor, ground, turned):
            better = ground is not None, *((p.reads_better_on(*ground) for p in (LIGHT, DARK)) if ground else ())
            name = {(True, True, True): "on", (True, True, False): "onl", (True, False, True): "ond"}.get(better, "")
            style = f' class="{name}"' if name else ""
            style += "" if anchor == "start" else f' text-anchor="{anchor}"'
            style += f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
            return f'<text{style} x="{x:.2f}" y="{y:.1f}">{escape(text)}</text>'


def figure(d: Drawing) -> str:
    """A drawing, for wide and for narrow pages, with its caption and legend."""
    layouts = "".join(_svg(d.title, name, layout) for name, layout in (("wide", d.wide), ("narrow", d.narrow)))
    keys = "".join(
        f'<span><i class="s{key.colour}{" dash" if key.dashed else ""}"></i>{escape(key.name)}</span>'
        for key in d.legend
    )
    legend = f'<p class="faint keys">{keys}</p>' if keys else ""
    return f'{paragraph(d.caption) if d.caption else ""}<div class="figure">{layouts}</div>{legend}'


def _svg(title: str, name: str, layout: Layout) -> str:
    return (
        f'<svg class="{name}" viewBox="0 0 {layout.width:g} {layout.height:g}" role="img" '
        f'aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">{"".join(map(_shape, layout.shapes))}</svg>'
    )


def strip(s: Strip) -> str:
    """Coloured text; a token's title shows when it is pointed at."""
    parts = [paragraph(s.caption)] if s.caption else []
    for tokens in s.paragraphs:
        spans = []
        for token in tokens:
            colour = ",".join(map(str, STRIP_RGB))
            style = f' style="background:rgba({colour},{STRIP_OPACITY * token.depth:.2f})"' if token.depth else ""
            spans.append(f'<span{style} title="{escape(token.title)}">{escape(token.text)}</span>')
        parts.append(f'<p class="strip">{"".join(spans)}</p>')
    return "".join(parts)
