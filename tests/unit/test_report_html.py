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
        for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= drawing.WIDTH - charts.END + 0.1
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


def test_bars_are_in_proportion() -> None:
    bars = [charts.Bar("a", {"x": 30, "y": 10, "z": 0}), charts.Bar("b", {"y": 20}), charts.Bar("none", {})]
    root = ET.fromstring(
        re.findall(r"<svg.*</svg>", html.figure(charts.stacked_bars("t", {"x": 0, "y": 3, "z": 1}, bars)))[0]
    )
    widths = [float(r.attrib["width"]) for r in root.iter("{http://www.w3.org/2000/svg}rect")]
    room = drawing.WIDTH - charts.LABEL - charts.END
    assert widths == pytest.approx([0.75 * room, 0.25 * room, 0.5 * room])
    wholes = html.figure(charts.stacked_bars("t", {"x": 0, "y": 3, "z": 1}, bars, fractions=True))
    root = ET.fromstring(re.findall(r"<svg.*</svg>", wholes)[0])
    assert [float(r.attrib["width"]) for r in root.iter("{http://www.w3.org/2000/svg}rect")][2] == pytest.approx(room)
    colours = [r.attrib["class"] for r in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert colours == ["s0", "s3", "s3"]


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
