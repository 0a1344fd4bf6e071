"""Stage 6, charts: pictures of a page that are not bars: points and curves over axes, and a heat map, as inline SVG.

Every point has its numbers as a title, and the report a table beside the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyengine.reports.html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000, 380, 80, 150, 14, 44
CELL = 26  # height of a row of a heat map


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one colour (a number of html.LIGHT), joined by a line or each with its own label."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    line: bool = True
    dashed: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Axis:
    """low < high; log: both above 0."""

    title: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 .. 1"""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            exponents = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**e for e in exponents]
        return [self.low + i * (self.high - self.low) / 4 for i in range(5)]


def log_axis(title: str, values: Sequence[float]) -> Axis:
    """Whole decades around positive values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return Axis(title, 10.0**low, 10.0 ** max(high, low + 1), log=True)


def plot(
    title: str, x: Axis, y: Axis, series: Sequence[Series], *, tick: Callable[[float], str] = "{:g}".format,
    x_ticks: Sequence[float] = (),
) -> str:  # fmt: skip
    """Series over two axes; tick: how the numbers of both are written; x_ticks: in place of the axis's own."""
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + width * x.place(point[0]), TOP + height * (1 - y.place(point[1]))

    out = []
    for value in x_ticks or x.ticks():
        px = LEFT + width * x.place(value)
        out.append(f'<path class="grid" d="M{px:.1f} {TOP}V{TOP + height}"/>')
        out.append(f'<text x="{px:.1f}" y="{TOP + height + 17}" text-anchor="middle">{escape(tick(value))}</text>')
    for value in y.ticks():
        py = TOP + height * (1 - y.place(value))
        out.append(f'<path class="grid" d="M{LEFT} {py:.1f}H{LEFT + width}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{py + 4.5:.1f}" text-anchor="end">{escape(tick(value))}</text>')
    out.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.title)}</text>')
    middle = TOP + height / 2
    out.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y.title)}</text>'
    )
    for one in series:
        places = [at(point) for point in one.points]
        if one.line:
            path = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
            out.append(f'<path class="l{one.colour}{" dashed" if one.dashed else ""}" d="M{path}"/>')
        for i, ((px, py), (vx, vy)) in enumerate(zip(places, one.points, strict=True)):
            if one.line and one.dashed:
                continue
            label = one.labels[i] if one.labels else one.name
            out.append(
                f'<circle class="s{one.colour}" cx="{px:.1f}" cy="{py:.1f}" r="5">'
                f"<title>{escape(f'{label}: {vx:.4g}, {vy:.4g}')}</title></circle>"
            )
            if one.labels:
                out.append(f'<text x="{px + 8:.1f}" y="{py - 6:.1f}">{escape(label)}</text>')
    legend = "".join(f'<span class="key s{s.colour}"></span>{escape(s.name)}' for s in series)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(out)}</svg><p class="faint">{legend}</p>'
    )


def heat_map(
    title: str, columns: Sequence[str], rows: Sequence[str], values: Sequence[Sequence[float | None]],
    show: Callable[[float], str],
) -> str:  # fmt: skip
    """values [rows][columns], at least 0; None leaves a cell out. The deeper, the larger, on a log scale."""
    found = [v for row in values for v in row if v]
    low, high = (math.log(min(found)), math.log(max(found))) if found else (0.0, 0.0)
    width = (WIDTH - LEFT) / max(len(columns), 1)
    out = [
        f'<text x="{LEFT + (i + 0.5) * width:.1f}" y="{CELL - 9}" text-anchor="middle">{escape(name)}</text>'
        for i, name in enumerate(columns)
    ]
    for r, (name, row) in enumerate(zip(rows, values, strict=True)):
        py = (r + 1) * CELL
        out.append(f'<text x="{LEFT - 8}" y="{py + 17}" text-anchor="end">{escape(name)}</text>')
        for c, value in enumerate(row):
            if value is None:
                continue
            depth = (math.log(value) - low) / (high - low) if value and high > low else 0.0
            px = LEFT + c * width
            out.append(
                f'<rect class="heat" x="{px:.1f}" y="{py}" width="{width - 2:.1f}" height="{CELL - 2}" '
                f'style="fill-opacity:{0.08 + 0.92 * depth:.3f}"><title>'
                f"{escape(f'{name}, {columns[c]}: {show(value)}')}</title></rect>"
                f'<text class="{"on" if depth > 0.5 else ""}" x="{px + width / 2:.1f}" y="{py + 17}" '
                f'text-anchor="middle">{escape(show(value))}</text>'
            )
    height = (len(rows) + 1) * CELL
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(out)}</svg>'
    )
