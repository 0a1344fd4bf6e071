"""docs/adding_a_model.md adds a family that the tree does not have: its blocks run, and the logits are transformers'.

Regenerate the golden with tools/goldens/make.py --walk.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from account_configs import REAL
from compare import assert_close
from golden import walk
from golden.golden_cases import CONFIGS, POSITIONS, VOCAB_SIZE, Golden, build, load_golden
from golden.variants import VARIANTS

import pyengine
from pyengine.cli.main import main
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.families import FAMILIES
from pyengine.family import Family
from pyengine.reference import ReferenceCache, load_reference
from pyengine.reports.account_read import read_anatomy

BOUND, DIFFERS = 1e-4, 1e-2
CHUNKS = (None, 1, 7, 64)
MAX_LINES = 50
# config.json of Phi-3-mini-4k-instruct.
MINI_4K: dict[str, Any] = {
    **REAL["Phi-3-mini"].config,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
}
MINI_4K_V5: dict[str, Any] = {
    **{key: value for key, value in MINI_4K.items() if key not in ("rope_theta", "rope_scaling", "attention_bias")},
    "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
}
LONG = {"short_factor": [1.0] * 48, "long_factor": [1.5] * 48}


@pytest.fixture
def steps() -> Iterator[None]:
    with walk.applied():
        yield


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert walk.ARCHITECTURE not in FAMILIES, "a test left the family in the registry"


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load_golden(walk.GOLDEN)


@pytest.fixture
def folder(golden: Golden, tmp_path: Path, steps: None) -> Path:
    """The tiny checkpoint, checked against the golden's sha256; the steps are applied."""
    path = build(tmp_path, golden.config, golden.seed)
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert digest == golden.weights_sha256, "other weights than the golden's; run tools/goldens/make.py --walk"
    return path


def written(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_the_code_is_under_fifty_lines_and_for_files_that_are_there() -> None:
    blocks = walk.blocks()
    assert len(blocks) == walk.PAGE.read_text(encoding="utf-8").count("```python")
    assert all((walk.ROOT / file).is_file() for file, _ in blocks)
    lines = [line for _, code in blocks for line in code.splitlines() if line.strip()]
    assert len(lines) < MAX_LINES
    assert max(map(len, lines)) <= 120


def test_the_tree_does_not_have_the_family_and_has_it_only_while_the_steps_are_applied() -> None:
    before = walk.ARCHITECTURE in FAMILIES, walk.CASE in CONFIGS, len(VARIANTS)
    assert before[:2] == (False, False), f"{walk.PAGE}: the family is in the tree; expected one that is not"
    with walk.applied():
        assert walk.ARCHITECTURE in FAMILIES
        assert walk.CASE in CONFIGS
        assert any(case == walk.CASE for case, _, _ in VARIANTS)
    assert (walk.ARCHITECTURE in FAMILIES, walk.CASE in CONFIGS, len(VARIANTS)) == before


def test_without_the_steps_it_is_refused_by_name(
    golden: Golden, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with walk.applied():
        build(tmp_path, golden.config, golden.seed)
    with pytest.raises(UnsupportedModelError, match=r"config\.json: key 'architectures': 'Phi3ForCausalLM'; expected"):
        pyengine.load(tmp_path, quant="f32")
    assert main(["generate", str(tmp_path), "--raw", "-p", "Hi"]) == UnsupportedModelError.exit_code == 4
    assert "'Phi3ForCausalLM'" in capsys.readouterr().err


def test_the_golden_is_that_of_the_case(golden: Golden, steps: None) -> None:
    assert golden.config == CONFIGS[walk.CASE], "config changed since the golden was made"
    assert golden.logits.shape == (POSITIONS, VOCAB_SIZE)
    assert golden.logits.std() > 0.1


@pytest.mark.parametrize("chunk", CHUNKS)
def test_reference(chunk: int | None, golden: Golden, folder: Path) -> None:
    model, cache, step = load_reference(folder), ReferenceCache(), chunk or POSITIONS
    parts = [model.forward(golden.ids[at : at + step], at, cache) for at in range(0, POSITIONS, step)]
    assert_close(np.concatenate(parts), golden.logits, BOUND, f"chunk {chunk}")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_engine(chunk: int | None, golden: Golden, folder: Path) -> None:
    with pyengine.load(folder, quant="f32", threads=1) as engine:
        assert_close(engine.logits(golden.ids, chunk=chunk), golden.logits, BOUND, f"chunk {chunk}")


def test_wrong_variants_differ(golden: Golden, folder: Path) -> None:
    variants = [(what, make_wrong) for case, what, make_wrong in VARIANTS if case == walk.CASE]
    assert len(variants) > 1
    for what, make_wrong in variants:
        model = load_reference(folder)
        with pytest.MonkeyPatch.context() as monkeypatch:
            make_wrong(model, monkeypatch)
            difference = np.abs(model.forward(golden.ids) - golden.logits).max()
        assert difference > DIFFERS, f"{what}: only {difference:.2e} away from the right logits"


@pytest.mark.parametrize(
    ("field", "error", "says"),
    [
        ("window", UnsupportedModelError, "'sliding_window'"),
        ("rope", UnsupportedModelError, "'partial_rotary_factor'"),
        ("inert", UnsupportedModelError, "'original_max_position_embeddings'"),
        ("names", ModelFormatError, r"model\.layers\.0\.self_attn\.q_proj\.weight"),
    ],
)
def test_without_one_line_of_the_entry_the_error_names_it(
    field: str, error: type[Exception], says: str, folder: Path
) -> None:
    entry = replace(FAMILIES[walk.ARCHITECTURE], **{field: getattr(Family("", ""), field)})
    with patch.dict(FAMILIES, {walk.ARCHITECTURE: entry}), pytest.raises(error, match=says):
        pyengine.load(folder, quant="f32")


def test_no_line_of_the_entry_says_what_is_the_default(steps: None) -> None:
    entry, plain = FAMILIES[walk.ARCHITECTURE], Family("", "")
    (code,) = (code for file, code in walk.blocks() if file == "pyengine/families.py")
    for name in re.findall(r"^    (\w+)=", code, re.MULTILINE):
        assert getattr(entry, name) != getattr(plain, name), name
    differs = {field.name for field in fields(Family) if getattr(entry, field.name) != getattr(plain, field.name)}
    assert differs == {"name", "model_type", *re.findall(r"^    (\w+)=", code, re.MULTILINE)}


def test_a_file_with_biases_is_refused(tmp_path: Path, steps: None) -> None:
    with pytest.raises(UnsupportedModelError, match="'attention_bias': 'True'; expected false for phi3"):
        load_model_spec(written(tmp_path, MINI_4K, attention_bias=True))


def test_defaults_are_those_of_transformers(tmp_path: Path, steps: None) -> None:
    absent = ("rms_norm_eps", "max_position_embeddings", "sliding_window", "tie_word_embeddings")
    spec = load_model_spec(written(tmp_path, {key: MINI_4K[key] for key in MINI_4K if key not in absent}))
    assert (spec.norm.eps, spec.max_position_embeddings, spec.tie_word_embeddings) == (1e-5, 4096, False)
    assert {layer.attention.window for layer in spec.layers} == {None}


@pytest.mark.parametrize("config", [MINI_4K, MINI_4K_V5], ids=["as published", "as transformers 5 saves it"])
def test_a_real_config(config: dict[str, Any], tmp_path: Path, steps: None) -> None:
    written(tmp_path, config)
    spec, found = load_model_spec(tmp_path, strict=True), read_anatomy(tmp_path / "config.json")
    assert spec.warnings == ()
    assert {layer.attention.window for layer in spec.layers} == {2047}
    assert (found.parameters()["total"], found.not_run, found.notes) == (REAL["Phi-3-mini"].total, None, ())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("longrope", r"'rope_scaling\.rope_type': 'longrope'"),
        ("su", r"'rope_scaling\.rope_type': 'su'"),  # what older files call it; or yarn
        ("yarn", r"'rope_scaling\.short_factor'"),
    ],
)
def test_the_rope_of_the_long_models_is_refused_by_name(kind: str, says: str, tmp_path: Path, steps: None) -> None:
    written(tmp_path, MINI_4K, max_position_embeddings=131072, rope_scaling={"type": kind, **LONG})
    with pytest.raises(UnsupportedModelError, match=says):
        load_model_spec(tmp_path)
