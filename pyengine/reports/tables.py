"""Stage 6, tables: rows of cells as a markdown table, names with their texts, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table, the first column to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Names and what there is to say of each, as lines."""
    return [f"{name:<12}{text}" for name, text in pairs]


def short(value: float) -> str:
    """1234567890 -> '1.23 G' (decimal)."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
