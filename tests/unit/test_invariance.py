"""A token's logits are the same bits whatever runs beside it: any thread count, batch, chunk, fused or not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.golden_cases import CONFIGS, build

import pyengine
from pyengine import _core
from pyengine.errors import UnsupportedModelError
from pyengine.kv_cache import Sequence

ISAS = [entry["name"] for entry in _core.isas() if entry["available"]]
FORMATS: dict[str, dict[str, Any]] = {
    "f32": {"quant": "f32"},
    "bf16": {"quant": "bf16"},
    "int8": {"quant": "int8"},
    "int4_minimum_32": {"quant": "int4"},
    "int4_minimum_128": {"quant": "int4", "group_size": 128},
    "int4_symmetric_64": {"quant": "int4", "group_size": 64, "int4_scheme": "symmetric"},
}
MORE_FORMATS: dict[str, dict[str, Any]] = {  # run on one family each
    "int4_minimum_64": {"quant": "int4", "group_size": 64},
    "int4_symmetric_32": {"quant": "int4", "group_size": 32, "int4_scheme": "symmetric"},
    "int4_symmetric_128": {"quant": "int4", "group_size": 128, "int4_scheme": "symmetric"},
    "f32_bf16_cache": {"quant": "f32", "kv_dtype": "bf16"},
    "int8_f32_cache": {"quant": "int8", "kv_dtype": "f32"},
    "f32_int8_cache": {"quant": "f32", "kv_dtype": "int8"},
    "int4_int8_cache": {"quant": "int4", "kv_dtype": "int8"},
}
LENGTH = 70  # over two KV blocks; the long case below crosses a partition of 256 keys
CASES = (
    *("llama", "mistral_window", "qwen2", "qwen3", "llama_head_dim", "llama_ratio_7", "olmo2"),
    *("qwen2_moe_steps", "qwen3_moe"),
)
WIDE = ("wide_window", "wide_biases")  # several groups of 128 in a row, and a part of one
LATENT = ("deepseek_v3", "deepseek_v3_biases", "deepseek_v2_yarn")  # the second has sizes off the panels of 16
LATENT_FORMATS = ("f32", "bf16", "int8", "int4_minimum_32")
LATENT_EXPERTS = ("deepseek_v3_experts", "deepseek_v2_groups")
FORMS = ("granite", "smollm3_listed", "ministral3_16")  # multipliers, a layer without RoPE, q scaled by position
DENSE = ("gemma2", "gemma3_v5", "glm4", "gpt2_gelu")  # softcaps, two thetas, four norms, LayerNorm and a plain FFN
MORE_CASES: dict[str, dict[str, Any]] = {
    "wide_window": {**CONFIGS["qwen2_window"], "hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 1},
    **{name: CONFIGS[name] for name in (*LATENT, *LATENT_EXPERTS)},
    "latent_many_heads": {**CONFIGS["deepseek_v3"], "num_attention_heads": 40, "num_key_value_heads": 40},
    "granite": CONFIGS["granite"],
    **{name: CONFIGS[name] for name in DENSE},
    "smollm3_listed": CONFIGS["smollm3_listed"],
    "ministral3_16": {**CONFIGS["ministral3"], "head_dim": 16},
    "wide_biases": {**CONFIGS["llama_biases"], "hidden_size": 192, "head_dim": 48, "intermediate_size": 300},
}


def ids_of(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("invariance")
    longer = {"max_position_embeddings": 1024}
    configs = {**{name: CONFIGS[name] for name in CASES}, **MORE_CASES}
    return {
        name: build(base / name, {**config, **({"n_positions": 1024} if "n_embd" in config else longer)}, seed=11)
        for name, config in configs.items()
    }


@pytest.fixture
def load(folders: dict[str, Path]) -> Iterator[Any]:
    opened: list[pyengine.Engine] = []

    def one(case: str, isa: str, fmt: str, threads: int = 1) -> pyengine.Engine:
        options = {**FORMATS, **MORE_FORMATS}[fmt]
        engine = pyengine.load(folders[case], isa=isa, threads=threads, calibration=False, **options)
        opened.append(engine)
        return engine

    yield one
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("case", "fmt"),
    [
        *itertools.product(CASES, FORMATS),
        *zip(itertools.cycle(WIDE), MORE_FORMATS, strict=False),
        *itertools.product((*FORMS, *DENSE), ("f32", "int4_int8_cache")),
        *itertools.product(LATENT, LATENT_FORMATS),
        *itertools.product(LATENT_EXPERTS, ("f32", "int4_minimum_32")),
        ("latent_many_heads", "int8"),  # 40 heads of one KV head, in tasks of 10
    ],
)
def test_report_f10_threads_chunks_and_fusion_change_no_bit(load: Any, case: str, fmt: str, isa: str) -> None:
    engine = load(case, isa, fmt)
    ids = ids_of(LENGTH)
    expected = engine.logits(ids)
    assert np.isfinite(expected).all()
    for chunk in (1, 7, 64):
        np.testing.assert_array_equal(engine.logits(ids, chunk=chunk), expected, err_msg=f"chunk {chunk}")
    unfused = engine.build(fused=False)
    assert len(unfused.ops) > len(engine.program.ops)
    np.testing.assert_array_equal(engine.logits(ids, program=unfused), expected, err_msg="unfused")
    for threads in (2, 3):
        other = load(case, isa, fmt, threads)
        np.testing.assert_array_equal(other.logits(ids), expected, err_msg=f"{threads} threads")
        np.testing.assert_array_equal(other.logits(ids, chunk=1), expected, err_msg=f"{threads} threads, decode")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_malformed_g12_report_c37_f09_a_batch_of_eight_changes_no_bit(load: Any, fmt: str, isa: str) -> None:
    engine = load("qwen2", isa, fmt, 2)
    prompts = [ids_of(length, seed=length) for length in (1, 2, 7, 8, 31, 32, 33, 65)]
    together = engine.logits_batch(prompts)
    for prompt, row in zip(prompts, together, strict=True):
        alone = engine.logits(prompt, rows=[len(prompt) - 1])[0]
        np.testing.assert_array_equal(row, alone, err_msg=f"{len(prompt)} tokens")


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
@pytest.mark.parametrize(
    ("case", "fmt"),
    [
        *itertools.product(["llama", "mistral_window"], ["int8", "int4_int8_cache"]),
        *(("deepseek_v3", "int8"), ("latent_many_heads", "bf16")),
    ],
)
def test_contexts_over_several_partitions(load: Any, case: str, fmt: str, isa: str) -> None:
    """Decode splits over partitions of 256 keys, prefill walks them: the same bits, also around the borders."""
    ids = ids_of(530)
    one, three = load(case, isa, fmt), load(case, isa, fmt, 3)
    rows = [0, 254, 255, 256, 257, 511, 512, 513, 529]
    expected = one.logits(ids, rows)
    for engine, chunk in ((one, 1), (three, 1), (three, 7), (three, 64)):
        np.testing.assert_array_equal(engine.logits(ids, rows, chunk=chunk), expected, err_msg=f"chunk {chunk}")


@pytest.mark.parametrize("fmt", ["f32", "bf16", "int4_minimum_32", "f32_int8_cache"])
@pytest.mark.parametrize("case", ["qwen3", "wide_window", "deepseek_v3"])
def test_a_long_batch_of_decode_steps_changes_no_bit(load: Any, case: str, fmt: str) -> None:
    """Eight sequences, some past one or two partitions: their decode steps run together, then ragged with prefills."""
    if case == "deepseek_v3" and "int8" in fmt:
        with pytest.raises(UnsupportedModelError, match="KV dtype 'int8' for latent attention"):
            load(case, ISAS[-1], fmt)
        return
    engine = load(case, ISAS[-1], fmt, 3)
    lengths = (1, 31, 32, 255, 256, 257, 300, 520)
    prompts = [ids_of(length + 4, seed=length) for length in lengths]
    sequences = [Sequence(engine.pool) for _ in prompts]
    for sequence, prompt, length in zip(sequences, prompts, lengths, strict=True):
        for at in range(0, length, 200):
            engine.forward([(sequence, prompt[at : min(at + 200, length)])])

    def together(news: list[int]) -> np.ndarray:
        entries = [(s, p[s.length : s.length + n]) for s, p, n in zip(sequences, prompts, news, strict=True)]
        out = np.empty((len(news), 97), np.float32)
        engine.forward(entries, rows=np.cumsum(news).astype(np.int32) - np.int32(1), logits=out)
        return out

    for news in ([1] * 8, [1, 3, 1, 2, 1, 1, 3, 2]):
        out = together(news)
        for prompt, sequence, row in zip(prompts, sequences, out, strict=True):
            alone = engine.logits(prompt[: sequence.length], [sequence.length - 1])[0]
            np.testing.assert_array_equal(row, alone, err_msg=f"{sequence.length} tokens")
    for sequence in sequences:
        sequence.close()


@pytest.mark.parametrize("case", ["mistral_window", "wide_window"])
def test_every_length_around_a_window_changes_no_bit(load: Any, case: str) -> None:
    """Windows of 8: a prompt of any length gives its last token what one long prompt gives that token."""
    engine = load(case, ISAS[-1], "f32", 2)
    ids = ids_of(41)
    expected = engine.logits(ids)
    for length in range(1, 42):
        np.testing.assert_array_equal(engine.logits(ids[:length], [length - 1])[0], expected[length - 1])
    for chunk in range(1, 20):
        np.testing.assert_array_equal(engine.logits(ids, chunk=chunk), expected, err_msg=f"chunk {chunk}")


def test_fusion_happens_where_it_can(load: Any) -> None:
    """Else fused and unfused would be the same program, and their equality would say nothing."""
    kinds = {int(kind): name for name, kind in _core.OpKind.__members__.items()}
    fused = {kinds[op["kind"]] for op in load("llama", ISAS[-1], "int8").program.ops}
    assert fused == {
        *("EMBED", "NORM_QUANTIZE", "QKV_ROPE_APPEND", "ATTENTION_QUANTIZE", "LINEAR_RESIDUAL"),
        *("GATED_FFN_RESIDUAL", "LM_HEAD", "SAMPLE"),
    }
    plain = {kinds[op["kind"]] for op in load("qwen3", ISAS[-1], "int8").build(fused=False).ops}
    assert plain == {
        *("EMBED", "NORM", "QUANTIZE", "LINEAR", "QK_NORM", "ROPE", "KV_APPEND", "ATTENTION", "ADD", "ACT_MUL"),
        *("LM_HEAD", "SAMPLE"),
    }
    after = {kinds[op["kind"]] for op in load("gemma2", ISAS[-1], "int8").program.ops}
    assert {"NORM_QUANTIZE", "GATED_FFN", "NORM_RESIDUAL"} < after
    assert not after & {"NORM", "QUANTIZE", "ACT_MUL", "ADD"}
    assert "FFN_RESIDUAL" in {kinds[op["kind"]] for op in load("gpt2_gelu", ISAS[-1], "f32").program.ops}
    for case in FORMS:
        names = [kinds[op["kind"]] for op in load(case, ISAS[-1], "int8").program.ops]
        assert not {"LINEAR", "ADD", "KV_APPEND", "ROPE"} & set(names), case
    after = {kinds[op["kind"]] for op in load("olmo2", ISAS[-1], "int8").program.ops}
    assert {"QKV_ROPE_APPEND", "NORM_RESIDUAL"} < after
    assert not after & {"NORM", "NORM_QUANTIZE", "QK_NORM", "ADD", "LINEAR_RESIDUAL"}
    latent = {kinds[op["kind"]] for op in load("deepseek_v3", ISAS[-1], "int8").program.ops}
    assert latent == fused - {"QKV_ROPE_APPEND", "ATTENTION_QUANTIZE"} | {
        *("LINEAR", "LATENT_APPEND", "HEAD_LINEAR", "ATTENTION", "QUANTIZE")
    }
    apart = {kinds[op["kind"]] for op in load("llama_head_dim", ISAS[-1], "int8").program.ops}
    assert "QKV_ROPE_APPEND" not in apart  # heads of 24 share panels


@pytest.mark.parametrize("fmt", [*FORMATS, "f32_int8_cache"])
def test_isas_agree(load: Any, fmt: str) -> None:
    """Every ISA adds the same 16 lanes in the same order, so even floats agree to the bit."""
    ids = ids_of(40)
    for case in ("qwen3",) if "int8_cache" in fmt else ("qwen3", "deepseek_v3_biases"):
        first = load(case, ISAS[0], fmt).logits(ids)
        for isa in ISAS[1:]:
            np.testing.assert_array_equal(load(case, isa, fmt).logits(ids), first, err_msg=f"{case}, {isa}")
