"""Make tests/golden/tiny_<case>.npz: logits and states of tiny random models, as transformers computes them.

    python tools/goldens/make.py [CASE ...]
    python tools/goldens/make.py --walk      (tests/golden/walk_<case>.npz, of the family in docs/adding_a_model.md)

Needs torch and transformers; run from anywhere. A golden stores the config, the seed, the sha256 of the weights file
(the weights themselves are made again from the seed by tests/builders.py), the token ids, the float32 logits of 40
positions, for some cases the hidden state after each layer, and the versions that made it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from golden import golden_cases as cases  # noqa: E402
from golden import live, walk  # noqa: E402

SEED = 0


def make(name: str, out: Path) -> None:
    config = cases.CONFIGS[name]
    ids = cases.prompt(SEED)
    with tempfile.TemporaryDirectory() as folder:
        cases.build(Path(folder), config, SEED)
        sha256 = hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()
        logits, states = live.run_transformers(Path(folder), ids, one_by_one=cases.past_dynamic_limit(config))
    if name not in cases.WITH_STATES:
        states = states[:0]
    meta: dict[str, Any] = {
        "config": config,
        "seed": SEED,
        "weights_sha256": sha256,
        "made_with": live.versions(),
    }
    np.savez_compressed(out, meta=np.array(json.dumps(meta)), ids=np.array(ids, np.int32), logits=logits, states=states)
    print(f"{out.name}: {out.stat().st_size} bytes, |logit| max {np.abs(logits).max():.2f}, std {logits.std():.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(cases.CONFIGS)}; default all")
    parser.add_argument("--walk", action="store_true", help="the case that docs/adding_a_model.md adds, alone")
    given = parser.parse_args()
    if given.walk:
        if given.cases:
            parser.error("--walk makes one golden; expected no case beside it")
        with walk.applied():
            make(walk.CASE, walk.GOLDEN)
        return 0
    names = given.cases or list(cases.CONFIGS)
    unknown = sorted(set(names) - set(cases.CONFIGS))
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}")
    for name in names:
        make(name, ROOT / "tests" / "golden" / f"tiny_{name}.npz")
    return 0


if __name__ == "__main__":
    sys.exit(main())
