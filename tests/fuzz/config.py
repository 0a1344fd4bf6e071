"""config.json: any change of a good one is understood, or refused by an error of ours in one line that names the file.

python tests/fuzz/config.py --seconds 1800
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import fuzzing
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.reports.machine import Limits

CORPUS: tuple[int, ...] = ()
LIMITS = Limits(20.0, 500.0, 50.0)  # given, so that no case measures the machine
KEYS = sorted({key for config in CONFIGS.values() for key in config})
ROPE = ["factor", "rope_type", "type", "rope_theta", "low_freq_factor", "mscale", "beta_fast", "attention_factor"]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 64, 2**31, 2**63, 2**64, 10**30, 0.0, -0.0, 0.5, 1e-300, 1e308, 1e-6,
    "", "silu", "gelu", "yarn", "default", "llama3", "x" * 500, "\ud800", "a\nb", [], [1], ["full_attention"], {},
    {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "linear"}, [[[]]], {"": {}}, "float32",
]  # fmt: skip


def value(rng: random.Random, old: Any) -> Any:
    if isinstance(old, bool) or old is None or rng.random() < 0.4:
        return rng.choice(VALUES)
    if isinstance(old, (int, float)):
        return rng.choice([old + 1, old - 1, -old, old * 2, old / 2, old * 1000, float(old), str(old)])
    if isinstance(old, list) and old:
        return rng.choice([old[:-1], [*old, old[0]], old[::-1], [rng.choice(VALUES), *old[1:]]])
    if isinstance(old, dict) and old:
        return {**old, rng.choice([*old, *ROPE]): rng.choice(VALUES)}
    return rng.choice(VALUES)


def change(rng: random.Random, config: dict[str, Any]) -> None:
    kind = rng.randrange(5)
    if kind == 0 and config:
        del config[rng.choice(sorted(config))]
    elif kind == 1:  # what another family has
        other = CONFIGS[rng.choice(sorted(CONFIGS))]
        key = rng.choice(sorted(other))
        config[key] = copy.deepcopy(other[key])
    elif kind == 2:  # a name nobody knows, or one that sounds like a change of the computation
        config[rng.choice(["zz", "", "attention_bias_2", "quant_x", "layer_scale", "\u0000"])] = rng.choice(VALUES)
    else:
        key = rng.choice(sorted(config) or KEYS)
        config[key] = value(rng, config.get(key))


def case(rng: random.Random) -> None:
    config = copy.deepcopy(CONFIGS[rng.choice(sorted(CONFIGS))])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change(rng, config)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "config.json"
        text = json.dumps(config, ensure_ascii=True)
        if rng.random() < 0.1:  # not JSON any more
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(["", "{", ",", "NaN", "\x00", text]) + text[at + rng.randrange(3) :]
        path.write_text(text)
        try:
            spec = load_model_spec(path.parent)
        except (ModelFormatError, UnsupportedModelError) as error:
            fuzzing.check_message(error, "config.json")
            return
        assert load_model_spec(path.parent) == spec
        for layer in spec.layers:
            assert layer.attention.num_heads % layer.attention.num_kv_heads == 0
        try:
            pyengine.account(path.parent, threads=1, limits=LIMITS)
        except pyengine.PyEngineError as error:
            fuzzing.check_message(error)


if __name__ == "__main__":
    fuzzing.main("config", case, CORPUS)
