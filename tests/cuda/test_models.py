"""Whole models on the device, small ones of every family, against the same engine on the CPU.

f32: both add up float32 products, in another order: transformers' float32 logits, which the CPU's agree with to 1e-4
(docs/architecture.md), are as far.

int8 and int4: up to 8 tokens the sums are exact but for float32's last bits, which now and then round an activation the
other way: one step, where rounding itself moves every value by up to half of one. Half of what the CPU's quantized and
float32 logits differ by is allowed. More tokens are multiplied as bfloat16, which moves an activation by a tenth of a
step and so rounds many the other way: at worst as two independent roundings of the same values, whose difference is
sqrt(2) times one of them. Under bf16 rounding the activations there is as much as rounding the weights was: twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS, build
from tiny_reports import CONFIG, TEXT
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine.cli.main import main
from pyengine.hooks import Hooks
from pyengine.reports import machine

FAMILIES = (
    *("llama", "llama_biases", "mistral_window", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3_v5", "glm4", "gpt2_gelu"),
    *("granite", "smollm3_listed", "ministral3", "rope_yarn_v5", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v3_experts"),
)
QUANTIZED = ("llama", "qwen2_moe_steps", "deepseek_v3", "gemma2", "gpt2_gelu")
IDS = np.random.default_rng(5).integers(0, 97, 14).tolist()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = build(base / name, CONFIGS[name], seed=11)
        return made[name]

    return folder


@pytest.fixture
def load(library: Any, folder_of: Any) -> Iterator[Any]:
    """load(family, device, **arguments of pyengine.load)"""
    opened: list[pyengine.Engine] = []

    def one(name: str, device: str, **options: Any) -> pyengine.Engine:
        options = {"threads": 1, "calibration": False, "cache": False, **options}
        engine = pyengine.load(folder_of(name), device=device, **options)
        opened.append(engine)
        return engine

    yield one
    for engine in opened:
        engine.close()


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_logits_and_greedy_tokens(load: Any, name: str) -> None:
    cpu, device = (load(name, where, quant="f32") for where in ("cpu", "cuda"))
    assert (cpu.device, device.device, device.backend.device) == ("cpu", "cuda:0", "cuda:0")
    expected = cpu.logits(IDS)
    np.testing.assert_allclose(device.logits(IDS), expected, rtol=1e-4, atol=1e-4)  # 14 tokens at once
    np.testing.assert_allclose(device.logits(IDS, chunk=5), expected, rtol=1e-4, atol=1e-4)
    texts = [engine.generate(IDS[:4], max_tokens=8, ignore_eos=True) for engine in (cpu, device)]
    assert texts[1].tokens == texts[0].tokens
    assert (texts[1].device, len(texts[1].tokens)) == ("cuda:0", 8)


@pytest.mark.parametrize("quant", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_rounded_logits(load: Any, name: str, quant: str) -> None:
    cpu, device, stored = (
        load(name, "cpu", quant=quant),
        load(name, "cuda", quant=quant),
        load(name, "cpu", quant="f32"),
    )
    expected = cpu.logits(IDS)
    rounding = root_mean_square(expected - stored.logits(IDS))
    for chunk in (1, 7, None):
        got = device.logits(IDS, chunk=chunk)
        assert np.isfinite(got).all()
        limit = 0.5 if chunk is not None else 2 if quant == "bf16" else np.sqrt(2)
        assert root_mean_square(got - expected) < limit * rounding, chunk


@pytest.mark.parametrize(("name", "quant"), [("llama", "f32"), ("qwen2", "int4"), ("qwen3_moe", "int8")])
def test_bits_depend_on_no_chunk_or_batch_up_to_eight_tokens(load: Any, name: str, quant: str) -> None:
    engine = load(name, "cuda", quant=quant)
    expected = engine.logits(IDS, chunk=1)
    for chunk in (3, 8):
        np.testing.assert_array_equal(engine.logits(IDS, chunk=chunk), expected, err_msg=f"chunk {chunk}")
    unfused = engine.build(fused=False)
    np.testing.assert_array_equal(engine.logits(IDS, chunk=4, program=unfused), expected, err_msg="unfused")
    prompts = [IDS[:1], IDS[3:5], IDS[7:11]]
    for prompt, row in zip(prompts, engine.logits_batch(prompts), strict=True):
        alone = engine.logits(prompt, rows=[len(prompt) - 1], chunk=1)[0]
        np.testing.assert_array_equal(row, alone, err_msg=f"{len(prompt)} tokens")


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_caches(load: Any, kv_dtype: str) -> None:
    """Each cache rounds by itself; what the devices differ by is less than what an int8 cache rounds."""
    cpu, device = (load("qwen2", where, quant="f32", kv_dtype=kv_dtype) for where in ("cpu", "cuda"))
    exact = load("qwen2", "cpu", quant="f32", kv_dtype="f32").logits(IDS)
    expected = cpu.logits(IDS)
    bound = 0.5 * root_mean_square(expected - exact) if kv_dtype != "f32" else 1e-5 * root_mean_square(exact)
    assert root_mean_square(device.logits(IDS) - expected) < bound


def test_taps_and_masks(load: Any) -> None:
    hooks = Hooks(taps=((1, "hidden"),), ffn_skip=frozenset({0}), neuron_mask={1: [0, 3]})
    shown = []
    for where in ("cpu", "cuda"):
        engine = load("llama", where, quant="f32")
        taps: dict[tuple[int, str], np.ndarray] = {}
        logits = engine.logits(IDS, chunk=6, program=engine.build(hooks=hooks), taps=taps)
        shown.append((logits, taps[1, "hidden"]))
    for got, expected in zip(shown[1], shown[0], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_requests_in_shared_steps_and_kept_prefixes(load: Any) -> None:
    """Sampling on the device and on the host: top-k there, penalties here; the same random numbers on the CPU."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 5, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4},
    ]
    prompts = [IDS[:9], IDS[:5], IDS[2:4]]
    for way in ways:
        texts = []
        for where in ("cpu", "cuda"):
            engine = load("qwen2", where, quant="f32")
            texts.append([r.tokens for r in engine.generate_batch(prompts, max_tokens=5, ignore_eos=True, **way)])
        assert texts[1] == texts[0], way


def test_experts_are_counted(load: Any) -> None:
    counts = []
    for where in ("cpu", "cuda"):
        engine = load("qwen3_moe", where, quant="f32")
        engine.logits(IDS, chunk=8)
        counts.append(engine.routing())
    assert counts[0].keys() == counts[1].keys()
    for layer, expected in counts[0].items():
        np.testing.assert_array_equal(counts[1][layer], expected)


def test_profile(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"READ_BYTES": 1 << 16, "READ_PASSES": 1, "FIRST_OPS": 1000, "COMPUTE_PASSES": 1}.items():
        monkeypatch.setattr(machine, name, value)  # the emulated device would take minutes
    profiled = load("llama", "cuda", quant="int8").profile(context=12, steps=4).to_json()
    assert profiled["machine"]["device"] == "cuda:0"
    assert profiled["machine"]["read_gb_per_s"] > 0
    assert profiled["decode"]["stage_sum_ms"] > 0


@pytest.fixture
def speaking(library: Any, tmp_path: Path) -> Path:
    """A model with a tokenizer of bytes."""
    return write_tokenizer(write_tiny_model(tmp_path / "model", CONFIG, seed=3), byte_level())


def test_compare(speaking: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    sizes: dict[str, Any] = {"tokens": 32, "window": 16, "calibration": False, "cache": False, "threads": 1}
    results = [
        pyengine.compare(speaking, quant="int4", text=tmp_path / "text.txt", device=device, **sizes).to_json()
        for device in ("cpu", "cuda")
    ]
    assert results[1]["mean_kld"] == pytest.approx(results[0]["mean_kld"], rel=0.2)
    assert len(results[1]["layers"]) == len(results[0]["layers"]) > 0


def test_the_command_line(speaking: Path, capsys: Any) -> None:
    arguments = ["generate", str(speaking), "--raw", "-p", "The quick", "-n", "3", "--device", "cuda:0", "--no-cache"]
    assert main([*arguments, "--no-calibration", "-t", "1", "--ignore-eos"]) == 0
    assert ", cuda:0, raw" in capsys.readouterr().err
    assert main(["info"]) == 0
    assert "cuda:0: " in capsys.readouterr().out


def test_a_context_that_does_not_fit_the_device(load: Any) -> None:
    with pytest.raises(pyengine.RequestError, match="context"):
        load("llama", "cuda", quant="int8", ctx_size=10**9)
