"""float8 checkpoints: every code of E4M3, blocks with cut edges, and a model whose logits are those of its values."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_same_bits
from fp8_files import fp8, fp8_tensors, write_fp8
from golden.golden_cases import CONFIGS
from tiny_moe import stacked

import pyengine
from pyengine.checkpoint import E4M3, Checkpoint
from pyengine.errors import ModelFormatError, PyEngineError, UnsupportedModelError
from pyengine.fp8 import WHOLE, Fp8Checkpoint

CONFIG = CONFIGS["deepseek_v3"]
EXPERTS = CONFIGS["deepseek_v3_experts"]
BLOCK = (24, 20)  # no size of the model is a multiple
IDS = [1, 5, 40, 2, 66, 7]


def test_every_code_of_e4m3() -> None:
    """The largest value is 448, the smallest 2^-9, codes 127 and 255 are NaN, and values ascend with their codes."""
    assert E4M3.dtype == np.float32
    assert (E4M3[0x7E], E4M3[0x01], E4M3[0x08], E4M3[0x38], E4M3[0x3C]) == (448, 2**-9, 2**-6, 1, 1.5)
    assert np.isnan(E4M3[[127, 255]]).all()
    assert (np.diff(E4M3[:127]) > 0).all()
    assert_same_bits(E4M3[128:255], -E4M3[:127], "the sign")


@pytest.mark.parametrize("block", [BLOCK, (128, 128), WHOLE])
def test_logits_are_those_of_the_values(block: tuple[int, int], tmp_path: Path) -> None:
    codes, meant = fp8_tensors(tiny_tensors(CONFIG), block)
    one = write_fp8(tmp_path / "codes", fp8(block, CONFIG, activation_scheme="dynamic", fmt="e4m3"), codes)
    other = write_tiny_model(tmp_path / "values", CONFIG, tensors=meant)
    for quant in ("f32", "int4"):
        with pyengine.load(one, quant=quant, threads=1) as a, pyengine.load(other, quant=quant, threads=1) as b:
            assert_same_bits(a.logits(IDS), b.logits(IDS), f"{block}, {quant}")


@pytest.mark.parametrize("form", ["apart", "stacked"])
def test_experts_have_scales_of_their_own(form: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(EXPERTS)
    codes, meant = fp8_tensors(stacked(tensors) if form == "stacked" else tensors, BLOCK)
    one = write_fp8(tmp_path / "codes", fp8(BLOCK, EXPERTS), codes)
    other = write_tiny_model(tmp_path / "values", EXPERTS, tensors=meant)
    for quant in ("f32", "int4"):
        with pyengine.load(one, quant=quant, threads=1) as a, pyengine.load(other, quant=quant, threads=1) as b:
            assert_same_bits(a.logits(IDS), b.logits(IDS), quant)
    if form == "stacked":
        name = "model.layers.1.mlp.experts.down_proj"
        wrong = {**codes, name + "_scale_inv": ("F32", codes[name + "_scale_inv"][1][:7])}
        refused(
            write_fp8(tmp_path, fp8(BLOCK, EXPERTS), wrong), ModelFormatError, f"tensor '{name}_scale_inv': shape [7, "
        )
        no_blocks, _ = fp8_tensors(stacked(tensors), WHOLE)
        refused(
            write_fp8(tmp_path, fp8(WHOLE, EXPERTS), no_blocks), UnsupportedModelError, "gate_up_proj': dtype F8_E4M3"
        )


def test_report_a32_any_rows_have_their_own_scales(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    value = rng.standard_normal((130, 257)).astype(np.float32)
    codes, meant = fp8_tensors({"model.layers.0.w": value}, (128, 128))
    assert codes["model.layers.0.w_scale_inv"][1].shape == (2, 3)
    with Checkpoint.open(write_fp8(tmp_path, {}, codes)) as checkpoint:
        view, real = Fp8Checkpoint(checkpoint, (128, 128)), meant["model.layers.0.w"]
        assert_same_bits(view.read("model.layers.0.w"), real, "all of it")
        for begin, end in ((0, 1), (127, 129), (128, 130), (1, 130)):
            assert_same_bits(view.read_range("model.layers.0.w", begin, end), real[begin:end], f"{begin} to {end}")
        assert_same_bits(view.read_rows("model.layers.0.w", np.array([129, 0])), real[[129, 0]], "two rows")


def test_layers_that_predict_further_tokens_are_skipped_with_a_note(tmp_path: Path) -> None:
    codes, _ = fp8_tensors(tiny_tensors(CONFIG), BLOCK)
    alone = write_fp8(tmp_path / "alone", fp8(BLOCK, CONFIG), codes)
    more = {
        "model.layers.2.eh_proj.weight": ("F8_E4M3", np.zeros((4, 8), np.uint8)),
        "model.layers.2.eh_proj.weight_scale_inv": ("F32", np.ones((1, 1), np.float32)),
        "model.layers.2.enorm.weight": ("F32", np.ones(64, np.float32)),
    }
    whole = write_fp8(tmp_path / "whole", fp8(BLOCK, CONFIG), {**codes, **more})
    with pyengine.load(whole, quant="f32", threads=1) as one, pyengine.load(alone, quant="f32", threads=1) as other:
        assert_same_bits(one.logits(IDS), other.logits(IDS), "the layer behind the last")
        assert "3 tensors of layer 2, which predicts further tokens, are not used" in one.notes
    none = {**fp8(BLOCK, CONFIG), "num_nextn_predict_layers": 0}
    refused(write_fp8(tmp_path / "none", none, {**codes, **more}), UnsupportedModelError, "eh_proj.weight_scale_inv")


def refused(folder: Path, error: type[PyEngineError], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        pyengine.load(folder, quant="f32", threads=1)


def test_malformed_f10_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    codes, _ = fp8_tensors(tiny_tensors(CONFIG), BLOCK)
    name = "model.layers.0.self_attn.q_a_proj.weight"
    scales = codes[name + "_scale_inv"][1]
    without = {key: value for key, value in codes.items() if key != name + "_scale_inv"}
    refused(
        write_fp8(tmp_path, fp8(BLOCK, CONFIG), without), ModelFormatError, f"1 tensors are missing: '{name}_scale_inv'"
    )
    wrong = {**codes, name + "_scale_inv": ("F32", scales[:1])}
    refused(
        write_fp8(tmp_path, fp8(BLOCK, CONFIG), wrong), ModelFormatError, f"tensor '{name}_scale_inv': shape [1, 4]"
    )
    refused(write_fp8(tmp_path, CONFIG, without), UnsupportedModelError, "tensors of a quantized checkpoint")
    lone = {key: value for key, value in codes.items() if not key.endswith("_scale_inv")}
    refused(write_fp8(tmp_path, CONFIG, lone), UnsupportedModelError, "dtype F8_E4M3; expected F32, F16, BF16")
    nan = codes[name][1].copy()
    nan[3, 5] = 127
    refused(
        write_fp8(tmp_path, fp8(BLOCK, CONFIG), {**codes, name: ("F8_E4M3", nan)}),
        ModelFormatError,
        f"tensor '{name}': nan at flat index {3 * 64 + 5}",
    )
