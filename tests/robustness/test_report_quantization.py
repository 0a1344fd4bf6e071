"""Quantization: what users of other engines ran into, on small inputs. Ids are those of case_ids.txt, section A.

Every test that computes also shows that the mistake would have been seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_close, assert_same_bits
from golden.golden_cases import CONFIGS, TL, TQ2
from kernel_cases import BEST, normal, unpack
from kernel_cases import linear_oracle as oracle
from refusal import assert_refused
from report_models import IDS, Tensors, assert_nearer, logits, model, rounded
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import kernels
from pyengine.errors import UnsupportedModelError
from pyengine.reference import load_reference

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"quant": "int8"},
    **{
        f"int4 {scheme} {group}": {"quant": "int4", "group_size": group, "scheme": scheme}
        for group in (32, 64, 128)
        for scheme in ("minimum", "symmetric")
    },
}
by_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
ROWS = {  # columns of a matrix; each leaves a short last group of some size
    "report-A01-4544": 4544, "report-A02-172": 172, "report-A07-100": 100, "report-A10-48": 48,
    "report-A11-1712": 1712, "report-A12-112": 112, "report-A12-4304": 4304,
}  # fmt: skip


@by_format
@pytest.mark.parametrize("case", ROWS)
def test_a_short_last_group_has_a_scale_of_its_own(case: str, options: dict[str, Any]) -> None:
    """The last group is an eighth of the others in size, and so must be its errors."""
    k, group = ROWS[case], options.get("group_size", 64)
    tail = k % group or group
    weight = normal(k, 8, k).clip(-3, 3)
    weight[:, -tail:] /= 8
    layer = kernels.Linear(weight, threads=1, isa=BEST, **options)
    x, stored = normal(1, 5, k), unpack(layer.packed())
    expected, bound = oracle(x, stored)
    assert_close(layer(x), expected, bound, case)
    error = np.abs(layer.dequantized() - weight)[:, -tail:].max()
    levels = {"int8": 254, "minimum": 15, "symmetric": 14}[options.get("scheme", "int8")]
    step = float(np.ptp(weight[:, -tail:], axis=1).max()) / levels
    assert error <= 2 * step, "half a step and what rounding the scale and the minimum adds"
    if k > group:
        body = 6 / levels
        shared = np.abs(np.rint(weight[:, -tail:] / body) * body - weight[:, -tail:]).max()
        assert shared > 2 * error, "the scale of its neighbours would have done as well"
    short = x.copy()
    short[:, -tail:] = 0
    with pytest.raises(AssertionError, match="out of bound"):
        assert_close(layer(x), oracle(short, stored)[0], bound, "without the last group")


@by_format
@pytest.mark.parametrize("case", ["report-A02-llama", "report-A10-qwen3_moe"])
def test_models_whose_rows_are_no_multiple_of_a_group(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """172 and 48 columns in groups of 32, 64 and 128; the mistake is a last group that counts for nothing."""
    folder = model(tmp_path, CONFIGS[case[11:]])
    right, wrong = rounded(folder, **options), rounded(folder, **options)
    for name, weight in wrong.weights.items():
        if "down_proj" in name:
            cut = weight.copy()
            cut[:, -(weight.shape[1] % 32) :] = 0
            wrong.weights = {**wrong.weights, name: cut}
    load = {"int4_scheme" if key == "scheme" else key: value for key, value in options.items()}
    assert_nearer(logits(folder, **load), right.forward(IDS), wrong.forward(IDS))


@pytest.mark.parametrize("group", [48, 100, 172, 256])
def test_report_a05_a_group_size_that_is_not_there_says_which_are(group: int, tmp_path: Path) -> None:
    with pytest.raises(pyengine.RequestError, match=rf"group size {group}.*32, 64, 128"):
        pyengine.load(model(tmp_path, TL), quant="int4", group_size=group)


# ---- ranges and biases ----------------------------------------------------------------------------------------------


def far_residual(tensors: Tensors) -> None:
    """Channel 9 of the residual goes past 1e5, which float16 does not hold."""
    tensors["model.layers.0.mlp.down_proj.weight"][9] *= 4e6


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("case", ["report-A17-plain", "report-A19-calibrated"])
def test_a_residual_past_float16(case: str, quant: str, tmp_path: Path) -> None:
    config = {**TL, "vocab_size": 258}
    folder = write_tokenizer(model(tmp_path, config, far_residual), byte_level())
    taps: dict[str, list[np.ndarray]] = {}
    right = load_reference(folder, np.float64).forward(IDS, taps=taps)
    hidden = taps["hidden"][0]
    assert np.abs(hidden).max() > np.finfo(np.float16).max, "float16 would have held it"
    with pyengine.load(folder, quant=quant, threads=1, calibration=case.endswith("calibrated")) as engine:
        actual = engine.logits(IDS)
    assert np.isfinite(actual).all()
    sure = np.abs(hidden[:, 9]) > np.abs(hidden[:, 9]).max() / 4  # near 0 its sign is a matter of rounding
    size = float(np.abs(right).max())
    assert_close(actual[sure], right[sure], {"f32": 1e-3, "bf16": 0.1, "int8": 0.2, "int4": 1.0}[quant] * size, quant)


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
def test_report_a20_biases_survive_every_format(quant: str, tmp_path: Path) -> None:
    folder = model(tmp_path, TQ2)
    right, wrong = (load_reference(folder) for _ in range(2))
    biases = {name: value * 0 for name, value in wrong.weights.items() if name.endswith("_proj.bias")}
    assert len(biases) == 6
    wrong.weights = {**wrong.weights, **biases}
    assert_nearer(logits(folder, quant=quant), right.forward(IDS), wrong.forward(IDS), 2.0)


@pytest.mark.parametrize("key", [{}, {"attention_bias": True}, {"attention_bias": None}])
def test_report_a21_biases_that_no_key_announces_are_used(key: dict[str, Any], tmp_path: Path) -> None:
    folder = model(tmp_path / "plain", TQ2)
    other = model(tmp_path / "key", {**TQ2, **key})
    assert_same_bits(logits(other), logits(folder), "the key changes nothing")

    def dropped(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".bias")]:
            del tensors[name]

    assert_refused(
        lambda: logits(model(tmp_path / "none", {**TQ2, **key}, dropped)),
        pyengine.ModelFormatError,
        ("6 tensors are missing", "'model.layers.0.self_attn.q_proj.bias'"),
        tmp_path / "plain",
        small=False,
    )

    def other_family(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    as_llama = {**TQ2, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    folder = write_tiny_model(tmp_path / "llama", as_llama, tensors=changed(TQ2, other_family))
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias"):
        logits(folder)


def changed(config: dict[str, Any], change: Callable[[Tensors], object]) -> Tensors:
    tensors = tiny_tensors(config, seed=3)
    change(tensors)
    return tensors


# ---- router, importances --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1e-42, 1e-36, 1e-20, 1e20, 1e36, 3e38])
@by_format
def test_report_a26_importances_of_any_size_round_as_well(options: dict[str, Any], size: float) -> None:
    """Only their ratios matter, and where all are zero the weights are rounded as without any."""
    weight, h = normal(5, 16, 300), np.full(300, size, np.float32)
    weight[:, :128] = 0
    plain = kernels.quantize_dequantize(weight, **options)
    found = kernels.quantize_dequantize(weight, importance=h, **options)
    assert_close(found, plain, float(np.ptp(weight)) / (254 if options["quant"] == "int8" else 14), "no importance")
    error, usual = (float(np.square(values - weight).sum()) for values in (found, plain))
    assert error <= 1.05 * usual
    assert not found[:, :128].any()
    odd = np.where(np.arange(300) % 2, 1e6, 1).astype(np.float32)
    skewed = kernels.quantize_dequantize(weight, importance=odd, **options)
    assert (skewed != plain).any(), "importances do nothing"
    h[128:] = 1  # what one group has is nothing to another
    beside = kernels.quantize_dequantize(weight, importance=h, **options)
    assert_close(beside, plain, float(np.ptp(weight)) / (254 if options["quant"] == "int8" else 14), "beside others")


# ---- checkpoints that are quantized already -------------------------------------------------------------------------

LAYER = "model.layers.0.mlp.gate_proj"


def stored(case: str) -> Tensors:
    """TL with one matrix as some quantizers store it: [172, 64] at 4 bits in groups of 32 along the 64."""
    tensors = tiny_tensors(TL, seed=3)
    del tensors[LAYER + ".weight"]
    groups = {"A14": 1, "A34": 1}.get(case, 2)  # a size of group that the config does not say; one short
    tensors[LAYER + ".qweight"] = np.zeros((7 if case == "A34" else 8, 172), np.int32)
    tensors[LAYER + ".scales"] = np.ones((groups, 172), np.float16)
    zeros = np.uint32(0x77777777 if case == "A16" else 0).astype(np.int32)  # A15: 0 - 1 would wrap to 15
    tensors[LAYER + ".qzeros"] = np.full((2, 22), zeros)
    index = {"A36": np.arange(64) // 32, "A37": np.random.default_rng(0).permutation(64) // 32}
    tensors[LAYER + ".g_idx"] = index.get(case, np.zeros(64)).astype(np.int32)
    if case == "A22":
        tensors = tiny_tensors(TQ2, seed=3)
        tensors["model.layers.0.self_attn.q_proj.biases"] = np.ones((64, 2), np.float16)
        tensors["model.layers.0.self_attn.q_proj.scales"] = np.ones((64, 2), np.float16)
    if case == "A31":
        tensors = tiny_tensors(TQ2, seed=3)
        tensors["model.embed_tokens.scales"] = np.ones((97, 2), np.float16)
        tensors["model.embed_tokens.biases"] = np.ones((97, 2), np.float16)
    return tensors


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
# config of the file; what a refusal by its config names, then what a refusal by its tensors names
QUANTIZED: dict[str, tuple[dict[str, Any], str, str]] = {
    "report-A14": ({**GPTQ, "group_size": 64}, "gptq", LAYER + ".qweight"),
    "report-A15-malformed-F12": ({**GPTQ, "checkpoint_format": "gptq"}, "gptq", LAYER + ".qzeros"),
    "report-A16": ({**GPTQ, "checkpoint_format": "gptq_v2"}, "gptq", LAYER + ".qzeros"),
    "report-A22": ({"quant_method": "mlx", "bits": 4}, "mlx", "q_proj.biases"),
    "report-A31": ({"quant_method": "mlx", "bits": 4}, "mlx", "model.embed_tokens.scales"),
    "report-A34": (AWQ, "awq", LAYER + ".scales"),
    "report-A35": ({**GPTQ, "group_size": -1}, "gptq", LAYER + ".g_idx"),
    "report-A36": (GPTQ, "gptq", LAYER + ".g_idx"),
    "report-A37": ({**GPTQ, "desc_act": True}, "gptq", LAYER + ".g_idx"),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_checkpoint_that_is_quantized_already_is_refused(case: str, tmp_path: Path) -> None:
    """By its config, and by its tensors where the config says nothing: never read as something else."""
    quantization, method, tensor = QUANTIZED[case]
    base = TQ2 if case.endswith(("A22", "A31")) else TL
    folder = write_tiny_model(tmp_path, {**base, "quantization_config": quantization}, tensors=stored(case[7:10]))
    texts = ("config.json", "key 'quantization_config'", f"'{method}'", "expected")
    assert_refused(lambda: logits(folder), UnsupportedModelError, texts, tmp_path, small=False)
    (folder / "config.json").write_text(json.dumps(base))
    texts = ("tensors of a quantized checkpoint", tensor)
    assert_refused(lambda: logits(folder), UnsupportedModelError, texts, tmp_path, small=False)


@pytest.mark.parametrize("names", [["lm_head"], ["mlp.gate"], ["model.layers.0.mlp.gate", "nothing.of.this.name"], []])
def test_report_a24_what_a_file_keeps_in_float_is_seen_in_its_dtypes(names: list[str], tmp_path: Path) -> None:
    """Lists of modules are matched differently by every writer; a matrix is float8 where the file says F8_E4M3."""
    block = {"quant_method": "fp8", "weight_block_size": [24, 20]}
    config = CONFIGS["deepseek_v3_experts"]
    plain = model(tmp_path / "plain", config)
    kept = model(tmp_path / "kept", {**config, "quantization_config": {**block, "modules_to_not_convert": names}})
    assert_same_bits(logits(kept), logits(plain), str(names))
