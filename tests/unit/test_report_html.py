"""Stage 6, html and account_html: pages that stand alone, bars in proportion, files whole or not at all."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from account_configs import REAL

from pyengine.cli.main import main
from pyengine.reports import charts, drawing, html
from pyengine.reports.account import account
from pyengine.reports.machine import Limits

NS = "{http://www.w3.org/2000/svg}"
LIMITS = Limits(read_gb_per_s=20.0, int8_gops=500.0, f32_gflops=100.0)


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**config, **changes}))
    return path


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "DeepSeek-V3", "T5-base", "BERT-base", "Qwen3-Next-80B-A3B"])
def test_the_page_stands_alone(name: str, tmp_path: Path) -> None:
    result = account(write(tmp_path, REAL[name].config), limits=LIMITS)
    page = result.to_html()
    assert page.startswith("<!doctype html>")
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ET.fromstring(svg)
        assert root.attrib["aria-label"]
        room = {"wide": drawing.WIDTH - charts.END, "narrow": drawing.NARROW}[root.attrib["class"]]
        for rect in root.iter(f"{NS}rect"):
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= room + 0.1
    text = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert all(f"{count:,}" in text for count in result.parameters.values() if count)
    fragment = result._repr_html_()
    assert fragment.startswith("<div")
    assert fragment in page


def test_what_a_config_says_is_text_in_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)</script>".replace("/", "")
    folder.mkdir()
    write(folder, REAL["Mixtral-8x7B"].config, architectures=["<b>&\"'"])
    page = account(folder, limits=LIMITS).to_html()
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;&quot;&#x27;" in page


@pytest.mark.parametrize("layout", ["wide", "narrow"])
def test_bars_are_in_proportion(layout: str) -> None:
    series = {"x": 0, "y": 3, "z": 1}
    bars = [charts.Bar("a", {"x": 30, "y": 10, "z": 0}), charts.Bar("b", {"y": 20}), charts.Bar("none", {})]
    room = {"wide": drawing.WIDTH - charts.LABEL - charts.END, "narrow": drawing.NARROW}[layout]
    rects = shapes(charts.stacked_bars("t", series, bars), layout, "rect")
    assert [float(r.attrib["width"]) for r in rects] == pytest.approx([0.75 * room, 0.25 * room, 0.5 * room])
    assert [r.attrib["class"] for r in rects] == ["s0", "s3", "s3"]
    wholes = shapes(charts.stacked_bars("t", series, bars, fractions=True), layout, "rect")
    assert float(wholes[2].attrib["width"]) == pytest.approx(room)


def shapes(d: drawing.Drawing, layout: str, kind: str) -> list[ET.Element]:
    """Of one of a figure's two pictures."""
    svgs = map(ET.fromstring, re.findall(r"<svg.*?</svg>", html.figure(d)))
    return list(next(svg for svg in svgs if svg.attrib["class"] == layout).iter(NS + kind))


def boxes(layout: drawing.Layout) -> list[tuple[float, float, float, float]]:
    """Of what is written upright, about: left, top, right, bottom."""
    found = []
    for text in layout.shapes:
        if isinstance(text, drawing.Text) and not text.turned:
            wide = drawing.CHARACTER * len(text.text)
            left = text.x - {"start": 0, "middle": wide / 2, "end": wide}[text.anchor]
            found.append((left, text.y - drawing.TEXT + 3, left + wide, text.y + 2))
    return found


@pytest.mark.parametrize("corner", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.5)])
def test_labels_of_points_find_room(corner: tuple[float, float]) -> None:
    """Eight points in one place, in any corner: labels cover neither each other nor an axis, and stay inside."""
    names = ["embed", "norm", "attention", "router", "ffn", "lm_head", "sample", "other"]
    series = [charts.Series(n, i, [corner], line=False, labels=[n]) for i, n in enumerate(names)]
    plot = charts.plot("t", charts.Axis("x", 0, 1), charts.Axis("y", 0, 1), series)
    for layout in (plot.wide, plot.narrow):
        found = boxes(layout)
        for i, (left, top, right, bottom) in enumerate(found):
            assert left >= 0
            assert right <= layout.width
            for other in found[:i]:
                assert not (left < other[2] and other[0] < right and top < other[3] and other[1] < bottom)


@pytest.mark.parametrize("columns", [1, 7, 12, 24])
def test_columns_of_a_heat_map_are_named(columns: int) -> None:
    """Side by side where there is room, else turned; all of them, down to columns as narrow as a line of text."""
    names = [f"column_{i}" for i in range(columns)]
    d = charts.heat_map("t", names, ["0", "29"], [[1.0 + i for i in range(columns)]] * 2, "{:.4f}".format)
    for layout in (d.wide, d.narrow):
        texts = [s for s in layout.shapes if isinstance(s, drawing.Text)]
        shown = [t for t in texts if t.text in names]
        cell = layout.width / columns
        assert all(t.turned == (cell < drawing.CHARACTER * len(names[-1])) for t in shown)
        assert len(shown) == columns or cell < 2 + drawing.TEXT + 2
        assert all(s.x >= 0 and s.x + s.width <= layout.width for s in layout.shapes if isinstance(s, drawing.Rect))
        assert all(t.y - drawing.CHARACTER * len(t.text) >= 0 for t in shown if t.turned)
        numbers = [t for t in texts if "." in t.text]
        assert len(numbers) == (2 * columns if cell > 60 else 0)


def test_tables_that_do_not_fit_name_every_value() -> None:
    plain = html.table(["part", "share"], [["FFN", "59.2 %"]])
    assert "cards" not in plain
    assert "data-head" not in plain
    wide = html.table(["<stage>", *(f"column {i}" for i in range(9))], [["ffn", *["0.1234"] * 9]])
    assert '<table class="cards" style="--cell:14ch">' in wide
    assert '<td data-head="&lt;stage&gt;">ffn</td><td data-head="column 0">0.1234</td>' in wide
    long = html.table(["token", "top 5"], [["a", "'x' 50.0 %  'y' 49.0 %  " + "z" * 30]])
    assert '<td class="long" data-head="top 5"><span>' in long


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, REAL["Llama-3.1-8B"].config)
    target, link = tmp_path / "a.html", tmp_path / "b.html"
    link.symlink_to(target)
    assert main(["account", str(path), "--html", str(link)]) == 0
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8").endswith("</html>\n")
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()
    before, files = target.read_bytes(), sorted(os.listdir(tmp_path))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    capsys.readouterr()
    assert main(["account", str(path), "--context", "77", "--html", str(target)]) == 6
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "No space left" in err
    assert (target.read_bytes(), sorted(os.listdir(tmp_path))) == (before, files)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
