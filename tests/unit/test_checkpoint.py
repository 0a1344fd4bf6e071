"""Reading tensors: the bytes of each dtype, rows and ranges, use after close, many threads; and every extra tensor."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from builders import safetensors_bytes, tiny_tensors, write_tiny_model
from compare import assert_same_bits
from safetensors.numpy import load_file, save_file

from pyengine import checkpoint as module
from pyengine import safetensors_header
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, PyEngineError, RequestError, ResourceError, UnsupportedModelError
from pyengine.tensors import check_tensors, expected_tensors

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((7, 5)).astype(np.float32)
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": ml_dtypes.bfloat16}
OTHERS = {"I64": np.int64, "I32": np.int32, "U8": np.uint8, "BOOL": np.bool_}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """MATRIX in every dtype, behind a tensor of 3 bytes, so that nothing is aligned."""
    parts: dict[str, Any] = {"odd": ("U8", np.zeros(3, np.uint8)), "vector": ("F32", MATRIX[0])}
    parts |= {name: (name, MATRIX.astype(dtype)) for name, dtype in (DTYPES | OTHERS).items()}
    header, data = {}, b""
    for name, (dtype, values) in parts.items():
        begin = len(data)
        data += values.tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [begin, len(data)]}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    return tmp_path


@pytest.mark.parametrize("dtype", DTYPES)
def test_read(dtype: str, folder: Path) -> None:
    stored = MATRIX.astype(DTYPES[dtype])
    with Checkpoint.open(folder) as checkpoint:
        info, raw, floats = checkpoint.tensors[dtype], checkpoint.read(dtype), checkpoint.read_float32(dtype)
    assert (info.name, info.dtype, info.shape) == (dtype, dtype, (7, 5))
    assert info.file.read_bytes()[info.begin : info.end] == stored.tobytes()
    assert raw.tobytes() == stored.tobytes()
    assert raw.dtype == (np.uint16 if dtype == "BF16" else stored.dtype)
    assert raw.flags.c_contiguous
    assert raw.flags.writeable
    assert_same_bits(floats, stored.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_read_rows(dtype: str, folder: Path) -> None:
    expected = MATRIX.astype(DTYPES[dtype]).astype(np.float32)
    rows = np.array([6, 0, 3, 3])
    with Checkpoint.open(folder) as checkpoint:
        assert_same_bits(checkpoint.read_rows(dtype, rows), expected[rows])
        assert checkpoint.read_rows(dtype, np.array([], np.int64)).shape == (0, 5)
        for row in (-1, 7, 2**40):
            with pytest.raises(RequestError, match=f"tensor '{dtype}': row {row}; expected 0 to 6"):
                checkpoint.read_rows(dtype, np.array([0, row]))
        with pytest.raises(RequestError, match="expected a matrix"):
            checkpoint.read_rows("vector", rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_read_range(dtype: str, folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        whole = checkpoint.read(dtype)
        for begin, end in ((0, 7), (2, 5), (6, 7), (3, 3)):
            part = checkpoint.read_range(dtype, begin, end)
            assert part.shape == (end - begin, 5)
            assert part.dtype == whole.dtype
            assert part.tobytes() == whole[begin:end].tobytes()
        for begin, end in ((0, 8), (-1, 2), (5, 4)):
            with pytest.raises(RequestError, match=f"'{dtype}'"):
                checkpoint.read_range(dtype, begin, end)


@pytest.mark.parametrize("dtype", OTHERS)
def test_dtypes_that_are_listed_and_not_read(dtype: str, folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.tensors[dtype].dtype == dtype
        for read in (checkpoint.read, checkpoint.read_float32):
            with pytest.raises(UnsupportedModelError, match=f"tensor '{dtype}': dtype {dtype}; expected F64, F32"):
                read(dtype)


def test_bfloat16_keeps_every_bit_pattern(tmp_path: Path) -> None:
    """All 65,536, with NaN, Inf and numbers below the normal range."""
    bits = np.arange(65536, dtype=np.uint16)
    header = {"a": {"dtype": "BF16", "shape": [65536], "data_offsets": [0, 131072]}}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header, bits.tobytes()))
    with Checkpoint.open(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("a"), bits)
        np.testing.assert_array_equal(checkpoint.read_float32("a").view(np.uint32), bits.astype(np.uint32) << 16)


def test_arrays_are_own_and_outlive_the_checkpoint(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        first, second = checkpoint.read("F32"), checkpoint.read("F32")
    first[:] = 0
    assert_same_bits(second, MATRIX)


def test_a_long_tensor_is_read_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the system gives fewer bytes than asked for."""
    monkeypatch.setattr(safetensors_header, "READ_BYTES", 13)
    with Checkpoint.open(folder) as checkpoint:
        assert_same_bits(checkpoint.read("F32"), MATRIX)


def test_many_threads(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint, ThreadPoolExecutor(8) as pool:
        for raw in pool.map(checkpoint.read_float32, ["F32", "F64"] * 200):
            assert_same_bits(raw, MATRIX)


def test_use_after_close(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.close()
    checkpoint.close()
    for action in (
        lambda: checkpoint.read("F32"),
        lambda: checkpoint.read_float32("F32"),
        lambda: checkpoint.read_rows("F32", np.array([0])),
        checkpoint.verify_unchanged,
    ):
        with pytest.raises(RequestError, match="closed"):
            action()


def test_unknown_name(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint, pytest.raises(RequestError, match="'nowhere': not in the files"):
        checkpoint.read("nowhere")


def test_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    with Checkpoint.open(folder) as checkpoint:
        monkeypatch.setattr(module.np, "empty", full)
        with pytest.raises(ResourceError, match="tensor 'F32': no memory for 140 bytes"):
            checkpoint.read("F32")


def test_package_has_the_last_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the safetensors package refuses is refused too; a limit on address space is no reason to refuse."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise safetensors_header.safetensors.SafetensorError("new rule")

    def no_room(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(safetensors_header.safetensors, "safe_open", refuse)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: new rule"):
        Checkpoint.open(folder)
    monkeypatch.setattr(safetensors_header.safetensors, "safe_open", no_room)
    with Checkpoint.open(folder) as checkpoint:
        assert_same_bits(checkpoint.read("F32"), MATRIX)


def test_opening_reads_no_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    really = os.preadv

    def counted(fd: int, buffers: list[Any], offset: int) -> int:
        count = really(fd, buffers, offset)
        reads.append(offset + count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    with Checkpoint.open(folder) as checkpoint:
        first = min(info.begin for info in checkpoint.tensors.values())
        assert max(reads) <= max(first, 40)


# ---- every tensor of a model is accounted for -------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def account(folder: Path, **changes: np.ndarray | None) -> list[str]:
    """check_tensors' notes for the tiny model with tensors added, replaced or (None) taken away."""
    tensors: dict[str, Any] = {**tiny_tensors(CONFIG), **changes}
    write_tiny_model(folder, CONFIG, tensors={name: value for name, value in tensors.items() if value is not None})
    spec = load_model_spec(folder)
    with Checkpoint.open(folder) as checkpoint:
        return check_tensors(spec, checkpoint.tensors, folder)


INERT = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    "model.layers.1.self_attn.masked_bias": np.ones((), np.float32),
    "model.layers.0.self_attn.position_ids": np.zeros(4, np.int64),
    "seen": np.zeros(4, np.bool_),
    "mtp.fc.weight": np.ones((8, 16), np.float32),
    "lm_head.weight": np.ones((11, 8), np.float32),
}


@pytest.mark.parametrize("name", INERT)
def test_malformed_c21_extra_tensor_that_changes_nothing(name: str, tmp_path: Path) -> None:
    assert account(tmp_path, **{name: INERT[name]}) == [f"tensor '{name}' is not used"]


Q = "model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[dict[str, np.ndarray | None], type[PyEngineError], str]] = {
    "bias": ({f"{Q}.bias": np.ones(8, np.float32)}, UnsupportedModelError, f"'{Q}.bias'"),
    "norm": (
        {"model.layers.0.self_attn.q_norm.weight": np.ones(4, np.float32)},
        UnsupportedModelError,
        "'model.layers.0.self_attn.q_norm.weight'",
    ),
    "fp8-scale": ({f"{Q}.weight_scale_inv": np.ones((1, 1), np.float32)}, UnsupportedModelError, "quantized"),
    "gptq": (
        {f"{Q}.weight": None, f"{Q}.qweight": np.ones((1, 8), np.int32), f"{Q}.g_idx": np.ones(8, np.int32)},
        UnsupportedModelError,
        f"'{Q}.qweight'",
    ),
    "int64-g-idx": ({f"{Q}.g_idx": np.ones(8, np.int64)}, UnsupportedModelError, "quantized"),
    "mlx-biases": ({f"{Q}.biases": np.ones((8, 1), np.float32)}, UnsupportedModelError, "quantized"),
    "unknown": ({"adapter.weight": np.ones(3, np.float32)}, UnsupportedModelError, "'adapter.weight'"),
    "head-of-another-shape": (
        {"lm_head.weight": np.ones((12, 8), np.float32)},
        UnsupportedModelError,
        "'lm_head.weight'",
    ),
    "typo": (
        {"model.layers.1.mlp.up_proj.weight": None, "model.layers.1.mlp.up_projj.weight": np.ones((12, 8), np.float32)},
        ModelFormatError,
        "missing: 'model.layers.1.mlp.up_proj.weight' (and 1 not known: 'model.layers.1.mlp.up_projj.weight')",
    ),
    "matrix-in-float64": ({f"{Q}.weight": np.ones((8, 8))}, UnsupportedModelError, f"'{Q}.weight': dtype F64"),
    "matrix-in-int64": (
        {f"{Q}.weight": np.ones((8, 8), np.int64)},
        UnsupportedModelError,
        f"'{Q}.weight': dtype I64; expected F32, F16, BF16",
    ),
    "shape": (
        {f"{Q}.weight": np.ones((8, 9), np.float32)},
        ModelFormatError,
        f"model.safetensors: tensor '{Q}.weight': shape [8, 9]; expected [8, 8]",
    ),
    "transposed": (
        {"model.layers.0.mlp.down_proj.weight": np.ones((12, 8), np.float32)},
        ModelFormatError,
        "shape [12, 8]; expected [8, 12]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensor_that_is_wrong_or_too_much(case: str, tmp_path: Path) -> None:
    changes, error, text = REFUSED[case]
    with pytest.raises(error) as caught:
        account(tmp_path, **changes)
    assert text in str(caught.value)


def test_errors_list_ten(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError) as caught:
        account(tmp_path, **dict.fromkeys(tiny_tensors(CONFIG)), other=np.ones(1, np.float32))
    message = str(caught.value)
    assert "20 tensors are missing" in message
    assert message.count("'model.") == 10
    assert message.count("...") == 1


def test_norms_in_float64(tmp_path: Path) -> None:
    assert account(tmp_path, **{"model.norm.weight": np.full(8, 1.25)}) == []
    with Checkpoint.open(tmp_path) as checkpoint:
        assert_same_bits(checkpoint.read_float32("model.norm.weight"), np.full(8, 1.25, np.float32))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"tie_word_embeddings": False}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"head_dim": 6, "num_key_value_heads": 1}),
        ("Mistral", {"num_key_value_heads": 1}),
        ("Qwen2", {"num_key_value_heads": 2}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 6, "attention_bias": True}),
    ],
)
def test_expected_tensors_are_those_of_the_family(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), **changes}
    write_tiny_model(tmp_path, config)
    stored = {name: value.shape for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert expected_tensors(load_model_spec(tmp_path)) == stored


def test_shapes_of_nemo_and_qwen3(tmp_path: Path) -> None:
    """heads * head_dim need not be hidden_size: q_proj is [32 * 128, 5120] in Nemo."""
    nemo = {
        **CONFIG,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 5120,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(nemo))
    spec = load_model_spec(tmp_path)
    shapes = expected_tensors(spec)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4096, 5120)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (1024, 5120)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (5120, 4096)
    assert spec.layers[0].attention.scale == pytest.approx(128**-0.5)


def test_saved_by_the_package(tmp_path: Path) -> None:
    tensors = {
        "b": MATRIX,
        "a.é": MATRIX.T.copy(),
        "empty": np.zeros((0, 3), np.float32),
        "one": np.full((1, 1), 3, np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for name, values in tensors.items():
            np.testing.assert_array_equal(checkpoint.read(name), values)
