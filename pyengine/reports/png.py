"""Stage 6, png: the pictures of a report as one PNG file, drawn by matplotlib (the extra [viz]).

Shapes are laid out as in a wide page, in its light colours; running text becomes rows of characters of one width. What
the font has no glyph for is drawn as U+FFFD. Settings of the user's matplotlib change nothing.
"""

from __future__ import annotations

import io
import os
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.errors import ResourceError
from pyengine.reports import drawing, files
from pyengine.reports.drawing import LIGHT, STRIP_OPACITY, STRIP_RGB, TEXT, WIDTH, Drawing, Picture, Strip, Token

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIT_INCHES = 0.01
DPI, MAX_PIXELS = 160, 1 << 15  # of a side; a very long picture gets fewer dots
MARGIN, GAP = 30.0, 36.0
LARGE, MEDIUM = 22.0, 15.0  # text of the title's first line, and of its others
MONO, MONO_EM, ROW = 12.5, 0.602, 18.0  # text of a strip, the width of its characters (DejaVu Sans Mono), its rows
STRIP_ROWS = 80  # of text at most; the caption says where it ends
MISSING = "\N{REPLACEMENT CHARACTER}"
SIGNS = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": " "}


def require() -> None:
    """ResourceError without the extra [viz]."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ResourceError(
            f"PNG pictures need matplotlib ({error}); expected the extra: pip install '.[viz]'"
        ) from error


def write(path: str | os.PathLike[str], title: Sequence[str], pictures: Sequence[Picture]) -> None:
    """All pictures, one under the other, under the lines of a title. The file is whole or not there.

    Errors: ResourceError without the extra [viz] or for a full disk, RequestError for a path that cannot be written.
    """
    require()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    files.check_writable(Path(path))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        data = io.BytesIO()
        FigureCanvasAgg(figure(title, pictures)).print_png(data)
    files.write(Path(path), data.getvalue())


def figure(title: Sequence[str], pictures: Sequence[Picture]) -> Figure:
    """The figure that is written, its one axes in the units of the drawings."""
    from matplotlib.figure import Figure

    sheet = _Sheet()
    for i, line in enumerate(title):
        sheet.title(line, MEDIUM if i else LARGE)
    for picture in pictures:
        sheet.gap()
        sheet.strip(picture) if isinstance(picture, Strip) else sheet.drawing(picture)
    width, height = WIDTH + 2 * MARGIN, sheet.y + MARGIN
    inches = (width * UNIT_INCHES, height * UNIT_INCHES)
    result = Figure(inches, dpi=min(DPI, MAX_PIXELS / max(inches)), facecolor=LIGHT.page)
    axes = result.add_axes((0, 0, 1, 1), xlim=(-MARGIN, WIDTH + MARGIN), ylim=(height, 0))
    axes.set_axis_off()
    for order, artist in enumerate(sheet.artists):
        artist.set_zorder(order)
        axes.add_artist(artist)
    return result


class _Sheet:
    """Artists in units, from the top down; y: how far it has come."""

    def __init__(self) -> None:
        import matplotlib
        from matplotlib.font_manager import FontProperties, get_font

        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        names = {"plain": "DejaVuSans.ttf", "bold": "DejaVuSans-Bold.ttf", "mono": "DejaVuSansMono.ttf"}
        self.fonts = {font: FontProperties(fname=str(folder / name)) for font, name in names.items()}
        self.glyphs = {font: set(get_font(str(folder / name)).get_charmap()) for font, name in names.items()}
        self.artists: list[Any] = []
        self.y = MARGIN

    def shown(self, text: str, font: str) -> str:
        """As many characters, each of which the font can draw in a place of its own."""

        def sign(c: str) -> str:
            known = ord(c) in self.glyphs[font] and unicodedata.category(c)[0] not in "CM"
            return c if known else SIGNS.get(c, MISSING)

        return "".join(map(sign, text))

    def text(
        self, x: float, y: float, text: str, *, font: str = "plain", size: float = TEXT, colour: str = LIGHT.text,
        anchor: str = "start", turned: bool = False,
    ) -> None:  # fmt: skip
        from matplotlib.text import Text as Artist

        aligned = {"start": "left", "middle": "center", "end": "right"}[anchor]
        artist = Artist(
            x, y, self.shown(text, font), color=colour, ha=aligned, va="baseline", rotation=90 if turned else 0,
            rotation_mode="anchor", parse_math=False, usetex=False, fontproperties=self.fonts[font],
        )  # fmt: skip
        artist.set_fontsize(72 * UNIT_INCHES * size)
        self.artists.append(artist)

    def title(self, line: str, size: float) -> None:
        for part in textwrap.wrap(line, int(WIDTH / (0.62 * size))):
            self.y += 1.4 * size
            self.text(0, self.y, part, font="bold" if size == LARGE else "plain", size=size)

    def gap(self) -> None:
        self.y += GAP

    def caption(self, text: str) -> None:
        if text:
            self.text(0, self.y, text, size=MEDIUM)
            self.y += 14

    def drawing(self, d: Drawing) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Circle as Disc
        from matplotlib.patches import Rectangle

        self.caption(d.caption)
        top = self.y
        for shape in d.wide.shapes:
            match shape:
                case drawing.Rect(x, y, width, height, colour, _, opacity):
                    fill = (LIGHT.series[colour], opacity)
                    self.artists.append(Rectangle((x, top + y), width, height, facecolor=fill, linewidth=0))
                case drawing.Circle(x, y, colour, _, radius):
                    self.artists.append(Disc((x, top + y), radius, facecolor=LIGHT.series[colour], linewidth=0))
                case drawing.Line(points, colour, dashed):
                    xs, ys = zip(*((x, top + y) for x, y in points), strict=True)
                    stroke, wide = (LIGHT.line, 1.0) if colour is None else (LIGHT.series[colour], 2.0)
                    style: Any = (0, (3, 2)) if dashed else "solid"
                    wide *= 72 * UNIT_INCHES
                    self.artists.append(Line2D(xs, ys, color=stroke, linewidth=wide, linestyle=style))
                case drawing.Text(x, y, text, anchor, ground, turned):
                    on = ground is not None and LIGHT.reads_better_on(*ground)
                    ink = LIGHT.on if on else LIGHT.text
                    self.text(x, top + y, text, colour=ink, anchor=anchor, turned=turned)
        self.y = top + d.wide.height
        self.legend(d)

    def legend(self, d: Drawing) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle

        x, wide = 0.0, 0.58 * TEXT
        for key in d.legend:
            needed = 20 + wide * len(key.name)
            if x == 0 or x + needed > WIDTH:
                x, self.y = 0.0, self.y + 20
            colour = LIGHT.series[key.colour]
            if key.dashed:
                ends = ([x, x + 14], [self.y - 4, self.y - 4])
                self.artists.append(Line2D(*ends, color=colour, linewidth=1.44, linestyle=(0, (2, 1))))
            else:
                self.artists.append(Rectangle((x, self.y - 10), 12, 12, facecolor=colour, linewidth=0))
            self.text(x + 18, self.y, key.name, colour=LIGHT.faint)
            x += needed + 12

    def strip(self, s: Strip) -> None:
        from matplotlib.patches import Rectangle

        pieces = list(rows(s, int(WIDTH / (MONO * MONO_EM))))
        kept = [piece for piece in pieces if piece[0] < STRIP_ROWS]
        self.caption(s.caption)
        wide, fill = MONO * MONO_EM, tuple(c / 255 for c in STRIP_RGB)
        for row, column, text, token in kept:
            x, y = column * wide, self.y + ROW * row
            if token.depth:
                ground = (*fill, STRIP_OPACITY * token.depth)
                self.artists.append(Rectangle((x, y), wide * len(text), ROW - 2, facecolor=ground, linewidth=0))
            if text.strip(" "):
                self.text(x, y + ROW - 6, text, font="mono", size=MONO)
        self.y += ROW * (kept[-1][0] + 1 if kept else 0)
        if len(kept) < len(pieces):
            self.y += 20
            tokens, shown = sum(map(len, s.paragraphs)), len({id(piece[3]) for piece in kept})
            self.text(0, self.y, f"the first {shown:,} of {tokens:,} tokens", colour=LIGHT.faint)


def rows(s: Strip, columns: int) -> Iterator[tuple[int, int, str, Token]]:
    """Pieces of tokens as (row, column, text, token): rows of so many characters, a paragraph begins a new one."""
    row = 0
    for tokens in s.paragraphs:
        column = 0
        for token in tokens:
            rest = token.text
            while rest:
                if column == columns:
                    row, column = row + 1, 0
                yield row, column, rest[: columns - column], token
                rest, column = rest[columns - column :], min(column + len(rest), columns)
        row += 1
