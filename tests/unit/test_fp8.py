"""float8 checkpoints: every code of E4M3, blocks with cut edges, and a model whose logits are those of its values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import safetensors_bytes, tiny_tensors, write_tiny_model
from compare import assert_same_bits
from golden.golden_cases import CONFIGS
from tiny_moe import stacked

import pyengine
from pyengine.checkpoint import E4M3, Checkpoint
from pyengine.errors import ModelFormatError, PyEngineError, UnsupportedModelError
from pyengine.fp8 import WHOLE, Fp8Checkpoint, scale_shape

CONFIG = CONFIGS["deepseek_v3"]
EXPERTS = CONFIGS["deepseek_v3_experts"]
BLOCK = (24, 20)  # no size of the model is a multiple
IDS = [1, 5, 40, 2, 66, 7]
Stored = dict[str, tuple[str, np.ndarray]]


def test_every_code_of_e4m3() -> None:
    """The largest value is 448, the smallest 2^-9, codes 127 and 255 are NaN, and values ascend with their codes."""
    assert E4M3.dtype == np.float32
    assert (E4M3[0x7E], E4M3[0x01], E4M3[0x08], E4M3[0x38], E4M3[0x3C]) == (448, 2**-9, 2**-6, 1, 1.5)
    assert np.isnan(E4M3[[127, 255]]).all()
    assert (np.diff(E4M3[:127]) > 0).all()
    assert_same_bits(E4M3[128:255], -E4M3[:127], "the sign")


def nearest(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest values of E4M3."""
    codes = np.argsort(E4M3[:127])
    at = np.clip(np.searchsorted(E4M3[codes], np.abs(values)), 1, 126)
    below = np.abs(values) - E4M3[at - 1] < E4M3[at] - np.abs(values)
    return ((at - below) | np.where(values < 0, 128, 0)).astype(np.uint8)


def stored(tensors: dict[str, np.ndarray], block: tuple[int, int]) -> tuple[Stored, dict[str, np.ndarray]]:
    """The matrices of layers as codes with scales, the rest as it is; and what all of it means."""
    out: Stored = {}
    meant = dict(tensors)
    for name, value in tensors.items():
        if value.ndim == 3:  # experts in one tensor, each with its own scales
            each, real = zip(*(stored({f".layers.{e}": w}, block) for e, w in enumerate(value)), strict=True)
            for end in ("", "_scale_inv"):
                parts = [one[f".layers.{e}{end}"] for e, one in enumerate(each)]
                out[name + end] = (parts[0][0], np.stack([part for _, part in parts]))
            meant[name] = np.stack([one[f".layers.{e}"] for e, one in enumerate(real)])
            continue
        if value.ndim != 2 or ".layers." not in name:
            out[name] = ("F32", value)
            continue
        rows, columns = value.shape if block == WHOLE else block
        scales = np.empty(scale_shape(value.shape, (rows, columns)), np.float32)
        codes, real = np.empty(value.shape, np.uint8), np.empty_like(value)
        for i, k in np.ndindex(scales.shape):
            at = np.s_[i * rows : (i + 1) * rows, k * columns : (k + 1) * columns]
            scales[i, k] = np.abs(value[at]).max() / 448
            codes[at] = nearest(value[at] / scales[i, k])
            real[at] = E4M3[codes[at]] * scales[i, k]
        out[name] = ("F8_E4M3", codes)
        out[name + "_scale_inv"] = ("F32", scales.reshape(()) if block == WHOLE else scales)
        meant[name] = real
    return out, meant


def write(folder: Path, config: dict[str, Any], tensors: Stored) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, (dtype, value) in tensors.items():
        raw = value.tobytes()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    return folder


def fp8(block: tuple[int, int], config: dict[str, Any] = CONFIG, **more: Any) -> dict[str, Any]:
    size = None if block == WHOLE else list(block)
    return {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": size, **more}}


@pytest.mark.parametrize("block", [BLOCK, (128, 128), WHOLE])
def test_logits_are_those_of_the_values(block: tuple[int, int], tmp_path: Path) -> None:
    codes, meant = stored(tiny_tensors(CONFIG), block)
    one = write(tmp_path / "codes", fp8(block, activation_scheme="dynamic", fmt="e4m3"), codes)
    other = write_tiny_model(tmp_path / "values", CONFIG, tensors=meant)
    for quant in ("f32", "int4"):
        with pyengine.load(one, quant=quant, threads=1) as a, pyengine.load(other, quant=quant, threads=1) as b:
            assert_same_bits(a.logits(IDS), b.logits(IDS), f"{block}, {quant}")


@pytest.mark.parametrize("form", ["apart", "stacked"])
def test_experts_have_scales_of_their_own(form: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(EXPERTS)
    codes, meant = stored(stacked(tensors) if form == "stacked" else tensors, BLOCK)
    one = write(tmp_path / "codes", fp8(BLOCK, EXPERTS), codes)
    other = write_tiny_model(tmp_path / "values", EXPERTS, tensors=meant)
    for quant in ("f32", "int4"):
        with pyengine.load(one, quant=quant, threads=1) as a, pyengine.load(other, quant=quant, threads=1) as b:
            assert_same_bits(a.logits(IDS), b.logits(IDS), quant)
    if form == "stacked":
        name = "model.layers.1.mlp.experts.down_proj"
        wrong = {**codes, name + "_scale_inv": ("F32", codes[name + "_scale_inv"][1][:7])}
        refused(write(tmp_path, fp8(BLOCK, EXPERTS), wrong), ModelFormatError, f"tensor '{name}_scale_inv': shape [7, ")
        no_blocks, _ = stored(stacked(tensors), WHOLE)
        refused(write(tmp_path, fp8(WHOLE, EXPERTS), no_blocks), UnsupportedModelError, "gate_up_proj': dtype F8_E4M3")


def test_any_rows_have_their_own_scales(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    value = rng.standard_normal((130, 257)).astype(np.float32)
    codes, meant = stored({"model.layers.0.w": value}, (128, 128))
    assert codes["model.layers.0.w_scale_inv"][1].shape == (2, 3)
    with Checkpoint.open(write(tmp_path, {}, codes)) as checkpoint:
        view, real = Fp8Checkpoint(checkpoint, (128, 128)), meant["model.layers.0.w"]
        assert_same_bits(view.read("model.layers.0.w"), real, "all of it")
        for begin, end in ((0, 1), (127, 129), (128, 130), (1, 130)):
            assert_same_bits(view.read_range("model.layers.0.w", begin, end), real[begin:end], f"{begin} to {end}")
        assert_same_bits(view.read_rows("model.layers.0.w", np.array([129, 0])), real[[129, 0]], "two rows")


def test_layers_that_predict_further_tokens_are_skipped_with_a_note(tmp_path: Path) -> None:
    codes, _ = stored(tiny_tensors(CONFIG), BLOCK)
    alone = write(tmp_path / "alone", fp8(BLOCK), codes)
    more = {
        "model.layers.2.eh_proj.weight": ("F8_E4M3", np.zeros((4, 8), np.uint8)),
        "model.layers.2.eh_proj.weight_scale_inv": ("F32", np.ones((1, 1), np.float32)),
        "model.layers.2.enorm.weight": ("F32", np.ones(64, np.float32)),
    }
    whole = write(tmp_path / "whole", fp8(BLOCK), {**codes, **more})
    with pyengine.load(whole, quant="f32", threads=1) as one, pyengine.load(alone, quant="f32", threads=1) as other:
        assert_same_bits(one.logits(IDS), other.logits(IDS), "the layer behind the last")
        assert "3 tensors of layer 2, which predicts further tokens, are not used" in one.notes
    none = {**fp8(BLOCK), "num_nextn_predict_layers": 0}
    refused(write(tmp_path / "none", none, {**codes, **more}), UnsupportedModelError, "eh_proj.weight_scale_inv")


def refused(folder: Path, error: type[PyEngineError], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        pyengine.load(folder, quant="f32", threads=1)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    codes, _ = stored(tiny_tensors(CONFIG), BLOCK)
    name = "model.layers.0.self_attn.q_a_proj.weight"
    scales = codes[name + "_scale_inv"][1]
    without = {key: value for key, value in codes.items() if key != name + "_scale_inv"}
    refused(write(tmp_path, fp8(BLOCK), without), ModelFormatError, f"1 tensors are missing: '{name}_scale_inv'")
    wrong = {**codes, name + "_scale_inv": ("F32", scales[:1])}
    refused(write(tmp_path, fp8(BLOCK), wrong), ModelFormatError, f"tensor '{name}_scale_inv': shape [1, 4]")
    refused(write(tmp_path, CONFIG, without), UnsupportedModelError, "tensors of a quantized checkpoint")
    lone = {key: value for key, value in codes.items() if not key.endswith("_scale_inv")}
    refused(write(tmp_path, CONFIG, lone), UnsupportedModelError, "dtype F8_E4M3; expected F32, F16, BF16")
    nan = codes[name][1].copy()
    nan[3, 5] = 127
    refused(
        write(tmp_path, fp8(BLOCK), {**codes, name: ("F8_E4M3", nan)}),
        ModelFormatError,
        f"tensor '{name}': nan at flat index {3 * 64 + 5}",
    )
