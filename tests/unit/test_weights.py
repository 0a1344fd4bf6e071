"""A checkpoint's tensors in the core: where each row lies, in which format, from which stored type, at what size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_same_bits
from golden.golden_cases import CONFIGS
from kernel_cases import unpack, up

import pyengine
from pyengine import packer
from pyengine._core import Backend, Format
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.pack_layer import NONE
from pyengine.quantize import choose
from pyengine.spec import LayerSpec
from pyengine.weights import ModelWeights, load_weights

Tensors = dict[str, np.ndarray]
Array = np.ndarray

# one head of 24 rows ends in the middle of a panel, and so does an FFN of 172
ODD = {**CONFIGS["llama_biases"], "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}
TIED = CONFIGS["qwen2"]
IDS = [1, 5, 40, 2, 66, 7]
LAYER = "model.layers.1."
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load(folder: Path, quant: str = "f32", **arguments: Any) -> pyengine.Engine:
    return pyengine.load(folder, quant=quant, threads=1, calibration=False, **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("weights"), ODD, seed=3)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[pyengine.Engine]:
    with load(folder) as one:
        yield one


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return tiny_tensors(ODD, seed=3)


def interleaved(gate: Array, up_: Array) -> Array:
    """Panels of 16 rows, gate0 up0 gate1 up1 ..., each matrix padded with zero rows: [2 * 176, ...]."""
    padded = np.zeros((2, 176, *gate.shape[1:]), np.float32)
    padded[0, : len(gate)], padded[1, : len(up_)] = gate, up_
    panels = padded.reshape(2, 11, 16, *gate.shape[1:])
    return np.stack([panels[0], panels[1]], axis=1).reshape(352, *gate.shape[1:])


def joined(q: Array, k: Array, v: Array) -> Array:
    """q of 72 rows, k and v of 24: each starts at a panel's border, at 0, 80 and 112."""
    out = np.zeros((136, *q.shape[1:]), np.float32)
    out[:72], out[80:104], out[112:] = q, k, v
    return out


def test_q_k_and_v_are_one_tensor_from_panel_borders(engine: pyengine.Engine, tensors: Tensors) -> None:
    w = engine.weights.layers[1]
    parts = [tensors[f"{LAYER}self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")]
    assert_same_bits(engine.backend.tensor_dequantize(w.qkv), joined(*parts), "q | k | v")
    biases = [tensors[f"{LAYER}self_attn.{name}.bias"] for name in ("q_proj", "k_proj", "v_proj")]
    stored = engine.backend.tensor_dequantize(w.qkv_bias)
    assert stored.shape == (1, 144)  # whole panels
    assert_same_bits(stored[0, :136], joined(*biases), "their biases")
    assert not stored[0, 136:].any()


def test_gate_and_up_alternate_by_panels(engine: pyengine.Engine, tensors: Tensors) -> None:
    w = engine.weights.layers[1]
    gate, up_ = (tensors[f"{LAYER}mlp.{name}.weight"] for name in ("gate_proj", "up_proj"))
    assert_same_bits(engine.backend.tensor_dequantize(w.gate_up), interleaved(gate, up_), "gate, up")
    gate, up_ = (tensors[f"{LAYER}mlp.{name}.bias"] for name in ("gate_proj", "up_proj"))
    assert_same_bits(engine.backend.tensor_dequantize(w.gate_up_bias)[0], interleaved(gate, up_), "their biases")


def test_the_other_tensors_are_as_stored(engine: pyengine.Engine, tensors: Tensors) -> None:
    w, read = engine.weights.layers[1], engine.backend.tensor_dequantize
    for tensor, name in (
        (w.o, LAYER + "self_attn.o_proj.weight"),
        (w.down, LAYER + "mlp.down_proj.weight"),
        (engine.weights.embed, "model.embed_tokens.weight"),
        (engine.weights.lm_head, "lm_head.weight"),
    ):
        assert_same_bits(read(tensor), tensors[name], name)
    for tensor, name in (
        (w.attn_norm, LAYER + "input_layernorm.weight"),
        (w.ffn_norm, LAYER + "post_attention_layernorm.weight"),
        (w.o_bias, LAYER + "self_attn.o_proj.bias"),
        (w.down_bias, LAYER + "mlp.down_proj.bias"),
        (engine.weights.final_norm, "model.norm.weight"),
    ):
        assert_same_bits(read(tensor)[0], tensors[name], name)
    assert (w.q_norm, w.k_norm) == (NONE, NONE)


@pytest.mark.parametrize(
    ("quant", "layers", "head"),
    [("f32", "f32", "f32"), ("bf16", "bf16", "bf16"), ("int8", "int8", "int8"), ("int4", "int4 minimum", "int8")],
)
def test_report_a06_each_kind_of_matrix_has_its_format(folder: Path, quant: str, layers: str, head: str) -> None:
    with load(folder, quant) as one:
        kinds = {
            unpack(one.backend.tensor_bytes(tensor)).kind
            for w in one.weights.layers
            for tensor in (w.qkv, w.o, w.gate_up, w.down)
        }
        assert kinds == {layers}
        assert unpack(one.backend.tensor_bytes(one.weights.lm_head)).kind == head
        table = one.backend.tensor_bytes(one.weights.embed)
        assert int(table[12:16].view(np.int32)[0]) == int(Format.ROWS_F32)


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
def test_a_tied_head_is_the_embedding(tmp_path: Path, quant: str) -> None:
    """One tensor serves both; a tied model is the untied one whose head is a copy, up to the embedding's format."""
    write_tiny_model(tmp_path / "tied", TIED, seed=3)
    copied = tiny_tensors(TIED, seed=3)
    copied["lm_head.weight"] = copied["model.embed_tokens.weight"].copy()
    write_tiny_model(tmp_path / "untied", {**TIED, "tie_word_embeddings": False}, tensors=copied)
    with load(tmp_path / "tied", quant) as tied, load(tmp_path / "untied", quant) as untied:
        assert tied.weights.embed == tied.weights.lm_head
        assert untied.weights.embed != untied.weights.lm_head
        table, head = (one.backend.tensor_bytes(one.weights.lm_head) for one in (tied, untied))
        assert_same_bits(table, head, "lm_head")
        assert tied.weights.packed_bytes < untied.weights.packed_bytes
        if quant == "f32":
            assert_same_bits(tied.logits(IDS), untied.logits(IDS), "logits")


# ---- stored types ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_floats_are_their_float32_values(tmp_path: Path, tensors: Tensors, dtype: Any, quant: str) -> None:
    half = {name: values.astype(dtype) for name, values in tensors.items()}
    write_tiny_model(tmp_path / "half", ODD, tensors=half)
    wide = {name: values.astype(np.float32) for name, values in half.items()}
    write_tiny_model(tmp_path / "wide", ODD, tensors=wide)
    with load(tmp_path / "half", quant) as a, load(tmp_path / "wide", quant) as b:
        assert_same_bits(a.logits(IDS), b.logits(IDS), str(dtype))
        kept = a.backend.tensor_bytes(a.weights.embed)[12:16].view(np.int32)[0]
        assert int(kept) == int(Format.ROWS_BF16 if dtype is ml_dtypes.bfloat16 else Format.ROWS_F32)


def test_mixed_types_load_and_none_holds_them_all(tmp_path: Path, tensors: Tensors) -> None:
    kinds = [np.float32, np.float16, ml_dtypes.bfloat16]
    mixed = {name: values.astype(kinds[i % 3]) for i, (name, values) in enumerate(tensors.items())}
    write_tiny_model(tmp_path / "mixed", ODD, tensors=mixed)
    write_tiny_model(tmp_path / "wide", ODD, tensors={name: v.astype(np.float32) for name, v in mixed.items()})
    with load(tmp_path / "mixed", "none") as a, load(tmp_path / "wide") as b:
        assert a.quant == "f32"
        assert_same_bits(a.logits(IDS), b.logits(IDS), "mixed")
    bfloat = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    write_tiny_model(tmp_path / "bf16", ODD, tensors=bfloat)
    with load(tmp_path / "bf16", "none") as c, load(tmp_path / "bf16", "bf16") as d:
        assert c.quant == "bf16"
        assert_same_bits(c.logits(IDS), d.logits(IDS), "bf16")


def test_norms_may_be_float64_but_nothing_else(tmp_path: Path, tensors: Tensors) -> None:
    norms = {name: v.astype(np.float64) if "norm" in name else v for name, v in tensors.items()}
    write_tiny_model(tmp_path / "norms", ODD, tensors=norms)
    write_tiny_model(tmp_path / "plain", ODD, tensors=tensors)
    with load(tmp_path / "norms") as a, load(tmp_path / "plain") as b:
        assert_same_bits(a.logits(IDS), b.logits(IDS), "float64 norms")
    large = {**norms, LAYER + "input_layernorm.weight": np.full(64, 1e300)}
    write_tiny_model(tmp_path / "large", ODD, tensors=large)
    with pytest.raises(ModelFormatError, match=r"layers\.1\.input_layernorm\.weight': inf at flat index 0"):
        load(tmp_path / "large")
    for name in (LAYER + "mlp.up_proj.weight", LAYER + "self_attn.k_proj.bias"):
        write_tiny_model(tmp_path / "bad", ODD, tensors={**tensors, name: tensors[name].astype(np.float64)})
        with pytest.raises(UnsupportedModelError, match=rf"'{re.escape(name)}': dtype F64; expected"):
            load(tmp_path / "bad")


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"])
def test_a_bias_that_is_not_finite_is_named(tmp_path: Path, tensors: Tensors, name: str) -> None:
    refuses_bias(tmp_path, tensors, name)


@pytest.mark.parametrize("name", ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_bias_of_the_ffn_that_is_not_finite_is_named(tmp_path: Path, tensors: Tensors, name: str) -> None:
    refuses_bias(tmp_path, tensors, name)


def refuses_bias(folder: Path, tensors: Tensors, name: str) -> None:
    full = f"{LAYER}{name}.bias"
    bad = tensors[full].copy()
    bad[[20, 21]] = np.inf
    write_tiny_model(folder, ODD, tensors={**tensors, full: bad})
    pattern = rf"model\.safetensors: tensor '{re.escape(full)}': inf at flat index 20; expected finite values"
    with pytest.raises(ModelFormatError, match=pattern):
        load(folder)


# ---- large tensors in parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["f32", "int8"])
@pytest.mark.parametrize("config", [ODD, TIED], ids=["untied", "tied"])
def test_tables_read_in_parts_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], quant: str
) -> None:
    write_tiny_model(tmp_path, config, seed=3)
    with load(tmp_path, quant) as one:
        expected = [one.backend.tensor_bytes(t).copy() for t in (one.weights.embed, one.weights.lm_head)]
    for size in (1, 4 * 64 * 16, 4 * 64 * 40):  # a panel or a row at a time; 97 rows leave a part of one
        monkeypatch.setattr(packer, "CHUNK_BYTES", size)
        with load(tmp_path, quant) as one:
            for tensor, raw in zip((one.weights.embed, one.weights.lm_head), expected, strict=True):
                assert_same_bits(one.backend.tensor_bytes(tensor), raw, f"in parts of {size} bytes")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_nan_in_a_later_part_has_the_tensors_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: Tensors, name: str
) -> None:
    bad = tensors[name].copy()
    bad[70, 9] = np.nan
    write_tiny_model(tmp_path, ODD, tensors={**tensors, name: bad})
    monkeypatch.setattr(packer, "CHUNK_BYTES", 4 * 64 * 32)
    with pytest.raises(ModelFormatError, match=rf"'{re.escape(name)}': nan at flat index {70 * 64 + 9};"):
        load(tmp_path, "bf16")


# ---- sizes -----------------------------------------------------------------------------------------------------------


def panel_bytes(columns: int, quant: str, group: int, scheme: str | None) -> int:
    """16 rows, by docs/packed_formats.md."""
    if quant in ("f32", "bf16"):
        return 64 * up(columns, 1 if quant == "f32" else 2) // (1 if quant == "f32" else 2)
    groups = -(-columns // group)
    data = 64 * -(-columns // (4 if quant == "int8" else 8))
    return data + (128 + 2 * up(16 * groups, 64) if scheme == "minimum" else 64 + up(32 * groups, 64))


@pytest.mark.parametrize(
    ("quant", "group", "scheme"),
    [
        ("f32", None, None),
        ("bf16", None, None),
        ("int8", 64, None),
        *(("int4", group, scheme) for group in (32, 64, 128) for scheme in ("minimum", "symmetric")),
    ],
)
def test_report_a04_bits_per_weight_are_what_lies_in_memory(
    tmp_path: Path, quant: str, group: int | None, scheme: str | None
) -> None:
    config = {**CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    write_tiny_model(tmp_path, config)
    with load(tmp_path, quant, group_size=group, int4_scheme=scheme) as one:
        small, large = (panel_bytes(columns, quant, group or 1, scheme) for columns in (512, 1024))
        panels = (8 + 2 * 2) * 64 // 16 + 512 // 16 + 2 * 1024 // 16
        expected = 2 * (panels * small + 512 // 16 * large)
        assert one.weights.layer_matrix_bytes == expected
        count = 2 * (2 * (8 + 2) * 64 * 512 + 3 * 1024 * 512)
        assert one.bits_per_weight == pytest.approx(8 * expected / count)
        sizes = [one.backend.tensor_size(tensor) for tensor in all_tensors(one.weights)]
        assert one.weights.packed_bytes == sum(sizes)
        if quant == "int4" and (group, scheme) == (32, "minimum"):
            assert one.bits_per_weight == pytest.approx(4.5 + 64 / 512, abs=0.04)  # two of the columns' counts differ
        if quant == "int4":
            assert one.bits_per_weight <= 5


def all_tensors(weights: ModelWeights) -> set[int]:
    ids = {weights.embed, weights.lm_head, weights.final_norm}
    for layer in weights.layers:
        ids.update(vars(layer).values())
    return ids - {NONE}


# ---- the observer, progress ------------------------------------------------------------------------------------------


class Recorder:
    """An observer that gives every matrix an importance of its own."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, set[str]]] = []

    def __call__(self, layer: LayerSpec, raw: Mapping[str, Array]) -> dict[str, Array]:
        self.seen.append((layer.index, set(raw)))
        return {key: importance(width, layer.index) for key, width in WIDTHS.items()}

    def head_importance(self) -> Array:
        assert len(self.seen) == 2
        return importance(64, 9)


WIDTHS = {"qkv": 64, "o": 64, "gate_up": 64, "down": 172}


def importance(width: int, seed: int) -> Array:
    return np.exp(2 * np.random.default_rng(seed).standard_normal(width)).astype(np.float32)


def test_an_observer_sees_layers_in_order_and_its_word_counts(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS["llama"], seed=3)
    tensors = tiny_tensors(CONFIGS["llama"], seed=3)
    backend, observer, said = Backend(1, ""), Recorder(), list[tuple[int, int, str]]()

    def progress(done: int, total: int, what: str) -> None:
        said.append((done, total, what))

    with Checkpoint.open(tmp_path) as checkpoint:
        spec = load_model_spec(tmp_path)
        made = load_weights(backend, checkpoint, spec, choose("int4"), observer, progress)
    assert [index for index, _ in observer.seen] == [0, 1]
    assert all({f"mlp.{name}.weight" for name in MATRICES[4:]} <= names for _, names in observer.seen)
    assert said == [(0, 3, "loading"), (1, 3, "loading"), (2, 3, "loading"), (3, 3, "loading")]
    packed: list[tuple[int, str, str, int, Callable[[], int]]] = [
        (1, "down", LAYER + "mlp.down_proj.weight", 1, lambda: made.layers[1].down),
        (0, "o", "model.layers.0.self_attn.o_proj.weight", 0, lambda: made.layers[0].o),
    ]
    for _, key, name, seed, tensor in packed:
        fmt = choose("int4").layers
        alone = backend.tensor_create(int(fmt.format), *tensors[name].shape, fmt.group)
        backend.tensor_pack(alone, tensors[name], importance=importance(WIDTHS[key], seed))
        assert_same_bits(backend.tensor_bytes(tensor()), backend.tensor_bytes(alone), name)
        plain = backend.tensor_create(int(fmt.format), *tensors[name].shape, fmt.group)
        backend.tensor_pack(plain, tensors[name])
        assert (backend.tensor_bytes(plain) != backend.tensor_bytes(alone)).any()
    head = backend.tensor_create(int(Format.INT8), 97, 64, 64)
    backend.tensor_pack(head, tensors["lm_head.weight"], importance=importance(64, 9))
    assert_same_bits(backend.tensor_bytes(made.lm_head), backend.tensor_bytes(head), "head")
