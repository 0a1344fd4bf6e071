"""Stage 6, png: the page's pictures as a file, from the same shapes; whole or not there; nothing without matplotlib."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from account_configs import REAL
from tiny_reports import NAMES, tiny_results

from pyengine.cli.main import main
from pyengine.errors import RequestError, ResourceError
from pyengine.reports import account_pictures, compare_pictures, drawing, png, profile_pictures
from pyengine.reports.account import account
from pyengine.reports.drawing import LIGHT, Drawing, Strip, Token
from pyengine.reports.machine import Limits

matplotlib = pytest.importorskip("matplotlib", reason="needs the extra [viz]: pip install '.[viz]'")
PICTURES = {"profile": profile_pictures, "compare": compare_pictures, "account": account_pictures}
SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return tiny_results()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(REAL["Mixtral-8x7B"].config), encoding="utf-8")
    return path


def pixels(path: Path) -> np.ndarray:
    """uint8 [height, width, 3]"""
    from matplotlib.image import imread

    return np.rint(255 * imread(str(path))[..., :3]).astype(np.uint8)


def artists(figure: Any, kind: str) -> list[Any]:
    return [one for one in figure.axes[0].get_children() if type(one).__name__ == kind]


def rectangles(figure: Any) -> list[Any]:
    """Without the background of the axes, which comes last."""
    found = artists(figure, "Rectangle")
    assert found[-1] is figure.axes[0].patch
    return found[:-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_are_those_of_the_page(name: str, results: dict[str, Any]) -> None:
    """The same shapes in the same places: SVG and figure are drawn from one list, title by title."""
    pictures = PICTURES[name].pictures(results[name])
    page = results[name].to_html()
    svgs = [ET.fromstring(svg) for svg in re.findall(r'<svg class="wide".*?</svg>', page, re.DOTALL)]
    drawings = [one for one in pictures if isinstance(one, Drawing)]
    assert [svg.attrib["aria-label"] for svg in svgs] == [one.title for one in drawings]
    ns = "{http://www.w3.org/2000/svg}"
    for svg, one in zip(svgs, drawings, strict=True):
        figure = png.figure([], [one])
        keys = [key for key in one.legend if not key.dashed]
        shown = rectangles(figure)[: len(rectangles(figure)) - len(keys)]
        expected = [
            (float(r.attrib["x"]), float(r.attrib["width"]), float(r.attrib["height"])) for r in svg.iter(f"{ns}rect")
        ]
        assert len(shown) == len(expected)
        for rect, (x, width, height) in zip(shown, expected, strict=True):
            assert (rect.get_x(), rect.get_width(), rect.get_height()) == pytest.approx((x, width, height), abs=0.01)
        circles = [(float(c.attrib["cx"])) for c in svg.iter(f"{ns}circle")]
        assert [c.center[0] for c in artists(figure, "Circle")] == pytest.approx(circles, abs=0.06)
        texts = [text.text or "" for text in svg.iter(f"{ns}text")]
        caption, legend = ([one.caption] if one.caption else []), [key.name for key in one.legend]
        assert [text.get_text() for text in artists(figure, "Text")][: len(texts) + 1 + len(legend)] == [
            *caption, *texts, *legend
        ]  # fmt: skip


def test_the_strip_is_all_of_the_text(results: dict[str, Any]) -> None:
    strip = compare_pictures.tokens(results["compare"])
    figure = png.figure([], [strip])
    shown = "".join(text.get_text() for text in artists(figure, "Text")[1:] if text.get_text())
    assert shown.replace(" ", "") == "".join(t.text for p in strip.paragraphs for t in p).replace(" ", "")
    coloured = [token for row in strip.paragraphs for token in row if token.depth]
    found = rectangles(figure)
    assert [r.get_facecolor()[3] for r in found] == pytest.approx([0.75 * token.depth for token in coloured])
    records = results["compare"].positions
    assert max(token.depth for token in coloured) == pytest.approx(
        min(1.0, np.log(max(p.kld for p in records) / 0.001) / np.log(1000))
    )


def test_rows_break_where_they_are_full() -> None:
    a, b, c = Token("abc", 0.1), Token("defgh", 0.2), Token("", 0.3)
    strip = Strip("t", [[a, b], [c], [b, a]])
    assert list(png.rows(strip, 4)) == [
        (0, 0, "abc", a), (0, 3, "d", b), (1, 0, "efgh", b), (3, 0, "defg", b), (4, 0, "h", b), (4, 1, "abc", a),
    ]  # fmt: skip


def test_a_long_text_says_where_it_ends() -> None:
    strip = Strip("t", [[Token("word ", 0.5)] * 10] * 200)
    strip = replace(strip, paragraphs=[[Token("word ", 0.5) for _ in row] for row in strip.paragraphs])
    figure = png.figure([], [strip])
    assert artists(figure, "Text")[-4].get_text() == "the first 800 of 2,000 tokens"
    assert figure.get_size_inches()[1] < 20


def test_any_text_can_be_drawn(tmp_path: Path, results: dict[str, Any]) -> None:
    """No mathematics, no warning of a missing glyph (warnings are errors here), no place that moves."""
    odd = ["$x^2$", "\n", "\t", "\u6f22\u5b57", "e\u0301", "\u200d", "\x00", "\U0001f600", "\\frac", "\ud800", "\u05d0"]
    strip = Strip("odd", [[Token(text, 0.5) for text in odd]])
    figure = png.figure(["$a$ \u6f22 " * 40], [strip])
    written = [text.get_text() for text in artists(figure, "Text")]
    assert "$x^2$" in written
    assert "\ufffd\ufffd" in written  # two characters of no glyph, two places
    assert "e\ufffd" in written
    png.write(tmp_path / "odd.png", ["$a$ \u6f22"], [strip])
    greedy = replace(results["compare"], model="/tmp/$\u6f22$")
    greedy.to_png(tmp_path / "model.png")


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_a_picture(name: str, results: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / f"{name}.png"
    assert results[name].to_png(str(target)) is None
    assert target.read_bytes().startswith(SIGNATURE)
    image = pixels(target)
    assert image.shape[1] == 1696
    assert (image[0] == 255).all()
    assert not (image == 255).all(axis=(1, 2)).all()
    results[name].to_png(tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == target.read_bytes()


def test_the_pixels_of_a_bar_are_in_proportion(results: dict[str, Any], tmp_path: Path) -> None:
    profile = results["profile"]
    png.write(tmp_path / "bar.png", [], [replace(profile_pictures.stages("Decode", profile.decode), legend=())])
    image = pixels(tmp_path / "bar.png")
    row = next(r for r in image if (r == 255).all(axis=1).sum() < len(r) / 2)  # the bar's upper edge, above its text
    counts = {}
    for stage, colour in profile_pictures.COLOURS.items():
        rgb = np.array([round(255 * c) for c in drawing.channels(LIGHT.series[colour])])
        counts[stage] = int((np.abs(row.astype(int) - rgb) <= 1).all(axis=1).sum())
    whole = sum(counts.values())
    assert whole > 1000
    for stage, ms in profile.decode.stages.items():
        assert counts[stage] / whole == pytest.approx(max(ms, 0) / profile.decode.wall_ms, abs=4 / whole)


def test_settings_of_the_user_change_nothing(results: dict[str, Any], tmp_path: Path) -> None:
    results["account"].to_png(tmp_path / "plain.png")
    odd = {"figure.dpi": 20, "text.usetex": True, "font.size": 40, "savefig.bbox": "tight", "axes.facecolor": "red",
           "lines.linewidth": 9, "patch.linewidth": 9, "text.hinting": "none", "path.sketch": (5, 10, 2)}  # fmt: skip
    with matplotlib.rc_context(odd):
        results["account"].to_png(tmp_path / "odd.png")
        assert matplotlib.rcParams["figure.dpi"] == 20
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "odd.png").read_bytes()


def test_a_very_long_picture_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png, "MAX_PIXELS", 2000)
    tall = drawing.Layout(1000, 6000, [drawing.Rect(0, 0, 1000, 6000, 0)])
    png.write(tmp_path / "tall.png", [], [Drawing("tall", tall, tall)])
    assert max(pixels(tmp_path / "tall.png").shape) <= png.MAX_PIXELS + 1


# ---- files, and the command


def test_the_command_writes_it(config: Path, tmp_path: Path, capsys: Any) -> None:
    page, target = tmp_path / "a.html", tmp_path / "a.png"
    assert main(["account", str(config), "--png", str(target), "--html", str(page), "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]
    assert target.read_bytes().startswith(SIGNATURE)
    assert page.is_file()
    assert target.stat().st_mode & 0o777 == page.stat().st_mode & 0o777


@pytest.mark.parametrize("command", ["profile", "compare", "account"])
def test_bad_files_are_one_line(command: str, config: Path, tmp_path: Path, capsys: Any) -> None:
    """Before anything is loaded: the folder has no weights."""
    target = str(tmp_path / "x.png")
    for options, says in (
        (["--png", "/dev/null/x.png"], "/dev/null/x.png: its folder is not there"),
        (["--png", str(tmp_path)], "not a regular file"),
        (["--png", target, "--html", target], f"--html and --png are both {target}; expected two files"),
    ):
        assert main([command, str(config.parent), *options]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert says in err
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize("command", ["profile", "compare", "account"])
def test_without_matplotlib(
    command: str, config: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([command, str(config.parent), "--png", str(tmp_path / "x.png")]) == 6
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "pip install '.[viz]'" in err
    assert os.listdir(tmp_path) == ["config.json"]
    result = account(config, limits=Limits(20.0, 500.0, 100.0))
    with pytest.raises(ResourceError, match=r"matplotlib .*pip install '\.\[viz\]'"):
        result.to_png(tmp_path / "x.png")
    result.to_html()


def test_it_is_written_whole_or_not_at_all(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, target = account(config, limits=Limits(20.0, 500.0, 100.0)), tmp_path / "x.png"
    target.write_bytes(b"before")
    files = sorted(os.listdir(tmp_path))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        result.to_png(target)
    with pytest.raises(RequestError, match="its folder is not there"):
        result.to_png(tmp_path / "none" / "x.png")
    assert (target.read_bytes(), sorted(os.listdir(tmp_path))) == (b"before", files)


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = (
        "import sys, pyengine.reports.png, pyengine.cli.main, pyengine.reports.compare_html, "
        "pyengine.reports.profile_pictures\nassert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
