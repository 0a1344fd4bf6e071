"""Stage 6, profile_text: a profile as text: the FFN's share first, then tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.reports.machine import hop_text, processor
from pyengine.reports.tables import facts, share, short, table

if TYPE_CHECKING:
    from pyengine.reports.profile_result import Phase, Profile

SMALL = 0.5  # points that are not named in one

Table = tuple[list[str], list[list[str]]]


def report(p: Profile) -> str:
    """All of it as plain text."""
    lines = [
        first_line(p),
        *explanation(p),
        "",
        *facts(about(p)),
        "",
        f"decode, a step of {p.decode.wall_ms:.3f} ms ({p.decode.tokens_per_second:.1f} tok/s)",
        table(*stage_table(p.decode)),
        "",
        f"prefill, a prompt of {p.prefill.tokens} tokens in {p.prefill.wall_ms:.1f} ms "
        f"({p.prefill.tokens_per_second:.1f} tok/s); FFN {share(p.prefill.ffn_share, 1)}",
        table(*stage_table(p.prefill)),
        "",
        table(*layer_table(p)),
    ]
    if len(p.sweep) > 1:
        lines += ["", table(*sweep_table(p))]
    return "\n".join(lines)


def first_line(p: Profile) -> str:
    d = p.decode
    return (
        f"FFN {share(d.ffn_share, 1)} of decode time at context {d.context:,}; by bytes account predicts "
        f"{share(d.byte_share, 1)}"
    )


def title(p: Profile) -> list[str]:
    """Lines above a picture that stands alone."""
    known = dict(about(p))
    said = [known[name] for name in ("formats", "machine", "not quiet") if name in known]
    return [p.model, first_line(p), *said]


def explanation(p: Profile) -> list[str]:
    """Where the two shares part: which stages read slower, or faster, than the FFN; what that does to its share."""
    d = p.decode
    rate = d.rate(d.work["ffn"].bytes, "ffn")
    if rate is None:
        return []
    effect = {row["stage"]: -row["points"] for row in d.differences()}  # on the measured share
    named = sorted((row for row in d.differences() if abs(row["points"]) >= SMALL), key=lambda row: -abs(row["points"]))
    whole = 100 * (d.ffn_share - d.byte_share)
    first = f"{abs(whole):.1f} points {'more' if whole > 0 else 'less'} than predicted"
    if not named:
        return [f"{first}: every stage reads about as fast as the FFN, {rate:.1f} GB/s"]
    lines = [f"{first}: the FFN reads at {rate:.1f} GB/s, and of the others"]
    for row in named:
        stage, ms, expected = row["stage"], row["ms"], row["ms_at_ffn_rate"]
        if expected:
            own = d.rate(d.work[stage].bytes, stage)
            what = f"reads at {number(own)} GB/s and takes {ms:.3f} ms, {expected:.3f} ms at the FFN's rate"
        else:
            what = f"takes {ms:.3f} ms and counts no bytes"
        lines.append(f"  {stage} {what}: {effect[stage]:+.1f} points")
    rest = sum(effect.values()) - sum(effect[row["stage"]] for row in named)
    return [*lines, f"  the rest: {rest:+.1f} points"] if abs(rest) >= 0.05 else lines


def about(p: Profile) -> list[tuple[str, str]]:
    """What was measured and how, by name."""
    m, d = p.machine, p.decode
    group = f" g{p.group_size}" if p.group_size else ""
    others = [share(phase.stages["other"], phase.wall_ms) for phase in (d, p.prefill)]
    spread = ", ".join(f"{name} {ms:.3f}" for name, ms in d.all_steps_ms.items())
    return [
        ("model", p.model),
        ("formats", f"{p.quant}{group}, {p.bits_per_weight:.2f} bits per weight, {p.kv_dtype} KV"),
        (
            "machine",
            f"{processor(m)}: read {m['read_gb_per_s']:.1f} GB/s, int8 "
            f"{m['int8_gops']:.0f} Gop/s, float32 {m['f32_gflops']:.0f} GFLOP/s"
            f"{hop_text(m)}",
        ),
        *([("not quiet", m["disturbed"])] if m["disturbed"] else []),
        (
            "steps",
            f"{d.steps}, context {d.context - d.steps + 1:,} to {d.context:,}; the mean of the quicker "
            f"{d.steps_used}, {d.wall_ms:.3f} ms (of all: {spread})",
        ),
        (
            "measuring",
            f"{100 * p.cost.value:+.2f} % (standard error {100 * p.cost.error:.2f} %) beside a program without "
            f"timers, {p.cost.pairs} pairs of the same step",
        ),
        ("other", f"{others[0]} of decode wall time, {others[1]} of prefill"),
    ]


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value else ""


def stage_table(phase: Phase) -> Table:
    """Of a phase, a row for each stage that takes time, `other` last."""
    head = ["stage", "ms", "share", "bytes", "operations", "GB/s", "Gop/s", "of read", "of compute", "bound"]
    rows = [
        [
            r["stage"], f"{r['ms']:.3f}", share(r["ms"], phase.wall_ms), short(r["bytes"]), short(r["operations"]),
            number(r["gb_per_s"]), number(r["gops"]), percent(r["read_fraction"]), percent(r["compute_fraction"]),
            r["bound"],
        ]
        for r in phase.roofline()
    ]  # fmt: skip
    other = phase.stages["other"]
    rows.append(["other", f"{other:.3f}", share(other, phase.wall_ms), *[""] * 7])
    work = phase.work.values()
    amounts = [short(sum(w.bytes for w in work)), short(sum(w.ops for w in work))]
    rows.append(["wall", f"{phase.wall_ms:.3f}", "100.0 %", *amounts, *[""] * 5])
    return head, rows


def layer_stages(phase: Phase) -> list[str]:
    return [name for name in phase.work if any(name in layer for layer in phase.layers)]


def layer_table(p: Profile) -> Table:
    """Each layer of a decode step by stage, and of the prompt."""
    stages = layer_stages(p.decode)
    rows = []
    for index, (decode, prefill) in enumerate(zip(p.decode.layers, p.prefill.layers, strict=True)):
        parts = [f"{decode.get(stage, 0.0):.4f}" for stage in stages]
        rows.append([str(index), *parts, f"{sum(decode.values()):.4f}", f"{sum(prefill.values()):.3f}"])
    return ["layer, ms", *stages, "decode", "prefill"], rows


def sweep_table(p: Profile) -> Table:
    """The FFN's share against the context; p10, median and p90 are of the wall time of all steps."""
    head = ["context", "ms", "p10", "median", "p90", "tok/s", "FFN share", "by bytes", "attention ms", "ffn ms"]
    return head, [
        [
            f"{q.context:,}", f"{q.wall_ms:.3f}", *(f"{ms:.3f}" for ms in q.all_steps_ms.values()),
            f"{q.tokens_per_second:.1f}", share(q.ffn_share, 1), share(q.byte_share, 1),
            f"{q.stages['attention']:.3f}", f"{q.stages['ffn']:.3f}",
        ]
        for q in p.sweep
    ]  # fmt: skip
