"""RoPE frequencies and tables: against stored numbers of transformers, against published tables, and by property."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits

from pyengine.config_values import ConfigValues
from pyengine.rope import cos_sin, inv_freq
from pyengine.rope_config import ropes_by_layer_type
from pyengine.spec import RopeSpec

STORED: dict[str, Any] = json.loads((Path(__file__).parent / "rope_transformers.json").read_text())["cases"]
ULP = float(np.finfo(np.float32).eps)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}


def spec_of(config: dict[str, Any]) -> RopeSpec:
    return ropes_by_layer_type(ConfigValues(Path("config.json"), config, {}), config["head_dim"])["full_attention"]


def spec(kind: str, dim: int = 16, theta: float = 10000.0, **parameters: float) -> RopeSpec:
    return RopeSpec(kind, theta, dim, tuple(sorted(parameters.items())))


def f32(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize("name", STORED)
def test_frequencies_of_transformers(name: str) -> None:
    case = STORED[name]
    found, factor = inv_freq(spec_of(case["config"]))
    expected = f32(case["inv_freq"])
    assert found.dtype == np.float32
    assert_close(found, expected, 4 * ULP * expected, name)  # a power and a few roundings
    assert factor == pytest.approx(case["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("name", STORED)
def test_tables_of_transformers(name: str) -> None:
    case = STORED[name]
    cos, sin = cos_sin(spec_of(case["config"]), 7, 8)
    bound = 16 * ULP * case["attention_factor"]  # an angle of up to 7, off by a few units in its last place
    assert_close(cos[0], f32(case["cos7"]), bound, name)
    assert_close(sin[0], f32(case["sin7"]), bound, name)


def test_dynamic_past_its_maximum_is_transformers() -> None:
    case = STORED["dynamic"]
    rope = spec_of(case["config"])
    expected = f32(case["inv_freq_200"])
    found, _ = inv_freq(rope, 200)
    assert_close(found, expected, 8 * ULP * expected)
    assert np.abs(found[1:] / inv_freq(rope)[0][1:] - 1).min() > 0.05, "the same as without a length"


# Published values: pairs unchanged, blended (index -> value), and from where on divided by the factor.
TABLES = {
    "64-32": (64, 32.0, 14, {15: 1.290547928e-03, 16: 4.295567966e-04, 17: 9.708287803e-05}, 18),
    "128-8": (
        128,
        8.0,
        28,
        {
            29: 2.166570764e-03,
            30: 1.371893568e-03,
            31: 8.567514129e-04,
            32: 5.248461610e-04,
            33: 3.126937504e-04,
            34: 1.785078128e-04,
        },
        35,
    ),
    "16-8": (16, 8.0, 3, {4: 5.248461610e-04}, 5),
}


@pytest.mark.parametrize("name", TABLES)
def test_report_c01_c02_llama3_zones(name: str) -> None:
    dim, factor, kept, blended, divided = TABLES[name]
    plain = 500000.0 ** -(np.arange(0, dim, 2) / dim)
    found, attention = inv_freq(spec("llama3", dim, 500000.0, **{**LLAMA3, "factor": factor}))
    assert attention == 1.0
    np.testing.assert_allclose(found[: kept + 1], plain[: kept + 1], rtol=1e-6)
    np.testing.assert_allclose([found[i] for i in blended], list(blended.values()), rtol=2e-6)
    np.testing.assert_allclose(found[divided:], plain[divided:] / factor, rtol=1e-6)
    assert kept + 1 + len(blended) == divided


def test_linear_divides_by_the_factor() -> None:
    assert_same_bits(inv_freq(spec("linear", factor=4.0))[0], inv_freq(spec("default"))[0] / np.float32(4))


YARN = {"original_max_position_embeddings": 2048.0}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"factor": 4.0}, 1.1386294361),
        ({"factor": 16.0}, 1.2772588722),
        ({"factor": 40.0}, 1.3688879454),
        ({"factor": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.707}, 1.2772588722 / (0.0707 * math.log(16) + 1)),
        ({"factor": 16.0, "mscale": 0.5}, 1.2772588722),
        ({"factor": 16.0, "mscale": 0.0, "mscale_all_dim": 1.0}, 1.2772588722),
        ({"factor": 4.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 4.0, "attention_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.707}, 0.5),
    ],
)
def test_report_c05_c06_yarn_attention_factor(parameters: dict[str, float], expected: float) -> None:
    rope = spec("yarn", **YARN, **parameters)
    assert inv_freq(rope)[1] == pytest.approx(expected, rel=1e-9)
    cos, sin = cos_sin(rope, 0, 1)  # angle 0
    assert cos[0].tolist() == [np.float32(expected)] * 8
    assert sin[0].tolist() == [0.0] * 8


@pytest.mark.parametrize("change", [{"beta_fast": 64.0}, {"beta_slow": 4.0}, {"truncate": 0.0}])
def test_yarn_parameters_change_the_frequencies(change: dict[str, float]) -> None:
    plain = spec("yarn", 64, factor=8.0, **YARN)
    changed = spec("yarn", 64, factor=8.0, **YARN, **change)
    assert np.abs(inv_freq(changed)[0] / inv_freq(plain)[0] - 1).max() > 0.01


def test_yarn_where_both_ends_of_the_ramp_meet() -> None:
    found, _ = inv_freq(spec("yarn", 4, 1e6, factor=8.0, **YARN, beta_fast=1.0, truncate=0.0))
    assert np.isfinite(found).all()


KINDS = {
    "default": spec("default"),
    "linear": spec("linear", factor=4.0),
    "dynamic": spec("dynamic", factor=4.0, original_max_position_embeddings=32.0),
    "llama3": spec("llama3", theta=500000.0, **LLAMA3),
    "yarn": spec("yarn", factor=4.0, **YARN),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_do_not_depend_on_chunks(kind: str) -> None:
    rope = KINDS[kind]
    whole = cos_sin(rope, 0, 100)
    for step in (1, 7, 64):
        parts = [cos_sin(rope, at, min(at + step, 100)) for at in range(0, 100, step)]
        for which in (0, 1):
            joined = np.concatenate([part[which] for part in parts])
            assert joined.dtype == np.float32
            assert_same_bits(joined, whole[which], f"{kind}, {step} at a time")


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_angles_are_float32_products(kind: str) -> None:
    """Far out, an angle rounded to float32 is off by more than a thousandth; the models were trained with that."""
    rope, position = KINDS[kind], 1_000_003
    frequencies, factor = inv_freq(rope)
    cos, _ = cos_sin(rope, position, position + 1)
    angle = (np.float32(position) * frequencies).astype(np.float32)
    assert_same_bits(cos[0], np.cos(angle) * np.float32(factor), kind)
    assert np.abs(np.cos(position * frequencies.astype(np.float64)) * factor - cos[0]).max() > 1e-4


def test_dynamic_within_its_maximum_is_default() -> None:
    rope = KINDS["dynamic"]
    inside, plain = cos_sin(rope, 0, 40), cos_sin(KINDS["default"], 0, 40)
    assert_same_bits(inside[0][:32], plain[0][:32])
    assert np.abs(inside[0][32:] - plain[0][32:]).max(axis=1).min() > 1e-3


def test_dynamic_row_is_the_frequencies_of_its_own_length() -> None:
    rope = KINDS["dynamic"]
    _, sin = cos_sin(rope, 50, 51)
    assert_same_bits(sin[0], np.sin(np.float32(50) * inv_freq(rope, 51)[0]))
    assert np.abs(sin[0] - np.sin(np.float32(50) * inv_freq(rope, 100)[0])).max() > 1e-3


def test_report_c10_c39_theta_is_used() -> None:
    assert np.abs(inv_freq(replace(KINDS["default"], theta=1e6))[0] / inv_freq(KINDS["default"])[0] - 1).max() > 0.9


def test_head_dim_that_is_no_power_of_two() -> None:
    found, _ = inv_freq(spec("default", 24, 1e6))
    assert found.shape == (12,)
    np.testing.assert_allclose(found, 1e6 ** -(np.arange(0, 24, 2) / 24), rtol=1e-6)
