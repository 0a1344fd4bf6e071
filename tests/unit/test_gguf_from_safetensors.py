"""tools/bench/gguf_from_safetensors.py: what it writes is the folder, by the reader of demo.py, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_tokenizers
from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from tokenizers import pre_tokenizers
from tool_scripts import load_tool

from pyengine import demo, rope
from pyengine.checkpoint import Checkpoint
from pyengine.spec import RopeSpec
from pyengine.tokenizer import Tokenizer

SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 280,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("bench/gguf_from_safetensors")


def write_model(folder: Path, case: str, **changes: Any) -> Path:
    """A tiny model with SmolLM's kind of tokenizer, of 260 tokens."""
    write_tiny_model(folder, {**CONFIGS[case], **SIZES, "bos_token_id": 258, "eos_token_id": 259, **changes})
    tokenizer = tiny_tokenizers.byte_level(merges=(("h", "i"), ("hi", "hi")))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_llama_comes_back(tool: ModuleType, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", "llama_tied")
    assert tool.main([str(folder), str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny-BF16.gguf"]
    back = tmp_path / "back"
    back.mkdir()
    reader = gguf.GGUFReader(tmp_path / "out" / "tiny-BF16.gguf")
    assert "output.weight" not in [tensor.name for tensor in reader.tensors]
    demo.convert(tmp_path / "out" / "tiny-BF16.gguf", back)
    with Checkpoint.open(folder) as given, Checkpoint.open(back) as made:
        assert set(given.tensors) == set(made.tensors)
        for name in given.tensors:
            want = demo.to_bf16(given.read_float32(name))
            np.testing.assert_array_equal(made.read(name), want, err_msg=name)
    config = json.loads((back / "config.json").read_text())
    source = json.loads((folder / "config.json").read_text())
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "rope_theta")
    assert {key: config[key] for key in same} == {key: source[key] for key in same}
    assert (config["bos_token_id"], config["eos_token_id"]) == (258, 259)
    text = "hihi 12!\n"
    ids = [Tokenizer.load(where, vocab_size=280).encode(text) for where in (folder, back)]
    assert ids[0] == ids[1]


def test_a_qwen2_has_biases_and_no_other_order(tool: ModuleType, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", "qwen2_untied", use_sliding_window=False)
    tool.write_bf16(folder, tmp_path / "q.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "q.gguf").tensors}
    with Checkpoint.open(folder) as given:
        assert len(tensors) == len(given.tensors)
        for name, ours in (
            ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"),
            ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
            ("output.weight", "lm_head.weight"),
        ):
            values = given.read_float32(ours)
            found = gguf.dequantize(tensors[name].data, tensors[name].tensor_type).reshape(values.shape)
            matrix = values.ndim == 2
            assert tensors[name].tensor_type.name == ("BF16" if matrix else "F32")
            want = (demo.to_bf16(values).astype(np.uint32) << 16).view(np.float32) if matrix else values
            np.testing.assert_array_equal(found, want, err_msg=name)


def test_the_order_of_rows(tool: ModuleType) -> None:
    rows = np.arange(8)
    assert tool.permute(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    order = rope.half_split(RopeSpec("default", 10000.0, 8), 8)  # how the loader reads such rows
    assert tool.permute(rows, 1)[order].tolist() == rows.tolist()


def test_what_it_refuses(tool: ModuleType, tmp_path: Path, capsys: Any) -> None:
    window = write_model(tmp_path / "window", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    yarn = write_model(tmp_path / "yarn", "llama", rope_scaling={"rope_type": "linear", "factor": 2.0})
    mistral = write_model(tmp_path / "mistral", "mistral_window")
    pieces = write_model(tmp_path / "pieces", "llama", vocab_size=400)
    tiny_tokenizers.sentencepiece().save(str(pieces / "tokenizer.json"))
    good = write_model(tmp_path / "good", "llama")
    for folder, extra, says in (
        (window, [], "sliding windows"),
        (yarn, [], "rope_type='linear'"),
        (mistral, [], "family mistral"),
        (pieces, [], "no byte-level BPE"),
        (tmp_path / "none", [], "none"),
        (good, ["--types", "Q4_0", "--llama", str(tmp_path / "python")], "No such file"),
        (good, ["--types", "Q4_0", "--llama", sys.executable], "No module named 'llama_cpp'"),
    ):
        assert tool.main([str(folder), str(tmp_path / "out"), *extra]) > 1
        assert says in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
