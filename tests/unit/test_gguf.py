"""A GGUF file as MODEL: its tensors, its config and its logits are those of the folder that it was written from."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import tiny_tokenizers
from builders import tiny_tensors, write_tiny_model
from cache_cases import own_cache
from golden.golden_cases import CONFIGS
from tokenizers import pre_tokenizers

import pyengine
from pyengine import hub, rope
from pyengine.cli.main import main
from pyengine.config import load_model_spec
from pyengine.errors import PyEngineError, RequestError
from pyengine.gguf_checkpoint import block_types, default_quant, open_checkpoint
from pyengine.reference import load_reference
from pyengine.reports.account import account
from pyengine.tensors import CanonicalTensors, check_tensors

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {**CONFIGS["llama"], **SIZES}
IDS = [1, 5, 9, 60, 33, 2, 90, 17, 8, 41]
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def logits(model: Path, **arguments: Any) -> np.ndarray:
    with pyengine.load(model, cache=False, log=lambda _: None, **arguments) as engine:
        return engine.logits(IDS)


def pair(tmp_path: Path, config: dict[str, Any], **arguments: Any) -> tuple[Path, Path]:
    """A GGUF and a folder of the same model."""
    path = tmp_path / "m.gguf"
    means = tiny_gguf.write(path, config, tiny_tensors(config), **arguments)
    return path, write_tiny_model(tmp_path / "folder", config, tensors=means)


@pytest.mark.parametrize("case", ["llama", "llama_tied", "llama_biases", "qwen2", "qwen2_untied", "qwen3"])
def test_logits_of_float32_are_the_folders(case: str, tmp_path: Path) -> None:
    config = {"num_key_value_heads": CONFIGS[case]["num_attention_heads"], **CONFIGS[case]}
    path, folder = pair(tmp_path, config)
    np.testing.assert_array_equal(logits(path, quant="f32"), logits(folder, quant="f32"))
    spec, other = load_model_spec(path), load_model_spec(folder)
    assert (spec.norm, spec.max_context, spec.bos_token_id) == (other.norm, other.max_context, other.bos_token_id)
    assert spec.eos_token_ids == other.eos_token_ids
    assert spec.warnings == ()


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_means_its_formula(kind: str, tmp_path: Path) -> None:
    path, folder = pair(tmp_path, LLAMA, kind=kind)
    spec = load_model_spec(path)
    with open_checkpoint(path) as given, open_checkpoint(folder) as expected:
        assert given.tensors["blk.1.ffn_down.weight"].dtype == kind
        check_tensors(spec, given.tensors, path)
        tensors = CanonicalTensors(given, spec)
        for name in expected.tensors:
            want = expected.read_float32(name)
            bound = 2**-22 * np.abs(want).max()  # float32 roundings of d * scale * q - minimum
            np.testing.assert_allclose(tensors.read_float32(name), want, rtol=0, atol=bound, err_msg=name)
            if want.ndim == 2:
                rows = np.array([3, 0, 41])
                np.testing.assert_array_equal(tensors.read_rows(name, rows), tensors.read_float32(name)[rows])
                np.testing.assert_array_equal(tensors.read_range(name, 5, 9), tensors.read(name)[5:9])
    exact, found = logits(folder, quant="f32"), logits(path, quant="f32")
    assert np.abs(found - exact).max() <= 1e-5 * max(1.0, np.abs(exact).max())


def test_mixed_types(tmp_path: Path) -> None:
    kinds = {"": "Q4_K", "blk.0.ffn_down.weight": "Q6_K", "output.weight": "Q6_K", "blk.1.attn_v.weight": "Q8_0"}
    path, folder = pair(tmp_path, LLAMA, kind=kinds)
    exact = logits(folder, quant="f32")
    assert np.abs(logits(path, quant="f32") - exact).max() <= 1e-5 * max(1.0, np.abs(exact).max())
    bits, types = block_types(path)
    assert types == ["Q4_K", "Q6_K", "Q8_0"]
    assert 4.5 < bits < 5


def test_a_chunk_border_inside_a_tensor_shows_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = pair(tmp_path, LLAMA, kind="Q5_K")
    with open_checkpoint(path) as checkpoint:
        whole = checkpoint.read("token_embd.weight")
        monkeypatch.setattr("pyengine.gguf_checkpoint.CHUNK_WEIGHTS", 256 * 7)
        np.testing.assert_array_equal(checkpoint.read("token_embd.weight"), whole)
        for begin, end in ((-1, 2), (5, 3), (0, 98)):
            with pytest.raises(RequestError, match=r"token_embd"):
                checkpoint.read_range("token_embd.weight", begin, end)


def test_rows_of_a_quantized_tensor(tmp_path: Path) -> None:
    path, _ = pair(tmp_path, LLAMA, kind="Q8_0")
    with open_checkpoint(path) as checkpoint:
        name = "token_embd.weight"
        whole = checkpoint.read(name)
        assert checkpoint.read_rows(name, np.array([3, 1])).tobytes() == whole[[3, 1]].tobytes()
        assert checkpoint.read_rows(name, np.array([], int)).shape == (0, whole.shape[1])


@pytest.mark.parametrize(
    ("kind", "quant"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q4_K", "int4"), ("Q5_K", "int8"), ("Q8_0", "int8"),
                        ("BF16", "int8"), ("F32", "int8")]
)  # fmt: skip
def test_the_default_format_follows_the_bits(kind: str, quant: str, tmp_path: Path) -> None:
    path, _ = pair(tmp_path, LLAMA, kind=kind)
    assert default_quant(path) == quant
    said: list[str] = []
    with pyengine.load(path, cache=False, log=said.append) as engine:
        assert engine.quant == quant
    lines = [f"m.gguf: {kind}, {block_types(path)[0]:.1f} bits per weight, dequantized and quantized again to {quant}"]
    assert said == ([] if kind in ("BF16", "F32") else lines)
    said.clear()
    with pyengine.load(path, quant="bf16", cache=False, log=said.append) as engine:
        assert engine.quant == "bf16"
    assert all(line.endswith("dequantized to bf16") for line in said)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantized_again_as_the_folder_is(quant: str, tmp_path: Path) -> None:
    path, folder = pair(tmp_path, LLAMA, kind="Q8_0")
    np.testing.assert_array_equal(logits(path, quant=quant), logits(folder, quant=quant))


# ---- RoPE


def scaled(**parameters: Any) -> dict[str, Any]:
    return {**LLAMA, "max_position_embeddings": 256, "rope_scaling": parameters}


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0, "original_context_length": 64}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": True},
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 64,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
            },
        ),
    ],
    ids=["linear", "yarn", "yarn-betas"],
)
def test_scaled_rope(parameters: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    given = {f".rope.scaling.{key}": value for key, value in keys.items()}
    path, folder = pair(tmp_path, scaled(**parameters), keys=given)
    np.testing.assert_array_equal(logits(path, quant="f32"), logits(folder, quant="f32"))
    plain = tiny_gguf.write(tmp_path / "plain.gguf", LLAMA, tiny_tensors(LLAMA))
    assert plain
    assert not np.array_equal(logits(tmp_path / "plain.gguf", quant="f32"), logits(folder, quant="f32"))


def test_the_older_name_of_linear_scaling(tmp_path: Path) -> None:
    path, folder = pair(tmp_path, scaled(rope_type="linear", factor=2.0), keys={".rope.scale_linear": 2.0})
    np.testing.assert_array_equal(logits(path, quant="f32"), logits(folder, quant="f32"))


def test_frequencies_of_llama_3_are_in_a_tensor(tmp_path: Path) -> None:
    """What the converter writes: by how much each frequency is divided, smoothly between the two wavelengths."""
    factor, low, high, original, theta = 8.0, 1.0, 4.0, 64, LLAMA["rope_theta"]
    config = scaled(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    divisors = []
    for i in range(32):
        wavelength = 2 * math.pi * theta ** (2 * i / 64)
        smooth = min(max((original / wavelength - low) / (high - low), 0), 1)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    path, folder = pair(tmp_path, config, extra=extra)
    ours, theirs = (load_model_spec(model).layers[1].attention.rope for model in (path, folder))
    assert ours is not None
    assert theirs is not None
    np.testing.assert_allclose(rope.inv_freq(ours)[0], rope.inv_freq(theirs)[0], rtol=1e-6)
    assert not np.allclose(rope.inv_freq(ours)[0], rope.inv_freq(theirs)[0] * divisors, rtol=1e-2)
    exact = logits(folder, quant="f32")
    assert np.abs(logits(path, quant="f32") - exact).max() < 1e-5 * np.abs(exact).max()
    ids = np.array(IDS)
    np.testing.assert_allclose(load_reference(path, np.float64).forward(ids), exact, rtol=0, atol=1e-4)


def test_a_window(tmp_path: Path) -> None:
    config = CONFIGS["mistral_window"]
    keys = {".attention.sliding_window": config["sliding_window"]}
    path, folder = pair(tmp_path, config, keys=keys)
    assert load_model_spec(path).layers[0].attention.window == config["sliding_window"] < len(IDS)
    np.testing.assert_array_equal(logits(path, quant="f32"), logits(folder, quant="f32"))
    (tmp_path / "qwen2").mkdir()
    with pytest.raises(PyEngineError, match=r"qwen2\.attention\.sliding_window"):
        load_model_spec(pair(tmp_path / "qwen2", {**CONFIGS["qwen2"], **SIZES}, keys=keys)[0])


def test_frequencies_that_divide_by_one_are_none(tmp_path: Path) -> None:
    path, folder = pair(tmp_path, LLAMA, extra={"rope_freqs.weight": np.ones(32, np.float32)})
    np.testing.assert_array_equal(logits(path, quant="f32"), logits(folder, quant="f32"))


# ---- what is left out, and what is refused


def test_what_llama_cpp_takes_where_a_key_is_absent(tmp_path: Path) -> None:
    """As many KV heads as heads, theta 10000, heads of hidden_size / heads: not config.json's defaults."""
    config = {**CONFIGS["qwen2"], **SIZES, "num_key_value_heads": 4, "rope_theta": 10000.0}
    absent = ["attention.head_count_kv", "rope.freq_base", "attention.key_length", "attention.value_length"]
    absent += ["rope.dimension_count", "vocab_size"]
    path, folder = pair(tmp_path, config, keys={f".{key}": None for key in absent})
    np.testing.assert_array_equal(logits(path, quant="f32"), logits(folder, quant="f32"))


@pytest.mark.parametrize(
    ("keys", "code", "says"),
    [
        ({"general.architecture": "mamba"}, 4, "key 'general.architecture': 'mamba'"),
        ({"general.type": "adapter"}, 4, "key 'general.type': 'adapter'"),
        ({"split.count": 3}, 4, "key 'split.count': '3'"),
        *((({f".{key}": None}), 3, f"key 'llama.{key}' is missing") for key in (
            "block_count", "context_length", "embedding_length", "attention.head_count", "feed_forward_length",
            "attention.layer_norm_rms_epsilon",
        )),
        ({".embedding_length": 0}, 3, "key 'llama.embedding_length': '0'"),
        ({".block_count": 3}, 3, "blk.2."),
        ({".block_count": 1}, 3, "layers past num_hidden_layers"),
        ({".attention.head_count": [4, 4]}, 3, "key 'llama.attention.head_count'"),
        ({".attention.head_count_kv": 3}, 3, "key 'llama.attention.head_count_kv': '3'"),
        ({".attention.value_length": 32}, 4, "key 'llama.attention.value_length': '32'"),
        ({".rope.dimension_count": 32}, 4, "key 'llama.rope.dimension_count'"),
        ({".rope.dimension_count": 99}, 3, "key 'llama.rope.dimension_count': '99'"),
        ({".rope.scaling.type": "longrope"}, 4, "key 'llama.rope.scaling.type': 'longrope'"),
        ({".rope.scaling.type": "linear"}, 3, "key 'llama.rope.scaling.factor'"),
        ({".rope.scaling.type": "yarn", ".rope.scaling.factor": 2.0, ".rope.scaling.yarn_log_multiplier": 0.1}, 4,
         "llama.rope.scaling.yarn_log_multiplier"),
        ({".expert_count": 8}, 4, "llama.expert_count"),
        ({".attention.sliding_window": 0}, 3, "key 'llama.attention.sliding_window': '0'"),
        ({".logit_scale": 0.5}, 4, "llama.logit_scale"),
        ({".attention.causal": False}, 4, "llama.attention.causal"),
        ({".attention.scale": 0.1}, 4, "llama.attention.scale"),
        ({".attention.key_length": "abc", ".rope.dimension_count": 8}, 3, "llama.attention.key_length"),
        ({".vocab_size": 96}, 3, "tensor 'token_embd.weight'"),
        ({"tokenizer.ggml.eos_token_id": 97}, 3, "key 'tokenizer.ggml.eos_token_id'"),
        ({"tokenizer.ggml.bos_token_id": 97}, 3, "key 'tokenizer.ggml.bos_token_id'"),
    ],
)  # fmt: skip
def test_a_config_that_is_refused(keys: dict[str, Any], code: int, says: str, tmp_path: Path, capsys: Any) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", LLAMA, tiny_tensors(LLAMA), keys=keys)
    with pytest.raises(PyEngineError) as caught:
        pyengine.load(tmp_path / "m.gguf", quant="f32", cache=False)
    assert caught.value.exit_code == code, caught.value
    assert says in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_keys_that_change_nothing(tmp_path: Path) -> None:
    keys = {".expert_count": 0, ".attention.causal": True, ".tensor_data_layout": "Meta AI original pth"}
    path, _ = pair(tmp_path, LLAMA, keys={**keys, "general.name": "x", "quantize.imatrix.file": "y", ".color": 3})
    spec = load_model_spec(path)
    assert len(spec.warnings) == 1
    assert "llama.color" in spec.warnings[0]
    with pytest.raises(PyEngineError, match=r"llama\.color"):
        load_model_spec(path, strict=True)


@pytest.mark.parametrize(
    ("values", "says"),
    [(np.ones(31, np.float32), "[31]"), (np.zeros(32, np.float32), "above 0"), (np.ones(32, np.float16), "F16")],
)
def test_frequencies_that_are_refused(values: np.ndarray, says: str, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", LLAMA, tiny_tensors(LLAMA), extra={"rope_freqs.weight": values})
    with pytest.raises(PyEngineError, match=r"'rope_freqs\.weight'") as caught:
        load_model_spec(tmp_path / "m.gguf")
    assert says in str(caught.value)


def test_tensors_are_accounted_for(tmp_path: Path) -> None:
    tensors = tiny_tensors(LLAMA)
    tiny_gguf.write(tmp_path / "more.gguf", LLAMA, tensors, extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(PyEngineError, match=r"'blk\.0\.attn_sinks\.weight'") as caught:
        pyengine.load(tmp_path / "more.gguf", cache=False)
    assert caught.value.exit_code == 4
    less = {name: values for name, values in tensors.items() if "layers.1.mlp.up" not in name}
    tiny_gguf.write(tmp_path / "less.gguf", LLAMA, less)
    with pytest.raises(PyEngineError, match=r"'blk\.1\.ffn_up\.weight'") as caught:
        pyengine.load(tmp_path / "less.gguf", cache=False)
    assert caught.value.exit_code == 3


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors(LLAMA)
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = np.inf
    tiny_gguf.write(tmp_path / "m.gguf", LLAMA, tensors)
    with pytest.raises(PyEngineError, match=rf"'blk\.1\.ffn_up\.weight': inf at flat index {7 * 256 + 3}"):
        pyengine.load(tmp_path / "m.gguf", cache=False)


# ---- MODEL


def test_resolve(tmp_path: Path) -> None:
    path, _ = pair(tmp_path, LLAMA)
    assert hub.resolve(str(path), offline=True) == path
    assert hub.config_file(str(path), offline=True) == path
    (tmp_path / "folder.gguf").mkdir()
    assert hub.resolve(str(tmp_path / "folder.gguf")) == tmp_path / "folder.gguf"


def tokenized(tmp_path: Path) -> Path:
    """A GGUF with a tokenizer and a chat template."""
    config = {**LLAMA, "vocab_size": 280, "bos_token_id": 257, "eos_token_id": 258}
    tokenizer = tiny_tokenizers.byte_level(merges=(("h", "i"),))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    keys = tiny_gguf.tokenizer_keys(tokenizer, 280, "gpt-2")
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    path = tmp_path / "m.gguf"
    keys["tokenizer.chat_template"] = template
    tiny_gguf.write(path, config, tiny_tensors(config), kind="Q4_K", keys=keys)
    return path


def test_the_commands(tmp_path: Path, capsys: Any) -> None:
    path = str(tokenized(tmp_path))
    assert main(["generate", path, "-p", "hi", "-n", "3", "--json", "--no-cache"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["prompt_format"], result["quant"], result["model"]) == ("chat", "int4", path)
    assert captured.err.count("Q4_K, 4.5 bits per weight, dequantized and quantized again to int4") == 1
    assert main(["generate", path, "-p", "hi", "-n", "3", "--no-cache", "--quant", "int8", "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["inspect", path, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    row = next(row for row in table["tensors"] if row["name"] == "blk.0.attn_q.weight")
    assert (row["dtype"], row["shape"], row["bytes"]) == ("Q4_K", [256, 256], 256 * 144)
    assert main(["account", path, "--json", "-t", "1"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["parameters"]["total"] == table["parameters"]
    assert main(["perplexity", path, "--tokens", "64", "--window", "32", "--no-cache", "--json"]) == 0
    captured = capsys.readouterr()
    assert "flatters int4" in captured.err
    assert main(["compare", path, "--tokens", "64", "--window", "32", "--no-cache", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert (compared["baseline"], compared["quant"]) == ("f32", "int4")
    assert main(["generate", path, "-p", "x", "--int4-scheme", "symmetric"]) == 2
    assert "--quant int4" in capsys.readouterr().err


def test_account_counts_what_is_stored(tmp_path: Path) -> None:
    path, folder = pair(tmp_path, LLAMA)
    assert account(path, threads=1).stored_parameters == account(folder, threads=1).stored_parameters


def test_a_file_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    path, folder = pair(tmp_path, LLAMA)
    with (
        pyengine.load(path, quant="f32", cache=False) as ours,
        pyengine.load(folder, quant="f32", cache=False) as other,
    ):
        assert ours.tokenizer is None
        assert ours.generate(IDS, max_tokens=5).tokens == other.generate(IDS, max_tokens=5).tokens


def test_packed_weights_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = pair(tmp_path, LLAMA, kind="Q6_K")
    own_cache(tmp_path, monkeypatch)
    with pyengine.load(path, log=lambda _: None) as engine:
        assert not engine.weights.cached
        first = engine.logits(IDS)
    with pyengine.load(path, log=lambda _: None) as engine:
        assert engine.weights.cached
        np.testing.assert_array_equal(engine.logits(IDS), first)
    tiny_gguf.write(path, LLAMA, tiny_tensors(LLAMA, 1), kind="Q6_K")
    with pyengine.load(path, log=lambda _: None) as engine:
        assert not engine.weights.cached


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path, folder = pair(tmp_path, LLAMA)
    with open_checkpoint(path) as checkpoint:
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
        with pytest.raises(PyEngineError, match=r"changed while loading"):
            checkpoint.verify_unchanged()
    assert folder.is_dir()


def test_the_package_is_imported_for_blocks_alone(tmp_path: Path) -> None:
    path, folder = pair(tmp_path, LLAMA)
    script = "import sys, pyengine\nfor model in sys.argv[1:]: pyengine.load(model, quant='f32', cache=False).close()\n"
    script += "sys.exit('gguf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, str(path), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
