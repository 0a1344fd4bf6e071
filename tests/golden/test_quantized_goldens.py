"""int8 and int4 models against the stored logits of transformers, within bounds computed from the scales in the files.

Every tiny model of tests/golden is loaded in int8 and int4, packed matrices are read back from their bytes
(packed_model.py), and three things are held, none with a number that was fitted:

- Values. Every weight is the nearest that its group can hold: within half a step of the checkpoint's (or at the end of
  the grid), a step being the group's scale. The mean error of a group is at most that of plain rounding. Routers are
  the checkpoint's to the bit, and experts are chosen as float64 chooses them from what the engine's router read.
- Arithmetic. The engine against the float64 reference with the values as packed: only the rounding of activations is
  between them. Errors e, independent, without bias and at most b (half a step of the activation's group), move the
  logits to first order by J e. Its mean square is at most that of J s b with random signs s, sigma^2, which draws of s
  through the reference itself measure. Uniform errors give sigma / sqrt(3); all logits together may not pass sigma.
  One error moves the norm of a token's logits by at most 2 b |J_i|, so that by McDiarmid's inequality a token passes
  sigma (1 + sqrt(2 ln 1/p)) with a probability of at most p: p is 1e-9.
- The whole. The reference with the values as packed against that with the checkpoint's, which is transformers' to 1e-4:
  the same with b the bound of each weight. The engine is then within both bounds of transformers.

A token whose experts differ from transformers' (a router is a step function of a rounded input) has no logits to be
compared with: there both references take the engine's experts, which the first check has held to be the right ones.
The KV cache is float32: what the other caches round is not a matter of these scales.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from fp8_files import fp8, fp8_tensors, write_fp8
from golden.golden_cases import CONFIGS, build, load_golden
from golden.packed_model import packed_matrices
from golden.quantized_checks import Run, check_logits, check_routes, check_values, float64, root_mean_square
from kernel_cases import Array, quantize_activations

import pyengine
from pyengine.reference import load_reference

HERE = Path(__file__).parent
INT8, MINIMUM, SYMMETRIC = {"quant": "int8"}, {"quant": "int4"}, {"quant": "int4", "int4_scheme": "symmetric"}
# the kinds of RoPE share every matrix with one of the families: one format of each width does
RUNS = [
    pytest.param(name, load, id=f"{name}-{load['quant']}{'-symmetric' * ('int4_scheme' in load)}")
    for name in CONFIGS
    for load in ((INT8, MINIMUM) if name.startswith("rope_") else (INT8, MINIMUM, SYMMETRIC))
]


@pytest.mark.parametrize(("name", "load"), RUNS)
def test_within_the_bound_of_the_scales(name: str, load: dict[str, Any], tmp_path: Path) -> None:
    golden = load_golden(HERE / f"tiny_{name}.npz")
    folder = build(tmp_path, golden.config, golden.seed)
    run, stored = Run.of(folder, golden.ids, load, None), float64(folder)
    check_values(run, stored)
    check_routes(run, stored)
    check_logits(run, stored, golden.ids, golden.logits)


@pytest.mark.parametrize("load", [INT8, MINIMUM, SYMMETRIC], ids=["int8", "int4", "int4-symmetric"])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_experts"])
def test_float8_within_the_bound_of_the_scales(name: str, load: dict[str, Any], tmp_path: Path) -> None:
    """Of the values that the codes of a float8 checkpoint mean; transformers does not run them on a CPU."""
    golden = load_golden(HERE / f"tiny_{name}.npz")
    codes, meant = fp8_tensors(tiny_tensors(golden.config, golden.seed), (24, 20))
    folder = write_fp8(tmp_path / "codes", fp8((24, 20), golden.config), codes)
    run = Run.of(folder, golden.ids, load, None)
    stored = float64(write_tiny_model(tmp_path / "values", golden.config, tensors=meant))
    check_values(run, stored)
    check_routes(run, stored)
    check_logits(run, stored, golden.ids, None)


# ---- wrong variants --------------------------------------------------------------------------------------------------


def rewrite(engine: pyengine.Engine, tensor: int, change: Callable[[Array, int], None]) -> None:
    """change(panel's bytes, groups) of every panel of a tensor, and write it back."""
    raw = engine.backend.tensor_bytes(tensor)
    _, rows, cols, group = engine.weights.tensors[tensor]
    for panel in raw[64:].reshape(-(-rows // 16), -1):
        change(panel, -(-cols // group))
    engine.backend.tensor_write(tensor, raw)


def doubled(field: str, layer: int = 1) -> Callable[[Any], None]:
    """Units of rows, and with them scales and minimums."""

    def change(panel: Array, _groups: int) -> None:
        panel[:64].view(np.float32)[:] *= 2

    return lambda engine: rewrite(engine, getattr(engine.weights.layers[layer], field), change)


def next_group(field: str, layer: int = 1) -> Callable[[Any], None]:
    """Each group with the scale of the one behind it."""

    def change(panel: Array, groups: int) -> None:
        scales = panel[64 : 64 + 32 * groups].reshape(groups, 32)
        scales[:] = np.roll(scales, 1, axis=0)

    return lambda engine: rewrite(engine, getattr(engine.weights.layers[layer], field), change)


def coarse(engine: pyengine.Engine) -> None:
    """Scales of down_proj twice as large, with the integers that are nearest then: only the mean of a group tells."""
    name, tensor = "model.layers.1.mlp.down_proj.weight", engine.weights.layers[1].down
    w, stored = packed_matrices(engine)[name], load_reference(engine.folder).weights[name]
    steps = -(-stored.shape[1] // 4)
    bytes_ = np.full((len(stored), 4 * steps), 128, np.uint8)
    bytes_[:, : stored.shape[1]] = np.rint(stored / (2 * w.scale)) + 128
    raw = engine.backend.tensor_bytes(tensor)
    panels = raw[64:].reshape(len(stored) // 16, -1)
    panels[:, :64].view(np.float32)[:] *= 2
    data = bytes_.reshape(-1, 16, steps, 4).transpose(0, 2, 1, 3)
    panels[:, panels.shape[1] - 64 * steps :] = data.reshape(len(panels), -1)
    engine.backend.tensor_write(tensor, raw)


VALUES = [
    ("llama", INT8, doubled("qkv"), r"layers\.1\.self_attn\.q_proj"),
    ("gpt2", MINIMUM, doubled("down"), r"layers\.1\.mlp\.down_proj"),
    ("gemma3", SYMMETRIC, doubled("o"), r"layers\.1\.self_attn\.o_proj"),
    ("qwen3_moe", INT8, doubled("gate_up"), r"layers\.1\.mlp\.experts\.0\.gate_proj"),
    ("qwen2_moe", MINIMUM, doubled("shared_down"), r"layers\.1\.mlp\.shared_expert\.down_proj"),
    ("deepseek_v3", MINIMUM, doubled("kv_a"), r"layers\.1\.self_attn\.kv_a_proj_with_mqa"),
    ("qwen2", INT8, next_group("down"), r"layers\.1\.mlp\.down_proj"),
    ("glm4", SYMMETRIC, next_group("gate_up"), r"layers\.1\.mlp\.gate_proj"),
    ("llama", INT8, coarse, r"layers\.1\.mlp\.down_proj.weight: groups"),
]


@pytest.mark.parametrize(("name", "load", "change", "says"), VALUES)
def test_wrong_bytes_are_found(name: str, load: dict[str, Any], change: Any, says: str, tmp_path: Path) -> None:
    golden = load_golden(HERE / f"tiny_{name}.npz")
    folder = build(tmp_path, golden.config, golden.seed)
    run = Run.of(folder, golden.ids, load, change)
    with pytest.raises(AssertionError, match=says):
        check_values(run, float64(folder))


Tensors = dict[str, np.ndarray]


def filled(suffix: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        name = next(name for name in reversed(tensors) if name.endswith(suffix))
        tensors[name] = np.full_like(tensors[name], value)

    return change


def swapped(a: str, b: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if a in name]:
            other = name.replace(a, b)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def rounded_router(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.gate.weight"
    step = np.abs(tensors[name]).max(axis=1, keepdims=True) / 127
    tensors[name] = (np.rint(tensors[name] / step) * step).astype(np.float32)


def columns_moved(tensors: Tensors) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = np.roll(tensors[name], 1, axis=1)


MODELS = [
    ("llama_biases", INT8, filled("o_proj.bias", 0), check_logits, "against its own values"),
    ("qwen2", MINIMUM, filled("q_proj.bias", 0), check_logits, "against its own values"),
    ("gpt2", INT8, filled("c_proj.bias", 0), check_logits, "against its own values"),
    ("qwen3", INT8, filled("k_norm.weight", 1), check_logits, "against its own values"),
    ("qwen2_moe", INT8, filled("shared_expert_gate.weight", 0), check_logits, "against its own values"),
    ("qwen3_moe", INT8, swapped("experts.0.", "experts.1."), check_values, r"experts\.0\.gate_proj"),
    ("mixtral", MINIMUM, swapped("experts.3.w1", "experts.3.w3"), check_values, r"experts\.3\.gate_proj"),
    ("olmoe", INT8, rounded_router, check_values, r"layers\.1\.mlp\.gate"),
    (
        "deepseek_v2",
        INT8,
        swapped("layers.0.self_attn.kv_b_proj", "layers.1.self_attn.kv_b_proj"),
        check_values,
        "kv_b",
    ),
    ("llama", SYMMETRIC, columns_moved, check_values, r"layers\.0\.self_attn\.k_proj"),
]


@pytest.mark.parametrize(("name", "load", "change", "check", "says"), MODELS)
def test_another_model_is_found(
    name: str, load: dict[str, Any], change: Any, check: Any, says: str, tmp_path: Path
) -> None:
    """An engine that dropped, filled or swapped something: here a checkpoint in which that was done."""
    golden = load_golden(HERE / f"tiny_{name}.npz")
    tensors = dict(tiny_tensors(golden.config, golden.seed))
    change(tensors)
    run = Run.of(write_tiny_model(tmp_path / "other", golden.config, tensors=tensors), golden.ids, load, None)
    stored = float64(build(tmp_path / "right", golden.config, golden.seed))
    with pytest.raises(AssertionError, match=says):
        check(run, stored, *((golden.ids, golden.logits) if check is check_logits else ()))


def test_rounded_activations_are_seen() -> None:
    """The draws are not vacuous: int8 inputs of a random matrix move its results by sigma / sqrt(3), not by less."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 256)), rng.standard_normal((512, 256))
    q, scale, apart = quantize_activations(x.astype(np.float32))
    sigma = np.sqrt(np.square(np.where(apart != 0, 0, scale / 2)) @ np.square(w.T))
    ratio = root_mean_square((q * scale + apart - x) @ w.T) / root_mean_square(sigma)
    assert 0.9 / np.sqrt(3) < ratio < 1.1 / np.sqrt(3)
