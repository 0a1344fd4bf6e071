"""Tiny models of the reported cases: written, changed, loaded, and held against a right and a wrong reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from builders import tiny_tensors, write_tiny_model

import pyengine
from pyengine import kernels
from pyengine.reference import ReferenceModel, load_reference

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
IDS = [1, 5, 40, 2, 66, 7, 90, 3]
DIFFERS = 1e-2


def model(folder: Path, config: Config, change: Callable[[Tensors], object] | None = None, seed: int = 3) -> Path:
    """A folder of `config` with random weights, after `change` of the tensors."""
    tensors = tiny_tensors(config, seed=seed)
    if change is not None:
        change(tensors)
    return write_tiny_model(folder, config, tensors=tensors)


def logits(folder: Path, ids: list[int] = IDS, **arguments: Any) -> np.ndarray:
    """Logits float32 [len(ids), V] of a load without calibration, in float32 unless `quant` says otherwise."""
    with pyengine.load(folder, **{"quant": "f32", "threads": 1, "calibration": False, **arguments}) as engine:
        return engine.logits(ids)


def rounded(folder: Path, **options: Any) -> ReferenceModel:
    """The float64 reference whose matrices inside the layers are what they are once packed: activations stay exact."""
    reference = load_reference(folder, np.float64)
    for name, weight in reference.weights.items():
        if ".layers." in name and weight.ndim == 2 and ".gate.weight" not in name and "shared_expert_gate" not in name:
            packed = kernels.quantize_dequantize(weight.astype(np.float32), threads=1, **options)
            reference.weights = {**reference.weights, name: packed.astype(np.float64)}
    return reference


def assert_nearer(actual: np.ndarray, right: np.ndarray, wrong: np.ndarray, times: float = 3.0) -> None:
    """`actual` is `times` nearer to `right` than to `wrong`, which is really something else."""
    assert np.isfinite(actual).all()
    assert np.isfinite(right).all()
    assert np.abs(right - wrong).max() > DIFFERS, "the wrong variant gives the same result"
    errors = [float(np.abs(actual.astype(np.float64) - other).max()) for other in (right, wrong)]
    assert errors[0] * times < errors[1], f"{errors[0]:.3g} from the right result, {errors[1]:.3g} from the wrong one"


def assert_equal_models(actual: np.ndarray, right: np.ndarray, wrong: np.ndarray) -> None:
    """Within 1e-4 of `right`, in float32, and more than 1e-2 from `wrong`."""
    assert float(np.abs(actual - right).max()) <= 1e-4
    assert float(np.abs(actual - wrong).max()) > DIFFERS
