"""Values of a request: ranges, what is taken as off, token ids at the door."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pyengine.errors import RequestError
from pyengine.sampling import SamplingParams, check_token_ids


def test_defaults_are_greedy() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "max_tokens": 256,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
        "ignore_eos": False,
        "speculate": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "logit_bias": None,
        "logprobs": 0,
        "prompt_logprobs": False,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("max_tokens", 0, 0),
        ("max_tokens", -1, -1),
        ("max_tokens", 2**63, 2**63),
        ("max_tokens", np.int64(7), 7),
        ("temperature", 1e-30, 1e-30),
        ("temperature", 1e-4, 1e-4),
        ("temperature", 999999, 999999.0),
        ("temperature", 1e308, 1e30),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", Fraction(1, 2), 0.5),
        ("top_p", 0, 0.0),
        ("top_p", 1e-9, 1e-9),
        ("top_p", 1, 1.0),
        ("min_p", 1.0, 1.0),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 50, 50),
        ("top_k", 2**31, 2**31 - 1),
        ("repetition_penalty", 1e-30, 1e-30),
        ("repetition_penalty", 2, 2.0),
        ("seed", 0, 0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", ["x" * 1024] * 16, ("x" * 1024,) * 16),
        ("ignore_eos", True, True),
        ("frequency_penalty", -2, -2.0),
        ("presence_penalty", 2, 2.0),
        ("logit_bias", {}, {}),
        ("logit_bias", {np.int64(3): 1, 4: -math.inf, 5: np.float32(-0.5)}, {3: 1.0, 4: -math.inf, 5: -0.5}),
        ("logprobs", 20, 20),
        ("prompt_logprobs", True, True),
    ],
)
def test_malformed_g08_g14_g15_g16_g18_g20_g21_values_that_are_taken(name: str, value: Any, kept: Any) -> None:
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == kept
    assert type(got) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_tokens", -2, "at least -1"),
        ("max_tokens", 1e9, "an integer"),
        ("max_tokens", math.nan, "an integer"),
        ("max_tokens", True, "an integer"),
        ("max_tokens", "7", "'7'"),
        ("max_tokens", None, "an integer"),
        ("temperature", -1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", 10**400, "finite"),
        ("temperature", "0.7", "'0.7'"),
        ("temperature", True, "a number"),
        ("top_p", -1, "0.0 to 1.0"),
        ("top_p", 1.0001, "0.0 to 1.0"),
        ("top_p", math.nan, "0.0 to 1.0"),
        ("min_p", 1.5, "0.0 to 1.0"),
        ("min_p", -0.1, "0.0 to 1.0"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.5, "an integer"),
        ("top_k", math.nan, "an integer"),
        ("repetition_penalty", 0, "1e-30 to 1e+30"),
        ("repetition_penalty", -1, "1e-30 to 1e+30"),
        ("repetition_penalty", math.nan, "1e-30 to 1e+30"),
        ("repetition_penalty", 1e31, "1e-30 to 1e+30"),
        ("seed", -1, "0 to 18446744073709551615"),
        ("seed", 2**64, "0 to 18446744073709551615"),
        ("seed", 1.0, "an integer"),
        ("stop", [""], "1 to 1024"),
        ("stop", "", "1 to 1024"),
        ("stop", ["x" * 1025], "1 to 1024"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", ["x"] * 10_000, "at most 16"),
        ("stop", [1], "strings"),
        ("stop", 5, "strings"),
        ("stop", None, "strings"),
        ("stop", ["\ud800"], "surrogate"),
        ("ignore_eos", 1, "True or False"),
        ("ignore_eos", "no", "True or False"),
        ("frequency_penalty", 2.01, "-2.0 to 2.0"),
        ("frequency_penalty", math.nan, "-2.0 to 2.0"),
        ("presence_penalty", -2.01, "-2.0 to 2.0"),
        ("presence_penalty", "1", "a number"),
        ("logit_bias", [(1, 2.0)], "{token id: value}"),
        ("logit_bias", {"1": 2.0}, "an integer"),
        ("logit_bias", {True: 2.0}, "an integer"),
        ("logit_bias", {1: math.inf}, "finite"),
        ("logit_bias", {1: math.nan}, "finite"),
        ("logit_bias", {1: 1e7}, "1000000"),
        ("logit_bias", {1: "2"}, "a number"),
        ("logprobs", 21, "0 to 20"),
        ("logprobs", -1, "0 to 20"),
        ("logprobs", True, "an integer"),
        ("prompt_logprobs", 1, "True or False"),
    ],
)
def test_malformed_g08_g14_g15_g16_g18_g20_g21_values_that_are_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert name.split("_")[0] in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_unknown_values_are_refused() -> None:
    with pytest.raises(TypeError, match="top_z"):
        SamplingParams(top_z=1)  # type: ignore[call-arg]


# --- token ids


@pytest.mark.parametrize(
    "ids",
    [
        [0, 96],
        (0, 96),
        iter([0, 96]),
        np.array([0, 96]),
        np.array([0, 96], np.uint8),
        [np.int64(0), np.int32(96)],
    ],
)
def test_malformed_g04_token_ids_of_every_integer_kind(ids: Any) -> None:
    got = check_token_ids(ids, 97)
    assert got == [0, 96]
    assert {type(i) for i in got} == {int}


def test_no_token_ids_are_still_a_list() -> None:
    assert check_token_ids([], 97) == []
    assert check_token_ids(np.array([]), 97) == []


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([0, -1], "-1 at index 1; expected 0 to 96"),
        ([97], "97 at index 0; expected 0 to 96"),
        ([5279552648203111001], "5279552648203111001 at index 0; expected 0 to 96"),
        ([2**32], "4294967296 at index 0"),
        (np.array([5279552648203111001]), "5279552648203111001 at index 0"),
        (np.array([2**64 - 1], np.uint64), "18446744073709551615 at index 0"),
        ([1.5], "'1.5' at index 0"),
        ([1.0], "'1.0' at index 0"),
        (["1"], "'1' at index 0"),
        ([True], "'True' at index 0"),
        ([np.bool_(True)], "at index 0"),
        ([None], "'None' at index 0"),
        ([[1]], "at index 0"),
        ("abc", "a list of integers"),
        (b"abc", "a list of integers"),
        (5, "a list of integers"),
        (None, "a list of integers"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1]]), "(1, 1)"),
    ],
)
def test_malformed_g01_g02_g03_g04_report_f16_token_ids_that_are_refused(ids: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_token_ids(ids, 97)
    assert says in str(caught.value)
