"""Stage 6, account_html: an account as a page: stacked bars, and the same numbers as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine import quantize
from pyengine.reports import account_text as text
from pyengine.reports import html
from pyengine.reports.account_parts import GROUPS
from pyengine.reports.html import Bar
from pyengine.reports.tables import short

if TYPE_CHECKING:
    from pyengine.reports.account import Account


# The same colour for the same thing in every chart.
COLOURS = {
    "FFN": 0, "attention": 1, "attention: projections": 1, "attention: scores": 2, "KV cache": 2, "embedding": 4,
    "head": 3, "norms": 6, "router": 5, "other": 7,
}  # fmt: skip
MEMORY = {"weights": 7, "KV cache": 2, "activations": 5, "available": 6}


def page(a: Account) -> str:
    return html.page(f"{a.model}: parameters, FLOPs and bytes", _body(a))


def fragment(a: Account) -> str:
    return html.fragment(_body(a))


def _body(a: Account) -> str:
    anatomy = a.anatomy
    head = [f"<h1>{html.escape(a.model)}</h1>"]
    name = f"{anatomy.family} ({anatomy.architecture})" if anatomy.architecture else anatomy.family
    head.append(html.paragraph(f"{name}; {text.parameters_line(a)} parameters"))
    if anatomy.not_run is not None:
        head.append(html.paragraph(f"This version does not run it: {anatomy.not_run}"))
    head += [html.paragraph(note) for note in a.notes]
    return "".join([*head, _parameters(a), _flops(a), _bytes(a), _memory(a), _speed(a), _arithmetic(a)])


def _parameters(a: Account) -> str:
    p = a.parameters
    bars = [Bar("all", {text.NAMES[g]: p[g] for g in GROUPS}, short(p["total"]))]
    if p["active"] != p["total"]:
        used = {g: sum(part.active * part.size for part in a.anatomy.main if part.group == g) for g in GROUPS}
        bars.append(Bar("of a token", {text.NAMES[g]: used[g] for g in GROUPS}, short(p["active"])))
    chart = html.stacked_bars("Parameters by part", COLOURS, bars)
    return html.section("Parameters", chart, html.table(["part", "parameters", "share"], text.parameter_rows(a)))


def _flops(a: Account) -> str:
    bars = [
        Bar(f"context {context:,}", {text.NAMES[g]: flops[g] for g in text.FLOPS}, short(flops["total"]))
        for context, flops in a.flops_by_context().items()
    ]
    chart = html.stacked_bars("FLOPs of a token by part", COLOURS, bars, fractions=True)
    return html.section(
        "FLOPs per token", chart, html.table(*text.flops_table(a)), html.paragraph(text.crossover_line(a))
    )


def _bytes(a: Account) -> str:
    parts = [html.table(*text.bytes_table(a))]
    if a.decodes:
        kv = sum(s.read_bytes(a.context, a.kv_dtype) for s in a.anatomy.attention)
        bars = []
        for fmt in a.weight_bytes:
            reads = {text.NAMES[g]: n for g, n in a.anatomy.step_bytes(quantize.choose(fmt)).items()}
            bars.append(Bar(fmt, {**reads, "KV cache": kv}, short(sum(reads.values()) + kv) + "B"))
        title = f"Bytes of a decode step at context {a.context:,}, KV cache in {a.kv_dtype}"
        parts = [html.paragraph(title), html.stacked_bars(title, COLOURS, bars), *parts]
    return html.section("Bytes", *parts)


def _memory(a: Account) -> str:
    needs = {"weights": a.weight_bytes[a.quant], "KV cache": a.kv_cache_bytes, "activations": a.activation_bytes}
    bars = [Bar("needed", needs, short(a.needed_bytes) + "B")]
    if a.room.available is not None:
        bars.append(Bar("available", {"available": a.room.available}, short(a.room.available) + "B"))
    chart = html.stacked_bars("Memory", MEMORY, bars)
    return html.section("Memory", chart, *map(html.paragraph, text.memory_lines(a)))


def _speed(a: Account) -> str:
    return html.section("Speed to expect", *map(html.paragraph, text.speed_lines(a)))


def _arithmetic(a: Account) -> str:
    return html.section("The arithmetic", html.preformatted(a.explain()))
