"""Stage 6, account_pictures: what an account draws: parameters, FLOPs, bytes and memory as stacked bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine import quantize
from pyengine.reports import account_text as text
from pyengine.reports import charts
from pyengine.reports.account_parts import GROUPS
from pyengine.reports.charts import Bar
from pyengine.reports.drawing import Drawing
from pyengine.reports.tables import short

if TYPE_CHECKING:
    from pyengine.reports.account import Account

# The same colour for the same thing in every chart.
COLOURS = {
    "FFN": 0, "attention": 1, "attention: projections": 1, "attention: scores": 2, "KV cache": 2, "embedding": 4,
    "head": 3, "norms": 6, "router": 5, "other": 7,
}  # fmt: skip
MEMORY = {"weights": 7, "KV cache": 2, "activations": 5, "available": 6}


def pictures(a: Account) -> list[Drawing]:
    """All of them, in the order of the page."""
    read = step_bytes(a)
    return [parameters(a), flops(a), *([] if read is None else [read]), memory(a)]


def parameters(a: Account) -> Drawing:
    p = a.parameters
    bars = [Bar("all", {text.NAMES[g]: p[g] for g in GROUPS}, short(p["total"]))]
    if p["active"] != p["total"]:
        used = {g: sum(part.active * part.size for part in a.anatomy.main if part.group == g) for g in GROUPS}
        bars.append(Bar("of a token", {text.NAMES[g]: used[g] for g in GROUPS}, short(p["active"])))
    return charts.stacked_bars("Parameters by part", COLOURS, bars, caption="Parameters by part")


def flops(a: Account) -> Drawing:
    bars = [
        Bar(f"context {context:,}", {text.NAMES[g]: flops[g] for g in text.FLOPS}, short(flops["total"]))
        for context, flops in a.flops_by_context().items()
    ]
    title = "FLOPs of a token by part"
    return charts.stacked_bars(title, COLOURS, bars, fractions=True, caption=f"{title}, each bar the whole")


def step_bytes(a: Account) -> Drawing | None:
    """Of a model that decodes."""
    if not a.decodes:
        return None
    kv = sum(s.read_bytes(a.context, a.kv_dtype) for s in a.anatomy.attention)
    bars = []
    for fmt in a.weight_bytes:
        reads = {text.NAMES[g]: n for g, n in a.anatomy.step_bytes(quantize.choose(fmt)).items()}
        bars.append(Bar(fmt, {**reads, "KV cache": kv}, short(sum(reads.values()) + kv) + "B"))
    title = f"Bytes of a decode step at context {a.context:,}, KV cache in {a.kv_dtype}"
    return charts.stacked_bars(title, COLOURS, bars, caption=title)


def memory(a: Account) -> Drawing:
    needs = {"weights": a.weight_bytes[a.quant], "KV cache": a.kv_cache_bytes, "activations": a.activation_bytes}
    bars = [Bar("needed", needs, short(a.needed_bytes) + "B")]
    if a.room.available is not None:
        bars.append(Bar("available", {"available": a.room.available}, short(a.room.available) + "B"))
    return charts.stacked_bars("Memory", MEMORY, bars, caption=f"Memory, {a.quant}, context {a.context:,}")
