"""Odd values of weights, through a whole load in every format: refused by name, warned of, or computed with.

Ids are those of the case list: section F, and the rows of C, D and P that only a whole load can show.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import safetensors_bytes, tiny_tensors, write_tiny_model
from compare import assert_close, assert_same_bits
from refusal import assert_refused
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine.errors import ModelFormatError
from pyengine.reference import load_reference

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TIED = {**CONFIG, "tie_word_embeddings": True}
IDS = [1, 5, 40, 2, 66, 7]
QUANTS = ("f32", "bf16", "int8", "int4")
GATE = "model.layers.1.mlp.gate_proj.weight"
EMBED = "model.embed_tokens.weight"

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], None]


def logits(folder: Path, quant: str, **arguments: Any) -> np.ndarray:
    with pyengine.load(folder, quant=quant, threads=1, **arguments) as engine:
        return engine.logits(IDS)


def made(folder: Path, change: Change | None = None, config: dict[str, Any] = CONFIG) -> Path:
    tensors = tiny_tensors(config)
    if change is not None:
        change(tensors)
    return write_tiny_model(folder, config, tensors=tensors)


def write_as(folder: Path, dtype: str, tensors: Tensors, config: dict[str, Any] = CONFIG) -> Path:
    """A model whose every tensor is stored as BF16 (cut, not rounded), F16 or F32."""
    header, data = {}, b""
    for name, values in tensors.items():
        wide = values.astype("<f4")
        raw = (
            (wide.view("<u4") >> 16).astype("<u2")
            if dtype == "BF16"
            else wide.astype({"F16": "<f2", "F32": "<f4"}[dtype])
        )
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(data), len(data) + raw.nbytes]}
        data += raw.tobytes()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    return folder


# ---- F01 - F03: values that are no numbers ----------------------------------------------------------------------

# tensor, index of the bad value, its index in the flattened tensor
PLACES: dict[str, tuple[str, tuple[int, ...], int]] = {
    "matrix": (GATE, (101, 7), 101 * 64 + 7),
    "first": (GATE, (0, 0), 0),
    "last": ("model.layers.0.mlp.down_proj.weight", (63, 171), 64 * 172 - 1),
    "joined": ("model.layers.0.self_attn.v_proj.weight", (3, 9), 3 * 64 + 9),
    "unused embedding row": (EMBED, (66, 63), 67 * 64 - 1),
    "head": ("lm_head.weight", (12, 0), 12 * 64),
    "norm": ("model.layers.1.post_attention_layernorm.weight", (5,), 5),
    "final norm": ("model.norm.weight", (63,), 63),
}


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("place", PLACES)
def test_malformed_f01_f03_nan_is_refused_by_name_and_place(place: str, quant: str, tmp_path: Path) -> None:
    name, index, flat = PLACES[place]

    def change(tensors: Tensors) -> None:
        tensors[name][index] = np.nan

    good = made(tmp_path / "good")
    before = logits(good, quant)
    bad = made(tmp_path / "bad", change)
    texts = ("model.safetensors: tensor", f"'{name}'", f"nan at flat index {flat}", "expected")
    assert_refused(lambda: pyengine.load(bad, quant=quant, threads=1), ModelFormatError, texts, bad, small=False)
    assert_same_bits(logits(good, quant), before)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_malformed_f02_infinity_is_refused_by_name_and_place(
    dtype: str, value: float, quant: str, tmp_path: Path
) -> None:
    tensors = tiny_tensors(CONFIG)
    tensors[GATE][7, 3] = value
    folder = (
        write_tiny_model(tmp_path, CONFIG, tensors=tensors) if dtype == "F32" else write_as(tmp_path, dtype, tensors)
    )
    texts = (f"tensor '{GATE}'", f"{value} at flat index {7 * 64 + 3}")
    assert_refused(lambda: pyengine.load(folder, quant=quant, threads=1), ModelFormatError, texts, folder, small=False)


def test_malformed_f03_nan_in_a_tied_embedding(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[EMBED][66, 0] = np.nan

    folder = made(tmp_path, change, TIED)
    texts = (f"tensor '{EMBED}'", f"flat index {66 * 64}")
    assert_refused(lambda: pyengine.load(folder, threads=1), ModelFormatError, texts, folder, small=False)


# ---- F04 - F09: numbers that are hard to quantize ---------------------------------------------------------------


def zero_group(tensors: Tensors) -> None:
    tensors[GATE][:, :32] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][5] = 0


def outlier(tensors: Tensors) -> None:
    tensors[GATE][3] = 1e-3
    tensors[GATE][3, 40] = 1e30


def outlier_elsewhere(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = 1e-3
    tensors["model.layers.0.self_attn.o_proj.weight"][9, 9] = 1e30


def negative_zeros(tensors: Tensors) -> None:
    tensors[GATE][tensors[GATE] < 0.05] = -0.0


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("change", [zero_group, negative_zeros])
def test_malformed_f04_f09_stay_near_the_reference(change: Change, quant: str, tmp_path: Path) -> None:
    """Not farther from float32 than the unchanged model in the same format is, times a margin."""
    plain, changed = made(tmp_path / "plain"), made(tmp_path / "changed", change)
    usual = np.abs(logits(plain, quant) - load_reference(plain).forward(IDS)).max()
    actual = logits(changed, quant)
    assert_close(actual, load_reference(changed).forward(IDS), 4 * usual + 1e-4, change.__name__)


@pytest.mark.parametrize("quant", QUANTS)
def test_malformed_f04_a_matrix_of_zeros_is_exactly_zero(quant: str, tmp_path: Path) -> None:
    """With down_proj = 0 a layer's FFN adds nothing, whatever its gate is."""

    def no_ffn(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][:] = 0

    def no_ffn_and_another_gate(tensors: Tensors) -> None:
        no_ffn(tensors)
        tensors[GATE] *= -3

    one, other = made(tmp_path / "one", no_ffn), made(tmp_path / "other", no_ffn_and_another_gate)
    assert_same_bits(logits(one, quant), logits(other, quant))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("change", [outlier, outlier_elsewhere])
def test_malformed_f06_an_outlier_stays_finite(change: Change, quant: str, tmp_path: Path) -> None:
    """A weight of 1e30 is the model's own business: its logits are finite, as those of the reference are."""
    folder = made(tmp_path, change)
    assert np.isfinite(load_reference(folder, np.float64).forward(IDS)).all()
    assert np.isfinite(logits(folder, quant)).all()


TOPS = {"F16": 65504.0, "BF16": float.fromhex("0x1.fep127"), "F32": float(np.finfo(np.float32).max)}


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", TOPS)
@pytest.mark.parametrize("values", ["both signs", "ramp", "one"])
def test_malformed_f07_the_largest_values_spoil_no_other_neuron(
    values: str, dtype: str, quant: str, tmp_path: Path
) -> None:
    """A neuron whose weights span the whole range of the stored type, where its input is exactly zero.

    Its result is 0 unless a scale or a minimum overflowed, so the logits are those of the model without it.
    """
    span = {
        "both signs": np.tile([-TOPS[dtype], TOPS[dtype]], 16),
        "ramp": np.linspace(-1, 1, 32) * TOPS[dtype],  # the largest less the smallest is not a number of the type
        "one": np.array([TOPS[dtype]] + [1e-3] * 31),
    }[values].astype(np.float32)
    folders = []
    for name, weights in (("plain", np.zeros(32, np.float32)), ("large", span)):
        tensors = tiny_tensors(CONFIG)
        tensors["model.layers.1.post_attention_layernorm.weight"][:32] = 0
        tensors[GATE][2] = 0
        tensors[GATE][2, :32] = weights
        folders.append(write_as(tmp_path / name, dtype, tensors))
    expected, actual = (logits(folder, quant) for folder in folders)
    assert_same_bits(actual, expected)


def denormal(tensors: Tensors) -> None:
    for name, values in tensors.items():
        if values.ndim == 2 and name != EMBED:
            tensors[name] = (np.sign(values) * 1e-40).astype(np.float32)


@pytest.mark.parametrize("quant", QUANTS)
def test_malformed_f08_denormals_mean_zero_and_are_not_slow(quant: str, tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 256, "intermediate_size": 512}
    seconds = {}
    for name, change in (("usual", None), ("denormal", denormal)):
        folder = made(tmp_path / name, change, config)
        with pyengine.load(folder, quant=quant, threads=1) as engine:
            values = engine.logits(IDS)
            best = float("inf")
            for _ in range(15):
                started = time.perf_counter()
                engine.logits(IDS)
                best = min(best, time.perf_counter() - started)
            seconds[name] = best
    assert np.abs(values).max() < 1e-30
    assert (
        seconds["denormal"] < 3 * seconds["usual"]
    )  # each denormal operand costs some hundred cycles where it is slow


# ---- C12, F13: all zero -----------------------------------------------------------------------------------------


def zeros(tensors: Tensors) -> None:
    for values in tensors.values():
        values[:] = 0


@pytest.mark.parametrize("quant", QUANTS)
def test_malformed_c12_a_model_of_zeros_loads_with_a_warning_for_each_matrix(quant: str, tmp_path: Path) -> None:
    folder = made(tmp_path, zeros)
    matrices = [name for name, values in tiny_tensors(CONFIG).items() if values.ndim == 2]
    with pyengine.load(folder, quant=quant, threads=1) as engine:
        for name in matrices:
            told = [text for text in engine.spec.warnings if f"tensor '{name}' is all zero" in text]
            assert len(told) == 1, f"{name}: {told}"
            assert str(folder / "model.safetensors") in told[0]
        assert_same_bits(engine.logits(IDS), np.zeros((len(IDS), 67), np.float32))


@pytest.mark.parametrize("value", [0.0, -0.0])
@pytest.mark.parametrize("name", [GATE, EMBED, "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_malformed_c12_strict_refuses_a_matrix_of_zeros(dtype: str, name: str, value: float, tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG)
    tensors[name][:] = value
    folder = write_as(tmp_path, dtype, tensors)
    with pyengine.load(folder, threads=1) as engine:
        assert [text.split(": ", 1)[1] for text in engine.spec.warnings] == [f"tensor '{name}' is all zero"]
    assert_refused(
        lambda: pyengine.load(folder, threads=1, strict=True),
        ModelFormatError,
        ("model.safetensors: ", f"tensor '{name}' is all zero"),
        folder,
        small=False,
    )


def test_malformed_c12_a_matrix_with_one_value_is_not_all_zero(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[GATE][:] = 0
        tensors[GATE][171, 63] = 1e-30
        tensors[EMBED][:-1] = 0

    with pyengine.load(made(tmp_path, change), quant="f32", threads=1, strict=True) as engine:
        assert engine.spec.warnings == ()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
@pytest.mark.parametrize("quant", QUANTS)
def test_malformed_f13_a_norm_of_zeros_is_warned_of_and_gives_no_nan(quant: str, name: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[name][:] = 0

    with pyengine.load(made(tmp_path, change), quant=quant, threads=1) as engine:
        assert len(engine.spec.warnings) == 1
        assert f"tensor '{name}' is all zero" in engine.spec.warnings[0]
        assert np.isfinite(engine.logits(IDS)).all()


# ---- rows of C, D and P that need a whole load ------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def rewritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\x3f")
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [cut, replaced, rewritten])
def test_malformed_c13_file_that_changes_during_the_load(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = made(tmp_path)
    changed = []

    def progress(done: int, total: int, what: str) -> None:
        if not changed:
            changed.append(change(folder / "model.safetensors"))

    with pytest.raises(ModelFormatError, match=r"model\.safetensors: changed while loading"):
        pyengine.load(folder, quant="int8", threads=1, progress=progress)
    assert changed


def test_malformed_d37_the_longest_context_allocates_little(tmp_path: Path) -> None:
    plain, long = made(tmp_path / "plain"), made(tmp_path / "long")
    (long / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 2**31 - 1}))
    assert_same_bits(logits(long, "int8"), logits(plain, "int8"))


def test_malformed_p07_unused_tensors_are_not_read(tmp_path: Path) -> None:
    def extras(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.full(8, np.nan, np.float32)
        tensors["model.layers.0.self_attn.masked_bias"] = np.array(-np.inf, np.float32)
        tensors["model.layers.1.position_ids"] = np.arange(5, dtype=np.int64)
        tensors["model.layers.1.self_attn.causal"] = np.ones((2, 2), np.bool_)

    plain, more = made(tmp_path / "plain"), made(tmp_path / "more", extras)
    with pyengine.load(more, quant="int8", threads=1) as engine:
        assert len([note for note in engine.notes if note.endswith("is not used")]) == 4
        assert_same_bits(engine.logits(IDS), logits(plain, "int8"))


@pytest.mark.parametrize("same", [True, False])
def test_malformed_p09_a_head_beside_a_tied_embedding(same: bool, tmp_path: Path) -> None:
    """Equal it changes nothing; another one is the head, as in transformers 5."""

    def head(tensors: Tensors) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.copy() if same else np.full((67, 64), 9.0, np.float32)

    plain = made(tmp_path / "plain", None if same else head, TIED if same else {**TIED, "tie_word_embeddings": False})
    more = made(tmp_path / "more", head, TIED)
    assert_same_bits(logits(more, "int8"), logits(plain, "int8"))


SHAPES: dict[str, dict[str, Any]] = {
    "malformed-P14": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    "malformed-P15-172": {"intermediate_size": 172},
    "malformed-P15-16": {
        "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 16,
    },
    "malformed-P16-one-layer": {"num_hidden_layers": 1},
    "malformed-P16-one-head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "malformed-P16-vocab-3": {"vocab_size": 3},
    "malformed-P16-intermediate-1": {"intermediate_size": 1},
    "malformed-P16-smallest": {
        "hidden_size": 2, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "vocab_size": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unusual_shapes(shape: str, quant: str, tmp_path: Path) -> None:
    config = {**CONFIG, **SHAPES[shape]}
    folder = write_tiny_model(tmp_path, config, seed=1)  # seed 0 makes the smallest one ill-conditioned
    ids = [i % config["vocab_size"] for i in IDS]
    expected = load_reference(folder).forward(ids)
    with pyengine.load(folder, quant=quant, threads=1) as engine:
        actual = engine.logits(ids)
    bound = {"f32": 1e-4, "bf16": 0.05, "int8": 0.1, "int4": 1.0}[quant]
    assert_close(actual, expected, bound * max(1.0, float(np.abs(expected).max())), shape)


# ---- the same under calibration, which runs each layer on a text before it is packed ------------------------------

CALIBRATED = {**CONFIG, "vocab_size": 258}


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_calibration_meets_the_same_nan_first(quant: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[GATE][101, 7] = np.nan

    folder = write_tokenizer(made(tmp_path, change, CALIBRATED), byte_level())
    texts = (f"tensor '{GATE}'", f"nan at flat index {101 * 64 + 7}")
    assert_refused(lambda: pyengine.load(folder, quant=quant, threads=1), ModelFormatError, texts, folder, small=False)


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("change", [zeros, zero_group, outlier, outlier_elsewhere, denormal, negative_zeros])
def test_calibration_with_odd_values_stays_finite(change: Change, quant: str, tmp_path: Path) -> None:
    folder = write_tokenizer(made(tmp_path, change, CALIBRATED), byte_level())
    with pyengine.load(folder, quant=quant, threads=1) as engine:
        assert not [note for note in engine.notes if "without calibration" in note]
        actual = engine.logits(IDS)
    assert np.isfinite(actual).all()
    assert actual.any() or change not in (zero_group, negative_zeros)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_calibration_meets_embedding_rows_of_nan(quant: str, tmp_path: Path) -> None:
    """The rows of the text itself: refused as any other, not by what they would do to the pass."""

    def change(tensors: Tensors) -> None:
        tensors[EMBED][:] = np.nan

    folder = write_tokenizer(made(tmp_path, change, CALIBRATED), byte_level())
    texts = (f"tensor '{EMBED}'", "nan at flat index")
    assert_refused(lambda: pyengine.load(folder, quant=quant, threads=1), ModelFormatError, texts, folder, small=False)
