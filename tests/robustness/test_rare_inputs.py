"""Rare checkpoints, configs and places of models: what no other file of the tests has a reason to hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import safetensors_bytes, tiny_tensors, write_tiny_model
from config_models import BAD, GONE, UNSUPPORTED, key, refused, scaling
from golden.golden_cases import CONFIGS, TL, build
from safetensors.numpy import save_file

import pyengine
from pyengine import hub, safetensors_header, strict_json, system
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, RequestError
from pyengine.fp8 import Fp8Checkpoint
from pyengine.tensors import check_tensors

# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_accounts_for_all_its_tensors(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path, CONFIGS[name], 0)
    spec = load_model_spec(folder)
    with Checkpoint.open(folder) as checkpoint:
        assert check_tensors(spec, checkpoint.tensors, folder) == []
        last = next(reversed(checkpoint.tensors))
        rest = {n: info for n, info in checkpoint.tensors.items() if n != last}
    with pytest.raises(ModelFormatError, match="1 tensors are missing"):
        check_tensors(spec, rest, folder)


def test_the_only_safetensors_file_of_a_folder_is_the_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TL)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert {info.file.name for info in checkpoint.tensors.values()} == {"weights.safetensors"}


def test_a_shard_that_is_a_link_to_itself_is_named(tmp_path: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    save_file({"a": np.ones(1, np.float32)}, str(tmp_path / shard))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    Checkpoint.open(tmp_path).close()
    (tmp_path / shard).unlink()
    (tmp_path / shard).symlink_to(shard)
    with pytest.raises(ModelFormatError, match=rf"{shard}: Too many levels of symbolic links"):
        Checkpoint.open(tmp_path)


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise OSError(5, "Input/output error")

    write_tiny_model(tmp_path, TL)
    with Checkpoint.open(tmp_path) as checkpoint, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(ModelFormatError, match=r"model\.safetensors: Input/output error at byte \d+; expected"):
            checkpoint.read("model.norm.weight")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", fail)
        with pytest.raises(ModelFormatError, match=r"config\.json: Input/output error; expected a readable file"):
            strict_json.read_bytes(tmp_path / "config.json", 1 << 20)


def test_entries_that_are_no_objects_count_as_tensors_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 3)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({f"t{i}": 1 for i in range(4)}))
    with pytest.raises(ModelFormatError, match=r"4 tensors, over the tensor limit 3"):
        Checkpoint.open(tmp_path)


def test_a_package_that_cannot_read_the_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no")

    write_tiny_model(tmp_path, TL)
    monkeypatch.setattr(safetensors_header.safetensors, "safe_open", fail)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: no; expected a readable file"):
        Checkpoint.open(tmp_path)


def test_a_duplicate_key_is_found_inside_lists() -> None:
    with pytest.raises(ModelFormatError, match=r"duplicate key 'a' in 'x'\.'1'\.'0'"):
        strict_json.loads(b'{"w": 1, "x": [3, [{"a": 1, "a": 2}]]}', where="f", max_bytes=100)


def test_float8_checkpoints_read_other_tensors_as_they_are(tmp_path: Path) -> None:
    value = np.arange(12, dtype=np.float32).reshape(4, 3)
    save_file({"plain": value}, str(tmp_path / "model.safetensors"))
    with Checkpoint.open(tmp_path) as checkpoint:
        view = Fp8Checkpoint(checkpoint, (2, 2))
        np.testing.assert_array_equal(view.read_rows("plain", np.array([3, 1])), value[[3, 1]])


def test_scales_of_activations_are_counted_and_not_used(tmp_path: Path) -> None:
    config = {**TL, "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    tensors = tiny_tensors(TL)
    tensors["model.layers.0.mlp.gate_proj.activation_scale"] = np.ones(1, np.float32)
    folder = write_tiny_model(tmp_path, config, tensors=tensors)
    with Checkpoint.open(folder) as checkpoint:
        notes = check_tensors(load_model_spec(folder), checkpoint.tensors, folder)
    assert notes == ["1 tensors of scales of activations are not used"]


def test_memory_that_the_system_does_not_tell_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "available_memory", lambda: None)
    with pyengine.load(write_tiny_model(tmp_path, TL), quant="f32", threads=1) as engine:
        assert len(engine.generate([1], max_tokens=3, ignore_eos=True).tokens) == 3


# ---- config.json ----------------------------------------------------------------------------------------------------

PER_TYPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
GEMMA3 = {name: value for name, value in CONFIGS["gemma3"].items() if not name.startswith("rope_")}
# row -> config, changes, error, texts
RARE: dict[str, tuple[dict[str, Any], dict[str, Any], Any, tuple[str, ...]]] = {
    "layer-type-of-another-name": (
        GEMMA3, {"rope_parameters": {**PER_TYPE, "linear_attention": {}}}, UNSUPPORTED,
        key("rope_parameters", "linear_attention"),
    ),
    "layer-type-that-is-no-object": (GEMMA3, {"rope_parameters": {"full_attention": 3}}, BAD, ("full_attention",)),
    "both-spellings-per-layer-type": (
        GEMMA3, {"rope_parameters": PER_TYPE, "rope_scaling": {"rope_type": "default"}}, UNSUPPORTED,
        ("key 'rope_scaling'",),
    ),
    "two-partial-factors": (
        CONFIGS["glm4"], {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}, BAD,
        ("'partial_rotary_factor': '0.5'", "'rope_parameters.partial_rotary_factor': '1.0'", "differ"),
    ),
    "more-than-the-head": (
        CONFIGS["glm4"], {"partial_rotary_factor": 1.5}, BAD, (*key("partial_rotary_factor", "1.5"), "16 dimensions")
    ),
    "dynamic-of-another-length": (
        TL, scaling("dynamic", factor=2.0, original_max_position_embeddings=32), UNSUPPORTED,
        (*key("rope_scaling.original_max_position_embeddings", "32"), "max_position_embeddings 64"),
    ),
    "dynamic-of-two-dimensions": (
        {**TL, "head_dim": 2}, scaling("dynamic", factor=2.0), BAD, (*key("head_dim", "2"), "at least 4 rotated")
    ),
    "activation-scheme": (
        TL, {"quantization_config": {"quant_method": "fp8", "activation_scheme": "magic"}}, UNSUPPORTED,
        key("quantization_config.activation_scheme", "magic"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", RARE)
def test_rare_config_is_refused(row: str, tmp_path: Path) -> None:
    config, changes, error, texts = RARE[row]
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    refused(tmp_path, error, "config.json: ", *texts)


def test_keys_that_name_code_and_are_off_say_nothing(make: Callable[..., Path]) -> None:
    assert load_model_spec(make(auto_map=None, custom_pipelines={}), strict=True).warnings == ()


def test_a_copy_of_the_context_length_among_the_parameters_is_taken(make: Callable[..., Path]) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "llama_4_scaling_beta": 0.1}
    plain = load_model_spec(make("ministral3", rope_parameters=yarn))
    copied = load_model_spec(make("ministral3", rope_parameters={**yarn, "max_position_embeddings": 64}))
    assert copied.layers == plain.layers


def test_layers_without_rope_are_those_listed(make: Callable[..., Path]) -> None:
    spec = load_model_spec(make("smollm3", no_rope_layers=[1, 0, 1]))
    assert [layer.attention.rope is None for layer in spec.layers] == [False, True]
    every = load_model_spec(make("smollm3", no_rope_layers=GONE, no_rope_layer_interval=2))
    assert [layer.attention.rope is None for layer in every.layers] == [False, True]


# ---- where a model is -----------------------------------------------------------------------------------------------


def test_the_config_of_a_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, that of a folder, that of the hub cache; else the error that `resolve` gives."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = write_tiny_model(tmp_path / "model", TL)
    assert hub.config_file(str(folder)) == folder / "config.json"
    assert hub.config_file(str(folder / "config.json")) == folder / "config.json"
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    with pytest.raises(pyengine.ModelNotFoundError, match=r"offline; run `hf download org/name config\.json --revis"):
        hub.config_file("org/name@abc", offline=True)
    snapshot.mkdir(exist_ok=True)
    (snapshot / "config.json").write_text("{}")
    assert hub.config_file("org/name@abc", offline=True) == snapshot / "config.json"
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert hub.config_file(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"  # its header is the config
    for odd in ("", "  ", "nothing like a model", "a" * 5000, "x\0y"):
        with pytest.raises(RequestError):
            hub.config_file(odd)


def test_the_config_of_a_hub_model_is_downloaded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    calls: list[tuple[Any, ...]] = []

    def download(name: str, file: str, *, revision: str | None, cache_dir: Path) -> str:
        calls.append((name, file, revision, cache_dir))
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    assert hub.config_file("org/name@v2") == tmp_path / "config.json"
    assert calls == [("org/name", "config.json", "v2", tmp_path)]
