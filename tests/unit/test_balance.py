"""Balanced keys: the same scores to the bit, and channels of k that one int8 scale can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_same_bits
from golden.golden_cases import CONFIGS
from kernel_cases import bfloat16_bits, to_bfloat16

import pyengine
from pyengine.balance import balance_keys, key_factors, scaled_rows
from pyengine.config import load_model_spec
from pyengine.spec import ModelSpec

CONFIG = CONFIGS["qwen2"]
IDS = np.random.default_rng(2).integers(0, 97, 50).tolist()


def large_biases() -> dict[str, np.ndarray]:
    """A Qwen2 model whose k has biases of hundreds in some channels, as Qwen2.5 has."""
    tensors = tiny_tensors(CONFIG, seed=6)
    for name, bias in tensors.items():
        if name.endswith("k_proj.bias"):
            bias[3::11] *= 200
    return tensors


def spec_of(folder: Path) -> ModelSpec:
    return load_model_spec(folder)


def logits(folder: Path, **options: Any) -> np.ndarray:
    with pyengine.load(folder, quant="f32", **options) as engine:
        return engine.logits(IDS)


def test_balanced_tensors_give_the_same_bits(tmp_path: Path) -> None:
    tensors = large_biases()
    spec = spec_of(write_tiny_model(tmp_path / "as_is", CONFIG, tensors=tensors))
    balanced, changed = dict(tensors), 0
    for layer in spec.layers:
        prefix = f"model.layers.{layer.index}."
        raw = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        for name, value in balance_keys(layer, raw).items():
            changed += value is not raw[name]
            balanced[prefix + name] = value
    assert changed == 4 * spec.num_layers
    write_tiny_model(tmp_path / "balanced", CONFIG, tensors=balanced)
    assert_same_bits(logits(tmp_path / "balanced"), logits(tmp_path / "as_is"), "balanced")


def test_large_biases_lose_little_in_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, CONFIG, tensors=large_biases())
    exact = logits(tmp_path)
    ours = np.abs(logits(tmp_path, kv_dtype="int8") - exact).mean()
    monkeypatch.setattr("pyengine.engine.balance_keys", None)
    unbalanced = np.abs(logits(tmp_path, kv_dtype="int8") - exact).mean()
    assert 0 < ours < unbalanced / 2


def test_factors_are_shared_by_rotated_pairs(tmp_path: Path) -> None:
    a = spec_of(write_tiny_model(tmp_path, CONFIG)).layers[0].attention
    half = a.rope.rotary_dim // 2
    bias = np.zeros((a.num_kv_heads, a.head_dim), np.float32)
    bias[0, 1], bias[-1, half] = 300, -64
    factors = key_factors(a, bias.reshape(-1))
    expected = np.ones_like(factors)
    expected[0, [1, 1 + half]], expected[-1, [0, half]] = 16, 4
    assert_same_bits(factors, expected, "300 / 16 to 16, 64 / 16")
    bias[0, 2] = np.nan
    assert np.isfinite(key_factors(a, bias.reshape(-1))).all(), "packing names the NaN"


def test_rows_are_scaled_in_their_own_dtype() -> None:
    x = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    by = np.array([1, 8, 0.25], np.float32)
    assert_same_bits(scaled_rows(x, by), x * by[:, None], "float32")
    assert_same_bits(scaled_rows(bfloat16_bits(x), by), bfloat16_bits(to_bfloat16(x) * by[:, None]), "bfloat16")
    half = scaled_rows(x.astype(np.float16) * np.float16(1e4), by)
    assert half.dtype == np.float32
    assert_same_bits(half, (x.astype(np.float16) * np.float16(1e4)).astype(np.float32) * by[:, None], "float16")


def test_what_has_no_bias_or_a_norm_stays(tmp_path: Path) -> None:
    for case in ("llama", "qwen3", "qwen3_biases"):
        spec = spec_of(write_tiny_model(tmp_path / case, CONFIGS[case]))
        raw = {"self_attn.k_proj.bias": np.full(1000, 99, np.float32)} if case == "qwen3_biases" else {}
        assert balance_keys(spec.layers[0], raw) is raw
