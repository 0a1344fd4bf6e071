"""Stage 6, compare_pictures: what a comparison draws: heat maps of layer x module, KL by module, the text's tokens."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from pyengine.reports import charts
from pyengine.reports import compare_text as text
from pyengine.reports.charts import Bar
from pyengine.reports.drawing import Drawing, Picture, Strip, Token

if TYPE_CHECKING:
    from pyengine.reports.compare_result import CompareResult

FAINT = 0.001  # nats: KL up to here leaves a token uncoloured; 1 nat and more colours it fully


def pictures(r: CompareResult) -> list[Picture]:
    """All of them, in the order of the page."""
    swapped = swap(r)
    return [*layers(r), *([] if swapped is None else [swapped]), tokens(r)]


def layers(r: CompareResult) -> list[Drawing]:
    """Output and weight error of every module; none where they were not measured."""
    if not r.layers:
        return []
    modules, found = text.modules_of(r), {(row.layer, row.module): row for row in r.layers}
    rows = [state.layer for state in r.hidden]
    out = []
    for title, name in (("Output error", "output_rel_error"), ("Weight error", "weight_rel_error")):
        values = [[getattr(found[layer, m], name) if (layer, m) in found else None for m in modules] for layer in rows]
        names, label = [f"{layer}" for layer in rows], f"{title} by layer and module"
        out.append(charts.heat_map(label, modules, names, values, "{:.4f}".format, caption=f"{title}, relative"))
    return out


def swap(r: CompareResult) -> Drawing | None:
    if r.swap is None:
        return None
    _, rows = text.swap_table(r)
    bars = [Bar(row[0], {"KL": max(one.mean_kld, 0.0)}, row[1]) for row, one in zip(rows, r.swap, strict=True)]
    return charts.stacked_bars(
        "KL caused by each module alone", {"KL": 1}, bars[: text.SHOWN * 2],
        caption=f"KL of the baseline with one module quantized, {r.swap_tokens} tokens",
    )  # fmt: skip


def tokens(r: CompareResult) -> Strip:
    """The scored text by window, the deeper the larger its KL."""
    windows = []
    for _, positions in groupby(r.positions, key=lambda p: p.window):
        row = []
        for p in positions:
            depth = math.log(p.kld / FAINT) / math.log(1 / FAINT) if p.kld > 0 else 0.0
            row.append(Token(p.text, min(max(depth, 0.0), 1.0), text.title_of(p, r)))
        windows.append(row)
    note = f"Second half of each window; from no colour (KL of {FAINT:g} nats and less) to full (1 and more)."
    return Strip("Token by token", windows, note)
