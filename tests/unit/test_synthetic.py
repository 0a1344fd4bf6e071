"""tools/bench/synthetic.py: random checkpoints load, have the right shapes and spread, and are reproducible."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from golden.golden_cases import CONFIGS
from tool_scripts import load_tool

import pyengine
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.tensors import CanonicalTensors, check_tensors, expected_tensors

FAMILY_CASES = (
    *("llama", "llama_tied", "mistral_window", "qwen2", "qwen3", "llama_biases", "olmo2", "gemma2", "gpt2", "glm4"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3_experts"),
)


@pytest.fixture(scope="module")
def synthetic() -> ModuleType:
    return load_tool("bench/synthetic")


def make(synthetic: ModuleType, folder: Path, config: dict[str, Any], *more: str) -> Path:
    file = folder.parent / f"{folder.name}.json"
    file.write_text(json.dumps(config))
    synthetic.main([str(folder), "--config", str(file), *more])
    return folder


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_a_folder_of_every_family_loads_and_generates(synthetic: ModuleType, tmp_path: Path, name: str) -> None:
    folder = make(synthetic, tmp_path / "model", {**CONFIGS[name], "vocab_size": 300})
    spec = load_model_spec(folder)
    with Checkpoint.open(folder) as checkpoint:
        assert check_tensors(spec, checkpoint.tensors, folder) == []
        assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}
        source = CanonicalTensors(checkpoint, spec)
        for tensor, shape in expected_tensors(spec).items():
            values = source.read_float32(tensor)
            if len(shape) == 1:
                assert set(values) == {1.0 if tensor.endswith("norm.weight") and not spec.norm.plus_one else 0.0}
            else:
                error = 6 * 0.02 / values.size**0.5
                assert abs(values.mean()) < error
                assert values.std() == pytest.approx(0.02, abs=error)
    with pyengine.load(folder, quant="int4") as engine:
        assert engine.generate("hi", max_tokens=3, ignore_eos=True).usage["completion_tokens"] == 3


def test_shards_hold_what_fits_and_chunks_do_not_show(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIGS["llama"], "initializer_range": 0.5}
    monkeypatch.setattr(synthetic, "SHARD_BYTES", 30_000)
    folder = make(synthetic, tmp_path / "model", config)
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert {folder / name for name in index["weight_map"].values()} == set(files)
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    with Checkpoint.open(folder) as checkpoint:
        sizes = {name: info.end - info.begin for name, info in checkpoint.tensors.items()}
        assert index["metadata"]["total_size"] == sum(sizes.values())
        for file in files:
            held = [size for name, size in sizes.items() if index["weight_map"][name] == file.name]
            assert sum(held) <= 30_000 or len(held) == 1
        matrix = checkpoint.read("model.layers.0.mlp.down_proj.weight").view(ml_dtypes.bfloat16)
    assert matrix.astype(np.float32).std() == pytest.approx(0.5, rel=0.1)
    assert not (folder / "tokenizer.json").exists()  # 97 ids have no room for every byte
    monkeypatch.setattr(synthetic, "CHUNK_VALUES", 400)  # a multiple of the four that a draw gives
    again = make(synthetic, tmp_path / "again", config)
    other = make(synthetic, tmp_path / "other", config, "--seed", "1")
    for file in files:
        assert (again / file.name).read_bytes() == file.read_bytes()
    assert any((other / file.name).read_bytes() != file.read_bytes() for file in files)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-moe-14b"])
def test_the_known_configs_have_the_size_of_their_name(synthetic: ModuleType, tmp_path: Path, name: str) -> None:
    config = synthetic.CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = sum(np.prod(shape, dtype=np.int64) for shape in expected_tensors(load_model_spec(tmp_path)).values())
    assert float(weights) == pytest.approx({"llama-3.1-8b": 8.03e9, "qwen3-moe-14b": 14.3e9}[name], rel=0.01)


def test_what_cannot_be_written_is_one_line(synthetic: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    def refused(config: dict[str, Any], says: str, *more: str) -> None:
        with pytest.raises(SystemExit, match=says):
            make(synthetic, tmp_path / "model", config, *more)

    refused({**CONFIGS["llama"], "architectures": ["AbacusForCausalLM"]}, "'AbacusForCausalLM'; expected one of")
    assert not (tmp_path / "model").exists()
    with pytest.raises(
        SystemExit, match=r"--config nothing: .*expected llama-3\.1-8b, qwen3-moe-14b or a config\.json"
    ):
        synthetic.main([str(tmp_path / "model"), "--config", "nothing"])
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: synthetic.shutil._ntuple_diskusage(9, 0, 9))
    refused(CONFIGS["llama"], "the weights take [0-9]+ bytes, 9 are free")
    (tmp_path / "model" / "x").write_text("")
    refused(CONFIGS["llama"], "is not empty; expected a new folder")
