"""Requests with any parameters: an error of ours before anything is computed, or a result that keeps the rules.

python tests/fuzz/generate.py --seconds 1800
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from builders import write_tiny_model
from fuzz import fuzzing
from golden.golden_cases import CONFIGS
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine.errors import RequestError, TokenizerError

CORPUS: tuple[int, ...] = ()
VOCAB, CONTEXT, EOS = 258, 96, 257
ODD: list[Any] = [
    None, True, -1, 0, 1, 1.0, 0.5, -0.5, 1e300, -1e300, math.nan, math.inf, 2**63, 2**64, -(2**70), "", "1", "ngram",
    [], [1], (), {}, b"x", "\ud800", ["a"] * 20, "y" * 2000, np.float32(0.7), np.int64(3), np.bool_(True), object,
]  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "max_tokens": [0, 1, 2, 7, 40, -1, np.int32(5)],
    "temperature": [0, 0.0, 0.2, 1, 1.7, 1e30, 1e-30, np.float64(0.9)],
    "top_k": [0, -1, 1, 2, 40, 10**9],
    "top_p": [0, 0.01, 0.5, 0.95, 1],
    "min_p": [0, 0.05, 0.9, 1],
    "repetition_penalty": [1, 1.1, 0.5, 1e30, 1e-30],
    "seed": [None, 0, 1, 2**64 - 1],
    "stop": [(), "a", ["\n", "zz"], ("\ufffd",), ["ab", "b"]],
    "ignore_eos": [True, False],
    "speculate": [None, "ngram"],
}


@cache
def engines() -> list[pyengine.Engine]:
    made = []
    for kind, options in (("llama", {"quant": "int8"}), ("qwen2_window", {"quant": "int4", "kv_dtype": "int8"})):
        config = {**CONFIGS[kind], "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(write_tiny_model(Path(folder), config, seed=3), byte_level())
            made.append(pyengine.load(folder, threads=2, cache=False, calibration=False, **options))
    return made


def prompt(rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(ODD)
    if kind == 1:
        return "".join(chr(rng.randrange(32, 0x250)) for _ in range(rng.randrange(30)))
    ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, CONTEXT + 2))]
    if kind == 2:
        ids[rng.randrange(len(ids))] = rng.choice([-1, VOCAB, 2**31, 2**63, True, 1.0, "a", None])
    if kind == 3:  # something to draft from
        ids = (ids[:5] * 20)[: len(ids)]
    return np.array(ids) if kind == 4 else ids


def case(rng: random.Random) -> None:
    engine = rng.choice(engines())
    given = {name: rng.choice(values) for name, values in GOOD.items() if rng.random() < 0.6}
    if rng.random() < 0.4:
        given[rng.choice(sorted(GOOD))] = rng.choice(ODD)
    text = prompt(rng)
    try:
        result = engine.generate(text, **given)
    except (RequestError, TokenizerError) as error:
        fuzzing.check_message(error)
        check_pool(engine)
        return
    json.dumps(result.to_json(), allow_nan=False)
    asked = int(given.get("max_tokens", 256))
    total = result.usage["prompt_tokens"] + len(result.tokens)
    assert total <= CONTEXT, total
    assert asked < 0 or result.usage["completion_tokens"] <= asked
    assert all(0 <= token < VOCAB for token in result.tokens)
    assert result.finish_reason in ("stop", "length")
    stops = given.get("stop", ())
    assert not any(stop in result.text for stop in ((stops,) if isinstance(stops, str) else stops))
    if result.finish_reason == "length" and asked >= 0:
        assert result.usage["completion_tokens"] == asked or total == CONTEXT
    again = {**given, "seed": result.seed, "speculate": rng.choice([None, "ngram"])}
    other = engine.generate(text, **again)
    assert (other.tokens, other.text, other.finish_reason) == (result.tokens, result.text, result.finish_reason), again
    check_pool(engine)


def check_pool(engine: pyengine.Engine) -> None:
    while engine.pool.prefixes.evict():  # what is kept of earlier requests
        pass
    for free, size in zip(engine.pool.free, engine.pool.size, strict=True):
        assert sorted(free) == list(range(size)), "blocks were not given back"


if __name__ == "__main__":
    fuzzing.main("generate", case, CORPUS)
