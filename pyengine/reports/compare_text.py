"""Stage 6, compare_text: a comparison as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.reports.tables import facts, table

if TYPE_CHECKING:
    from pyengine.reports.compare_layers import ModuleError
    from pyengine.reports.compare_result import Choice, CompareResult, Position, SwapRow

SHOWN = 10  # rows of a list in the terminal

Table = tuple[list[str], list[list[str]]]


def report(r: CompareResult) -> str:
    lines = facts(summary(r))
    if r.layers:
        lines += [
            "",
            f"Errors of each module on the baseline's inputs, {r.layers_tokens} tokens",
            table(*layer_table(r)),
            *head_lines(r),
        ]
    if r.swap is not None:
        lines += ["", f"KL of the baseline with one module quantized, {r.swap_tokens} tokens"]
        lines.append(table(*swap_table(r, SHOWN)))
    lines += ["", "Where they part most", table(*worst_table(r, SHOWN))]
    if r.greedy is not None:
        lines += ["", *greedy_lines(r)]
    return "\n".join(lines)


def plus_minus(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" +- {error:.{digits}f}")


def summary(r: CompareResult) -> list[tuple[str, str]]:
    """What was compared and how far apart it is, by name."""
    text, group, d = r.text, f" g{r.group_size}" if r.group_size else "", r.delta_p
    return [
        ("model", r.model),
        (
            "formats",
            f"{r.quant}{group}, {r.bits_per_weight:.2f} bits per weight, against {r.baseline}"
            + ("" if r.against == r.model else f" of {r.against}")
            + ("" if r.loaded == "together" else f"; loaded {r.loaded}"),
        ),
        ("text", f"{text['name']}, {text['bytes']} bytes, sha256 {text['sha256'][:16]}"),
        ("tokens", f"{r.tokens} in windows of {r.window}, second half scored, {r.scored} in all"),
        (
            "KL",
            f"mean {plus_minus(r.mean_kld, r.mean_kld_stderr, 5)}  median {r.median_kld:.5f}  p99 "
            f"{r.p99_kld:.4f}  max {r.max_kld:.4f} nats",
        ),
        ("top-1", f"{100 * r.top1_agreement:.2f} % agree"),
        (
            "perplexity",
            f"{plus_minus(r.ppl_baseline, r.ppl_baseline_stderr, 4)} -> "
            f"{plus_minus(r.ppl_quant, r.ppl_quant_stderr, 4)}",
        ),
        (
            "true token",
            f"probability {100 * d['mean']:+.3f} % in the mean, {100 * d['rms']:.2f} % rms; "
            f"p1 {100 * d['p1']:+.1f}, p5 {100 * d['p5']:+.1f}, p95 {100 * d['p95']:+.1f}, p99 {100 * d['p99']:+.1f} %",
        ),
        *(("note", note) for note in r.notes),
    ]


def title(r: CompareResult) -> list[str]:
    """Lines above a picture that stands alone."""
    said = [f"{name} {text}" for name, text in summary(r) if name in ("KL", "top-1", "perplexity")]
    return [f"{r.model}: {r.quant} against {r.baseline}", *said]


def modules_of(r: CompareResult) -> list[str]:
    """Modules of layers, in order."""
    return list(dict.fromkeys(row.module for row in r.layers if row.layer is not None))


def head_lines(r: CompareResult) -> list[str]:
    return [
        f"{row.module}: weight error {row.weight_rel_error:.5f}, output error {row.output_rel_error:.4f}, "
        f"cosine {row.cosine:.6f}"
        for row in r.layers
        if row.layer is None
    ]


def layer_table(r: CompareResult) -> Table:
    """A row for each layer: output error of each module, and the error of the residual stream behind the layer."""
    modules, found = modules_of(r), {(row.layer, row.module): row for row in r.layers}
    rows = []
    for state in r.hidden:
        cells = [f"{found[state.layer, m].output_rel_error:.4f}" if (state.layer, m) in found else "" for m in modules]
        rows.append([str(state.layer), *cells, f"{state.rel_error:.4f}"])
    return ["layer, output error", *modules, "all up to here"], rows


def named(row: ModuleError | SwapRow) -> str:
    return row.module if row.layer is None else f"{row.layer} {row.module}"


def module_table(r: CompareResult) -> Table:
    """Every module with all of its figures."""
    rows = [
        [named(row), f"{row.weight_rel_error:.5f}", f"{row.output_rel_error:.5f}", f"{row.cosine:.6f}"]
        for row in r.layers
    ]
    return ["layer, module", "weight error", "output error", "cosine"], rows


def swap_table(r: CompareResult, count: int | None = None) -> Table:
    rows = [[named(row), f"{row.mean_kld:.6f}"] for row in r.swap or ()]
    return ["layer, module", "mean KL"], rows[:count]


def shown(text: str) -> str:
    """A token's text in one cell."""
    return repr(text)[1:-1].replace("|", "\\|")


def choices(top: tuple[Choice, ...]) -> str:
    return "  ".join(f"'{shown(c.text)}' {100 * c.probability:.1f} %" for c in top)


def worst_table(r: CompareResult, count: int | None = None) -> Table:
    rows = [
        [f"'{shown(p.text)}'", f"{p.window}:{p.position}", f"{p.kld:.4f}", f"{100 * p.delta_p:+.2f} %",
         choices(p.baseline), choices(p.quant)]
        for p in r.worst[:count]
    ]  # fmt: skip
    return ["token", "window:place", "KL", "delta p", f"top 5 of {r.baseline}", f"top 5 of {r.quant}"], rows


def title_of(p: Position, r: CompareResult) -> str:
    """What a token of the strip says when pointed at."""
    return (
        f"'{shown(p.text)}' KL {p.kld:.4f}, delta p {100 * p.delta_p:+.2f} %\n{r.baseline}: {choices(p.baseline)}\n"
        f"{r.quant}: {choices(p.quant)}"
    )


def greedy_lines(r: CompareResult) -> list[str]:
    """Both texts; >>> stands where they part."""
    g = r.greedy
    assert g is not None
    if g.first_difference is None:
        return [f"Greedy text of both: {g.baseline}"]
    at, token = g.first_difference["character"], g.first_difference["token"]
    marked = [f"{text[:at]}>>>{text[at:]}" for text in (g.baseline, g.quant)]
    return [f"Greedy texts part at token {token}", f"{r.baseline}: {marked[0]}", f"{r.quant}: {marked[1]}"]
