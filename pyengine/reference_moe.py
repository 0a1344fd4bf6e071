"""Stage 4, reference_moe: mixture of experts in plain numpy: which experts a token goes to, and what they add up to.

As in reference.py everything is [tokens, features], computed in the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyengine.errors import ComputeError
from pyengine.spec import RouterSpec

Array = NDArray[Any]


def scores_of(logits: Array, scoring: str) -> Array:
    """Scores [T, experts] of router logits: softmax over all experts, or sigmoid of each."""
    if scoring == "softmax":
        e = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(e / e.sum(axis=-1, keepdims=True))
    with np.errstate(over="ignore"):  # of a very negative logit: 1 / (1 + inf) is 0
        return np.asarray(1 / (1 + np.exp(-logits)))


def best(x: Array, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest along the last axis, largest first, the lower index where several are equal."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


def route(logits: Array, router: RouterSpec, bias: Array | None = None) -> tuple[NDArray[np.int64], Array]:
    """(expert ids, weights), each [T, top_k], of router logits [T, experts]; best first.

    Experts are chosen by score + bias [experts], with groups only from the `top_groups` best ones; the weights are the
    scores without it, divided by their sum where `normalise` says so, times `scale`. ComputeError for NaN or Inf.
    """
    if not np.isfinite(logits).all():
        raise ComputeError("NaN or Inf in the router; expected finite logits")
    scores = scores_of(logits, router.scoring)
    choice = scores if bias is None else scores + bias
    if router.top_groups < router.groups:
        grouped = choice.reshape(len(choice), router.groups, -1)
        count = {"max": 1, "top2_sum": 2}[router.group_score]
        group_scores = np.take_along_axis(grouped, best(grouped, count), axis=-1).sum(axis=-1)
        kept = best(group_scores, router.top_groups)
        outside = np.ones(group_scores.shape, bool)
        np.put_along_axis(outside, kept, False, axis=-1)
        choice = np.where(outside[:, :, None], -np.inf, grouped).reshape(choice.shape)
    ids = best(choice, router.top_k)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if router.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + weights.dtype.type(router.eps))
    return ids, np.asarray(weights * weights.dtype.type(router.scale))


def weighted_sum(x: Array, ids: Array, weights: Array, expert: Callable[[int, Array], Array]) -> Array:
    """Sum over the slots of weight * expert(id, x) for every row of x [T, d]; expert(id, rows [n, d]) gives [n, d]."""
    y = np.zeros_like(x)
    for index in np.unique(ids):
        rows, slots = np.nonzero(ids == index)
        y[rows] += weights[rows, slots][:, None] * expert(int(index), x[rows])
    return y
