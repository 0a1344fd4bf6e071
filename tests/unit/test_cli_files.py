"""Stage 7, cli over real files: inspect, the chat prompt form, and what a damaged or unknown model ends with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, install
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pyengine.cli.inspect import layer_lines, natural_key
from pyengine.cli.main import main
from pyengine.config import load_model_spec
from pyengine.tokenizer import Tokenizer as EngineTokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ suffix }}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def write_model(folder: Path, *, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """A complete tiny Llama folder: config, float32 weights, a byte tokenizer with two special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {"model.embed_tokens.weight": (VOCAB, 16), "model.norm.weight": (16,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {layer + "input_layernorm.weight": (16,), layer + "post_attention_layernorm.weight": (16,)}
        for name, n in (("q", 16), ("k", 8), ("v", 8), ("o", 16)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (n, 16)
        shapes |= {layer + "mlp.gate_proj.weight": (24, 16), layer + "mlp.up_proj.weight": (24, 16)}
        shapes[layer + "mlp.down_proj.weight"] = (16, 24)
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "add_bos_token": False}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_info_tells_what_the_core_chose(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("PYENGINE_THREADS", raising=False)
    assert main(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"name": record["isa"], "available": True} in record["isas"]
    assert record["isas"][0] == {"name": "scalar", "available": True}
    assert record["threads"] >= 1
    assert all(len(feature) > 1 for feature in record["cpu_features"])
    monkeypatch.setenv("PYENGINE_THREADS", "3")
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["threads"] == 3


# --- inspect


def test_inspect_json(tmp_path: Path, capsys: Any) -> None:
    folder = write_model(tmp_path / "a model")
    assert main(["inspect", str(folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    parameters = 258 * 16 + 16 + 11 * (2 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16)
    assert record["parameters"] == parameters
    assert record["bytes"] == 4 * parameters
    assert (record["family"], record["architecture"]) == ("llama", "LlamaForCausalLM")
    assert record["config"]["hidden_size"] == 16
    assert len(record["config"]["layers"]) == 11
    names = [row["name"] for row in record["tensors"]]
    assert names.index("model.layers.2.mlp.down_proj.weight") < names.index("model.layers.10.mlp.down_proj.weight")
    down = record["tensors"][names.index("model.layers.2.mlp.down_proj.weight")]
    assert down == {
        "name": "model.layers.2.mlp.down_proj.weight",
        "dtype": "F32",
        "shape": [16, 24],
        "bytes": 1536,
        "file": "model.safetensors",
    }


def test_inspect_table(tmp_path: Path, capsys: Any) -> None:
    folder = write_model(tmp_path)
    assert main(["inspect", "-m", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "layers 0-10: attention 4 heads, 2 KV heads, head_dim 4, rope default theta 10000; FFN 24 silu" in out
    assert any(
        line.split() == ["model.norm.weight", "F32", "16", "64", "model.safetensors"] for line in out.splitlines()
    )
    assert err == ""


def test_inspect_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["inspect", str(folder)]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        ("missing tensor", 3, "model.norm.weight"),
        ("truncated", 3, "model.safetensors"),
        ("unknown architecture", 4, "NoSuchForCausalLM"),
        ("no config", 3, "config.json"),
    ],
)
def test_inspect_of_a_wrong_model(tmp_path: Path, capsys: Any, damage: str, code: int, says: str) -> None:
    folder = write_model(tmp_path)
    weights = folder / "model.safetensors"
    if damage == "missing tensor":
        save_file({"model.embed_tokens.weight": np.ones((VOCAB, 16), np.float32)}, weights)
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "unknown architecture":
        write_model(tmp_path, architectures=["NoSuchForCausalLM"])
    else:
        (folder / "config.json").unlink()
    assert main(["inspect", str(folder)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_natural_order() -> None:
    names = ["layers.10.a", "layers.2.b", "layers.2.a", "embed", "2"]
    assert sorted(names, key=natural_key) == ["2", "embed", "layers.2.a", "layers.2.b", "layers.10.a"]


def test_layer_lines_join_equal_layers_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert [line.split(":")[0] for line in layer_lines(load_model_spec(folder))] == ["0-10"]


# --- the model argument


def test_a_missing_path_and_a_prompt_in_the_wrong_place(tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", "Why is the sky blue?"]) == 2
    assert "did you mean -p" in capsys.readouterr().err
    assert main(["inspect", "no-such-org-x/no-such-name", "--offline"]) == 3
    assert "hf download no-such-org-x/no-such-name" in capsys.readouterr().err


# --- the chat prompt form


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    folder = write_model(tmp_path)
    fake = install(monkeypatch, folder)
    fake.tokenizer = EngineTokenizer.load(folder, vocab_size=VOCAB)  # type: ignore[assignment]
    return fake


def shown(engine: FakeEngine) -> str:
    """The last request's ids as text, special tokens as <0> and <1>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = "".join(alphabet[i] if i < 256 else f"<{i - 256}>" for i in engine.requests[-1]["ids"])
    return raw.replace("\u0120", " ").replace("\u010a", "\n")


def test_generate_applies_the_models_template(engine: FakeEngine, capsys: Any) -> None:
    assert main(["generate", "-p", "Hi there"]) == 0
    assert shown(engine) == "<0>user\nHi there<1>\n<0>assistant\n"
    assert ", chat |" in capsys.readouterr().err
    assert main(["generate", "-p", "Hi", "-sys", "Be brief", "--json"]) == 0
    assert shown(engine) == "<0>system\nBe brief<1>\n<0>user\nHi<1>\n<0>assistant\n"
    assert json.loads(capsys.readouterr().out)["prompt_format"] == "chat"


def test_special_tokens_in_a_message_are_text_but_parsed_in_raw(engine: FakeEngine) -> None:
    assert main(["generate", "-p", "a<|im_end|>b"]) == 0
    assert shown(engine) == "<0>user\na<|im_end|>b<1>\n<0>assistant\n"
    assert main(["generate", "--raw", "-p", "a<|im_end|>b"]) == 0
    assert shown(engine) == "a<1>b"
    assert main(["generate", "--raw", "--no-special", "-p", "a<|im_end|>b"]) == 0
    assert shown(engine) == "a<|im_end|>b"


def test_template_file_and_arguments(engine: FakeEngine, tmp_path: Path) -> None:
    assert main(["generate", "-p", "Hi", "--template-arg", "suffix=now"]) == 0
    assert shown(engine).endswith("<0>assistant\nnow")
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0]['content'] }}!", encoding="utf-8")
    assert main(["generate", "-p", "Hi", "--chat-template", str(file)]) == 0
    assert shown(engine) == "Hi!"


def test_wrong_templates_end_with_5_and_refused_messages_with_2(
    engine: FakeEngine, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[", encoding="utf-8")
    assert main(["generate", "-p", "Hi", "--chat-template", str(file)]) == 5
    file.write_text("{{ raise_exception('only one user message') }}", encoding="utf-8")
    assert main(["generate", "-p", "Hi", "--chat-template", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "only one user message" in err
    assert engine.requests == []


def test_a_model_without_a_template_is_raw(engine: FakeEngine, tmp_path: Path, capsys: Any) -> None:
    write_model(tmp_path, template=None)
    assert main(["generate", "-p", "Hi"]) == 0
    assert shown(engine) == "Hi"
    assert ", raw |" in capsys.readouterr().err
    assert main(["generate", "-p", "Hi", "-sys", "Be brief"]) == 2
    assert "no chat template" in capsys.readouterr().err
