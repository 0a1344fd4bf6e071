"""Stage 6 and 7, account: keys, text, explanation, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from account_configs import BERT, DEEPSEEK_V3, REAL, T5
from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from refusal import assert_refused
from safetensors.numpy import save_file

import pyengine
from pyengine import hub
from pyengine.cli.main import main
from pyengine.errors import ModelFormatError, ModelNotFoundError, RequestError, UnsupportedModelError
from pyengine.reports import account as account_module
from pyengine.reports.account import account
from pyengine.reports.account_parts import Ffn
from pyengine.reports.account_read import read_anatomy
from pyengine.reports.account_text import width_lines
from pyengine.reports.machine import Limits
from pyengine.reports.memory import MemoryRoom

LIMITS = Limits(read_gb_per_s=20.0, int8_gops=500.0, f32_gflops=100.0)
LLAMA = REAL["Llama-3.1-8B"].config
GPT_OSS = REAL["gpt-oss-20b"].config
MIXTRAL = REAL["Mixtral-8x7B"].config
# The contract; other keys may stand beside them.
KEYS = {"parameters", "ffn_parameter_share", "flops_per_token", "ffn_flop_share", "weight_bytes",
        "decode_bytes_per_token", "kv_bytes_per_token", "context"}  # fmt: skip
PARAMETERS = {"total", "active", "ffn", "attention", "embedding", "lm_head", "norm", "router"}
FLOPS = {"ffn", "attention_projections", "lm_head", "attention_scores", "total"}


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's speed or memory changes what a test sees."""
    monkeypatch.setattr(account_module.machine, "measure", lambda *_, **__: LIMITS)
    monkeypatch.setattr(account_module.machine, "compute_rate", lambda _, limit, work: 1e11)
    monkeypatch.setattr(account_module.machine, "known_read", lambda _: None)
    monkeypatch.setattr(account_module, "memory_room", lambda: MemoryRoom(16_000_000_000, 32_000_000_000))


def write(folder: Path, config: dict[str, Any], name: str = "config.json", **changes: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({**config, **changes}))
    return path


# --- the object


@pytest.mark.parametrize("name", REAL)
def test_the_object_of_every_family(name: str, tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path, REAL[name].config)
    assert main(["account", str(path), "--json", "--context", "300", "--batch", "2"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record.keys() >= KEYS
    assert record["parameters"].keys() >= PARAMETERS
    assert record["flops_per_token"].keys() >= FLOPS
    assert record["weight_bytes"].keys() >= {"bf16", "int8", "int4"}
    assert record["parameters"]["total"] == REAL[name].total
    assert record["flops_per_token"]["total"] == sum(v for k, v in record["flops_per_token"].items() if k != "total")
    assert record["ffn_parameter_share"] == record["parameters"]["ffn"] / REAL[name].total
    assert record["context"] == 300
    assert record["runs"] == (record["why_not"] is None)
    assert err == ""
    assert sum(part["parameters"] for part in record["parts"] if part["stage"] != "mtp") == REAL[name].total


def test_the_object_of_a_step(tmp_path: Path) -> None:
    result = account(write(tmp_path, LLAMA), context=4096, batch=4, quant="int4", kv_dtype="int8")
    record = result.to_json()
    step = record["decode"]
    assert step["weight_bytes_per_step"] == record["decode_bytes_per_token"]["int4"]
    assert step["kv_bytes_per_step"] == 4 * 4096 * record["kv_bytes_per_token"]
    assert step["bytes_per_step"] == step["weight_bytes_per_step"] + step["kv_bytes_per_step"]
    assert step["ffn_byte_share"] == step["ffn_bytes_per_step"] / step["bytes_per_step"]
    assert record["kv_bytes_per_token"] == 32 * 8 * 2 * (128 + 4)
    memory = record["memory"]
    assert memory["kv_cache_bytes"] == step["kv_bytes_per_step"]
    assert memory["total_bytes"] == sum(memory[f"{k}_bytes"] for k in ("weight", "kv_cache", "activation"))
    assert (memory["available_bytes"], memory["cgroup_limit_bytes"]) == (16_000_000_000, 32_000_000_000)
    assert memory["fits"] is True
    assert account(tmp_path, quant="bf16", context=8192).fits is False
    assert json.dumps(record, allow_nan=False)


def test_defaults(tmp_path: Path) -> None:
    result = account(write(tmp_path, LLAMA))
    assert (result.context, result.batch, result.quant, result.kv_dtype) == (4096, 1, "int8", "bf16")
    assert account(write(tmp_path, LLAMA, max_position_embeddings=1000)).context == 1000
    assert account(write(tmp_path, LLAMA), quant="f32").kv_dtype == "f32"
    assert account(tmp_path, quant="none").quant == "bf16"
    assert account(write(tmp_path, LLAMA, torch_dtype="float16"), quant="none").quant == "f32"
    assert pyengine.account is account
    assert pyengine.Account is type(result)


def test_limits_are_those_that_bench_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, LLAMA)
    monkeypatch.setattr(account_module.machine, "known_read", lambda threads: 17.0 if threads == 1 else None)
    kept = account(tmp_path, threads=1).machine
    assert (kept.read, kept.threads, kept.limits) == ("kept", 1, Limits(17.0, 100.0, 100.0))
    assert account(tmp_path, threads=2).machine.read == "measured"
    given = account(tmp_path, threads=1, limits=LIMITS).machine
    assert (given.read, given.limits) == ("given", LIMITS)


# --- weights beside the config


def test_weights_that_are_there_are_compared(tmp_path: Path, capsys: Any) -> None:
    folder = write_tiny_model(tmp_path, CONFIGS["llama"])
    result = account(folder)
    assert result.stored_parameters == result.parameters["total"]
    assert "the files hold exactly those" in str(result)
    (folder / "generation_config.json").write_text("not read")
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert main(["account", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "were not counted" in err
    assert err.count("\n") == 1
    assert "exactly" not in out


def test_a_count_that_differs_is_said(tmp_path: Path, capsys: Any) -> None:
    config = {**CONFIGS["llama"], "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
              "num_local_experts": 2, "num_experts_per_tok": 1,
              "quantization_config": {"quant_method": "awq"}}  # fmt: skip
    write(tmp_path, config)
    save_file({"a": np.zeros((3, 4), np.float32), "a.weight_scale_inv": np.zeros(7, np.float32)},
              tmp_path / "model.safetensors")  # fmt: skip
    assert main(["account", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["stored_parameters"] == 12
    assert "hold 12 parameters" in err
    assert main(["account", str(tmp_path), "--json", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_the_demo_model_agrees_with_its_files() -> None:
    from pyengine import demo

    try:
        folder = demo.demo_folder()
    except ModelNotFoundError as error:
        pytest.skip(f"the demo model is not in the cache and cannot be fetched: {error}")
    result = account(folder, quant="int8")
    assert result.stored_parameters == result.parameters["total"] == 134_515_008
    assert result.notes == ()
    with pyengine.load(folder, quant="int8", calibration=False) as engine:
        assert result.decode_bytes_per_token is not None
        assert result.decode_bytes_per_token["int8"] == engine.weight_bytes_per_token
        assert result.weight_bytes["int8"] == engine.weights.packed_bytes


# --- models that the engine refuses


def test_a_quantized_checkpoint_of_a_family_that_runs(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA, quantization_config={"quant_method": "awq", "bits": 4})
    found = read_anatomy(path)
    assert found.parameters() == read_anatomy(write(tmp_path, LLAMA, "plain.json")).parameters()
    assert found.not_run is not None
    assert "awq" in found.not_run
    assert found.notes == ()


def test_a_composite_model_is_its_text_decoder(tmp_path: Path) -> None:
    text = {k: v for k, v in REAL["Gemma-3-1B"].config.items() if k not in ("architectures", "torch_dtype")}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
             "text_config": text, "vision_config": {"hidden_size": 1152}}  # fmt: skip
    found = read_anatomy(write(tmp_path, outer))
    assert found.parameters()["total"] == REAL["Gemma-3-1B"].total
    assert (found.stored, found.architecture) == ("bfloat16", "Gemma3ForConditionalGeneration")
    assert any("text_config" in note and "not counted" in note for note in found.notes)


def test_keys_that_may_stand_for_weights_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, GPT_OSS, num_adapters=3, rms_norm_eps=1e-5, some_flag=False)
    assert read_anatomy(path).notes == ("keys that may stand for weights and were not read: 'num_adapters'",)
    with pytest.raises(UnsupportedModelError, match="num_adapters"):
        read_anatomy(path, strict=True)
    with pytest.raises(UnsupportedModelError, match="surprise"):
        read_anatomy(write(tmp_path, LLAMA, surprise=1), strict=True)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a family not known": ({"model_type": "mamba"}, UnsupportedModelError, "'model_type': 'mamba'"),
    "no family": ({}, UnsupportedModelError, "model_type"),
    "no layers": ({**MIXTRAL, "num_hidden_layers": 0}, ModelFormatError, "num_hidden_layers"),
    "no width": ({k: v for k, v in MIXTRAL.items() if k != "hidden_size"}, ModelFormatError, "hidden_size"),
    "text for a number": ({**LLAMA, "intermediate_size": "wide"}, ModelFormatError, "intermediate_size"),
    "more picked than there are": ({**MIXTRAL, "num_experts_per_tok": 9}, ModelFormatError, "num_experts_per_tok"),
    "heads that do not divide": ({**MIXTRAL, "num_key_value_heads": 5}, ModelFormatError, "num_key_value_heads"),
    "layer types": ({**MIXTRAL, "layer_types": ["full_attention"]}, ModelFormatError, "layer_types"),
    "mlp layers": ({**REAL["Qwen3-30B-A3B"].config, "mlp_only_layers": 3}, ModelFormatError, "mlp_only_layers"),
    "architectures": ({**BERT, "architectures": "Bert"}, ModelFormatError, "architectures"),
    "a switched window": (
        {**REAL["Qwen3-30B-A3B"].config, "use_sliding_window": True, "sliding_window": 4096},
        UnsupportedModelError,
        "use_sliding_window",
    ),
    "heads of BERT": ({**BERT, "num_attention_heads": 7}, ModelFormatError, "num_attention_heads"),
    "form of T5": ({**T5, "feed_forward_proj": 3}, ModelFormatError, "feed_forward_proj"),
    "two embeddings": ({**REAL["BART-base"].config, "tie_word_embeddings": False}, UnsupportedModelError, "tie_word"),
    "latent rank": ({**DEEPSEEK_V3, "kv_lora_rank": -1}, ModelFormatError, "kv_lora_rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_configs(name: str, tmp_path: Path, capsys: Any) -> None:
    config, error, text = REFUSED[name]
    path = write(tmp_path, config)
    assert_refused(lambda: read_anatomy(path), error, (text, "config.json"), tmp_path)  # type: ignore[arg-type]
    assert main(["account", str(tmp_path)]) == (4 if error is UnsupportedModelError else 3)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "argv",
    [
        ["--context", "0"], ["--context", "131073"], ["--batch", "0"], ["--batch", "many"], ["--quant", "int3"],
        ["-t", "0"], ["-t", "5000"], ["--kv-dtype", "int4"], ["--html", ""], ["--html", "no/such/folder/a.html"],
        ["--html", "."], ["--html", "/dev/null"],
    ],
)  # fmt: skip
def test_bad_options(argv: list[str], tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path, LLAMA)
    assert main(["account", str(path), *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pyengine: error: ")


def test_bad_files(tmp_path: Path, capsys: Any) -> None:
    assert main(["account", str(tmp_path)]) == 3
    (tmp_path / "bad.json").write_text("[1]")
    assert main(["account", str(tmp_path / "bad.json")]) == 3
    assert main(["account", str(tmp_path / "none")]) == 3
    assert main(["account", "why is the sky blue"]) == 2
    assert main(["account", "no-such-org-x/no-such-name", "--offline"]) == 3
    assert "hf download no-such-org-x/no-such-name config.json" in capsys.readouterr().err


@pytest.mark.parametrize("value", [True, 1.5, "8", -1, 1 << 40])
def test_python_arguments(value: Any, tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    for name in ("context", "batch"):
        with pytest.raises(RequestError, match=name):
            account(path, **{name: value})
    with pytest.raises(RequestError, match="limits"):
        account(path, limits=Limits(0.0, 1.0, 1.0))


# --- where a config is found


def test_only_the_config_of_a_hub_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(*args: Any, **kwargs: Any) -> str:
        asked.append((args, kwargs))
        return str(write(tmp_path, LLAMA))

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    assert account("org/name@v1").parameters["total"] == REAL["Llama-3.1-8B"].total
    assert asked == [(("org/name", "config.json"), {"revision": "v1", "cache_dir": tmp_path / "hub"})]
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    write(snapshot, MIXTRAL)  # no weights: enough
    assert hub.config_file("org/name", offline=True) == snapshot.resolve() / "config.json"
    assert len(asked) == 1

    def fail(*_: Any, **__: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ModelNotFoundError, match=r"no route.*hf download org/other config\.json"):
        hub.config_file("org/other")


# --- text


def test_explain_has_the_numbers(tmp_path: Path, capsys: Any) -> None:
    assert main(["account", str(write(tmp_path, LLAMA)), "--explain", "--context", "4096"]) == 0
    out, _ = capsys.readouterr()
    for text in (
        "why 14336: int(2/3 x 4d) = int(2/3 x 16384) = 10922; int(1.3 x 10922) = 14198; rounded up to a multiple of",
        "3 x d x width = 3 x 4096 x 14336 = 176,160,768",
        "14336 x 4096 = 58,720,256, x 32 = 1,879,048,192",
        "FFN share: 5,637,144,576 / 8,030,261,248 = 70.2 %",
        "2 x 32 heads x (128 + 128) x 4,096 keys x 32 layers = 2,147,483,648",
        "at a context of 21,504",
        "8 heads x (128 + 128) in bf16 = 4,096, x 32 layers = 131,072",
    ):
        assert text in out
    assert main(["account", str(tmp_path), "--explain", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "\n".join(record["explain"]) in out
    assert main(["account", str(tmp_path), "--json"]) == 0
    assert "explain" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("hidden", "width", "rule"),
    [
        (4096, 14336, "int(1.3 x 10922) = 14198; rounded up to a multiple of 1024 = 14336"),
        (8192, 28672, "int(1.3 x 21845) = 28398; rounded up to a multiple of 4096 = 28672"),
        (4096, 11008, "= 10922; rounded up to a multiple of 256 = 11008"),
        (2048, 8192, "int(1.5 x 5461) = 8191; rounded up to a multiple of 256 = 8192"),
        (16384, 53248, "int(1.2 x 43690) = 52428; rounded up to a multiple of 4096 = 53248"),
    ],
)
def test_the_width_rule(hidden: int, width: int, rule: str) -> None:
    assert any(line.endswith(rule) for line in width_lines(Ffn(hidden, width, 3), "llama"))
    assert not any("why" in line for line in width_lines(Ffn(hidden, width, 3), "qwen2") if width != 4 * hidden)
    assert not any("why" in line for line in width_lines(Ffn(hidden, width + 3, 3), "llama"))


@pytest.mark.parametrize(
    ("name", "ratios"),
    [("Llama-2-7B", ["2.69"]), ("Mistral-7B", ["3.50"]), ("Qwen3-8B", ["3.00"]), ("Qwen2.5-0.5B", ["5.43"]),
     ("Gemma-2-9B", ["4.00"]), ("DeepSeek-V3", ["2.57", "0.29"])],
)  # fmt: skip
def test_ratios_of_widths(name: str, ratios: list[str], tmp_path: Path) -> None:
    lines = account(write(tmp_path, REAL[name].config)).explain()
    assert re.findall(r"hidden_size d = .* = ([\d.]+) d$", "\n".join(lines), re.MULTILINE) == ratios


def test_every_family_explains_its_total(tmp_path: Path) -> None:
    for name, real in REAL.items():
        result = account(write(tmp_path, real.config), batch=3)
        lines = "\n".join([str(result), *result.explain()])
        assert f"= {real.total:,}\nFFN share" in lines, name
        assert ("does not run here" in lines) == (result.anatomy.not_run is not None), name
