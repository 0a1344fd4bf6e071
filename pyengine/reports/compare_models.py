"""Stage 6, compare_models: load a quantized model and its baseline, run both over a text, module by module if asked.

Both are loaded at once where memory holds them, else one after the other (compare_baseline.py), with the same figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine import hub, quantize
from pyengine.errors import RequestError, ResourceError, TokenizerError
from pyengine.reports import compare_layers as by_layer
from pyengine.reports import compare_ops
from pyengine.reports.compare import PositionStatistics, TextSource, compare_rows, joined, make_windows, read_text
from pyengine.reports.compare_baseline import Live, Options, Remembered, Side, Spool, fit_together, needed_bytes
from pyengine.reports.compare_result import Choice, CompareResult, Greedy, Position, SwapRow, figures, first_difference

if TYPE_CHECKING:
    from pyengine.engine import Engine

Progress = Callable[[int, int, str], None]


# ---- the comparison --------------------------------------------------------------------------------------------------


def check_pair(baseline: Engine, quantized: Engine, text: TextSource) -> None:
    """Both give distributions over the same tokens. TokenizerError without a tokenizer, RequestError if not."""
    for engine in (baseline, quantized):
        if engine.tokenizer is None:
            raise TokenizerError(f"{engine.folder}: no tokenizer.json; expected one, compare measures on text")
    assert baseline.tokenizer is not None
    assert quantized.tokenizer is not None
    sizes = baseline.spec.vocab_size, quantized.spec.vocab_size
    sample = text.content[:4096]
    if sizes[0] != sizes[1] or baseline.tokenizer.encode(sample) != quantized.tokenizer.encode(sample):
        raise RequestError(
            f"{baseline.folder} and {quantized.folder}: two models with different vocabularies ({sizes[0]} and "
            f"{sizes[1]} tokens, or other tokens for the same text); expected the same one"
        )


class Steps:
    """Progress over all that a comparison does, in windows run."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, what: str, done: int = 1) -> None:
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, what)
        self.done += done


def positions_of(engine: Engine, windows: list[list[int]], s: PositionStatistics) -> tuple[Position, ...]:
    """Every scored token with its text: what it adds to the text before it (nothing for half a character)."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    known: dict[int, str] = {}

    def choices(top: tuple[Any, Any], row: int) -> tuple[Choice, ...]:
        ids = top[0][row].tolist()
        for token in ids:
            if token not in known:
                known[token] = tokenizer.decode([token])
        return tuple(Choice(i, known[i], p) for i, p in zip(ids, top[1][row].tolist(), strict=True))

    out, row, delta = [], 0, s.delta_p.tolist()
    for number, ids in enumerate(windows):
        stream = tokenizer.stream()
        for position, token in enumerate(ids):
            piece = stream.push(token)
            if position < len(ids) // 2:
                continue
            out.append(
                Position(
                    number, position, token, piece, float(s.kld[row]), delta[row],
                    choices(s.top_baseline, row), choices(s.top_quant, row),
                )
            )  # fmt: skip
            row += 1
    return tuple(out)


def run_swap(baseline: Engine, quantized: Engine, ids: list[int], step: Callable[[str], None]) -> tuple[SwapRow, ...]:
    """KL of the baseline with one module of the other in it, each in turn, the largest first."""
    half = len(ids) // 2
    rows = list(range(half - 1, len(ids) - 1))
    swap, plain = compare_ops.Swap(baseline, quantized), baseline.logits(ids, rows)
    found = []
    for module in swap.targets:
        step(f"swapping {module.name}" + (f" of layer {module.layer}" if module.layer >= 0 else ""))
        kld = compare_rows(plain, swap.logits(module, ids, rows), ids[half:]).kld
        found.append(SwapRow(module.layer if module.layer >= 0 else None, module.name, float(kld.mean())))
    return tuple(sorted(found, key=lambda row: -row.mean_kld))


def greedy_texts(baseline: Any, quantized: Any, prompt: str) -> Greedy:
    a, b = baseline.greedy(prompt), quantized.greedy(prompt)
    return Greedy(prompt, a.text, b.text, first_difference(a.tokens, b.tokens, a.text, b.text))


def compare_sides(
    baseline: Side, quantized: Side, text: TextSource, options: Options, progress: Progress | None = None
) -> CompareResult:
    """Load both and compare. Errors: those of loading; RequestError for sizes that do not fit each other or the text
    and for different vocabularies; ResourceError where both are needed at once and do not fit, or the disk is full."""
    o = options
    together = fit_together(baseline, quantized) if o.together is None else o.together
    if not together and o.swap:
        raise ResourceError(
            f"--swap runs modules of {quantized.folder} inside the baseline, and memory does not hold both (about "
            f"{needed_bytes(baseline)} and {needed_bytes(quantized)} bytes); expected a smaller model or no --swap"
        )
    with ExitStack() as stack:
        ours = stack.enter_context(baseline.open())
        if ours.tokenizer is None:
            raise TokenizerError(f"{ours.folder}: no tokenizer.json; expected one, compare measures on text")
        windows, _ = make_windows(ours.tokenizer, text.content, tokens=o.tokens, window=o.window)
        if o.window > ours.ctx_size:
            raise RequestError(f"window {o.window}; expected at most {ours.ctx_size}, the model's context")
        half = o.window // 2
        rows = list(range(half - 1, o.window - 1))  # the logits after token i score token i + 1
        ids = windows[0][: compare_ops.LAYER_TOKENS]
        live = Live(ours, windows, rows, ids, o)
        steps = Steps(progress, 2 * len(windows) + (3 * len(windows) // 2 if o.layers else 0) + 1)
        known: Live | Remembered = live
        if not together:
            if o.layers and ours.quantization.layers.is_integer:
                raise ResourceError(
                    f"layers against a baseline in {ours.quant} need both models in memory, about "
                    f"{needed_bytes(baseline)} and {needed_bytes(quantized)} bytes; expected a float baseline or "
                    "--no-layers"
                )
            spool = Spool()
            stack.callback(spool.close)
            known = Remembered(live, spool, steps)
            stack.callback(known.tensors.close)
            ours.close()
        theirs = stack.enter_context(quantized.open())
        check_pair(ours, theirs, text)
        return _compare(known, ours, theirs, live, steps, text)


def _compare(
    known: Live | Remembered, ours: Engine, theirs: Engine, live: Live, steps: Steps, text: TextSource
) -> CompareResult:  # fmt: skip
    o, windows, rows = live.options, live.windows, live.rows
    together = known is live
    other = Live(theirs, windows, rows, live.ids, o)
    parts = []
    for index, ids in enumerate(windows):
        steps("comparing", 2 if together else 1)
        parts.append(compare_rows(known.logits(index), other.logits(index), ids[len(ids) // 2 :]))
    s, notes = joined(parts), []
    layers: list[by_layer.ModuleError] = []
    hidden: list[by_layer.HiddenError] = []
    alike = live.shapes == other.shapes
    if not alike and o.swap:
        raise RequestError(
            f"--swap: layers of {ours.folder} and {theirs.folder} have different shapes; expected two formats of one"
        )
    if not alike:
        notes.append("the two models have layers of different shapes: no errors by layer")
    elif o.layers:
        modules = len(theirs.spec.layers)
        done = 0
        for error in by_layer.module_errors(known.tensors, theirs, known.inputs()):
            if error.layer is not None and error.layer >= done:
                done = error.layer + 1
                steps(f"layer {error.layer}", 0)
            layers.append(error)
        steps(f"{modules} layers", 3 * len(windows) // 2)
        hidden = by_layer.hidden_errors(known.hidden(), other.hidden())
    swap = None
    if o.swap:
        steps.total += len(compare_ops.modules_of(ours, ours.build(fused=False, timed=False)))
        swap = run_swap(ours, theirs, live.ids, steps)
    return CompareResult(
        model=str(theirs.folder),
        against=str(ours.folder),
        baseline=known.quant,
        quant=theirs.quant,
        group_size=theirs.group_size,
        bits_per_weight=theirs.bits_per_weight,
        text=text.to_json(),
        tokens=o.tokens,
        window=o.window,
        **figures(s),
        layers=tuple(layers),
        layers_tokens=len(live.ids) - len(live.ids) // 2,
        hidden=tuple(hidden),
        swap=swap,
        swap_tokens=len(live.ids) - len(live.ids) // 2,
        greedy=None if o.prompt is None else greedy_texts(known, other, o.prompt),
        loaded="together" if together else "one after the other",
        notes=tuple(notes),
        positions=positions_of(theirs, windows, s),
    )


# ---- in Python -------------------------------------------------------------------------------------------------------


def compare(
    model: str | os.PathLike[str],
    *,
    quant: str | None = None,
    against: str | os.PathLike[str] = "none",
    text: str | os.PathLike[str] | None = None,
    text_offset: int = 0,
    tokens: int = 4096,
    window: int = 512,
    layers: bool = True,
    swap: bool = False,
    prompt: str | None = None,
    max_tokens: int = 64,
    offline: bool = False,
    progress: Progress | None = None,
    **load: Any,
) -> CompareResult:
    """Compare a model in `quant` with the baseline over a text.

    against: a format of the same model ("none": as stored), or another model (a folder or hub id) in its stored format.
    text: a file (None: the text that comes with pyengine), from byte `text_offset` on; `tokens` of it in windows of
    `window`. layers: errors module by module. swap: one module at a time. prompt: greedy texts of both, raw, of up to
    `max_tokens`. load: further arguments of `pyengine.load` for the quantized model (threads, device, cache: both).
    Errors: those of `pyengine.load`, and of `compare_sides`.
    """
    from pyengine.engine import load as load_engine

    source = read_text(None if text is None else Path(text), offset=text_offset)
    folder = hub.resolve(os.fspath(model), offline=offline)
    other, fmt = folder, os.fspath(against)
    if fmt not in quantize.QUANTS:
        other, fmt = hub.resolve(fmt, offline=offline), "none"
    shared = {
        key: load[key] for key in ("threads", "isa", "device", "cache", "cache_limit", "strict", "log") if key in load
    }
    options = Options(tokens, window, layers, swap, prompt, max_tokens)
    sides = (
        Side(other, fmt, None, lambda: load_engine(other, quant=fmt, **shared)),
        Side(folder, quant, load.get("group_size"), lambda: load_engine(folder, quant=quant, **load)),
    )
    return compare_sides(*sides, source, options, progress)
