"""Stage 6, account: published totals from config.json alone; bytes as the engine packs, reads and caches them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from account_configs import DEEPSEEK_V3, REAL, TRANSFORMER
from builders import write_tiny_model
from golden.golden_cases import CONFIGS

import pyengine
from pyengine import quantize
from pyengine._core import Backend, Format
from pyengine.config import load_model_spec
from pyengine.config_values import ConfigValues
from pyengine.families import FAMILIES
from pyengine.quantize import PackedFormat, packed_bytes
from pyengine.reports.account import FORMATS, Account, account
from pyengine.reports.account_families import FAMILIES as PLAIN
from pyengine.reports.account_families import Decoder
from pyengine.reports.account_parts import Anatomy, Attention
from pyengine.reports.account_read import read_anatomy
from pyengine.reports.bench import ModelRunner
from pyengine.reports.bench import Test as Case
from pyengine.reports.machine import Limits
from pyengine.tensors import expected_tensors

LIMITS = Limits(read_gb_per_s=20.0, int8_gops=500.0, f32_gflops=100.0)
LLAMA = REAL["Llama-3.1-8B"].config


def anatomy(config: dict[str, Any], folder: Path, **changes: Any) -> Anatomy:
    path = folder / "config.json"
    path.write_text(json.dumps({**config, **changes}))
    return read_anatomy(path)


def made(config: dict[str, Any], folder: Path, **options: Any) -> Account:
    (folder / "config.json").write_text(json.dumps(config))
    return account(folder, limits=LIMITS, **options)


# --- parameters


@pytest.mark.parametrize("name", REAL)
def test_published_totals(name: str, tmp_path: Path) -> None:
    real, found = REAL[name], anatomy(REAL[name].config, tmp_path)
    p = found.parameters()
    assert (p["total"], p["active"], p["mtp"]) == (real.total, real.active or real.total, real.mtp)
    assert sum(value for key, value in p.items() if key not in ("total", "active", "mtp")) == p["total"]
    assert (found.not_run is None) == (real.config["architectures"][0] in FAMILIES)
    assert found.notes == ()


def test_llama_8b_by_part(tmp_path: Path) -> None:
    p = anatomy(LLAMA, tmp_path).parameters()
    assert p["ffn"] == 32 * 176_160_768 == 5_637_144_576
    assert p["attention"] == 1_342_177_280
    assert p["embedding"] + p["lm_head"] == 1_050_673_152
    assert p["norm"] == 266_240
    assert round(100 * p["ffn"] / p["total"], 1) == 70.2


def test_deepseek_v3_experts(tmp_path: Path) -> None:
    found = anatomy(DEEPSEEK_V3, tmp_path)
    experts = [p for p in found.main if ".experts." in p.name]
    assert sum(p.size for p in experts) == 44_040_192
    routed = sum(p.active * p.size for p in experts) // 58
    shared = sum(p.parameters for p in found.main if "shared_expert" in p.name) // 58
    dense = sum(p.parameters for p in found.main if p.group == "ffn" and "expert" not in p.name) // 3
    assert routed + shared == 396_361_728 == dense
    layer = sum(p.parameters for p in experts) // 58 + shared
    assert (round(layer / 1e9, 1), round(layer / dense, 1)) == (11.3, 28.6)
    assert [a.token_bytes("bf16") for a in found.attention] == [61 * (576 + 512) * 2]


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("rope")])
def test_the_loaders_tensors_are_the_parts_and_so_are_the_plain_shapes(name: str, tmp_path: Path) -> None:
    """Families that run are read from the loader's table; the table of shapes must say the same of them."""
    config = CONFIGS[name]
    found = anatomy(config, tmp_path)
    shapes = expected_tensors(load_model_spec(tmp_path)).values()
    assert found.not_run is None
    assert found.parameters()["total"] == sum(math.prod(shape) for shape in shapes)
    plain = Decoder(ConfigValues.read(tmp_path / "config.json"), PLAIN[config["model_type"]]).build("", None)
    assert plain.parameters() == found.parameters()
    assert plain.attention == found.attention
    for quant in FORMATS:
        assert plain.step_bytes(quantize.choose(quant)) == found.step_bytes(quantize.choose(quant))
        assert plain.weight_bytes(quantize.choose(quant)) == found.weight_bytes(quantize.choose(quant))


def test_what_the_transformer_base_counts(tmp_path: Path) -> None:
    """Vaswani et al. say 65 M: one embedding of 37000, six layers of each kind, biases everywhere, sinusoids not."""
    d, ff = 512, 2048
    block = 4 * (d * d + d)
    ffn = 2 * d * ff + d + ff
    layers = 6 * (block + ffn + 4 * d) + 6 * (2 * block + ffn + 6 * d)
    p = anatomy(TRANSFORMER, tmp_path).parameters()
    assert (p["total"], p["ffn"]) == (37000 * d + layers, 12 * ffn)


@pytest.mark.parametrize("name", ["GPT-2", "BERT-base"])
def test_a_two_matrix_ffn(name: str, tmp_path: Path) -> None:
    found = anatomy(REAL[name].config, tmp_path)
    assert found.parameters()["ffn"] == 12 * (2 * 768 * 3072 + 768 + 3072)
    assert found.flops(1)["ffn"] == 12 * 2 * 2 * 768 * 3072


# --- FLOPs


def test_llama_8b_flops(tmp_path: Path) -> None:
    found = anatomy(LLAMA, tmp_path)
    flops = found.flops(131072)
    matrices = flops["total"] - flops["attention_scores"]
    assert (flops["ffn"], round(matrices / 1e9, 1)) == (2 * 5_637_144_576, 15.0)
    assert round(flops["ffn"] / matrices, 2) == 0.75
    assert flops["attention_scores"] == 32 * 4 * 131072 * 4096
    assert round(flops["ffn"] / flops["total"], 3) == 0.135
    assert found.crossover() == 21_504
    assert found.flops(21_504)["attention_scores"] == found.flops(21_504)["ffn"]


def test_a_window_bounds_what_is_seen(tmp_path: Path) -> None:
    config = REAL["Mistral-7B"].config
    near, far = (anatomy(config, tmp_path).flops(n)["attention_scores"] for n in (4096, 131072))
    assert near == far == 32 * 4 * 4096 * 4096
    assert anatomy(config, tmp_path).crossover() is None
    everywhere = anatomy(config, tmp_path, sliding_window=None)
    assert everywhere.flops(131072)["attention_scores"] == 32 * near


@pytest.mark.parametrize(
    ("name", "full", "windowed"), [("Gemma-2-9B", 21, 21), ("Gemma-3-1B", 4, 22), ("Olmo-3-7B", 8, 24)]
)
def test_layers_with_and_without_a_window(name: str, full: int, windowed: int, tmp_path: Path) -> None:
    found = {a.window is None: a.layers for a in anatomy(REAL[name].config, tmp_path).attention}
    assert found == {True: full, False: windowed}


def test_prompt_flops_are_the_mean_of_the_positions() -> None:
    for window in (None, 5, 40):
        a = Attention(2, 3, 4, 5, 1, 4, 5, window=window)
        assert a.prompt_flops(23) == pytest.approx(np.mean([a.flops(n) for n in range(1, 24)]))


def test_encoder_and_decoder_are_counted_apart(tmp_path: Path) -> None:
    result = made(REAL["T5-base"].config, tmp_path, context=512)
    d, ff, scores = 768, 3072, 2 * 12 * 128 * 512
    decoder = (
        12 * (2 * (6 * d * d + 2 * d * ff) + 2 * scores) + 2 * 32128 * d
    )  # k and v of cross-attention are not here
    assert result.flops_per_token["total"] == decoder
    assert result.encoder_flops_per_token is not None
    assert result.encoder_flops_per_token["total"] == 12 * (2 * (4 * d * d + 2 * d * ff) + scores) + 12 * 2 * 2 * d * d
    assert result.kv_bytes_per_token == 2 * 12 * 2 * 768 * 2
    bert = made(REAL["BERT-base"].config, tmp_path)
    assert (bert.decode_bytes_per_token, bert.decode_tokens_per_second, bert.kv_bytes_per_token) == (None, None, 0)
    assert bert.prefill_tokens_per_second > 0
    assert bert.to_json()["decode"] is None


# --- bytes


def test_packed_bytes_are_the_cores() -> None:
    backend = Backend(1, "")
    formats = [PackedFormat(Format.F32), PackedFormat(Format.BF16), PackedFormat(Format.INT8, 64)]
    formats += [PackedFormat(f, g) for f in (Format.INT4_SYM, Format.INT4_MIN) for g in (32, 64, 128)]
    for fmt in formats:
        for rows, cols in [(1, 1), (16, 64), (17, 65), (172, 576), (33, 129), (48, 1440), (5, 2047), (2, 31)]:
            tensor = backend.tensor_create(int(fmt.format), rows, cols, fmt.group)
            assert packed_bytes(fmt, rows, cols) == backend.tensor_size(tensor) - 64
            backend.tensor_free(tensor)


TINY = [
    "llama",
    "llama_biases",
    "llama_ratio_7",
    "mistral_window",
    "mistral_nemo",
    "qwen2",
    "qwen2_window",
    "qwen3_biases",
    "olmo2",
    "gemma2",
    "gpt2_gelu",
    "mixtral",
    "qwen2_moe",
    "qwen2_moe_steps",
    "qwen3_moe_dense_layer",
    "deepseek_v3_biases",
    "deepseek_v3_experts",
    "deepseek_v2_experts",
    "deepseek_v2_biases",
]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kv_dtype", ["bf16", "f32", "int8"])
@pytest.mark.parametrize("quant", FORMATS)
def test_bytes_are_the_engines(name: str, quant: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, CONFIGS[name])
    if kv_dtype == "int8" and name.startswith("deepseek"):
        kv_dtype = "f32"  # latent attention has no int8 cache
    with pyengine.load(folder, quant=quant, kv_dtype=kv_dtype, threads=1, calibration=False, cache=False) as engine:
        depth = min(99, engine.ctx_size - 1)
        found = account(folder, quant=quant, kv_dtype=kv_dtype, context=depth + 1, threads=1, limits=LIMITS)
        work = ModelRunner(engine).work(Case("tg", 1, depth))
        assert found.weight_bytes[quant] == engine.weights.packed_bytes
        assert found.decode_bytes_per_token is not None
        assert found.decode_bytes_per_token[quant] == engine.weight_bytes_per_token == work.weight_bytes
        assert found.kv_bytes_per_token == engine.pool.bytes_per_token
        assert found.step_kv_bytes == work.kv_bytes
        ffn = 0
        for w, (chosen, of) in zip(engine.weights.layers, engine.weights.chosen_experts, strict=True):
            ffn += sum(engine.backend.tensor_size(t) - 64 for t in (w.gate_up, w.down)) // of * chosen
            ffn += sum(engine.backend.tensor_size(t) - 64 for t in (w.shared_gate_up, w.shared_down) if t >= 0)
        assert found.step_weight_bytes["ffn"] == ffn
        assert found.stored_parameters == found.parameters["total"]
        assert found.activation_bytes == pytest.approx(engine.program.program.info()["arena_bytes"], rel=0.02)


def test_the_cache_of_a_full_context_is_what_the_pools_would_hold(tmp_path: Path) -> None:
    config = {**CONFIGS["qwen2_window"], "max_position_embeddings": 4096}
    found = made(config, tmp_path, context=1000, batch=3)
    full, near = (
        next(a for a in found.anatomy.attention if (a.window is None) == seen_all) for seen_all in (True, False)
    )
    blocks = 1024 * full.token_bytes("bf16") + 544 * near.token_bytes("bf16")  # a window of 8 and a chunk of 512
    assert found.kv_cache_bytes == 3 * blocks


def test_llama_8b_ffn_bytes_of_a_step(tmp_path: Path) -> None:
    result = made(LLAMA, tmp_path, quant="bf16", context=4096)
    assert round(result.step_weight_bytes["ffn"] / 1e9, 1) == 11.3
    assert result.kv_bytes_per_token == 131_072
    assert result.weight_bytes["bf16"] > 2 * 8_030_261_248


def test_a_batch_reads_the_experts_that_it_picks(tmp_path: Path) -> None:
    config = REAL["Mixtral-8x7B"].config
    q = quantize.choose("int8")
    found = anatomy(config, tmp_path)
    one, two, many = (found.step_bytes(q, batch)["ffn"] for batch in (1, 2, 10_000))
    expert = 32 * 3 * packed_bytes(q.layers, 14336, 4096)
    assert one == pytest.approx(2 * expert, rel=0.01)
    assert two / one == pytest.approx(8 * (1 - (6 / 8) ** 2) / 2)
    assert many / one == pytest.approx(4)
    dense = anatomy(LLAMA, tmp_path)
    assert dense.step_bytes(q, 1) == dense.step_bytes(q, 7)


# --- time


def test_a_step_takes_the_longer_of_reading_and_computing(tmp_path: Path) -> None:
    result = made(LLAMA, tmp_path, context=1)
    read = result.step_bytes / 20e9
    assert result.decode_tokens_per_second == pytest.approx(1 / read)
    assert result.decode_bound == "bandwidth"
    many = made(LLAMA, tmp_path, context=1, batch=1000)
    flops = many.flops_per_token
    seconds = 1000 * ((flops["total"] - flops["attention_scores"]) / 500e9 + flops["attention_scores"] / 100e9)
    assert many.decode_tokens_per_second == pytest.approx(1000 / seconds)
    assert many.decode_bound == "compute"
    floats = made(LLAMA, tmp_path, context=1, batch=1000, quant="bf16")
    assert floats.decode_tokens_per_second == pytest.approx(100e9 / flops["total"])


def test_a_prompt_computes_the_head_once(tmp_path: Path) -> None:
    result = made(LLAMA, tmp_path, context=1000, quant="f32")
    flops = result.flops_per_token
    layers = flops["ffn"] + flops["attention_projections"]
    total = 1000 * layers + flops["lm_head"] + sum(result.anatomy.flops(n)["attention_scores"] for n in range(1, 1001))
    assert result.prefill_tokens_per_second == pytest.approx(1000 * 100e9 / total)
