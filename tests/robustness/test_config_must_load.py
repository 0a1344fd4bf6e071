"""Unusual config.json files that must load, of the Llama, Mistral, Qwen2 and Qwen3 kinds, and what each then means.

Ids are those of the case list, section D and the positives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_models import BASES, GONE, UNSUPPORTED, Changes, load, refused, scaling

# ---- what must load ---------------------------------------------------------------------------------------------


def test_malformed_d04_whole_float(make: Callable[..., Path]) -> None:
    assert load(make(hidden_size=48.0, num_hidden_layers=2.0))[0] == load(make())[0]


@pytest.mark.parametrize("base", BASES)
def test_unchanged_config_loads_without_a_word(base: str, make: Callable[..., Path]) -> None:
    spec, notes = load(make(base), strict=True)
    assert (spec.family, spec.warnings, notes) == (base, (), [])


def test_malformed_d03_model_type_alone(make: Callable[..., Path]) -> None:
    assert load(make("qwen2", architectures=GONE))[0] == load(make("qwen2"))[0]


SAME: dict[str, tuple[Changes, Changes]] = {
    "malformed-D20-both-equal": (
        scaling("linear", factor=2.0),
        {**scaling("linear", factor=2.0), "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e4}},
    ),
    "malformed-D20-empty-object": ({}, {"rope_scaling": {}, "rope_parameters": {"rope_type": "default"}}),
    "malformed-P11": ({}, {"rope_theta": GONE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "malformed-P11-theta-inside-old": (
        {**scaling("linear", factor=2.0), "rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rope_theta": GONE},
    ),
    "type-and-rope-type": (
        scaling("dynamic", factor=2.0),
        {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}},
    ),
    "theta-default": ({}, {"rope_theta": GONE}),
    "finetuned": (scaling("linear", factor=2.0), scaling("linear", factor=2.0, finetuned=True)),
    "swish": ({}, {"hidden_act": "swish"}),
    "null-means-default": ({}, {"rope_scaling": None, "head_dim": None, "attention_bias": None, "mlp_bias": False}),
}


@pytest.mark.parametrize("row", SAME)
def test_two_spellings_of_one_model(row: str, make: Callable[..., Path]) -> None:
    one, other = SAME[row]
    expected = load(make(**one))[0]
    spec, notes = load(make(**other))
    assert spec == expected
    assert (spec.warnings, notes) == ((), [])


WINDOWS: dict[str, tuple[str, Changes, list[int | None]]] = {
    "mistral": ("mistral", {}, [8, 8]),
    "mistral-absent": ("mistral", {"sliding_window": GONE}, [4096, 4096]),
    "malformed-D25-null": ("mistral", {"sliding_window": None}, [None, None]),
    "malformed-D27": ("qwen2", {"use_sliding_window": False, "sliding_window": 32768}, [None, None]),
    "malformed-D27-absent": ("qwen2", {"sliding_window": 32768}, [None, None]),
    "on": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, [8, 8]),
    "from-a-layer": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, [None, 8]),
    "default-28-layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, [None, None]),
    "layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        [8, None],
    ),
    "llama-null": ("llama", {"sliding_window": None, "use_sliding_window": False}, [None, None]),
}


@pytest.mark.parametrize("row", WINDOWS)
def test_window(row: str, make: Callable[..., Path]) -> None:
    kind, changes, windows = WINDOWS[row]
    spec, _ = load(make(kind, **changes))
    assert [layer.attention.window for layer in spec.layers] == windows


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), ([2, 3], None, (2, 3)), (2, [2, 5], (2, 5)), (GONE, 7, (7,)), (None, None, ()), ([4], 3, (4, 3))],
)
def test_malformed_p12_eos(config: Any, generation: Any, expected: tuple[int, ...], make: Callable[..., Path]) -> None:
    folder = make(eos_token_id=config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load(folder)[0].eos_token_ids == expected


def test_malformed_d31_unknown_dtype_is_one_warning(make: Callable[..., Path]) -> None:
    spec, _ = load(make(torch_dtype="float7"))
    assert len(spec.warnings) == 1
    assert "key 'torch_dtype': 'float7'" in spec.warnings[0]
    assert load(make(torch_dtype="bfloat16", dtype="float16"))[0].warnings == ()


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_malformed_d36_unknown_key_that_is_off_is_inert(value: Any, make: Callable[..., Path]) -> None:
    spec, _ = load(make(attn_logit_softcapping=value, some_new_thing=value))
    assert spec.warnings == ()


def test_malformed_d36_unknown_key_is_a_warning(make: Callable[..., Path]) -> None:
    folder = make(unsloth_fixed=True, _name_or_path="x", transformers_version="5.0.0")
    spec, _ = load(folder)
    assert len(spec.warnings) == 1
    assert "config.json: unknown key 'unsloth_fixed': 'True' is ignored" in spec.warnings[0]
    refused(folder, UNSUPPORTED, "key 'unsloth_fixed': 'True'", "strict", strict=True)


def test_malformed_d36_strict_refuses_unknown_keys_that_are_off(make: Callable[..., Path]) -> None:
    refused(make(some_new_thing=None), UNSUPPORTED, "key 'some_new_thing': 'None'", strict=True)


def test_malformed_d37_longest_context_allocates_nothing(make: Callable[..., Path]) -> None:
    assert load(make(max_position_embeddings=2**31 - 1))[0].max_context == 2**31 - 1


NAMES_CODE = {
    "auto_map": {"AutoModel": "modeling_evil.Evil"},
    "model_file": "evil.py",
    "custom_pipelines": {"evil": {"impl": "evil.Evil"}},
    "_attn_implementation_internal": "evil",
}


@pytest.mark.parametrize("name", NAMES_CODE)
def test_malformed_d40_code_is_named_and_never_run(name: str, make: Callable[..., Path]) -> None:
    folder = make(**{name: NAMES_CODE[name]})
    marker = folder / "imported"
    for module in ("modeling_evil", "evil"):
        (folder / f"{module}.py").write_text(f"open({str(marker)!r}, 'w')")
    before = set(sys.modules)
    spec, _ = load(folder)
    assert set(sys.modules) == before
    assert not marker.exists()
    assert len(spec.warnings) == 1
    assert f"key '{name}' is ignored; code that a model brings is never run" in spec.warnings[0]
