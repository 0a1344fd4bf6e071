"""Stage 6, pages in a browser: what headless Chromium draws of them is what the JSON says, on any screen."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_reports import NAMES, tiny_results
from tool_scripts import load_tool

from pyengine.reports import compare_pictures, html, profile_pictures
from pyengine.reports.drawing import DARK, LIGHT, Palette
from pyengine.reports.profile_work import STAGES

screens = load_tool("checks/report_screens")
Measured = dict[str, Any]


@pytest.fixture(scope="module")
def browser() -> str:
    found: str | None = screens.find_browser()
    if found is None:
        pytest.skip("no Chromium or Chrome on this machine (Debian: apt install chromium)")
    return found


@pytest.fixture(scope="module")
def results(browser: str) -> dict[str, Any]:
    return tiny_results()


@pytest.fixture(scope="module")
def pages(results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, result in results.items():
        (folder / f"{name}.html").write_text(result.to_html(), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in results}


@pytest.fixture(scope="module", params=[1280, 400])
def light(request: pytest.FixtureRequest, browser: str, pages: dict[str, Path]) -> dict[str, Measured]:
    """Every page with its pictures wide, and with them narrow."""
    return {name: screens.measure(browser, page, request.param) for name, page in pages.items()}


def width_of(shape: Measured) -> float:
    left, _, right, _ = shape["box"]
    return float(right - left)


def middle_of(shape: Measured) -> tuple[float, float]:
    left, top, right, bottom = shape["box"]
    return (left + right) / 2, (top + bottom) / 2


def rgb(colour: str) -> tuple[int, ...]:
    """Of '#2b6cb0' or 'rgb(43, 108, 176)'."""
    numbers = [int(colour[i : i + 2], 16) for i in (1, 3, 5)] if colour[0] == "#" else re.findall(r"\d+", colour)[:3]
    return tuple(map(int, numbers))


def picture(measured: Measured, label: str) -> Measured:
    found = [one for one in measured["pictures"] if one["label"] == label]
    assert len(found) == 1, label
    one: Measured = found[0]
    return one


def bars(one: Measured) -> dict[str, dict[str, Measured]]:
    """Label of a bar -> name of a part -> its rectangle."""
    found: dict[str, dict[str, Measured]] = {}
    for rect in one["rects"]:
        label, name = re.fullmatch(r"(.*?), (.*): [\d.]+ %", rect["title"]).groups()  # type: ignore[union-attr]
        found.setdefault(label, {})[name] = rect
    return found


def assert_in_proportion(parts: dict[str, Measured], values: dict[str, float]) -> None:
    """Widths of a bar's parts, laid end to end, to a fiftieth of a pixel."""
    values = {name: value for name, value in values.items() if value > 0}
    assert set(parts) == set(values)
    scale = sum(map(width_of, parts.values())) / sum(values.values())
    for name, value in values.items():
        assert width_of(parts[name]) == pytest.approx(scale * value, abs=0.02), name
    boxes = [part["box"] for part in parts.values()]
    for before, after in pairwise(boxes):
        assert after[0] == pytest.approx(before[2], abs=0.02)


def place_of(one: Measured, value: float, along: int) -> float:
    """Where a number lies on a logarithmic axis (0: x, 1: y), by the numbers written along it."""
    ticks = [
        (t["box"][2] if along else -middle_of(t)[1], float(t["text"].replace(",", "")), middle_of(t)[along])
        for t in one["texts"]
        if re.match(r"[\d.,]+$", t["text"])
    ]
    line = min(edge for edge, _, _ in ticks)  # the lowest row, or the column that ends farthest to the left
    on_axis = sorted((number, at) for edge, number, at in ticks if edge < line + 3)
    (low, start), (high, end) = on_axis[0], on_axis[-1]
    return start + (end - start) * math.log(value / low) / math.log(high / low)


def assert_right(measured: Measured, layout: str, palette: Palette = LIGHT) -> None:
    """Nothing cut, covered, small, faint or to be scrolled sideways; all pictures in one layout and in the palette."""
    assert measured["page_width"] == measured["width"]
    assert screens.findings(measured) == []
    assert (rgb(measured["background"]), rgb(measured["colour"])) == (rgb(palette.page), rgb(palette.text))
    assert {one["layout"] for one in measured["pictures"]} == {layout}
    for one in measured["pictures"]:
        assert 0 <= one["frame"][0] <= one["box"][0] < one["box"][2] <= one["frame"][2] <= measured["width"]
        assert {rgb(shape["fill"]) for shape in one["rects"] + one["circles"]} <= set(map(rgb, palette.series))


def test_nothing_is_wrong_on_any_screen(light: dict[str, Measured]) -> None:
    for measured in light.values():
        assert_right(measured, "wide" if measured["width"] == 1280 else "narrow")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "layout"), [(1280, "wide"), (400, "narrow")])
def test_nothing_is_wrong_in_the_dark(name: str, width: int, layout: str, browser: str, pages: dict[str, Path]) -> None:
    assert_right(screens.measure(browser, pages[name], width, dark=True), layout, DARK)


@pytest.mark.parametrize(("around", "layout"), [(0, "wide"), (1, "narrow")])
def test_the_layout_changes_where_text_would_be_too_small(
    around: int, layout: str, browser: str, pages: dict[str, Path]
) -> None:
    """At the last width of the wide layout, and a pixel below it; the page has 16 pixels at either side."""
    width = html.NARROW_PIXELS + 32 - around
    measured = screens.measure(browser, pages["profile"], width)
    assert {one["layout"] for one in measured["pictures"]} == {layout}
    assert min(text["pixels"] for one in measured["pictures"] for text in one["texts"]) >= screens.MIN_TEXT
    assert screens.findings(measured) == []


def test_the_cell_of_a_notebook_counts_and_not_the_window(
    browser: str, results: dict[str, Any], tmp_path: Path
) -> None:
    page = tmp_path / "notebook.html"
    cell = f'<div style="width:400px">{results["profile"]._repr_html_()}</div>'
    page.write_text(f"<!doctype html><html><body>{cell}</body></html>", encoding="utf-8")
    measured = screens.measure(browser, page, 1280)
    assert_right(measured, "narrow")
    assert all(one["box"][2] <= 410 for one in measured["pictures"])


def test_the_profile_is_drawn_as_the_json_says(light: dict[str, Measured], results: dict[str, Any]) -> None:
    measured, record = light["profile"], results["profile"].to_json()
    for name in ("decode", "prefill"):
        title = name.capitalize()
        parts = bars(picture(measured, f"{title} time by stage"))[name]
        assert_in_proportion(parts, record[name]["stages"])
        for stage, rect in parts.items():
            assert rgb(rect["fill"]) == rgb(LIGHT.series[profile_pictures.COLOURS[stage]])
        roofline = picture(measured, f"{title}: roofline")
        rows = {row["stage"]: row for row in record[name]["roofline"] if row["operations"] and row["bytes"]}
        assert len(roofline["circles"]) == len(rows)
        for circle in roofline["circles"]:
            row = rows[circle["title"].split(":")[0]]
            x, y = middle_of(circle)
            assert x == pytest.approx(place_of(roofline, row["operations"] / row["bytes"], 0), abs=2)
            assert y == pytest.approx(place_of(roofline, row["gops"], 1), abs=2)
    layers = bars(picture(measured, "A decode step by layer"))
    assert list(layers) == [f"layer {row['layer']}" for row in record["decode"]["layers"]]
    for row, parts in zip(record["decode"]["layers"], layers.values(), strict=True):
        assert_in_proportion(parts, row["stages"])
    sums = [sum(map(width_of, parts.values())) for parts in layers.values()]
    longest = max(row["ms"] for row in record["decode"]["layers"])
    for row, whole in zip(record["decode"]["layers"], sums, strict=True):
        assert whole == pytest.approx(max(sums) * row["ms"] / longest, abs=0.1)
    sweep = picture(measured, "FFN share of decode against context")
    assert len(sweep["circles"]) == 2 * len(record["contexts"])
    heights = {circle["title"]: middle_of(circle)[1] for circle in sweep["circles"]}
    top, bottom = (next(middle_of(t)[1] for t in sweep["texts"] if t["text"] == n) for n in ("100", "0"))
    for row in record["contexts"]:
        for name, key in (("measured", "ffn_share"), ("by bytes, as account counts them", "byte_share")):
            height = heights[f"{name}: {row['context']:.4g}, {100 * row[key]:.4g}"]
            assert height == pytest.approx(bottom + (top - bottom) * row[key], abs=2)


def test_the_tables_of_the_profile_are_the_json(light: dict[str, Measured], results: dict[str, Any]) -> None:
    tables, record = light["profile"]["tables"], results["profile"].to_json()
    stages = [table for table in tables if table[0][0] == "stage"]
    for table, name in zip(stages, ("decode", "prefill"), strict=True):
        ms = {row[0]: row[1] for row in table[1:]}
        expected = {row["stage"]: f"{row['ms']:.3f}" for row in record[name]["roofline"]}
        phase = record[name]
        assert ms == {**expected, "other": f"{phase['stages']['other']:.3f}", "wall": f"{phase['wall_ms']:.3f}"}
        assert set(expected) <= set(STAGES)
    layers = next(table for table in tables if table[0][0] == "layer, ms")
    assert [row[-2] for row in layers[1:]] == [f"{row['ms']:.4f}" for row in record["decode"]["layers"]]
    sweep = next(table for table in tables if table[0][0] == "context")
    assert [(row[1], row[4]) for row in sweep[1:]] == [
        (f"{row['wall_ms']:.3f}", f"{row['all_steps_ms']['p90']:.3f}") for row in record["contexts"]
    ]
    facts = dict(tables[0])
    assert facts["measuring"].startswith(f"{100 * record['timer_cost']['value']:+.2f} %")


def test_the_comparison_is_drawn_as_the_json_says(light: dict[str, Measured], results: dict[str, Any]) -> None:
    measured, record = light["compare"], results["compare"].to_json()
    rows = [row for row in record["layers"] if row["layer"] is not None]  # lm_head has none
    layers, modules = {row["layer"] for row in rows}, {row["module"] for row in rows}
    for title, key in (("Output", "output_rel_error"), ("Weight", "weight_rel_error")):
        cells = picture(measured, f"{title} error by layer and module")["rects"]
        assert len(cells) == len(layers) * len(modules) == len(rows)
        assert [cell["title"] for cell in cells] == [f"{row['layer']}, {row['module']}: {row[key]:.4f}" for row in rows]
        by_value = np.argsort([row[key] for row in rows])
        opacity = np.array([cell["opacity"] for cell in cells])[by_value]
        assert (np.diff(opacity) >= 0).all()
        assert (opacity[0], opacity[-1]) == (pytest.approx(0.08), 1)
        lefts, tops = ({round(cell["box"][i]) for cell in cells} for i in (0, 1))
        assert (len(lefts), len(tops)) == (len(modules), len(layers))
    swap = bars(picture(measured, "KL caused by each module alone"))
    widths = [width_of(parts["KL"]) for parts in swap.values()]
    klds = [row["mean_kld"] for row in record["swap"] if row["mean_kld"] > 0]
    assert widths == pytest.approx([widths[0] * kld / klds[0] for kld in klds], abs=0.02)
    positions, strips = record["positions"], measured["strips"]
    assert len(strips) == len(set(positions["window"])) == 4
    tokens = [token for strip in strips for token in strip]
    assert len(tokens) == record["scored"]
    assert [token["text"] for token in tokens] == positions["text"]
    deep = np.array([screens.channels(token["background"])[3] for token in tokens])
    klds = np.array(positions["kld"])
    assert (np.diff(deep[np.argsort(klds)]) >= 0).all()
    assert (deep[klds <= compare_pictures.FAINT] == 0).all()
    assert (deep[klds > 1.1 * compare_pictures.FAINT] > 0).all()
    for token, kld in zip(tokens, positions["kld"], strict=True):
        assert f"KL {kld:.4f}" in token["title"]


def test_the_tables_of_the_comparison_are_the_json(light: dict[str, Measured], results: dict[str, Any]) -> None:
    tables, record = light["compare"]["tables"], results["compare"].to_json()
    modules = next(table for table in tables if table[0][0] == "layer, module" and len(table[0]) == 4)
    assert modules[1:] == [
        [row["module"] if row["layer"] is None else f"{row['layer']} {row['module']}",
         f"{row['weight_rel_error']:.5f}", f"{row['output_rel_error']:.5f}", f"{row['cosine']:.6f}"]
        for row in record["layers"]
    ]  # fmt: skip
    worst = next(table for table in tables if table[0][0] == "token")
    assert [row[2] for row in worst[1:]] == [f"{position['kld']:.4f}" for position in record["worst"]]
    for row, position in zip(worst[1:], record["worst"], strict=True):
        assert [f"{100 * choice['probability']:.1f} %" for choice in position["quant"]] == re.findall(
            r"' ([\d.]+ %)(?:  |$)", row[5]
        )
    assert f"mean {record['mean_kld']:.5f}" in dict(tables[0])["KL"]


def test_the_account_is_drawn_as_the_json_says(light: dict[str, Measured], results: dict[str, Any]) -> None:
    measured, record = light["account"], results["account"].to_json()
    names = {"ffn": "FFN", "attention": "attention", "embedding": "embedding", "lm_head": "head", "norm": "norms",
             "router": "router", "other": "other"}  # fmt: skip
    counts = {names[key]: value for key, value in record["parameters"].items() if key in names}
    assert_in_proportion(bars(picture(measured, "Parameters by part"))["all"], counts)
    flops = bars(picture(measured, "FLOPs of a token by part"))
    keys = {"ffn": "FFN", "attention_projections": "attention: projections", "attention_scores": "attention: scores",
            "lm_head": "head", "router": "router"}  # fmt: skip
    for row in record["flops_by_context"]:
        parts = {keys[key]: value for key, value in row.items() if key in keys}
        assert_in_proportion(flops[f"context {row['context']:,}"], parts)
    memory = bars(picture(measured, "Memory"))["needed"]
    needs = record["memory"]
    assert_in_proportion(
        memory,
        {"weights": needs["weight_bytes"], "KV cache": needs["kv_cache_bytes"],
         "activations": needs["activation_bytes"]},
    )  # fmt: skip
    shown = {row[0]: row[1] for row in measured["tables"][0][1:]}
    assert shown == {
        **{name: f"{count:,}" for name, count in counts.items() if count},
        "total": f"{record['parameters']['total']:,}",
    }


def test_what_is_wrong_is_found(browser: str, tmp_path: Path) -> None:
    """A page with one of each fault: the checks above can fail."""
    page = tmp_path / "wrong.html"
    page.write_text(
        '<html><body><div class="pyengine-report" style="color:#ccc;background:#fff">'
        '<div style="width:900px">wide</div><p style="font-size:8px">small</p>'
        '<div id="box" style="width:50px;overflow:auto"><div style="width:90px">long</div></div>'
        '<img src="http://127.0.0.1:9/picture.png">'
        '<div class="figure"><svg viewBox="0 0 1000 60" width="600" aria-label="bad">'
        '<rect x="0" y="0" width="300" height="60" fill="#808080"/>'
        '<text x="20" y="30" fill="#909090" style="font-size:30px">grey</text>'
        '<text x="500" y="30" style="font-size:30px">one</text><text x="510" y="32" style="font-size:30px">two</text>'
        '<text x="700" y="30" style="font-size:9px">tiny</text><text x="980" y="40" style="font-size:30px">cut</text>'
        "</svg></div></div></body></html>",
        encoding="utf-8",
    )
    found = "\n".join(screens.findings(screens.measure(browser, page, 700)))
    for fault in ("scrolls sideways: <div id=\"box\"", "'small' is 8.0 pixels", "wide in a window of 700",
                  "requested ['http://127.0.0.1:9/picture.png']", "text rgb(204, 204,",
                  "'grey' has a contrast", "'one' covers 'two'", "'tiny' is 5.4 pixels", "'cut' is cut"):  # fmt: skip
        assert fault in found
    assert found.count("\n") == 8
