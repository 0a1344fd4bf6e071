#!/usr/bin/env python3
"""The numpy study that chose the int4 format: KL of each candidate against the stored weights. Needs no C++ core.

    python tools/study_int4.py FOLDER TEXT [--formats PATTERN ...] [--tokens 4096] [--json FILE]

FOLDER is a Hugging Face model folder (measure on weights that do not lie on a 4-bit grid already), TEXT a plain text
file. Calibration, E[x^2] of each input channel of each linear, reads the first `--calibration-tokens` tokens of TEXT;
the measured tokens start at byte `--skip-bytes`, in windows of `--window` tokens, each with a fresh cache, the second
half of each scored. The figure is the mean over scored positions of KL(stored || quantized) in nats, over the whole
vocabulary. Everything but the formats' own rounding is float32 numpy (pyengine/reference.py).

A format is named  int4-<kind>-g<group>-<fit>[-a8]  or  int8-g64-<fit>[-a8]:
  kind  sym       w = s * (q - 8)        bfloat16 scale (the sign of s puts the extreme weight at q = 0)
        zero      w = s * (q - z)        float16 scale, integer z in 0..15 stored in a byte
        minf16    w = s * q + m          float16 scale and minimum
        minbf16   w = s * q + m          bfloat16 scale and minimum: no weight is out of range
        min8      w = S*a * q + M*b      8-bit a and b per group, float32 S and M per row
  fit   plain     from the largest and smallest weight
        searched  least squares over candidate ranges
        weighted  the same, each column weighted by its E[x^2]
  a8    activations of every linear rounded to int8 in groups of 64 (scale = amax / 127, nearest even)
lm_head, or a tied embedding, is int8 with group 64 under every format (searched and weighted as the rest).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the windows run in threads of their own
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pyengine.reference import ReferenceModel, load_reference

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ACTIVATION_GROUP = 64
SHRINK = (0.0, 0.04, 0.08, 0.12, 0.16)  # candidate cuts of a group's range, at each end
REFITS = 1
SYMMETRIC = tuple(np.arange(5.6, 8.7, 0.2))  # where the extreme weight is put, in steps
LEVELS8 = tuple(np.arange(115.0, 128.0))
FORMATS = [
    f"int4-{kind}-g{group}-{fit}"
    for kind in ("sym", "zero", "minf16", "minbf16", "min8")
    for group in (32, 64, 128)
    for fit in ("plain", "searched", "weighted")
] + [
    *(f"int4-{kind}-g{group}-weighted-a8" for kind in ("minbf16", "min8", "zero", "sym") for group in (32, 64, 128)),
    *(f"int8-g64-{fit}{act}" for act in ("", "-a8") for fit in ("plain", "searched", "weighted")),
]


# ---- rounding of the stored numbers


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Nearest even bfloat16 of finite float32, saturating at the largest finite one."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    rounded = bits.astype(np.uint32).view(np.float32)
    return np.where(np.isinf(rounded), np.sign(x) * np.float32(3.3895314e38), rounded)


def float16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def nonzero(s: np.ndarray) -> np.ndarray:
    """s with 1 in place of 0: a group of equal weights quantizes to any q."""
    return np.where(s == 0, np.float32(1), s)


# ---- fits of one format. x [g, groups, rows] weights, h [g, groups, 1] importance; both float32. Sums run over axis 0


def levels(x: np.ndarray, s: np.ndarray, m: np.ndarray, low: int, high: int) -> np.ndarray:
    """The integers q in low..high nearest to (x - m) / s."""
    q = x - m
    q *= np.float32(1) / nonzero(s)
    np.rint(q, out=q)
    np.maximum(q, low, out=q)
    return np.minimum(q, high, out=q)


def refit_minimum(x: np.ndarray, h: np.ndarray, mean: np.ndarray, total: np.ndarray, s: np.ndarray, m: np.ndarray):
    """Levels from (s, m), then the weighted least squares (s, m) of those levels and its gain (error taken away).

    x here has its weighted mean taken off already (mean is added back to m), so that float32 sums suffice.
    """
    q = levels(x, s, m - mean, 0, 15)
    hq = h * q
    sum_q, sum_qq, sum_qx = hq.sum(0), (hq * q).sum(0), (hq * x).sum(0)
    variance = sum_qq - sum_q * sum_q / total
    usable = variance > 1e-6 * total
    s = np.where(usable, sum_qx / np.where(usable, variance, 1), 0)
    return s, mean - s * sum_q / total, s * sum_qx


def fit_minimum(x: np.ndarray, h: np.ndarray, search: bool) -> tuple[np.ndarray, np.ndarray]:
    """(s, m) of w = s * q + m, unrounded."""
    low, high = x.min(0), x.max(0)
    if not search:
        return (high - low) / 15, low
    total = h.sum(0)
    mean = (h * x).sum(0) / total
    centred = x - mean
    best = np.full(low.shape, -1, np.float32)
    best_s, best_m = np.zeros_like(low), low
    for cut_low in SHRINK:
        for cut_high in SHRINK:
            start = low + np.float32(cut_low) * (high - low)
            step = (high - low) * np.float32((1 - cut_low - cut_high) / 15)
            s, m, gain = refit_minimum(centred, h, mean, total, step, start)
            better = gain > best
            best, best_s, best_m = (
                np.where(better, gain, best),
                np.where(better, s, best_s),
                np.where(better, m, best_m),
            )
    for _ in range(REFITS):
        best_s, best_m, _ = refit_minimum(centred, h, mean, total, best_s, best_m)
    return best_s, best_m


def quantize_minimum(x: np.ndarray, h: np.ndarray, search: bool, rounding: Callable[[np.ndarray], np.ndarray]):
    """Scale rounded first, then the minimum refitted to the rounded scale and rounded, then the levels chosen again."""
    s, m = fit_minimum(x, h, search)
    return finish_minimum(x, h, rounding(s), m, search, rounding)


def finish_minimum(x, h, s, m, search: bool, rounding: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    if search:
        q = levels(x, s, m, 0, 15)
        m = (h * (x - s * q)).sum(0) / h.sum(0)
    m = rounding(m)
    return s * levels(x, s, m, 0, 15) + m


def quantize_min8(x: np.ndarray, h: np.ndarray, search: bool) -> np.ndarray:
    """8-bit scale 0..255 and minimum -127..127 per group; float32 steps per row (the last axis is rows)."""
    s, m = fit_minimum(x, h, search)
    step_s = nonzero(np.abs(s).max(0) / 255)
    step_m = nonzero(np.abs(m).max(0) / 127)
    s = np.maximum(np.rint(s / step_s), 1) * step_s
    return finish_minimum(x, h, s, m, search, lambda v: np.clip(np.rint(v / step_m), -127, 127) * step_m)


def scale_gain(x: np.ndarray, h: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weighted least squares s of w = s * p, and its gain."""
    hp = h * p
    sum_pp, sum_px = (hp * p).sum(0), (hp * x).sum(0)
    s = np.where(sum_pp > 0, sum_px / np.where(sum_pp > 0, sum_pp, 1), 0)
    return s, s * sum_px


def quantize_scale(x, h, search: bool, low: int, high: int, places, rounding) -> np.ndarray:
    """w = s * p, p in low..high: the extreme weight put at `low` (the sign of s makes it so), or searched around it."""
    extreme = np.where(x.max(0) > -x.min(0), x.max(0), x.min(0))
    zero = np.zeros_like(extreme)
    if not search:
        s = rounding(extreme / low)
        return s * levels(x, s, zero, low, high)
    best, best_s = np.full(extreme.shape, -1, np.float32), zero
    for place in places:
        s, gain = scale_gain(x, h, levels(x, extreme / np.float32(-place), zero, low, high))
        best, best_s = np.where(gain > best, gain, best), np.where(gain > best, s, best_s)
    for _ in range(REFITS):
        best_s, _ = scale_gain(x, h, levels(x, best_s, zero, low, high))
    s = rounding(best_s)
    return s * levels(x, s, zero, low, high)


def quantize_zero(x: np.ndarray, h: np.ndarray, search: bool) -> np.ndarray:
    """w = s * (q - z), z an integer in 0..15; the range always holds 0."""
    low, high = np.minimum(x.min(0), 0), np.maximum(x.max(0), 0)
    best, best_s, best_z = np.full(low.shape, -1, np.float32), np.zeros_like(low), np.zeros_like(low)
    for cut_low in SHRINK if search else (0.0,):
        for cut_high in SHRINK if search else (0.0,):
            start = low * np.float32(1 - cut_low)
            s = (high * np.float32(1 - cut_high) - start) / 15
            z = np.clip(np.rint(-start / nonzero(s)), 0, 15)
            if not search:
                best_s, best_z = s, z
                break
            s, gain = scale_gain(x, h, levels(x, s, -s * z, 0, 15) - z)
            better = gain > best
            best, best_s, best_z = (
                np.where(better, gain, best),
                np.where(better, s, best_s),
                np.where(better, z, best_z),
            )
    for _ in range(REFITS if search else 0):
        best_s, _ = scale_gain(x, h, levels(x, best_s, -best_s * best_z, 0, 15) - best_z)
    s = float16(best_s)
    return s * (levels(x, s, -s * best_z, 0, 15) - best_z)


def quantize_group_block(x: np.ndarray, h: np.ndarray, kind: str, search: bool) -> np.ndarray:
    if kind == "int8":
        return quantize_scale(x, h, search, -127, 127, LEVELS8, bfloat16)
    if kind == "sym":
        return quantize_scale(x, h, search, -8, 7, SYMMETRIC, bfloat16)
    if kind == "zero":
        return quantize_zero(x, h, search)
    if kind == "min8":
        return quantize_min8(x, h, search)
    return quantize_minimum(x, h, search, bfloat16 if kind == "minbf16" else float16)


# ---- whole tensors and models


@dataclass(frozen=True)
class Format:
    name: str
    kind: str
    group: int
    fit: str
    activations: bool

    @classmethod
    def parse(cls, name: str) -> Format:
        parts = name.split("-")
        kind = parts[1] if parts[0] == "int4" else "int8"
        group, fit = parts[2:4] if parts[0] == "int4" else parts[1:3]
        return cls(name, kind, int(group[1:]), fit, parts[-1] == "a8")

    def bits(self, k: int) -> float:
        """Bits per weight of a row of k columns, padding included, the last group shorter."""
        per_group = {"sym": 16, "zero": 24, "minf16": 32, "minbf16": 32, "min8": 16, "int8": 16}[self.kind]
        data = 8 * -(-k // 4) * 4 if self.kind == "int8" else 4 * -(-k // 8) * 8
        return (data + per_group * -(-k // self.group) + (64 if self.kind == "min8" else 0)) / k


def quantize(w: np.ndarray, importance: np.ndarray | None, kind: str, group: int, fit: str) -> np.ndarray:
    """w [N, K] rounded to the format and back, float32. The last group may be short: it is filled up with copies of its
    last column at importance 0, which no fit sees."""
    rows, k = w.shape
    groups = -(-k // group)
    pad = groups * group - k
    h = importance if fit == "weighted" and importance is not None else np.ones(k, np.float32)
    h = h / h.mean() + np.float32(1e-4)  # a channel calibration never saw still counts a little
    h = np.ascontiguousarray(np.pad(h, (0, pad)).reshape(groups, group).T[:, :, None], np.float32)
    out = np.empty_like(w)
    block = max(1, (1 << 19) // (groups * group))

    def run(begin: int) -> None:
        part = np.pad(w[begin : begin + block], ((0, 0), (0, pad)), mode="edge")
        x = np.ascontiguousarray(part.reshape(-1, groups, group).transpose(2, 1, 0))
        q = quantize_group_block(x, h, kind, fit != "plain")
        out[begin : begin + block] = q.transpose(2, 1, 0).reshape(-1, groups * group)[:, :k]

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(0, rows, block)))
    return out


def quantize_activations(x: np.ndarray) -> np.ndarray:
    """x [T, K] rounded to int8 and back: groups of 64, scale = amax / 127, nearest even."""
    k = x.shape[1]
    g = np.pad(x, ((0, 0), (0, -k % ACTIVATION_GROUP))).reshape(len(x), -1, ACTIVATION_GROUP)
    scale = np.abs(g).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(g * (1 / nonzero(scale))) * scale).reshape(len(x), -1)[:, :k]


class StudyModel(ReferenceModel):
    """The reference with int8 activations, if asked, and with each linear's E[x^2] collected, if asked."""

    int8_activations = False
    squares: dict[str, np.ndarray] | None = None

    def linear(self, x: np.ndarray, name: str, bias: bool = False) -> np.ndarray:
        if self.squares is not None:
            self.squares[name + ".weight"] = np.mean(x * x, axis=0)
        return super().linear(quantize_activations(x) if self.int8_activations else x, name, bias)


def quantize_model(weights: Mapping[str, Any], fmt: Format, squares: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights with every linear's rounded to the format; norms, biases and an untied embedding stay as they are."""
    out = dict(weights)
    for name, square in squares.items():
        kind, group = (fmt.kind, fmt.group) if name.startswith("model.layers.") else ("int8", 64)
        out[name] = quantize(weights[name], square, kind, group, fmt.fit)
    return out


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def scored_log_probs(model: ReferenceModel, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities [T / 2, vocab] of the second half of one window of T tokens."""
    return log_softmax(model.forward(ids)[len(ids) // 2 :])


def measure(model: ReferenceModel, baseline: list[np.ndarray], windows: np.ndarray) -> tuple[float, float]:
    """Mean KL(baseline || model) in nats and the share of positions with the same top token."""

    def compare(p: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = scored_log_probs(model, ids)
        return (np.exp(p) * (p - q)).sum(-1, dtype=np.float64), p.argmax(-1) == q.argmax(-1)

    with ThreadPoolExecutor(THREADS) as pool:
        kl, same = zip(*pool.map(compare, baseline, windows), strict=True)
    return float(np.concatenate(kl).mean()), float(np.concatenate(same).mean())


def inner_bits(model: ReferenceModel, fmt: Format) -> float:
    """Mean bits per weight of the linears inside the layers."""
    shapes = [w.shape for n, w in model.weights.items() if n.startswith("model.layers.") and w.ndim == 2]
    return sum(n * k * fmt.bits(k) for n, k in shapes) / sum(n * k for n, k in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--formats", nargs="*", default=["*"], help="names or patterns; default: all")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--calibration-tokens", type=int, default=512)
    parser.add_argument("--skip-bytes", type=int, default=150_000, help="the measured text starts here")
    parser.add_argument("--json", type=Path, help="also append one JSON line per format to this file")
    args = parser.parse_args()
    from tokenizers import Tokenizer

    chosen = [name for name in FORMATS if any(fnmatch.fnmatchcase(name, pattern) for pattern in args.formats)]
    text = args.text.read_bytes()
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    ids = [
        np.array(tokenizer.encode(t.decode(errors="ignore"), add_special_tokens=False).ids)
        for t in (text[: args.skip_bytes], text[args.skip_bytes :])
    ]
    calibration, tokens = ids[0][: args.calibration_tokens], ids[1][: args.tokens]
    if len(tokens) < args.tokens or args.tokens % args.window or not chosen:
        parser.error(f"{len(tokens)} tokens after the skipped bytes, {len(chosen)} formats: nothing to measure")

    plain = load_reference(args.folder)
    windows = tokens.reshape(-1, args.window)
    with ThreadPoolExecutor(THREADS) as pool:
        baseline = list(pool.map(lambda ids: scored_log_probs(plain, ids), windows))
    calibrated = StudyModel(plain.spec, plain.weights)
    calibrated.squares = {}
    calibrated.forward(calibration)
    print(f"{'format':32} {'bits':>6} {'KL':>8} {'same top':>8}  seconds", flush=True)
    for name in chosen:
        fmt = Format.parse(name)
        began = time.monotonic()
        model = StudyModel(plain.spec, quantize_model(plain.weights, fmt, calibrated.squares))
        model.int8_activations = fmt.activations
        kl, same = measure(model, baseline, windows)
        bits = inner_bits(plain, fmt)
        print(f"{name:32} {bits:6.3f} {kl:8.4f} {same:8.1%}  {time.monotonic() - began:.0f}", flush=True)
        if args.json:
            row = {"format": name, "bits": bits, "kl": kl, "same_top": same, "tokens": len(tokens)}
            with args.json.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
