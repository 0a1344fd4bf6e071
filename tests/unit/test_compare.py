"""The comparator itself: each thing it must refuse is refused, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits, linear_bound

ONES = np.ones((2, 3), np.float32)


def changed(value: float, at: tuple[int, int] = (1, 2)) -> np.ndarray:
    out = ONES.copy()
    out[at] = value
    return out


def test_within_the_bound_passes_and_just_outside_fails() -> None:
    step = 2.0**-10
    assert_close(changed(1 + step), ONES, step)
    with pytest.raises(AssertionError, match=r"1 of 6 values out of bound; worst at \[1, 2\]"):
        assert_close(changed(1 + step), ONES, step * 0.999)
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(ONES, changed(1 + step), step * 0.999)


def test_a_bound_per_element_is_used_per_element() -> None:
    bound = np.zeros((2, 3))
    bound[1, 2] = 0.5
    assert_close(changed(1.5), ONES, bound)
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(changed(1.5, (0, 0)), ONES, bound)


def test_the_worst_is_the_one_farthest_over_its_bound() -> None:
    actual = changed(1.75)
    actual[0, 0] = 9
    bound = np.full((2, 3), 0.5)
    bound[0, 0] = 8
    with pytest.raises(AssertionError, match=r"worst at \[1, 2\]"):
        assert_close(actual, ONES, bound)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_fail_on_either_side_and_on_both(value: float) -> None:
    bad = changed(value)
    for pair in ((bad, ONES), (ONES, bad), (bad, bad)):
        with pytest.raises(AssertionError, match=r"is -?(nan|inf) at"):
            assert_close(*pair, 1e30)
        with pytest.raises(AssertionError, match="NaN or Inf"):
            assert_same_bits(*pair)


@pytest.mark.parametrize("bound", [np.nan, np.inf, -1.0, np.full((2, 3), np.nan), np.zeros(3), np.zeros((1, 2, 3))])
def test_a_bound_that_could_hide_an_error_is_refused(bound: Any) -> None:
    with pytest.raises(AssertionError, match="bound"):
        assert_close(ONES, ONES, bound)


@pytest.mark.parametrize(
    "other",
    [np.ones((1, 3), np.float32), np.ones((3, 2), np.float32), np.ones((2, 3, 1), np.float32), np.float32(1)],
    ids=["row", "transposed", "extra axis", "scalar"],
)
def test_nothing_is_broadcast(other: Any) -> None:
    for pair in ((ONES, other), (other, ONES)):
        with pytest.raises(AssertionError, match=r"shape|numpy array"):
            assert_close(*pair, 10)
        with pytest.raises(AssertionError, match=r"shape|numpy array"):
            assert_same_bits(*pair)


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.bool_])
def test_dtypes_must_agree(dtype: Any) -> None:
    for pair in ((ONES, ONES.astype(dtype)), (ONES.astype(dtype), ONES)):
        with pytest.raises(AssertionError, match=r"expected (float|int|bool)"):
            assert_close(*pair, 0)
        with pytest.raises(AssertionError, match=r"expected (float|int|bool)"):
            assert_same_bits(*pair)


def test_only_the_expected_side_may_be_a_float64_oracle() -> None:
    assert_close(ONES, ONES.astype(np.float64) + 1e-9, 2e-9)
    with pytest.raises(AssertionError, match="out of bound"):  # compared in float64, not rounded to float32 first
        assert_close(ONES, ONES.astype(np.float64) + 1e-9, 0)
    with pytest.raises(AssertionError, match="float64, expected float32"):
        assert_close(ONES.astype(np.float64), ONES, 0)
    with pytest.raises(AssertionError, match="float32, expected float64"):
        assert_same_bits(ONES, ONES.astype(np.float64))


def test_integers_are_equal_or_wrong() -> None:
    a = np.array([1, 2, 3], np.int32)
    assert_close(a, a.copy(), 0)
    with pytest.raises(AssertionError, match=r"first at \[1\]"):
        assert_close(a, np.array([1, 3, 3], np.int32), 0)
    with pytest.raises(AssertionError, match="bound above 0"):
        assert_close(a, a.copy(), 1)


def test_large_integers_do_not_pass_through_float() -> None:
    big = np.array([2**60], np.int64)
    with pytest.raises(AssertionError, match="differ"):
        assert_close(big, big + 1, 0)


def test_empty_arrays_and_lists_are_refused() -> None:
    empty = np.empty((0, 3), np.float32)
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_close(empty, empty, 0)
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_same_bits(empty, empty)
    with pytest.raises(AssertionError, match="numpy array"):
        assert_close([1.0], [1.0], 0)
    objects = np.array([None])
    with pytest.raises(AssertionError, match="numpy array"):
        assert_same_bits(objects, objects)


def test_same_bits_sees_the_sign_of_zero_and_the_last_bit() -> None:
    assert_same_bits(ONES, ONES.copy())
    assert_same_bits(ONES.T, np.ones((3, 2), np.float32))  # strides do not matter
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(changed(0.0), changed(-0.0))
    with pytest.raises(AssertionError, match=r"1 of 6 values differ; first at \[1, 2\]"):
        assert_same_bits(changed(np.nextafter(np.float32(1), np.float32(2))), ONES)


@pytest.mark.parametrize("k", [1, 2, 33, 576])
def test_linear_bound_holds_for_float32_and_catches_a_dropped_column(k: int) -> None:
    rng = np.random.default_rng(k)
    x, w = rng.normal(size=(7, k)).astype(np.float32), rng.normal(size=(5, k)).astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    chain = np.zeros((7, 5), np.float32)
    for i in range(k):
        chain = chain + np.outer(x[:, i], w[:, i])
    assert_close(chain, exact, linear_bound(x, w))
    dropped = (x[:, :-1] @ w[:, :-1].T).astype(np.float32)
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(dropped, exact, linear_bound(x, w))
