"""Pages of reports in headless Chromium: screenshots to look at, and what the browser laid out, as JSON.

    python tools/checks/report_screens.py --out FOLDER [--model MODEL] [--quant Q] [--swap] [PAGE.html ...]

makes the pages of profile, compare and account of MODEL (default: the demo model), and their PNG files where matplotlib
is installed, takes each page 1280 and 400 pixels wide, light and dark, and prints what is wrong: a page wider than its
window, what scrolls sideways, text that is cut, covers other text, or is too small or too faint to read. Exit code 1 if
anything is. With PAGEs only those are taken. Needs `chromium` (Debian's package of that name) or Chrome.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1280, 400)
MIN_TEXT, MIN_CONTRAST = 11.0, 3.0  # size of a font in pixels; WCAG's least, for graphics and large text
SECONDS = 60
# Of a page as it is laid out, what it shows of it. A picture's text and shapes are in pixels of the page.
MEASURE = """
(() => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const own = e => e.firstChild && e.firstChild.nodeType === 3 ? e.firstChild.data : e.textContent;
  const title = e => { const t = e.querySelector("title"); return t ? t.textContent : ""; };
  const all = (e, name) => [...e.querySelectorAll(name)];
  const root = document.querySelector(".pyengine-report");
  const shown = e => e.getBoundingClientRect().width > 0;
  const pictures = all(document, "svg").filter(shown).map(svg => {
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return {
      label: svg.getAttribute("aria-label"), layout: svg.classList[0], box: box(svg), frame: box(svg.parentElement),
      rects: all(svg, "rect").map(e => ({box: box(e), title: title(e), fill: getComputedStyle(e).fill,
                                         opacity: +getComputedStyle(e).fillOpacity})),
      circles: all(svg, "circle").map(e => ({box: box(e), title: title(e), fill: getComputedStyle(e).fill})),
      texts: all(svg, "text").map(e => ({box: box(e), text: own(e), fill: getComputedStyle(e).fill,
                                         pixels: scale * parseFloat(getComputedStyle(e).fontSize)})),
      paths: all(svg, "path").map(e => ({box: box(e), stroke: getComputedStyle(e).stroke})),
    };
  });
  return {
    width: innerWidth, page_width: document.documentElement.scrollWidth,
    page_height: Math.ceil(root.getBoundingClientRect().bottom),
    wider: all(root, "*").filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
      .map(e => e.outerHTML.slice(0, 80)),
    scrolling: all(root, ":not(svg *)").filter(e => e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1)
      .map(e => e.outerHTML.slice(0, 80)),
    sizes: all(root, ":not(svg *)").filter(e => shown(e) && own(e).trim())
      .map(e => [parseFloat(getComputedStyle(e).fontSize), own(e).slice(0, 40)]),
    background: getComputedStyle(root).backgroundColor, colour: getComputedStyle(root).color,
    requested: performance.getEntriesByType("resource").map(e => e.name),
    pictures,
    tables: all(document, "table").map(t => all(t, "tr").map(row => all(row, "th, td").map(c => c.textContent))),
    strips: all(document, ".strip").map(p => all(p, "span").map(e => ({
      text: e.textContent, title: e.title, background: getComputedStyle(e).backgroundColor}))),
    text: root.innerText,
  };
})()
"""


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


def run(browser: str, page: Path, width: int, height: int, dark: bool, *options: str) -> str:
    """One headless run; its standard output. RuntimeError with the browser's last lines if it fails."""
    with tempfile.TemporaryDirectory(prefix="report_screens") as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
            "--force-device-scale-factor=1", f"--window-size={width},{height}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", *options, page.resolve().as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{browser} ended with {done.returncode}: {done.stderr[-400:]}")
    return done.stdout


def measure(browser: str, page: Path, width: int, dark: bool = False) -> dict[str, Any]:
    """What MEASURE finds in a copy of the page (which has no script itself), in a frame: windows are 500 or wider."""
    put = f'parent.document.getElementById("measured").textContent = JSON.stringify({MEASURE})'
    script = f'<script>addEventListener("load", () => {{ {put}; }});</script></body>'
    inner = html.escape(page.read_text(encoding="utf-8").replace("</body>", script), quote=True)
    frame = f'<iframe width="{width}" height="1000" style="border:0" srcdoc="{inner}"></iframe>'
    with tempfile.TemporaryDirectory(prefix="report_screens") as folder:
        copy = Path(folder) / page.name
        copy.write_text(
            f'<!doctype html><meta charset="utf-8"><body><pre id="measured"></pre>{frame}</body>', encoding="utf-8"
        )
        dom = run(browser, copy, width + 100, 1000, dark, "--dump-dom")
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
    if found is None or not found.group(1):
        raise RuntimeError(f"{page}: {browser} measured nothing")
    measured: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return measured


def screenshot(browser: str, page: Path, target: Path, width: int, height: int, dark: bool) -> None:
    run(browser, page, width, height, dark, f"--screenshot={target.resolve()}")


def channels(colour: str) -> list[float]:
    """'rgb(1, 2, 3)' or 'rgba(1, 2, 3, 0.5)' -> red, green, blue, opacity; 0..1."""
    numbers = [float(n) for n in re.findall(r"[\d.]+", colour)]
    return [*(n / 255 for n in numbers[:3]), numbers[3] if len(numbers) > 3 else 1.0]


def contrast(a: list[float], b: list[float]) -> float:
    """WCAG's, of two opaque colours."""

    def luminance(rgb: list[float]) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb[:3]]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def overlap(a: list[float], b: list[float], slack: float = 1.0) -> bool:
    """Of two boxes [left, top, right, bottom], by more than so many pixels both ways."""
    return min(a[2], b[2]) - max(a[0], b[0]) > slack and min(a[3], b[3]) - max(a[1], b[1]) > slack


def findings(m: dict[str, Any]) -> list[str]:
    """What is wrong with a measured page."""
    found = []
    if m["page_width"] > m["width"] or m["wider"]:
        found.append(f"{m['page_width']} pixels wide in a window of {m['width']}: {m['wider'][:3]}")
    for element in m["scrolling"]:
        found.append(f"scrolls sideways: {element}")
    for pixels, text in m["sizes"]:
        if pixels < MIN_TEXT:
            found.append(f"'{text}' is {pixels:.1f} pixels high")
    if m["requested"]:
        found.append(f"requested {m['requested']}")
    page = channels(m["background"])
    if contrast(channels(m["colour"]), page) < 4.5:
        found.append(f"text {m['colour']} on {m['background']}")
    for picture in m["pictures"]:
        label, texts = picture["label"], picture["texts"]
        for text in texts:
            left, top, right, bottom = text["box"]
            if not text["text"]:
                continue
            if text["pixels"] < MIN_TEXT:
                found.append(f"{label}: '{text['text']}' is {text['pixels']:.1f} pixels high")
            box = picture["box"]
            if left < box[0] - 1 or right > box[2] + 1 or top < box[1] - 3 or bottom > box[3] + 3:
                found.append(f"{label}: '{text['text']}' is cut off")
            ground = page[:3]
            for rect in picture["rects"]:
                x, y = (left + right) / 2, (top + bottom) / 2
                if rect["box"][0] <= x <= rect["box"][2] and rect["box"][1] <= y <= rect["box"][3]:
                    fill, opacity = channels(rect["fill"]), rect["opacity"]
                    ground = [opacity * f + (1 - opacity) * g for f, g in zip(fill[:3], ground, strict=True)]
            if contrast(channels(text["fill"]), ground) < MIN_CONTRAST:
                found.append(
                    f"{label}: '{text['text']}' has a contrast of {contrast(channels(text['fill']), ground):.1f}"
                )
        lines = [t for t in texts if t["text"]]
        for a, b in combinations(lines, 2):
            if overlap(a["box"], b["box"], slack=4.0):
                found.append(f"{label}: '{a['text']}' covers '{b['text']}'")
    return found


def make_pages(model: str | None, quant: str, swap: bool, out: Path) -> list[Path]:
    """Of all reports; their PNG files beside them."""
    import pyengine
    from pyengine import demo
    from pyengine.errors import ResourceError

    folder = Path(model) if model else demo.demo_folder(log=print)
    baseline = folder if model else demo.demo_folder(degrid=True, log=print)
    with pyengine.load(folder, quant=quant) as engine:
        contexts = [c for c in (128, 1024) if c < engine.ctx_size]
        results = {"profile": engine.profile(steps=16, contexts=contexts)}
    results["compare"] = pyengine.compare(baseline, quant=quant, tokens=2048, swap=swap, prompt="The sky is")
    results["account"] = pyengine.account(folder, quant=quant)
    pages = []
    for name, result in results.items():
        page = out / f"{name}.html"
        page.write_text(result.to_html(), encoding="utf-8")
        pages.append(page)
        try:
            result.to_png(out / f"{name}.png")
        except ResourceError as error:
            print(error, file=sys.stderr)
    return pages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", metavar="MODEL", help="a folder (default: the demo model)")
    parser.add_argument("--out", metavar="FOLDER", required=True, type=Path)
    parser.add_argument("--quant", default="int4", help="format to profile and compare (int4)")
    parser.add_argument("--swap", action="store_true", help="compare one module at a time too")
    parser.add_argument("pages", metavar="PAGE", nargs="*", type=Path, help="pages there are, in place of new ones")
    args = parser.parse_args(argv)
    browser = find_browser()
    if browser is None:
        parser.error(f"none of {', '.join(NAMES)} is installed")
    args.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for page in args.pages or make_pages(args.model, args.quant, args.swap, args.out):
        for width in WIDTHS:
            for dark in (False, True):
                m = measure(browser, page, width, dark)
                target = args.out / f"{page.stem}-{width}-{'dark' if dark else 'light'}.png"
                screenshot(browser, page, target, width, min(m["page_height"], 16000), dark)
                found = findings(m)
                wrong += len(found)
                print(f"{target}: {len(found)} findings")
                print("".join(f"  {line}\n" for line in dict.fromkeys(found[:20])), end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
