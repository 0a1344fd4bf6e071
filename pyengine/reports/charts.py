"""Stage 6, charts: stacked bars, points and curves over axes, and heat maps, as drawings.

Every bar, point and cell has its numbers as a title, and the report a table beside the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyengine.reports.drawing import CHARACTER, TEXT, WIDTH, Circle, Drawing, Key, Line, Rect, Shape, Text

LABEL, END, ROW, BAR = 130, 110, 34, 22  # of bars; END: room for a row's total
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 80, 150, 14, 44  # of a plot
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
    room = WIDTH - LABEL - END
    shapes: list[Shape] = []
    for row, bar in enumerate(bars):
        whole = sum(bar.parts.values())
        scale = room / (whole if fractions else longest) if whole else 0.0
        x, y = float(LABEL), row * ROW + (ROW - BAR) / 2
        base = y + BAR / 2 + MIDDLE
        shapes.append(Text(LABEL - 8, base, bar.label, "end"))
        for name, colour in series.items():
            value = bar.parts.get(name, 0.0)
            if not value:
                continue
            width, share = value * scale, f"{100 * value / whole:.1f} %"
            shapes.append(Rect(x, y, width, BAR, colour, f"{bar.label}, {name}: {share}"))
            if width > CHARACTER * len(share) + 8:
                shapes.append(Text(x + width / 2, base, share, "middle", (colour, 1.0)))
            x += width
        shapes.append(Text(x + 8, base, bar.end))
    used = [Key(name, colour) for name, colour in series.items() if any(bar.parts.get(name) for bar in bars)]
    return Drawing(title, max(len(bars), 1) * ROW, shapes, used, caption)


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
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + width * x.place(point[0]), TOP + height * (1 - y.place(point[1]))

    shapes: list[Shape] = []
    free = LEFT - width  # to the right of the last number
    for value in x_ticks or x.ticks():
        px, written = LEFT + width * x.place(value), tick(value)
        shapes.append(Line([(px, TOP), (px, TOP + height)]))
        half = CHARACTER * len(written) / 2
        if px - half > free:
            shapes.append(Text(px, TOP + height + 17, written, "middle"))
            free = px + half + 6
    for value in y.ticks():
        py = TOP + height * (1 - y.place(value))
        shapes.append(Line([(LEFT, py), (LEFT + width, py)]))
        shapes.append(Text(LEFT - 8, py + MIDDLE, tick(value), "end"))
    shapes.append(Text(LEFT + width / 2, HEIGHT - 6, x.title, "middle"))
    shapes.append(Text(16, TOP + height / 2, y.title, "middle", turned=True))
    named: list[tuple[float, float, str]] = []
    for one in series:
        places = [at(point) for point in one.points]
        if one.line:
            shapes.append(Line(places, one.colour, one.dashed))
        if one.line and one.dashed:
            continue
        for i, ((px, py), (vx, vy)) in enumerate(zip(places, one.points, strict=True)):
            label = one.labels[i] if one.labels else one.name
            shapes.append(Circle(px, py, one.colour, f"{label}: {vx:.4g}, {vy:.4g}"))
            if one.labels:
                named.append((px, py, label))
    shapes += labels_beside(named)
    legend = [Key(one.name, one.colour, one.dashed) for one in series if not one.labels]
    return Drawing(title, HEIGHT, shapes, legend, caption)


def labels_beside(points: Sequence[tuple[float, float, str]]) -> Iterator[Text]:
    """Each label to the right of its point, where it covers neither another label nor a point."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y, _ in points]
    for x, y, label in points:
        for below in (15, -6, 28, -19, 41, -32, 54):
            base = y + below
            box = (x + 7, base - TEXT + 2, x + 8 + CHARACTER * len(label), base + 3)
            inside = box[1] >= TOP and box[3] <= HEIGHT - BOTTOM  # below are the numbers of the axis
            if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
                break
        taken.append(box)
        yield Text(x + 8, base, label)


def heat_map(
    title: str, columns: Sequence[str], rows: Sequence[str], values: Sequence[Sequence[float | None]],
    show: Callable[[float], str], *, caption: str = "",
) -> Drawing:  # fmt: skip
    """values [rows][columns], at least 0; None leaves a cell out. The deeper, the larger, on a log scale.

    A number that its cell has no room for is only its title.
    """
    found = [v for row in values for v in row if v]
    low, high = (math.log(min(found)), math.log(max(found))) if found else (0.0, 0.0)
    width = (WIDTH - LEFT) / max(len(columns), 1)
    every = max(1, math.ceil(max((CHARACTER * len(name) for name in columns), default=0.0) / width))
    shapes: list[Shape] = [
        Text(LEFT + (i + 0.5) * width, CELL - 9, name, "middle") for i, name in enumerate(columns) if i % every == 0
    ]
    for r, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = (r + 1) * CELL
        shapes.append(Text(LEFT - 8, y + 17, name, "end"))
        for c, value in enumerate(row):
            if value is None:
                continue
            depth = (math.log(value) - low) / (high - low) if value and high > low else 0.0
            x, opacity, written = LEFT + c * width, 0.08 + 0.92 * depth, show(value)
            shapes.append(Rect(x, y, width - 2, CELL - 2, HEAT, f"{name}, {columns[c]}: {written}", opacity))
            if CHARACTER * len(written) < width - 2:
                shapes.append(Text(x + width / 2 - 1, y + 17, written, "middle", (HEAT, opacity)))
    return Drawing(title, (len(rows) + 1) * CELL, shapes, (), caption)
