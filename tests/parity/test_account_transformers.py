"""account's parameters against transformers' own modules, built without memory: extra `[parity]`, else skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from account_configs import REAL

pytest.importorskip("torch", reason="this needs torch: pip install '.[parity]'")
pytest.importorskip("transformers", reason="this needs transformers: pip install '.[parity]'")

import torch
import transformers

from pyengine.reports.account_read import read_anatomy

NOT_WEIGHTS = ("embed_positions.weight",)  # Marian's sinusoids are parameters there
# transformers 5 ties the head of every T5, whatever config.json says; the published files hold two matrices.
UNTIED = ("T5-v1.1-base", "mT5-small")
# The same shapes, switched the other way: biases, ties, windows, widths.
CHANGES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "SmolLM3-3B": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "Granite-3.1-8B": {"attention_bias": True, "mlp_bias": True},
    "OLMo-2-7B": {"attention_bias": True, "num_key_value_heads": 8},
    "GLM-4-9B": {"attention_bias": True},
    "Gemma-2-9B": {"attention_bias": True, "tie_word_embeddings": False},
    "GPT-2": {"n_inner": 1000, "tie_word_embeddings": False},
    "Qwen1.5-MoE-A2.7B": {"qkv_bias": False, "decoder_sparse_step": 2, "mlp_only_layers": [1, 3]},
    "Qwen3-30B-A3B": {"attention_bias": True, "mlp_only_layers": [0]},
    "DeepSeek-V2-Lite": {"attention_bias": True, "q_lora_rank": 300, "mlp_bias": True},
    "DeepSeek-V3": {"attention_bias": True, "q_lora_rank": None, "n_shared_experts": 3},
    "GLM-4.5-Air": {"use_qk_norm": True, "attention_bias": False},
    "Qwen3-Next-80B-A3B": {"attention_bias": True, "linear_num_value_heads": 16, "decoder_sparse_step": 2},
    "T5-base": {"num_decoder_layers": 5, "d_kv": 32},
    "BERT-base": {"type_vocab_size": 3},
}


def count(config: dict[str, Any]) -> int:
    """Parameters of the model that transformers makes of a config, each once."""
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "torch_dtype")}
    built = transformers.AutoConfig.for_model(config["model_type"], **values)
    auto = transformers.AutoModelForCausalLM
    if config["model_type"] in ("t5", "mt5", "marian"):
        auto = transformers.AutoModelForSeq2SeqLM
    elif config["model_type"] in ("bert", "roberta", "bart"):
        auto = transformers.AutoModel
    with torch.device("meta"):
        model = auto.from_config(built)
    model.tie_weights()
    skipped = NOT_WEIGHTS if config["model_type"] == "marian" else ()
    found = {name: p.numel() for name, p in model.named_parameters() if not name.endswith(skipped)}
    buffers = [b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(found.values()) + sum(buffers)


def total(config: dict[str, Any], folder: Path) -> int:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return read_anatomy(path).parameters()["total"]


@pytest.mark.parametrize("name", [name for name in REAL if name not in UNTIED])
def test_the_total_is_that_of_the_modules(name: str, tmp_path: Path) -> None:
    assert total(REAL[name].config, tmp_path) == count(REAL[name].config)


@pytest.mark.parametrize("name", CHANGES)
def test_and_with_other_switches(name: str, tmp_path: Path) -> None:
    config = {**REAL[name].config, **CHANGES[name]}
    assert total(config, tmp_path) == count(config)


@pytest.mark.parametrize("name", UNTIED)
def test_an_untied_head_is_one_embedding_more(name: str, tmp_path: Path) -> None:
    config = REAL[name].config
    assert total(config, tmp_path) == count(config) + config["vocab_size"] * config["d_model"]
