"""Quantizing and multiplying matrices of any size: every ISA, number of threads and batch gives the bits of scalar.

python tests/fuzz/matmul.py --seconds 1800
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from compare import assert_same_bits
from fuzz import fuzzing
from kernel_cases import FORMATS, ISAS, bfloat16_bits

from pyengine import kernels
from pyengine.errors import PyEngineError

CORPUS: tuple[int, ...] = ()
SIDES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 172, 255, 257, 320, 576)


def side(rng: random.Random) -> int:
    return rng.choice(SIDES) if rng.random() < 0.7 else rng.randrange(1, 400)


def values(rng: random.Random, *shape: int) -> np.ndarray:
    """Normal values at a scale of any size, with rows or columns of zeros, equal ones and a few far above the rest."""
    source = np.random.default_rng(rng.randrange(2**32))
    x = source.standard_normal(shape) * 10.0 ** rng.randrange(-6, 7)
    if rng.random() < 0.2:
        x[rng.randrange(shape[0])] = 0
    if rng.random() < 0.2:
        x[:, rng.randrange(shape[1])] = rng.choice([0.0, 1.0, -3.5])
    if rng.random() < 0.3:
        x[source.random(shape) < 0.01] *= 1000
    return x.astype(np.float32)


def stored(rng: random.Random, weight: np.ndarray) -> np.ndarray:
    kind = rng.randrange(3)
    if kind == 0:
        return weight
    return bfloat16_bits(weight) if kind == 1 else np.clip(weight, -60000, 60000).astype(np.float16)


def check_refusal(rng: random.Random, options: dict[str, Any]) -> None:
    """A value that is not finite is refused, wherever it is."""
    weight = values(rng, side(rng), side(rng))
    weight[rng.randrange(weight.shape[0]), rng.randrange(weight.shape[1])] = rng.choice([np.nan, np.inf, -np.inf])
    try:
        kernels.Linear(weight, isa=rng.choice(ISAS), threads=rng.randrange(1, 4), **options)
    except PyEngineError as error:
        fuzzing.check_message(error, "NaN or Inf at row")
        return
    raise AssertionError("a matrix with a NaN or Inf was taken")


def case(rng: random.Random) -> None:
    options = FORMATS[rng.choice(sorted(FORMATS))]
    if rng.random() < 0.1:
        return check_refusal(rng, options)
    n, k, m = side(rng), side(rng), rng.choice([1, 1, 2, 3, 4, 8, 9, 12, 13, 16, 33])
    weight, x = stored(rng, values(rng, n, k)), values(rng, m, k)
    bias = values(rng, 1, n)[0] if rng.random() < 0.5 else None
    importance = np.abs(values(rng, 1, k))[0] if rng.random() < 0.5 else None
    given = {"bias": bias, "importance": importance, **options}
    plain = kernels.Linear(weight, threads=1, isa="scalar", **given)
    expected = plain(x)
    for isa in ISAS:
        layer = kernels.Linear(weight, threads=rng.choice([1, 2, 3, 7]), isa=isa, **given)
        assert_same_bits(layer.packed(), plain.packed(), f"{isa}: packed {n} x {k}")
        assert_same_bits(layer(x), expected, f"{isa}: {m} rows of {n} x {k}")
        few = rng.randrange(1, m + 1)
        assert_same_bits(layer(x[:few]), expected[:few], f"{isa}: the first {few} of {m} rows of {n} x {k}")
    exact = x.astype(np.float64) @ plain.dequantized().astype(np.float64).T + (0 if bias is None else bias)
    # int8 activations: half a step of 1/127 of a row's largest value; beside it the roundings of float32
    size = np.abs(x).max(axis=1, keepdims=True) * np.abs(plain.dequantized()).astype(np.float64).sum(axis=1)
    bound = size * (k * 2.0**-22 + (0.5 / 127 if options["quant"].startswith("int") else 0))
    bound += 2.0**-22 * (np.abs(exact) + (0 if bias is None else np.abs(bias))) + 1e-30
    wrong = ~(np.abs(expected - exact) <= bound)
    assert not wrong.any(), f"{m} x {n} x {k} {options}: {np.argwhere(wrong)[:3]}"
    return None


if __name__ == "__main__":
    fuzzing.main("matmul", case, CORPUS)
