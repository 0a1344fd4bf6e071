"""The one comparator of arrays: every numeric test goes through it, so a NaN, a broadcast or a cast cannot pass one.

`assert_close` for floats within a bound that the caller computes from the operation (`linear_bound` for a matrix
product), `assert_same_bits` for everything that must be identical.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def assert_close(actual: Any, expected: Any, bound: Any, what: str = "") -> None:
    """|actual - expected| <= bound in every element.

    Both must be numpy arrays of one shape and one dtype; `expected` may also be a float64 oracle of a narrower float
    `actual`. Neither may hold NaN or Inf. bound: finite, not negative, a number or an array of that same shape; for
    integers and booleans it must be 0.
    """
    _same_form(actual, expected, what)
    limit = np.asarray(bound, dtype=np.float64)
    if limit.shape not in ((), actual.shape):
        raise AssertionError(f"{what}: bound of shape {limit.shape} for values of shape {actual.shape}")
    if not (np.isfinite(limit) & (limit >= 0)).all():
        raise AssertionError(f"{what}: bound {bound}; expected finite and not negative")
    if actual.dtype.kind != "f":
        if limit.any():
            raise AssertionError(f"{what}: {actual.dtype} with a bound above 0; integers are equal or wrong")
        assert_same_bits(actual, expected, what)
        return
    for name, values in (("actual", actual), ("expected", expected)):
        if not np.isfinite(values).all():
            at = np.argwhere(~np.isfinite(values))[0].tolist()
            raise AssertionError(f"{what}: {name} is {values[tuple(at)]} at {at}")
    error = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    within = error <= limit  # written so that a NaN fails
    if not within.all():
        excess = np.where(within, -np.inf, error - limit)
        at = np.unravel_index(int(excess.argmax()), excess.shape)
        raise AssertionError(
            f"{what}: {int((~within).sum())} of {within.size} values out of bound; worst at {[int(i) for i in at]}: "
            f"{actual[at]!r}, expected {expected[at]!r} within {np.broadcast_to(limit, error.shape)[at]:.3g}"
        )


def assert_same_bits(actual: Any, expected: Any, what: str = "") -> None:
    """Same shape, same dtype and the same bytes: -0.0 is not 0.0. Floats must be finite."""
    _same_form(actual, expected, what)
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: {actual.dtype}, expected {expected.dtype}")
    if actual.dtype.kind == "f" and not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        raise AssertionError(f"{what}: NaN or Inf")
    width = actual.dtype.itemsize
    left, right = (
        np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(a.size, width) for a in (actual, expected)
    )
    differs = (left != right).any(axis=1)
    if differs.any():
        at = [int(i) for i in np.unravel_index(int(differs.argmax()), actual.shape)]
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.size} values differ; first at {at}: "
            f"{actual[tuple(at)]!r}, expected {expected[tuple(at)]!r}"
        )


def linear_bound(x: Array, w: Array, extra_terms: int = 0) -> Array:
    """How far a float32 x @ w.T, summed in any order, can be from the exact product: float64 [M, N].

    x [M, K], w [N, K]. Each of the K products and K - 1 sums rounds by at most eps / 2 of a partial sum, and no partial
    sum exceeds |x| . |w|, which is at most the product of the row norms: (K + extra_terms) * eps * norm(x) * norm(w).
    extra_terms: further float32 roundings of the result, such as a bias.
    """
    eps = float(np.finfo(np.float32).eps)
    norms = np.outer(np.linalg.norm(x.astype(np.float64), axis=1), np.linalg.norm(w.astype(np.float64), axis=1))
    return (x.shape[1] + extra_terms) * eps * norms


def _same_form(actual: Any, expected: Any, what: str) -> None:
    for name, value in (("actual", actual), ("expected", expected)):
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
            raise AssertionError(f"{what}: {name} is {type(value).__name__}; expected a numeric numpy array")
        if value.size == 0:
            raise AssertionError(f"{what}: {name} has shape {value.shape}: nothing to compare")
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {actual.shape}, expected {expected.shape}")
    oracle = actual.dtype.kind == "f" and expected.dtype == np.float64
    if actual.dtype != expected.dtype and not oracle:
        raise AssertionError(f"{what}: {actual.dtype}, expected {expected.dtype}")


def log_softmax(rows: np.ndarray) -> np.ndarray:
    """In float64, of float32 logits [T, V]."""
    x = rows.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
