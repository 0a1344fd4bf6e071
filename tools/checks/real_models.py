"""Hold pyengine against transformers on real checkpoints, through the stored goldens (no torch needed).

    python tools/checks/real_models.py smollm2=FOLDER qwen=FOLDER [--quant bf16 int8 int4] [--threads N]

NAME is that of tests/golden/real_NAME.json, made by tools/goldens/real.py from the same folder (compared by hash).
Rules, per model and format:

bf16        the same greedy tokens, or the first different one where the reference's own two best are within 0.05.
int8, int4  teacher forced over every position of every prompt: our best id is in the reference's top 5, and the
            reference's best is in our top 5, each in at least 99.9 % (int8) or 99 % (int4) of the positions.

Prints a table with one row per model and format; the exit status is 1 if any rule is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "goldens"))

from real import TOP, identity  # noqa: E402

import pyengine  # noqa: E402

NEAR_TIE = 0.05  # logits
NEEDED = {"bf16": None, "int8": 0.999, "int4": 0.99}  # of the positions, by the top-5 rule


@dataclass
class Result:
    """What one model in one format did over all prompts."""

    positions: int = 0
    ours_in_theirs: int = 0
    theirs_in_ours: int = 0
    same_prompts: int = 0
    prompts: int = 0
    faults: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()  # positions outside a top 5, told in the table whether or not the rule holds

    def share(self, count: int) -> float:
        return count / self.positions


def top_ids(logits: np.ndarray) -> np.ndarray:
    """The ids [T, TOP] of the largest logits [T, V], the best first; the lower id wins a tie."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :TOP]


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that differs; None when the lists are equal."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} tokens generated, expected {len(theirs)}")
    return next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)


def check_prompt(engine: Any, prompt: dict[str, Any], quant: str, result: Result) -> None:
    """Add one prompt's counts to `result`, and a fault if bf16 left the reference's tokens without a near tie."""
    theirs = prompt["generated_ids"]
    ours = engine.generate(prompt["prompt_ids"], max_tokens=len(theirs), ignore_eos=True).tokens
    at = first_difference(list(ours), theirs)
    result.prompts += 1
    result.same_prompts += at is None
    if quant == "bf16" and at is not None and not prompt["gaps"][at] <= NEAR_TIE:
        fault = f"{prompt['name']}: token {at} is {ours[at]}, expected {theirs[at]} (gap {prompt['gaps'][at]:.3f})"
        result.faults += (fault,)
    logits = engine.logits(prompt["prompt_ids"] + theirs)
    reference, mine = np.array(prompt["top5"]), top_ids(logits)
    if reference.shape != mine.shape or not np.isfinite(logits).all():
        raise ValueError(f"{prompt['name']}: logits {logits.shape} (finite?), expected {len(reference)} finite rows")
    result.positions += len(mine)
    ours_in_theirs = (mine[:, :1] == reference).any(axis=1)
    theirs_in_ours = (reference[:, :1] == mine).any(axis=1)
    result.ours_in_theirs += int(ours_in_theirs.sum())
    result.theirs_in_ours += int(theirs_in_ours.sum())
    for at in np.flatnonzero(~(ours_in_theirs & theirs_in_ours)):
        result.misses += (
            f"{prompt['name']}, position {at}: ours {mine[at].tolist()}, theirs {reference[at].tolist()}",
        )


def check_model(folder: Path, golden: dict[str, Any], quant: str, threads: int | None) -> Result:
    result = Result()
    with pyengine.load(folder, quant=quant, threads=threads, cache=False) as engine:
        for prompt in golden["prompts"]:
            check_prompt(engine, prompt, quant, result)
    needed = NEEDED[quant]
    for count, what in ((result.ours_in_theirs, "our best in their 5"), (result.theirs_in_ours, "theirs in our 5")):
        if needed is not None and not result.share(count) >= needed:
            result.faults += (f"{what}: {result.share(count):.3%}, needed {needed:.1%}",)
    return result


def read_golden(name: str, folder: Path) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / f"real_{name}.json").read_text(encoding="ascii"))
    found = identity(folder)
    if found != golden["identity_sha256"]:
        raise SystemExit(f"{folder}: not the model of real_{name}.json ({found[:16]}); make it with get_models.py")
    return golden


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--quant", nargs="+", choices=sorted(NEEDED), default=["bf16", "int8", "int4"])
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    pairs = [model.partition("=")[::2] for model in args.models]
    goldens = {name: read_golden(name, Path(folder)) for name, folder in pairs}

    print(f"{'model':10} {'quant':5} {'same tokens':>12} {'positions':>10} {'ours in 5':>10} {'theirs in 5':>12}  rule")
    broken = False
    for name, folder in pairs:
        for quant in args.quant:
            result = check_model(Path(folder), goldens[name], quant, args.threads)
            broken |= bool(result.faults)
            print(
                f"{name:10} {quant:5} {result.same_prompts:>6} of {result.prompts:>2} {result.positions:>10}"
                f" {result.share(result.ours_in_theirs):>10.3%} {result.share(result.theirs_in_ours):>12.3%}"
                f"  {'BROKEN' if result.faults else 'holds'}",
                flush=True,
            )
            for line in result.faults + result.misses:
                print(f"    {line}")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
