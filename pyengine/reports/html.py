"""Stage 6, html: what reports share as HTML: one self-contained page, tables, and stacked bars as inline SVG.

No script, no network: style is in the page, light or dark as the reader's system says, and plain when printed. Every
number of a bar is also in a table beside it.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyengine.errors import RequestError, ResourceError

CLASS = "pyengine-report"
WIDTH, LABEL, END, ROW, BAR = 1000, 130, 110, 34, 22  # of a chart, in its own units; END: room for a row's total
CHARACTER = 7.2  # width of one, about
LIGHT = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#975a16", "#97266d", "#4a5568", "#0987a0")
DARK = ("#63b3ed", "#f6ad55", "#68d391", "#b794f4", "#f6e05e", "#f687b3", "#a0aec0", "#76e4f7")


def _style() -> str:
    def colours(values: Sequence[str]) -> str:
        return "".join(f"--s{i}:{value};" for i, value in enumerate(values))

    light = f"--text:#1a202c;--faint:#4a5568;--line:#cbd5e0;--page:#ffffff;--on:#ffffff;{colours(LIGHT)}"
    dark = f"--text:#e2e8f0;--faint:#a0aec0;--line:#4a5568;--page:#171923;--on:#1a202c;{colours(DARK)}"
    c = "." + CLASS
    fills = "".join(f"{c} .s{i}{{fill:var(--s{i});background:var(--s{i})}}" for i in range(len(LIGHT)))
    lines = "".join(f"{c} .l{i}{{stroke:var(--s{i});stroke-width:2;fill:none}}" for i in range(len(LIGHT)))
    return (
        f"{c}{{{light}color:var(--text);background:var(--page);font:15px/1.5 system-ui,sans-serif;max-width:62rem;"
        f"margin:0 auto;padding:1rem}}@media(prefers-color-scheme:dark){{{c}{{{dark}}}}}"
        f"@media print{{{c}{{{light}font-size:10pt;max-width:none}}{c} section{{break-inside:avoid}}"
        f"{c} *{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}}}"
        f"{c} table{{border-collapse:collapse;margin:.5rem 0;font-variant-numeric:tabular-nums}}"
        f"{c} table{{display:block;overflow-x:auto}}"
        f"{c} th,{c} td{{border-bottom:1px solid var(--line);padding:.15rem .6rem;text-align:right;color:var(--text)}}"
        f"{c} th:first-child,{c} td:first-child{{text-align:left}}"
        f"{c} h1{{font-size:1.5rem}}{c} h2{{font-size:1.15rem;margin-top:1.6rem}}{c} p{{margin:.4rem 0}}"
        f"{c} pre{{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.82rem;color:var(--text);background:none}}"
        f"{c} svg{{width:100%;height:auto;display:block}}"
        f"{c} svg text{{fill:var(--text);font:13px system-ui,sans-serif}}"
        f"{c} svg text.on{{fill:var(--on)}}{c} .key{{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}}"
        f"{c} .faint{{color:var(--faint)}}{fills}"
        f"{c} .grid{{stroke:var(--line);fill:none}}{c} .dashed{{stroke-dasharray:6 4}}"
        f"{c} .heat{{fill:var(--s1)}}{c} .strip{{white-space:pre-wrap;overflow-wrap:anywhere}}{lines}"
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells as text, the first column to the left."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Bar:
    """A row of a chart: parts by series, and the text behind it."""

    label: str
    parts: Mapping[str, float]
    end: str = ""


def stacked_bars(title: str, series: Mapping[str, int], bars: Sequence[Bar], *, fractions: bool = False) -> str:
    """Bars of one scale, or (fractions) each as parts of its own whole. series: parts in order -> number of a colour.

    Parts that are 0 are left out. There are as many colours as in LIGHT.
    """
    longest = max((sum(bar.parts.values()) for bar in bars), default=0.0)
    room = WIDTH - LABEL - END
    drawn = []
    for row, bar in enumerate(bars):
        whole = sum(bar.parts.values())
        scale = room / (whole if fractions else longest) if whole else 0.0
        x, y = float(LABEL), row * ROW + (ROW - BAR) / 2
        middle = y + BAR / 2 + 4.5
        drawn.append(f'<text x="{LABEL - 8}" y="{middle:.1f}" text-anchor="end">{escape(bar.label)}</text>')
        for name, colour in series.items():
            value = bar.parts.get(name, 0.0)
            if not value:
                continue
            width, share = value * scale, f"{100 * value / whole:.1f} %"
            drawn.append(
                f'<rect class="s{colour}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{BAR}">'
                f"<title>{escape(f'{bar.label}, {name}: {share}')}</title></rect>"
            )
            if width > CHARACTER * len(share) + 8:
                at = f'x="{x + width / 2:.2f}" y="{middle:.1f}" text-anchor="middle"'
                drawn.append(f'<text class="on" {at}>{share}</text>')
            x += width
        drawn.append(f'<text x="{x + 8:.2f}" y="{middle:.1f}">{escape(bar.end)}</text>')
    used = [(i, name) for name, i in series.items() if any(bar.parts.get(name) for bar in bars)]
    legend = "".join(f'<span class="key s{i}"></span>{escape(name)}' for i, name in used)
    height = max(len(bars), 1) * ROW
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg><p class="faint">{legend}</p>'
    )


def check_writable(path: Path) -> None:
    """RequestError, before anything is measured, where `write` could not put a file."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise RequestError(f"{path}: not a regular file; expected a file to write to")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise RequestError(f"{path}: its folder is not there or not writable; expected a file that can be written")


def write(path: Path, text: str) -> None:
    """The whole file or none: written beside `path` under another name, then renamed.

    A link is followed. Errors: RequestError where there cannot be such a file, ResourceError for a full disk.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise RequestError(f"{path}: not a regular file; expected a file to write to")
    part = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        try:
            with part.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        import errno

        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = ResourceError if full else RequestError
        expected = "room for the file" if full else "a file that can be written"
        raise kind(f"{path}: {error.strerror or error}; expected {expected}") from error
