"""Stage 6, account_html: an account as a page: its pictures, and the same numbers as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.reports import account_pictures as pictures
from pyengine.reports import account_text as text
from pyengine.reports import html

if TYPE_CHECKING:
    from pyengine.reports.account import Account


def page(a: Account) -> str:
    return html.page(f"{a.model}: parameters, FLOPs and bytes", _body(a))


def fragment(a: Account) -> str:
    return html.fragment(_body(a))


def _body(a: Account) -> str:
    anatomy = a.anatomy
    head = [f"<h1>{html.escape(a.model)}</h1>"]
    name = f"{anatomy.family} ({anatomy.architecture})" if anatomy.architecture else anatomy.family
    head.append(html.paragraph(f"{name}; parameters: {text.parameters_line(a)}"))
    if anatomy.not_run is not None:
        head.append(html.paragraph(f"This version does not run it: {anatomy.not_run}"))
    head += [html.paragraph(note) for note in a.notes]
    return "".join([*head, _parameters(a), _flops(a), _bytes(a), _memory(a), _speed(a), _arithmetic(a)])


def _parameters(a: Account) -> str:
    rows = html.table(["part", "parameters", "share"], text.parameter_rows(a))
    return html.section("Parameters", html.figure(pictures.parameters(a)), rows)


def _flops(a: Account) -> str:
    rows, crossover = html.table(*text.flops_table(a)), html.paragraph(text.crossover_line(a))
    return html.section("FLOPs per token", html.figure(pictures.flops(a)), rows, crossover)


def _bytes(a: Account) -> str:
    read = pictures.step_bytes(a)
    return html.section("Bytes", "" if read is None else html.figure(read), html.table(*text.bytes_table(a)))


def _memory(a: Account) -> str:
    return html.section("Memory", html.figure(pictures.memory(a)), *map(html.paragraph, text.memory_lines(a)))


def _speed(a: Account) -> str:
    return html.section("Speed to expect", *map(html.paragraph, text.speed_lines(a)))


def _arithmetic(a: Account) -> str:
    return html.section("The arithmetic", html.preformatted(a.explain()))
