"""Stage 6, drawing: a picture as shapes in units of its own, laid out twice: 1000 wide for a page and for a file, 340
wide for a telephone. html.py makes SVG of both, png.py a file of the wide one.

Colours are numbers of a palette, one for light pages and one for dark ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH, NARROW = 1000.0, 340.0
READABLE = 11.0  # pixels: a page shows the narrow layout where text of the wide one would be smaller
TEXT = 13.0  # height of a line of text
CHARACTER = 7.2  # width of one, about
STRIP_RGB, STRIP_OPACITY = (214, 110, 40), 0.75  # of a token at depth 1; reads on a light and on a dark page


@dataclass(frozen=True)
class Palette:
    text: str
    faint: str
    line: str
    page: str
    on: str  # text on a colour, where that reads better than `text`
    series: tuple[str, ...]

    def reads_better_on(self, colour: int, opacity: float) -> bool:
        """Whether `on` has more contrast than `text` on a colour that lies over the page."""
        ground = [
            opacity * a + (1 - opacity) * b
            for a, b in zip(channels(self.series[colour]), channels(self.page), strict=True)
        ]
        return contrast(channels(self.on), ground) > contrast(channels(self.text), ground)


LIGHT = Palette(
    "#1a202c", "#4a5568", "#cbd5e0", "#ffffff", "#ffffff",
    ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#975a16", "#97266d", "#4a5568", "#0987a0"),
)  # fmt: skip
DARK = Palette(
    "#e2e8f0", "#a0aec0", "#4a5568", "#171923", "#1a202c",
    ("#63b3ed", "#f6ad55", "#68d391", "#b794f4", "#f6e05e", "#f687b3", "#a0aec0", "#76e4f7"),
)  # fmt: skip


def channels(colour: str) -> list[float]:
    """'#2b6cb0' -> red, green and blue, 0..1."""
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def contrast(a: Sequence[float], b: Sequence[float]) -> float:
    """Of two colours as WCAG defines it, 1 to 21."""

    def luminance(rgb: Sequence[float]) -> float:
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    colour: int
    title: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class Line:
    """Through its points; colour None: a line of the grid."""

    points: Sequence[tuple[float, float]]
    colour: int | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Circle:
    x: float
    y: float
    colour: int
    title: str = ""
    radius: float = 5.0


@dataclass(frozen=True)
class Text:
    """On its baseline at y. ground: the colour and opacity of the Rect under it. turned: upwards."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    ground: tuple[int, float] | None = None
    turned: bool = False


Shape = Rect | Line | Circle | Text


@dataclass(frozen=True)
class Key:
    """Of a legend; a line is dashed."""

    name: str
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Layout:
    """Shapes from (0, 0) at the top left to (width, height)."""

    width: float
    height: float
    shapes: Sequence[Shape]


@dataclass(frozen=True)
class Drawing:
    """The same picture WIDTH and NARROW wide."""

    title: str
    wide: Layout
    narrow: Layout
    legend: Sequence[Key] = ()
    caption: str = ""  # what the numbers are, above it


@dataclass(frozen=True)
class Token:
    """A piece of text, the deeper coloured (0..1) the more it matters. title: what is known of it."""

    text: str
    depth: float
    title: str = ""


@dataclass(frozen=True)
class Strip:
    """Running text, in paragraphs."""

    title: str
    paragraphs: Sequence[Sequence[Token]]
    caption: str = ""


Picture = Drawing | Strip
