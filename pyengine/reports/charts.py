"""Stage 6, charts: stacked bars, points and curves over axes, and heat maps, as drawings.

Each is laid out by a function of the width, called for both. Every bar, point and cell has its numbers as a title, and
the report a table beside the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pyengine.reports.drawing import (
    CHARACTER,
    NARROW,
    TEXT,
    WIDTH,
    Circle,
    Drawing,
    Key,
    Layout,
    Line,
    Rect,
    Shape,
    Text,
)

LABEL, END, ROW, BAR = 130, 110, 34, 22  # of bars; END: room for a row's total
ABOVE = 14  # height of a line of label and total above its bar, where beside it they would take half of the width
HEIGHT, TOP, BOTTOM = 380, 14, 44  # of a plot, which is at most as high as wide
LINES = [at for i in range(9) for at in (15 + 14 * i, -6 - 14 * i)]  # for a point's label: how far below it
CELL = 26  # height of a row of a heat map
HEAT = 1  # its colour
MIDDLE = 4.5  # from the middle of a line of text down to its baseline


@dataclass(frozen=True)
class Bar:
    """A row of a chart: parts by series, and the text behind it."""

    label: str
    parts: Mapping[str, float]
    end: str = ""


def stacked_bars(
    title: str, series: Mapping[str, int], bars: Sequence[Bar], *, fractions: bool = False, caption: str = ""
) -> Drawing:
    """Bars of one scale, or (fractions) each as parts of its own whole. series: parts in order -> number of a colour.

    Parts that are 0 are left out.
    """
    longest = max((sum(bar.parts.values()) for bar in bars), default=0.0)

    def layout(width: float) -> Layout:
        beside = width >= 2 * (LABEL + END)
        left, room, line = (LABEL, width - LABEL - END, 0) if beside else (0, width, ABOVE)
        shapes: list[Shape] = []
        for row, bar in enumerate(bars):
            whole = sum(bar.parts.values())
            scale = room / (whole if fractions else longest) if whole else 0.0
            top = row * (ROW + line)
            x, y = float(left), top + line + (ROW - BAR) / 2
            base = y + BAR / 2 + MIDDLE
            shapes.append(Text(LABEL - 8, base, bar.label, "end") if beside else Text(0, top + ABOVE, bar.label))
            for name, colour in series.items():
                value = bar.parts.get(name, 0.0)
                if not value:
                    continue
                wide, share = value * scale, f"{100 * value / whole:.1f} %"
                shapes.append(Rect(x, y, wide, BAR, colour, f"{bar.label}, {name}: {share}"))
                if wide > CHARACTER * len(share) + 8:
                    shapes.append(Text(x + wide / 2, base, share, "middle", (colour, 1.0)))
                x += wide
            shapes.append(Text(x + 8, base, bar.end) if beside else Text(width, top + ABOVE, bar.end, "end"))
        return Layout(width, max(len(bars), 1) * (ROW + line), shapes)

    used = [Key(name, colour) for name, colour in series.items() if any(bar.parts.get(name) for bar in bars)]
    return Drawing(title, layout(WIDTH), layout(NARROW), used, caption)


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one colour, joined by a line or each with its own label."""

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
    title: str, x: Axis, y: Axis, series: Sequence[Series], *, tick: Callable[[float], str] = "{:,g}".format,
    x_ticks: Sequence[float] = (), caption: str = "",
) -> Drawing:  # fmt: skip
    """Series over two axes; tick: how the numbers of both are written; x_ticks: in place of the axis's own."""
    numbers = x_ticks or x.ticks()
    legend = [Key(one.name, one.colour, one.dashed) for one in series if not one.labels]

    def layout(width: float) -> Layout:
        height = min(HEIGHT, width)
        area = Area(
            30 + wide_of([tick(value) for value in y.ticks()]), TOP,
            width - 4 - wide_of([tick(numbers[-1])]) / 2, height - BOTTOM,
        )  # fmt: skip
        shapes = [*_axes(area, x, y, numbers, tick), Text(area.middle, height - 6, x.title, "middle")]
        named: list[tuple[float, float, str]] = []
        for one in series:
            places = [area.place(x.place(vx), y.place(vy)) for vx, vy in one.points]
            if one.line:
                shapes.append(Line(places, one.colour, one.dashed))
            if one.line and one.dashed:
                continue
            for i, ((px, py), (vx, vy)) in enumerate(zip(places, one.points, strict=True)):
                label = one.labels[i] if one.labels else one.name
                shapes.append(Circle(px, py, one.colour, f"{label}: {vx:.4g}, {vy:.4g}"))
                if one.labels:
                    named.append((px, py, label))
        return Layout(width, height, [*shapes, *labels_beside(named, area)])

    return Drawing(title, layout(WIDTH), layout(NARROW), legend, caption)


@dataclass(frozen=True)
class Area:
    """Of a plot, inside its axes."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Of shares (0 .. 1) of its width and, from the bottom, of its height."""
        return self.left + x * (self.right - self.left), self.bottom - y * (self.bottom - self.top)


def wide_of(texts: Sequence[str]) -> float:
    """Of the longest, about."""
    return CHARACTER * max(map(len, texts), default=0)


def _axes(area: Area, x: Axis, y: Axis, numbers: Sequence[float], tick: Callable[[float], str]) -> Iterator[Shape]:
    free = -math.inf  # to the right of the last number
    for value in numbers:
        px, written = area.place(x.place(value), 0)[0], tick(value)
        yield Line([(px, area.top), (px, area.bottom)])
        half = CHARACTER * len(written) / 2
        if px - half > free:
            yield Text(px, area.bottom + 17, written, "middle")
            free = px + half + 6
    for value in y.ticks():
        py = area.place(0, y.place(value))[1]
        yield Line([(area.left, py), (area.right, py)])
        yield Text(area.left - 8, py + MIDDLE, tick(value), "end")
    yield Text(16, (area.top + area.bottom) / 2, y.title, "middle", turned=True)


def labels_beside(points: Sequence[tuple[float, float, str]], area: Area) -> Iterator[Text]:
    """Each label to the right or left of its point, where it covers neither another label nor a point."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y, _ in points]
    for x, y, label in points:
        long = CHARACTER * len(label)
        for below, right in product(LINES, (True, False)):
            base, start = y + below, x + 8 if right else x - 8 - long
            box = (start - 1, base - TEXT + 2, start + long, base + 3)
            inside = area.left <= box[0] and box[2] <= area.right and area.top <= box[1] and box[3] <= area.bottom
            if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
                break
        taken.append(box)
        yield Text(x + 8 if right else x - 8, base, label, "start" if right else "end")


def heat_map(
    title: str, columns: Sequence[str], rows: Sequence[str], values: Sequence[Sequence[float | None]],
    show: Callable[[float], str], *, caption: str = "",
) -> Drawing:  # fmt: skip
    """values [rows][columns], at least 0; None leaves a cell out. The deeper, the larger, on a log scale.

    A number that its cell has no room for is only its title. Where the columns' names have no room they are turned.
    """
    found = [v for row in values for v in row if v]
    low, high = (math.log(min(found)), math.log(max(found))) if found else (0.0, 0.0)

    def layout(width: float) -> Layout:
        left, long = 12 + wide_of(rows), wide_of(columns)
        wide = (width - left) / max(len(columns), 1)
        turned = long + 4 > wide
        top, every = (long + 16, math.ceil((TEXT + 2) / wide)) if turned else (CELL, 1)
        shapes: list[Shape] = []
        for i, name in list(enumerate(columns))[::every]:
            x = left + (i + 0.5) * wide - 1
            shapes.append(Text(x + MIDDLE, top - 8, name, turned=True) if turned else Text(x, top - 9, name, "middle"))
        for r, (name, row) in enumerate(zip(rows, values, strict=True)):
            y = top + r * CELL
            shapes.append(Text(left - 8, y + 17, name, "end"))
            for c, value in enumerate(row):
                if value is None:
                    continue
                depth = (math.log(value) - low) / (high - low) if value and high > low else 0.0
                x, opacity, written = left + c * wide, 0.08 + 0.92 * depth, show(value)
                shapes.append(Rect(x, y, wide - 2, CELL - 2, HEAT, f"{name}, {columns[c]}: {written}", opacity))
                if CHARACTER * len(written) + 4 < wide - 2:
                    shapes.append(Text(x + wide / 2 - 1, y + 17, written, "middle", (HEAT, opacity)))
        return Layout(width, top + len(rows) * CELL, shapes)

    return Drawing(title, layout(WIDTH), layout(NARROW), (), caption)
