"""RoPE, attention and its cache: what users of other engines ran into. Ids are those of case_ids.txt, section C."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_cases import count_fresh, own_cache
from compare import assert_close, assert_same_bits
from config_models import LLAMA3
from golden.golden_cases import CONFIGS, LONG, TL, TQ2, TQ3, TW
from golden.variants import with_attention
from kernel_cases import BEST, EPS, normal
from report_models import IDS, assert_equal_models, assert_nearer, logits, model, rounded

import pyengine
from pyengine import kernels, reference
from pyengine.config import load_model_spec
from pyengine.errors import PyEngineError
from pyengine.reference import load_reference

MANY = np.random.default_rng(5).integers(0, 97, 700).tolist()

# ---- RoPE -----------------------------------------------------------------------------------------------------------

TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    "su": {"factor": 4.0},
    "mrope": {"mrope_section": [2, 3, 3]},
    "proportional": {"factor": 2.0},
}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", TYPES)
def test_report_c04_every_rope_type_under_both_keys_is_used_or_refused(kind: str, key: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "scaled", {**TL, "rope_scaling": {key: kind, **TYPES[kind]}})
    if kind in ("longrope", "su", "mrope", "proportional"):
        with pytest.raises(pyengine.UnsupportedModelError, match=f"rope_type': '{kind}'"):
            logits(folder)
        return
    ids = MANY[:60] if kind != "dynamic" else MANY[:100]
    found, plain = logits(folder, ids), model(tmp_path / "plain", {**TL, "max_position_embeddings": 256})
    assert_close(found, load_reference(folder).forward(ids), 1e-4, kind)
    assert (np.abs(found - logits(plain, ids)).max() > 0.1) == (kind != "default"), "scaling is ignored"


def test_report_c01_llama3_scaling_at_positions_up_to_9000(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192}
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    config = {**TL, **small, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    folder = model(tmp_path / "scaled", {**config, "rope_scaling": scaling})
    plain = model(tmp_path / "plain", config)
    ids = np.random.default_rng(6).integers(0, 97, 9000).tolist()
    rows = [0, 8191, 8192, 8999]
    found = _rows(folder, ids, rows)
    right = load_reference(folder).forward(ids)[rows]
    assert_equal_models(found, right, _rows(plain, ids, rows))


def _rows(folder: Path, ids: list[int], rows: list[int]) -> np.ndarray:
    with pyengine.load(folder, quant="f32", threads=2) as engine:
        return engine.logits(ids, rows)


@pytest.mark.parametrize("case", ["report-C10-10000", "report-C39-1e6", "report-C10-500000"])
def test_theta_of_the_config_is_used(case: str, tmp_path: Path) -> None:
    theta = float(case[11:])
    folder = model(tmp_path, {**TW, "rope_theta": theta})
    wrong = load_reference(folder)
    other = 1e6 if theta == 10000 else 10000.0
    wrong.spec = with_attention(wrong.spec, lambda _i, a: {"rope": replace(a.rope, theta=other)})
    right = load_reference(folder)
    assert_equal_models(logits(folder, MANY[:40]), right.forward(MANY[:40]), wrong.forward(MANY[:40]))


def test_report_c11_tables_grow_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 255 positions that grows at the next token; the mistake is one that stays as it was."""
    from pyengine import rope_tables

    monkeypatch.setattr(rope_tables, "FIRST_ROPE_POSITIONS", 255)
    folder = model(tmp_path, {**TL, "max_position_embeddings": 300})
    right = load_reference(folder).forward(MANY[:300])
    with pyengine.load(folder, quant="f32", threads=1) as one:
        grown = [one.ropes.positions]
        for length in (255, 256, 257, 300):
            found = one.logits(MANY[:length], [length - 1])
            assert_close(found[0], right[length - 1], 1e-4, f"position {length - 1}")
            grown.append(one.ropes.positions)
        assert grown[0] == grown[1] == 255
        assert grown[2] >= 256
        assert grown[-1] == 300, "never past the model's maximum"
        with pytest.raises(pyengine.RequestError, match="expected 1 to 300"):
            one.logits(MANY[:301])


@pytest.mark.parametrize(
    ("head_dim", "factor", "rotated"),
    [(16, 0.25, 4), (16, 0.5, 8), (20, 0.3, 6), (16, 1.0, 16), (10, 0.3, None), (12, 0.25, None), (3, 1.0, None)],
)
def test_report_c16_a_part_of_a_head_is_rotated_or_refused(
    head_dim: int, factor: float, rotated: int | None, tmp_path: Path
) -> None:
    config = {**CONFIGS["glm4"], "head_dim": head_dim, "partial_rotary_factor": factor}
    folder = model(tmp_path, config)
    if rotated is None:
        with pytest.raises(pyengine.ModelFormatError, match="even"):
            load_model_spec(folder)
        return
    spec = load_model_spec(folder)
    assert spec.layers[0].attention.rope is not None
    assert spec.layers[0].attention.rope.rotary_dim == rotated
    right, wrong = (load_reference(folder) for _ in range(2))
    other = rotated - 2 if rotated == head_dim else rotated + 2
    wrong.spec = with_attention(wrong.spec, lambda _i, a: {"rope": replace(a.rope, rotary_dim=other)})
    assert_equal_models(logits(folder, MANY[:40]), right.forward(MANY[:40]), wrong.forward(MANY[:40]))


@pytest.mark.parametrize("quant", ["f32", "int8"])
def test_report_c40_a_cache_on_disk_keeps_the_scaling_of_rope(
    quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path, monkeypatch)
    fresh = count_fresh(monkeypatch)
    scaling = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32}
    folder = model(tmp_path / "model", {**TL, **LONG, "rope_scaling": scaling})
    ids = MANY[:201]
    made, read = (logits(folder, ids, quant=quant, log=lambda _: None) for _ in range(2))
    assert len(fresh) == 1, "the second load is to read what the first wrote"
    assert_same_bits(read, made, "from the cache")
    wrong = load_reference(folder, np.float64)
    wrong.spec = with_attention(wrong.spec, lambda _i, a: {"rope": replace(a.rope, rope_type="default", parameters=())})
    right = rounded(folder, quant=quant)
    wrong.weights = right.weights
    assert_nearer(read[200:], right.forward(ids)[200:], wrong.forward(ids)[200:])


# ---- heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", range(1, 9))
def test_report_c22_every_head_dim_with_every_ratio(ratio: int) -> None:
    """head_dim 8 to 256 by 8, and the ones that are not: 33 keys, prefill and decode; no combination is missing."""
    for dim in (*range(8, 257, 8), 1, 3, 31, 33, 65, 512):
        q, k, v = (normal(dim + i, n, h, dim) for i, (n, h) in enumerate(((5, 2 * ratio), (33, 2), (33, 2))))
        exact = reference.attention(*(a.astype(np.float64) for a in (q, k, v)), dim**-0.5, 28).reshape(q.shape)
        size = 8 * (dim + 40) * EPS * float(np.abs(v).max()) * max(1.0, dim**0.5)
        found = kernels.attention(q, k, v, threads=1, isa=BEST)
        assert_close(found, exact, size, f"head_dim {dim}, ratio {ratio}")
        alone = kernels.attention(q[-1:], k, v, threads=1, isa=BEST)
        assert_same_bits(alone[0], found[-1], f"head_dim {dim}, ratio {ratio}: decode")
        other = np.roll(exact, 1, axis=1)
        assert ratio * dim == 1 or np.abs(found - other).max() > size, "another head's result would pass"


RATIOS = {"report-C20-3": (3, 1), "report-C20-12": (12, 1), "report-C20-24": (24, 2), "report-C21-28": (28, 4)}


@pytest.mark.parametrize("case", RATIOS)
def test_ratios_that_are_no_power_of_two(case: str, tmp_path: Path) -> None:
    heads, kv_heads = RATIOS[case]
    config = {**TL, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    folder = model(tmp_path, config)
    right, wrong = (load_reference(folder) for _ in range(2))
    name = "model.layers.0.self_attn.q_proj.weight"  # one query head after the other, beginning with the second
    wrong.weights = {**wrong.weights, name: np.roll(wrong.weights[name], -16, axis=0)}
    found = logits(folder, MANY[:40])
    assert_equal_models(found, right.forward(MANY[:40]), wrong.forward(MANY[:40]))
    assert_same_bits(logits(folder, MANY[:40], threads=3), found, "three threads")


# ---- window ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 8, 9, 17, 40])
def test_report_c23_c24_c25_a_window_of_8_sees_8_keys(length: int) -> None:
    """Values are one-hot by position and all scores are equal, so the result says which keys were seen."""
    q, k = np.zeros((length, 1, 16), np.float32), np.zeros((length, 1, 16), np.float32)
    for start in range(0, length, 16):  # 16 positions at a time
        v = np.zeros((length, 1, 16), np.float32)
        for position in range(start, min(start + 16, length)):
            v[position, 0, position - start] = 1
        seen = kernels.attention(q, k, v, window=8, threads=1)[:, 0] > 0
        alone = kernels.attention(q[-1:], k, v, window=8, threads=1)[:, 0] > 0
        for token in range(length):
            expected = [max(0, token - 7) <= position <= token for position in range(start, start + 16)]
            assert seen[token].tolist() == expected, f"token {token} of {length}"
        assert alone[0].tolist() == seen[-1].tolist()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pyengine.Engine, np.ndarray, np.ndarray]]:
    """A window of 8, its reference, and that without a window, over 700 tokens."""
    folder = model(tmp_path_factory.mktemp("window"), {**TW, "max_position_embeddings": 1024})
    right, wrong = (load_reference(folder) for _ in range(2))
    wrong.spec = with_attention(wrong.spec, lambda _i, _a: {"window": None})
    with pyengine.load(folder, quant="f32", threads=2) as one:
        yield one, right.forward(MANY), wrong.forward(MANY)


STEPS = {  # tokens at once, then one by one
    "report-C26-offset-32": (32, 12), "report-C27-6-and-5": (6, 5), "report-C29-40": (40, 1),
    "report-C30-600": (600, 9),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_decode_past_a_window_is_prefill(case: str, windowed: tuple[pyengine.Engine, np.ndarray, np.ndarray]) -> None:
    from pyengine.kv_cache import Sequence

    engine, right, wrong = windowed
    at_once, more = STEPS[case]
    sequence = Sequence(engine.pool)
    for begin in range(0, at_once, 500):
        engine.forward([(sequence, MANY[begin : min(begin + 500, at_once)])])
    for position in range(at_once, at_once + more):
        out = np.empty((1, 97), np.float32)
        engine.forward([(sequence, [MANY[position]])], rows=np.zeros(1, np.int32), logits=out)
        assert_close(out[0], right[position], 1e-4, f"position {position}")
        if position > 8:
            assert np.abs(out[0] - wrong[position]).max() > 1e-2
    sequence.close()


@pytest.mark.parametrize("flag", [True, False])
def test_report_c31_the_window_is_where_the_config_says(flag: bool, tmp_path: Path) -> None:
    config = {
        **TQ2, "num_hidden_layers": 4, "max_window_layers": 2, "sliding_window": 8, "use_sliding_window": flag,
    }  # fmt: skip
    folder = model(tmp_path, config)
    right, wrong = (load_reference(folder) for _ in range(2))
    windows = [layer.attention.window for layer in right.spec.layers]
    assert windows == ([None, None, 8, 8] if flag else [None] * 4)
    turned = windows[::-1] if flag else [8] * 4
    wrong.spec = with_attention(wrong.spec, lambda index, _a: {"window": turned[index]})
    assert_equal_models(logits(folder, MANY[:40]), right.forward(MANY[:40]), wrong.forward(MANY[:40]))


# ---- lengths --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pyengine.Engine]:
    with pyengine.load(model(tmp_path_factory.mktemp("lengths"), {**TQ3, **LONG}), quant="int8", threads=2) as one:
        yield one


def test_report_c35_c36_every_length_to_three_blocks_and_every_remainder(engine: pyengine.Engine) -> None:
    """Lengths 1 to 97 and around 128, 256 and 512 give their last token what one long prompt gives it."""
    whole = engine.logits(MANY)
    for length in (*range(1, 98), *range(120, 137), *range(250, 262), 511, 512, 513, 640, 641):
        assert_same_bits(engine.logits(MANY[:length], [length - 1])[0], whole[length - 1], f"{length} tokens")
    assert len({row.tobytes() for row in whole}) == len(MANY), "positions would not be told apart"


def test_report_c34_a_good_prompt_after_each_of_any_length(engine: pyengine.Engine) -> None:
    good = engine.generate(MANY[:20], max_tokens=8, ignore_eos=True).tokens
    for length in (31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513):
        engine.logits(MANY[:length], [length - 1])
        for bad in ([], [97], [*MANY[:length], -1]):
            with pytest.raises(PyEngineError):
                engine.generate(bad, max_tokens=4)
        assert engine.generate(MANY[:20], max_tokens=8, ignore_eos=True).tokens == good, f"after {length} tokens"
    other = engine.generate(MANY[1:21], max_tokens=8, ignore_eos=True).tokens
    assert other != good, "another prompt gives the same tokens"


@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral_window"])
def test_report_c37_prompts_of_12_and_3_tokens_in_one_batch(case: str, tmp_path: Path) -> None:
    folder = model(tmp_path, CONFIGS[case])
    with pyengine.load(folder, quant="f32", threads=2) as one:
        prompts = [MANY[:12], MANY[50:53]]
        for order in (prompts, prompts[::-1]):
            for prompt, row in zip(order, one.logits_batch(order), strict=True):
                assert_same_bits(row, one.logits(prompt, [len(prompt) - 1])[0], f"{len(prompt)} tokens")
        padded = one.logits([0] * 9 + prompts[1], [11])[0]
        assert np.abs(padded - one.logits(prompts[1], [2])[0]).max() > 1e-2, "padding that is seen would not show"


@pytest.mark.parametrize("case", ["report-C14-80-and-16", "report-C15-96-and-32"])
def test_head_dim_of_the_config_scales_the_scores(case: str, tmp_path: Path) -> None:
    config = {**TL, "hidden_size": 80, "head_dim": 16} if "C14" in case else TQ3
    folder = model(tmp_path, config)
    right, wrong = (load_reference(folder) for _ in range(2))
    other = (config["hidden_size"] / config["num_attention_heads"]) ** -0.5
    wrong.spec = with_attention(wrong.spec, lambda _i, _a: {"scale": other})
    assert_equal_models(logits(folder, IDS), right.forward(IDS), wrong.forward(IDS))


def test_report_c19_epsilon_of_the_config_is_that_of_the_head_norms(tmp_path: Path) -> None:
    """q and k of a thousandth, so that the epsilon counts."""

    def small(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                tensors[name] *= 1e-3

    folder = model(tmp_path, TQ3, small)
    right, wrong = (load_reference(folder) for _ in range(2))
    wrong.spec = replace(wrong.spec, norm=replace(wrong.spec.norm, eps=1e-5))
    assert_equal_models(logits(folder, IDS), right.forward(IDS), wrong.forward(IDS))
