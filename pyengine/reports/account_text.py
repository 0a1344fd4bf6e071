"""Stage 6, account_text: an account as text, and its arithmetic line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine import quantize
from pyengine.reports.account_parts import GROUPS, Ffn, Part
from pyengine.reports.tables import share, short, table

if TYPE_CHECKING:
    from pyengine.reports.account import Account

FLOPS = ("ffn", "attention_projections", "attention_scores", "lm_head", "router", "other")
NAMES = {
    "ffn": "FFN", "attention": "attention", "embedding": "embedding", "lm_head": "head", "norm": "norms",
    "router": "router", "other": "other", "attention_projections": "attention: projections",
    "attention_scores": "attention: scores",
}  # fmt: skip
# Of released Llamas: d, the factor of 2/3 x 4d, and what that is rounded up to a multiple of; config.json has only d.
LLAMA_RULES = (
    (4096, 1.0, 256), (5120, 1.0, 256), (6656, 1.0, 256), (8192, 1.0, 256), (8192, 1.3, 4096), (4096, 1.3, 1024),
    (2048, 1.5, 256), (3072, 1.0, 256), (16384, 1.2, 4096),
)  # fmt: skip


def report(a: Account) -> str:
    """All of it as tables of plain text."""
    anatomy = a.anatomy
    runs = "runs here" if anatomy.not_run is None else "does not run here, by arithmetic alone"
    lines = [
        f"model       {a.model}",
        f"family      {anatomy.family}{f' ({anatomy.architecture})' if anatomy.architecture else ''}; {runs}",
        f"parameters  {parameters_line(a)}",
        "",
        table(["parameters", "count", "share"], parameter_rows(a)),
        "",
        table(*flops_table(a)),
        *([] if a.anatomy.kind == "encoder" else ["", crossover_line(a)]),
        "",
        table(*bytes_table(a)),
        "",
        *memory_lines(a),
        "",
        *speed_lines(a),
    ]
    return "\n".join(lines)


def parameters_line(a: Account) -> str:
    p = a.parameters
    text = f"{p['total']:,}"
    if p["active"] != p["total"]:
        text += f", of which a token uses {p['active']:,} ({share(p['active'], p['total'])})"
    if p["mtp"]:
        text += f"; and {p['mtp']:,} of multi-token prediction"
    if a.stored_parameters in (p["total"], p["total"] + p["mtp"]):
        text += "; the files hold exactly those"
    return text


def parameter_rows(a: Account) -> list[list[str]]:
    p = a.parameters
    rows = [[NAMES[g], f"{p[g]:,}", share(p[g], p["total"])] for g in GROUPS if p[g]]
    return [*rows, ["total", f"{p['total']:,}", "100.0 %"]]


def flops_table(a: Account) -> tuple[list[str], list[list[str]]]:
    by_context = a.flops_by_context()
    rows = []
    for group in FLOPS:
        if any(flops[group] for flops in by_context.values()):
            rows.append([NAMES[group], *(short(flops[group]) for flops in by_context.values())])
    rows.append(["total", *(short(flops["total"]) for flops in by_context.values())])
    rows.append(["FFN share", *(share(flops["ffn"], flops["total"]) for flops in by_context.values())])
    return ["FLOPs per token, context", *(f"{context:,}" for context in by_context)], rows


def crossover_line(a: Account) -> str:
    at = a.anatomy.crossover()
    if at is None:
        return "attention scores never cost as much as the FFN"
    beyond = a.anatomy.max_context is not None and at > a.anatomy.max_context
    return f"attention scores cost as much as the FFN at a context of {at:,}" + (
        " (past the maximum)" if beyond else ""
    )


def bytes_table(a: Account) -> tuple[list[str], list[list[str]]]:
    """Of each format: weights in memory, what a step reads of them, and how much of that is the FFN's."""
    rows, reads = [], a.decode_bytes_per_token
    for name, stored in a.weight_bytes.items():
        row = [name, f"{stored:,}"]
        if reads is not None:
            ffn = a.anatomy.step_bytes(quantize.choose(name))["ffn"]
            row += [f"{reads[name]:,}", f"{ffn:,.0f}", share(ffn, reads[name])]
        rows.append(row)
    head = ["weights, bytes", "in memory"]
    return head + (["read per decode step", "of the FFN", "share"] if reads is not None else []), rows


def memory_lines(a: Account) -> list[str]:
    room = "unknown" if a.room.available is None else short(a.room.available) + "B"
    group = "" if a.room.cgroup_limit is None else f" (cgroup limit {short(a.room.cgroup_limit)}B)"
    fits = {True: "fits", False: "does not fit", None: "cannot be told"}[a.fits]
    return [
        f"KV cache    {a.kv_bytes_per_token:,} bytes per token in {a.kv_dtype}; {a.kv_cache_bytes:,} for "
        f"{a.batch:,} x {a.context:,} tokens",
        f"memory      {short(a.weight_bytes[a.quant])}B weights ({a.quant}) + {short(a.kv_cache_bytes)}B KV cache + "
        f"{short(a.activation_bytes)}B activations = {short(a.needed_bytes)}B; available {room}{group}: {fits}",
    ]


def speed_lines(a: Account) -> list[str]:
    limits = a.machine.limits
    prefill = "prefill" if a.anatomy.kind == "decoder" else "encoder"
    source = {"kept": "kept by bench", "measured": "measured now", "given": "given"}[a.machine.read]
    lines = [
        f"machine     {a.machine.cpu}, {a.machine.isa}, {a.machine.threads} threads: "
        f"read {limits.read_gb_per_s:.1f} GB/s ({source}), int8 {limits.int8_gops:.0f} Gop/s, "
        f"float32 {limits.f32_gflops:.0f} GFLOP/s",
        f"{prefill}     at most {a.prefill_tokens_per_second:.1f} tok/s for a text of {a.context:,}",
    ]
    if a.decode_tokens_per_second is not None:
        lines.append(
            f"decode      at most {a.decode_tokens_per_second:.1f} tok/s at context {a.context:,}, batch {a.batch:,}, "
            f"{a.quant} ({short(a.step_bytes)}B a step; bound by {a.decode_bound})"
        )
    return lines


# ---- the arithmetic, line by line ------------------------------------------------------------------------------------


def explain(a: Account) -> list[str]:
    lines = ["Widths"]
    for ffn in a.anatomy.ffns:
        lines += width_lines(ffn, a.anatomy.family)
    lines += ["", "Parameters: rows x columns of each tensor, x how many there are"]
    lines += [part_line(part) for part in a.anatomy.main]
    extra = [part for part in a.anatomy.parts if part.stage == "mtp"]
    if extra:
        lines += ["Multi-token prediction, beside the total:", *(part_line(part) for part in extra)]
    lines += ["", *sum_lines(a), "", *flops_lines(a), "", *byte_lines(a), "", *time_lines(a)]
    return lines


def why_lines(d: int, inter: int, family: str) -> list[str]:
    """Why a dense FFN is as wide as it is, where a rule says so."""
    if family == "llama":
        base = int(2 * (4 * d) / 3)
        rules = sorted(LLAMA_RULES, key=lambda rule: rule[0] != d)  # that of a release of the same d, if there is one
        for _, factor, multiple in rules:
            scaled = int(factor * base)
            if -(-scaled // multiple) * multiple == inter:
                times = "" if factor == 1 else f"; int({factor} x {base}) = {scaled}"
                return [
                    f"  why {inter}: int(2/3 x 4d) = int(2/3 x {4 * d}) = {base}{times}; rounded up to a multiple of "
                    f"{multiple} = {inter}",
                    "    (three matrices of 2/3 x 4d hold what two of 4d do; factor and multiple of a released Llama)",
                ]
    return [f"  why {inter}: 4d, as in the original Transformer"] if inter == 4 * d else []


def width_lines(ffn: Ffn, family: str) -> list[str]:
    """Where the FFN's width comes from, and what it makes."""
    d, inter = ffn.hidden, ffn.intermediate
    what = f"an expert's width {inter}" if ffn.experts else f"intermediate_size {inter}"
    lines = [f"  hidden_size d = {d}, {what} = {inter / d:.2f} d"]
    if not ffn.experts:
        lines += why_lines(d, inter, family)
    form = "gate, up and down" if ffn.matrices == 3 else "up and down"
    size = ffn.matrices * d * inter
    what = "an expert" if ffn.experts else "a layer"
    lines.append(f"  {what}: {form}, {ffn.matrices} x d x width = {ffn.matrices} x {d} x {inter} = {size:,}")
    if ffn.experts:
        lines += [
            f"  {ffn.experts} of them in a layer = {ffn.experts * size:,}",
            f"  a token is sent to {ffn.top_k} = {ffn.top_k * size:,}",
        ]
    return lines


def part_line(part: Part) -> str:
    shape = f"{part.rows} x {part.cols}" if part.cols else f"{part.rows}"
    one = f" = {part.size:,}" if part.cols else ""
    used = f" (a token uses {part.active:,} of them)" if part.active != part.count else ""
    total = f", x {part.count:,} = {part.parameters:,}" if part.count > 1 else ""
    return f"  {NAMES[part.group]:<10} {part.name}: {shape}{one}{total}{used}"


def sum_lines(a: Account) -> list[str]:
    p = a.parameters
    named = [g for g in GROUPS if p[g]]
    lines = [
        f"Total = {' + '.join(f'{NAMES[g]} {p[g]:,}' for g in named)} = {p['total']:,}",
        f"FFN share: {p['ffn']:,} / {p['total']:,} = {share(p['ffn'], p['total'])}",
    ]
    layers = p["ffn"] + p["attention"]
    lines.append(
        f"  why: inside the layers the FFN is {share(p['ffn'], layers)} ({p['ffn']:,} against {p['attention']:,} of "
        f"attention, {p['ffn'] / max(p['attention'], 1):.2f} x); embedding and head, {p['embedding'] + p['lm_head']:,} "
        f"({share(p['embedding'] + p['lm_head'], p['total'])}), belong to no layer"
    )
    shared = [s for s in a.anatomy.attention if s.kv_heads and s.heads > s.kv_heads and s.v_cached]
    if shared:
        s = shared[0]
        lines.append(
            f"  {s.heads} heads share {s.kv_heads} KV heads, so k and v have {s.kv_heads}/{s.heads} of q's rows: that "
            "makes attention small beside the FFN"
        )
    if p["active"] != p["total"]:
        idle = [part for part in a.anatomy.main if part.active != part.count]
        count = sum((part.count - part.active) * part.size for part in idle)
        lines.append(f"Active = {p['total']:,} - {count:,} of experts that a token is not sent to = {p['active']:,}")
    return lines


def flops_lines(a: Account) -> list[str]:
    flops, stack = a.flops_per_token, a.anatomy.stack
    lines = [f"FLOPs of the last of {a.context:,} tokens: 2 for each weight of a matrix that it goes through"]
    for group in FLOPS:
        if group == "attention_scores":
            continue
        counted = [p for p in a.anatomy.parts if p.stage == stack and p.flops]
        name = "attention" if group == "attention_projections" else group
        weights = sum(p.active * p.size for p in counted if p.computed_as == name)
        if weights:
            lines.append(f"  {NAMES[group]}: 2 x {weights:,} = {flops[group]:,}")
    for s in a.anatomy.attention:
        if s.stage != stack:
            continue
        if s.state:
            lines.append(
                f"  state: 6 x {s.state:,} elements x {s.layers} layers = {s.flops(a.context):,}, at any context"
            )
            continue
        keys = s.keys(a.context)
        seen = f"{keys:,} keys" + (f" (window {s.window:,})" if s.window is not None else "")
        form = ", absorbed: the latent stands for all heads' k and v" if s.kv_heads == 1 and s.k_dim != s.v_dim else ""
        lines.append(
            f"  {s.kind}-attention scores: 2 x {s.heads} heads x ({s.k_dim} + {s.v_dim}) x {seen} x {s.layers} layers "
            f"= {s.flops(a.context):,}{form}"
        )
    lines.append(f"  total = {flops['total']:,}; FFN {share(flops['ffn'], flops['total'])}")
    if a.anatomy.kind != "encoder":
        lines.append(f"  {crossover_line(a)}")
    if a.encoder_flops_per_token is not None:
        lines.append(f"  and of a source token in the encoder: {a.encoder_flops_per_token['total']:,}")
    return lines


def byte_lines(a: Account) -> list[str]:
    q = quantize.choose(a.quant)
    lines = [f"Bytes in {a.quant} (docs/packed_formats.md: panels of 16 rows, scales and padding included)"]
    seen = []
    for part in a.anatomy.main:
        if not part.computes or (part.rows, part.cols, part.role) in seen:
            continue
        seen.append((part.rows, part.cols, part.role))
        one = part.matrix_bytes(q, a.anatomy.bf16)
        lines.append(
            f"  {part.rows} x {part.cols}: {-(-part.rows // 16)} panels, {one:,} bytes, {8 * one / part.size:.3f} bits "
            f"a weight ({part.name})"
        )
    lines.append(f"  in memory, with norms, biases and looked-up tables: {a.weight_bytes[a.quant]:,}")
    if a.decodes:
        weights = a.step_weight_bytes
        parts = " + ".join(f"{NAMES[g]} {w:,.0f}" for g, w in weights.items() if w)
        lines.append(f"  a decode step reads {parts} = {sum(weights.values()):,.0f}")
        routed = next((f for f in a.anatomy.ffns if f.experts), None)
        if routed is not None and a.batch > 1:
            hit = routed.experts * (1 - (1 - routed.top_k / routed.experts) ** a.batch)
            lines.append(
                f"  of {routed.experts} experts a batch of {a.batch} needs {routed.experts} x (1 - (1 - {routed.top_k}/"
                f"{routed.experts})^{a.batch}) = {hit:.1f}, if all are picked equally often"
            )
    for s in a.anatomy.attention:
        if s.kv_heads:
            all_layers = s.token_bytes(a.kv_dtype)
            lines += [
                f"  KV of a token, {s.kind}: {s.kv_heads} heads x ({s.k_cached} + {s.v_cached}) in {a.kv_dtype} = "
                f"{all_layers // s.layers:,}, x {s.layers} layers = {all_layers:,}",
                f"    a step reads {s.keys(a.context):,} tokens = {s.read_bytes(a.context, a.kv_dtype):,}",
            ]
        if s.state:
            lines.append(f"  state: {s.state:,} float32 x {s.layers} layers, read and written")
    return lines


def time_lines(a: Account) -> list[str]:
    limits = a.machine.limits
    lines = ["Speed: what takes longer at the machine's limits, reading or computing"]
    if a.decode_seconds is not None:
        read, compute = a.decode_seconds
        lines += [
            f"  a step of {a.batch:,} reads {a.step_bytes:,.0f} bytes / {limits.read_gb_per_s:.2f} GB/s = "
            f"{1e3 * read:.3f} ms",
            f"  and computes {a.batch * a.flops_per_token['total']:,} FLOPs: {1e3 * compute:.3f} ms (matrices at "
            f"{'int8' if quantize.choose(a.quant).layers.is_integer else 'float32'} rate, scores at float32 rate)",
            f"  at most {a.batch:,} / {1e3 * max(read, compute):.3f} ms = {a.decode_tokens_per_second:.1f} tok/s",
        ]
    lines.append(f"  a text of {a.context:,}: at most {a.prefill_tokens_per_second:.1f} tok/s")
    return lines
