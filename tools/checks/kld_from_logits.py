#!/usr/bin/env python3
"""`compare`'s mean KL once more, from nothing but two `engine.logits` calls a window and float64.

    python tools/checks/kld_from_logits.py FOLDER --quant int4 --text FILE [--text-offset 150000] [--tokens 4096] \
        [--expect 0.02522]

With --expect (what `compare` said) it fails if the two differ by over 1 %. The baseline is bf16; windows of 512 tokens,
the tokens of each second half scored. Needs tokens / 2 x vocabulary x 4 bytes: 1.2 GB for Qwen2.5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import pyengine

WINDOW = 512


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--text-offset", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--expect", type=float)
    args = parser.parse_args()
    text = args.text.read_bytes()[args.text_offset :].decode("utf-8", "ignore")
    rows = list(range(WINDOW // 2 - 1, WINDOW - 1))  # what follows them is the second half
    with pyengine.load(args.folder, quant="bf16") as engine:
        ids = engine.tokenizer.encode(text, add_special_tokens=False, parse_special=False)[: args.tokens]
        windows = [ids[at : at + WINDOW] for at in range(0, args.tokens, WINDOW)]
        baseline = [engine.logits(window, rows) for window in windows]
    total = 0.0
    with pyengine.load(args.folder, quant=args.quant) as engine:
        for window, kept in zip(windows, baseline, strict=True):
            for one, two in zip(kept, engine.logits(window, rows), strict=True):
                p, q = log_softmax(one), log_softmax(two)
                total += float(np.sum(np.exp(p) * (p - q)))
    mean = total / (len(windows) * len(rows))
    print(f"mean KL {mean:.6f} nats over {len(windows) * len(rows)} tokens")
    if args.expect is not None and abs(mean - args.expect) > 0.01 * args.expect:
        sys.exit(f"{mean:.6f} is not within 1 % of {args.expect}")


if __name__ == "__main__":
    main()
