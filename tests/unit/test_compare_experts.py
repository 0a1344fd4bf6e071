"""Stage 6, compare on models whose matrices are more than LINEAR ops: experts, shared experts, latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_same_bits
from golden.golden_cases import CONFIGS
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import kernels
from pyengine.hooks import Hooks
from pyengine.reports import compare_ops, compare_units
from pyengine.reports.compare import TextSource
from pyengine.reports.compare_baseline import Options, Side
from pyengine.reports.compare_models import compare_sides
from pyengine.reports.compare_result import CompareResult, ModuleError

TEXT = TextSource("a text", "0" * 64, 600, "The quick brown fox jumps over the lazy dog. " * 12)
SIZES: dict[str, Any] = {"tokens": 128, "window": 32}
LOAD: dict[str, Any] = {"cache": False, "calibration": False, "threads": 2}
MOE = {**CONFIGS["qwen2_moe"], "vocab_size": 258}
MLA = {**CONFIGS["deepseek_v3_experts"], "vocab_size": 258}  # a dense layer, then experts in groups and a shared one

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FFN = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = [f"experts.{name}" for name in FFN]
SHARED = [f"shared_expert.{name}" for name in FFN]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj.keys", "kv_b_proj.values", "o_proj"]


def folder_of(path: Path, config: dict[str, Any], tensors: Any = None) -> Path:
    return write_tokenizer(write_tiny_model(path, config, seed=3, tensors=tensors), byte_level())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: folder_of(tmp_path_factory.mktemp(name), config) for name, config in (("moe", MOE), ("mla", MLA))}


def side(folder: Path, quant: str, change: Callable[[Any], None] | None = None, **arguments: Any) -> Side:
    def opened() -> pyengine.Engine:
        engine = pyengine.load(folder, quant=quant, **{**LOAD, **arguments})
        if change is not None:
            change(engine)
        return engine

    return Side(folder, quant, None, opened)


def rows_of(result: CompareResult) -> dict[tuple[int | None, str], ModuleError]:
    return {(row.layer, row.module): row for row in result.layers}


# ---- which modules there are


def test_every_matrix_has_a_row(folders: dict[str, Path]) -> None:
    options = Options(**SIZES, swap=True)
    moe = compare_sides(side(folders["moe"], "f32"), side(folders["moe"], "int8"), TEXT, options)
    assert list(rows_of(moe)) == [
        *((layer, name) for layer in range(2) for name in ATTENTION + EXPERTS + SHARED),
        (None, "lm_head"),
    ]
    assert moe.swap is not None
    modules = ("qkv", "o", "experts.gate_up", "experts.down", "shared_expert.gate_up", "shared_expert.down")
    expected = {(layer, name) for layer in range(2) for name in modules}
    assert {(row.layer, row.module) for row in moe.swap} == {*expected, (None, "lm_head")}
    mla = compare_sides(side(folders["mla"], "f32"), side(folders["mla"], "int8"), TEXT, options)
    assert list(rows_of(mla)) == [
        *((0, name) for name in LATENT + FFN),
        *((layer, name) for layer in (1, 2) for name in LATENT + EXPERTS + SHARED),
        (None, "lm_head"),
    ]
    assert mla.swap is not None
    assert len(mla.swap) == 3 * 6 + 2 + 2 * 4 + 1
    for result in (moe, mla):
        assert all(0 < row.weight_rel_error < 0.02 for row in result.layers)
        assert all(0 < row.output_rel_error < 0.05 for row in result.layers)
        assert all(row.cosine > 0.998 for row in result.layers)
        text, page = str(result), result.to_html()
        assert "lm_head: weight error" in text
        assert "1 experts.down_proj" in page
        assert None not in {row["layer"] for row in result.to_json()["hidden"]}


@pytest.mark.parametrize("name", ["moe", "mla"])
@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_a_model_against_itself_is_exactly_zero(name: str, quant: str, folders: dict[str, Path]) -> None:
    sides = side(folders[name], quant), side(folders[name], quant, threads=1)
    result = compare_sides(*sides, TEXT, Options(**SIZES, swap=True))
    assert {(r.weight_rel_error, r.output_rel_error, r.cosine) for r in result.layers} == {(0, 0, 1)}
    assert result.swap is not None
    assert {row.mean_kld for row in result.swap} == {0}


@pytest.mark.parametrize("name", ["moe", "mla"])
@pytest.mark.parametrize("pair", [("f32", "int4"), ("bf16", "int8")])
def test_one_after_the_other_gives_the_same(
    name: str, pair: tuple[str, str], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head in several parts, too."""
    options = Options(**SIZES, together=True)
    sides = [side(folders[name], quant) for quant in pair]
    both = compare_sides(*sides, TEXT, options)
    monkeypatch.setattr(compare_units, "HEAD_BYTES", 3 * 4 * 16 * MOE["hidden_size"])
    apart = compare_sides(*sides, TEXT, replace(options, together=False))
    assert apart.layers[:-1] == both.layers[:-1]
    head, whole = apart.layers[-1], both.layers[-1]
    assert (head.layer, head.module) == (whole.layer, whole.module) == (None, "lm_head")
    for figure in ("weight_rel_error", "output_rel_error", "cosine"):  # sums in another order
        assert getattr(head, figure) == pytest.approx(getattr(whole, figure), rel=1e-12)
    assert compare_sides(*sides, TEXT, options).layers == apart.layers  # the same parts: the same bits


# ---- the figures


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_errors_of_experts_are_their_definition(folders: dict[str, Path]) -> None:
    """Inputs and routing from the engine's own taps, each expert packed alone and applied to its tokens."""
    compared = rows_of(compare_sides(side(folders["moe"], "f32"), side(folders["moe"], "int4"), TEXT, Options(**SIZES)))
    tensors = tiny_tensors(MOE, seed=3)
    taps: dict[tuple[int, str], np.ndarray] = {}
    keys = tuple((1, tap) for tap in ("ffn_norm", "routing", "act", "shared_act"))
    with pyengine.load(folders["moe"], quant="f32", **LOAD) as base:
        ids = base.tokenize(TEXT.content)[:32]
        base.logits(ids, program=base.build(hooks=Hooks(taps=keys)), taps=taps)
    x, act, shared = (taps[1, tap][16:] for tap in ("ffn_norm", "act", "shared_act"))
    chosen = taps[1, "routing"][16:, 2:].astype(int)
    acts = act.reshape(len(x), 2, -1)
    for name in FFN:
        w, w_q, y, y_q = [], [], [], []
        for e in range(8):
            w.append(tensors[f"model.layers.1.mlp.experts.{e}.{name}.weight"])
            w_q.append(kernels.quantize_dequantize(w[-1], quant="int4"))
            mine = acts[chosen == e] if name == "down_proj" else x[np.nonzero(chosen == e)[0]]
            if len(mine):
                y.append(kernels.linear(mine, w[-1], quant="f32"))
                y_q.append(kernels.linear(mine, w[-1], quant="int4"))
        row = compared[1, f"experts.{name}"]
        assert row.weight_rel_error == pytest.approx(relative(np.stack(w_q), np.stack(w)), rel=1e-5)
        a, b = np.concatenate(y_q), np.concatenate(y)
        assert len(a) == 2 * len(x)
        assert row.output_rel_error == pytest.approx(relative(a, b), rel=1e-5)
        cosine = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        assert row.cosine == pytest.approx(cosine.mean(), abs=1e-6)
        w_shared, row = tensors[f"model.layers.1.mlp.shared_expert.{name}.weight"], compared[1, f"shared_expert.{name}"]
        inputs = shared if name == "down_proj" else x
        y_s, y_sq = (kernels.linear(inputs, w_shared, quant=quant) for quant in ("f32", "int4"))
        assert row.output_rel_error == pytest.approx(relative(y_sq, y_s), rel=1e-5)


def test_errors_of_heads_are_their_definition(folders: dict[str, Path]) -> None:
    """W_UK and W_UV are bfloat16 in a quantized model: their errors are those of rounding, on the heads' own inputs."""
    pair = [side(folders["mla"], quant) for quant in ("f32", "int8")]
    compared = rows_of(compare_sides(*pair, TEXT, Options(**SIZES)))
    tensors = tiny_tensors(MLA, seed=3)
    with pyengine.load(folders["mla"], quant="f32", **LOAD) as base:
        ids = base.tokenize(TEXT.content)[:32]
        seen = {(m.layer, m.name): x for m, x in compare_ops.inputs(base, ids)}
    heads = tensors["model.layers.2.self_attn.kv_b_proj.weight"].reshape(4, 32, 32)
    q, values = seen[2, "k_up"].reshape(-1, 4, 24), seen[2, "v_up"].reshape(-1, 4, 32)
    for part, w, x in (("keys", heads[:, :16].transpose(0, 2, 1), q[..., :16]), ("values", heads[:, 16:], values)):
        row = compared[2, f"kv_b_proj.{part}"]
        w_q = np.stack([kernels.quantize_dequantize(np.ascontiguousarray(one), quant="bf16") for one in w])
        assert row.weight_rel_error == pytest.approx(relative(w_q, w), rel=1e-5)
        y, y_q = (np.einsum("thk,hnk->thn", x.astype(np.float64), one) for one in (w, w_q))
        assert row.output_rel_error == pytest.approx(relative(y_q, y), rel=1e-3)


# ---- swaps and planted faults


def test_one_module_swapped_is_that_module_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    """bf16 rounds weights and nothing else: the same bits as a checkpoint with just those weights rounded."""
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 258, 24)]
    for name, config in (("moe", MOE), ("mla", MLA)):
        tensors = tiny_tensors(config, seed=3)
        shared = "shared_expert." if name == "moe" else "shared_experts."
        latent = {"q_a": "q_a_proj", "q": "q_b_proj", "kv_a": "kv_a_proj_with_mqa"}
        endings = {
            "experts.gate_up": ("gate_proj", "up_proj"), "experts.down": ("down_proj",),
            "shared_expert.gate_up": (shared + "gate_proj", shared + "up_proj"),
            "shared_expert.down": (shared + "down_proj",), **{k: (v,) for k, v in latent.items()},
        }  # fmt: skip
        with (
            pyengine.load(folders[name], quant="f32", **LOAD) as base,
            pyengine.load(folders[name], quant="bf16", **LOAD) as other,
        ):
            swap = compare_ops.Swap(base, other)
            for module in swap.targets:
                if module.layer != 1 or module.name not in endings:
                    continue
                rounded = dict(tensors)
                p = f"model.layers.{module.layer}." + ("mlp.experts." if "experts." in module.name[:8] else "")
                for full in [key for key in tensors if key.startswith(p)]:
                    if full.removesuffix(".weight").endswith(endings[module.name]):
                        rounded[full] = kernels.quantize_dequantize(tensors[full], quant="bf16")
                alone = folder_of(tmp_path / name / module.name, config, rounded)
                with pyengine.load(alone, quant="f32", **LOAD) as expected:
                    swapped = swap.logits(module, ids, list(range(24)))
                    assert_same_bits(swapped, expected.logits(ids), f"{name}: {module.name}")
                    assert not np.array_equal(swapped, base.logits(ids))


@pytest.mark.parametrize("name", ["moe", "mla"])
@pytest.mark.parametrize("pair", [("f32", "int8"), ("int8", "int4"), ("int8", "f32")])
def test_swaps_between_any_formats(name: str, pair: tuple[str, str], folders: dict[str, Path]) -> None:
    sides = [side(folders[name], quant) for quant in pair]
    result = compare_sides(*sides, TEXT, Options(**SIZES, swap=True, layers=False))
    assert result.swap is not None
    same = {row.module for row in result.swap if row.mean_kld == 0}
    # int4 keeps an int8 head, and the heads of latent attention are bfloat16 under both
    assert same == ({"lm_head", *(("k_up", "v_up") if name == "mla" else ())} if pair == ("int8", "int4") else set())


PLANTED = [
    ("moe", "down", "experts.down", "experts.down_proj"),
    ("moe", "gate_up", "experts.gate_up", "experts.gate_proj"),
    ("moe", "shared_down", "shared_expert.down", "shared_expert.down_proj"),
    ("mla", "down", "experts.down", "experts.down_proj"),
    ("mla", "v_up", "v_up", "kv_b_proj.values"),
    ("mla", "q", "q", "q_b_proj"),
]


@pytest.mark.parametrize(("name", "field", "module", "part"), PLANTED)
def test_a_module_whose_scales_are_doubled_ranks_first(
    name: str, field: str, module: str, part: str, folders: dict[str, Path]
) -> None:
    def double(engine: pyengine.Engine) -> None:
        tensor = getattr(engine.weights.layers[1], field)
        raw = engine.backend.tensor_bytes(tensor)
        panels = raw[64:].reshape(-(-engine.weights.tensors[tensor][1] // 16), -1)
        if field == "v_up":  # bfloat16: one more in the exponent
            values = panels.view(np.uint16)
            values[values & 0x7F80 != 0] += 0x80
        else:
            panels[:, :64].view(np.float32)[:] *= 2
        engine.backend.tensor_write(tensor, raw)

    faulty = side(folders[name], "int8", double)
    result = compare_sides(side(folders[name], "f32"), faulty, TEXT, Options(**SIZES, swap=True))
    assert result.swap is not None
    assert (result.swap[0].layer, result.swap[0].module) == (1, module)
    assert result.swap[0].mean_kld > 5 * result.swap[1].mean_kld
    parts = {part, part.replace("gate_proj", "up_proj")}
    for figure in ("weight_rel_error", "output_rel_error"):
        ranked = sorted(result.layers, key=lambda row: -getattr(row, figure))
        assert {(row.layer, row.module) for row in ranked[: len(parts)]} == {(1, one) for one in parts}
        assert getattr(ranked[0], figure) == pytest.approx(1, abs=0.02)
        assert getattr(ranked[len(parts)], figure) < 0.05


def test_one_expert_alone_shows(folders: dict[str, Path]) -> None:
    """The busiest of eight experts with scales doubled: sqrt(1 / 8) of the weights, more of the outputs."""
    with pyengine.load(folders["moe"], quant="f32", **LOAD) as base:
        base.logits(base.tokenize(TEXT.content)[:32])
        busiest = int(base.routing()[1].argmax())

    def double(engine: pyengine.Engine) -> None:
        tensor = engine.weights.layers[1].down
        raw = engine.backend.tensor_bytes(tensor)
        raw[64:].reshape(8, 4, -1)[busiest, :, :64].view(np.float32)[:] *= 2
        engine.backend.tensor_write(tensor, raw)

    sides = side(folders["moe"], "f32"), side(folders["moe"], "int8", double)
    result = compare_sides(*sides, TEXT, Options(**SIZES, swap=True))
    row = rows_of(result)[1, "experts.down_proj"]
    assert row.weight_rel_error == pytest.approx(np.sqrt(1 / 8), rel=0.1)
    assert row.output_rel_error == max(one.output_rel_error for one in result.layers) > 0.2
    assert result.swap is not None
    assert (result.swap[0].layer, result.swap[0].module) == (1, "experts.down")
