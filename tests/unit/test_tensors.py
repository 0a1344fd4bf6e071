"""Names on disk: whatever a family calls, joins or transposes, what is read is what the canonical names mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_same_bits
from golden.golden_cases import CONFIGS

import pyengine
from pyengine import reference
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.families import FAMILIES
from pyengine.family import Names, RopeForm
from pyengine.reference import load_reference
from pyengine.tensors import CanonicalTensors, NamesOnDisk, check_tensors

CONFIG = CONFIGS["llama_biases"]
IDS = [1, 5, 40, 2, 66, 7]
Tensors = dict[str, np.ndarray]

ODD = Names(
    prefixes=("outer.model.", "transformer.", ""),
    renames={"embed_tokens": "wte", "norm": "ln_f", "layers": "h", "self_attn.o_proj": "attn.c_proj"},
    fused={
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.both": ("mlp.gate_proj", "mlp.up_proj"),
    },
    transposed=True,
    skipped=("vision.", "outer.projector."),
)


def stored(tensors: Tensors, names: Names, prefix: str, head: str) -> Tensors:
    """What a family with `names` would have written."""
    out: Tensors = {}
    for name, value in tensors.items():
        if name == "lm_head.weight":
            out[head + name] = value
            continue
        parts = name.split(".")
        in_layer = parts[1] == "layers"
        inner = parts[3:-1] if in_layer else parts[1:-1]
        start = f"{prefix}{names.renames.get('layers', 'layers')}.{parts[2]}." if in_layer else prefix
        module, leaf = ".".join(inner), parts[-1]
        fused = next((disk for disk, of in names.fused.items() if module in of), None)
        key = f"{start}{fused or names.renames.get(module, module)}.{leaf}"
        out[key] = value if key not in out else np.concatenate([out[key], value])
    if names.transposed:
        matrices = [key for key, value in out.items() if value.ndim == 2 and ".h." in "." + key]
        out |= {key: np.ascontiguousarray(out[key].T) for key in matrices}
    return out


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny model as the family of names `ODD` would, after `change`."""

    def write(prefix: str = "transformer.", head: str = "", change: Callable[[Tensors], object] = lambda _: 0) -> Path:
        family = FAMILIES["LlamaForCausalLM"]
        monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", replace(family, names=ODD))
        tensors = stored(tiny_tensors(CONFIG, seed=3), ODD, prefix, head)
        change(tensors)
        return write_tiny_model(tmp_path / "odd", CONFIG, tensors=tensors)

    return write


@pytest.mark.parametrize(("prefix", "head"), [("transformer.", ""), ("", ""), ("outer.model.", "outer.")])
@pytest.mark.parametrize("quant", ["f32", "int4"])
def test_the_same_model_under_other_names(odd: Callable[..., Path], prefix: str, head: str, quant: str) -> None:
    folder = odd(prefix, head)
    plain = write_tiny_model(folder.parent / "plain", CONFIG, seed=3)
    with pyengine.load(folder, quant=quant, threads=1) as one:
        logits = one.logits(IDS)
        assert one.notes == ["no tokenizer: scales are searched without calibration"] * (quant == "int4")
    found = load_reference(folder).forward(IDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "LlamaForCausalLM", replace(FAMILIES["LlamaForCausalLM"], names=Names()))
        with pyengine.load(plain, quant=quant, threads=1) as other:
            assert_same_bits(logits, other.logits(IDS), "logits")
        assert_same_bits(found, load_reference(plain).forward(IDS), "reference")


def test_every_read_is_of_the_canonical_tensor(odd: Callable[..., Path]) -> None:
    folder, expected = odd(), tiny_tensors(CONFIG, seed=3)
    with Checkpoint.open(folder) as checkpoint:
        tensors = CanonicalTensors(checkpoint, load_model_spec(folder))
        assert set(tensors.tensors) == set(expected)
        for name, value in expected.items():
            assert tensors.tensors[name].shape == value.shape
            assert_same_bits(tensors.read(name), value, name)
            assert_same_bits(tensors.read_float32(name), value, name)
            assert tensors.read(name).flags.c_contiguous
            disk = checkpoint.read(tensors.tensors[name].name).reshape(-1)
            for flat in (0, value.size // 2, value.size - 1):
                assert disk[tensors.flat_on_disk(name, flat)] == value.reshape(-1)[flat], (name, flat)
            if value.ndim == 2:
                assert_same_bits(tensors.read_range(name, 1, 5), value[1:5], name)
                assert_same_bits(tensors.read_rows(name, np.array([3, 0])), value[[3, 0]], name)


def test_numbers_in_renamed_modules_stay() -> None:
    names = NamesOnDisk(Names(renames={"mlp.experts.{}.gate_proj": "moe.experts.{}.w1"}), {})
    assert names.of("model.layers.3.mlp.experts.12.gate_proj.weight") == "model.layers.3.moe.experts.12.w1.weight"
    assert names.of("model.layers.3.mlp.experts.12.up_proj.weight") == "model.layers.3.mlp.experts.12.up_proj.weight"


def test_parts_may_also_lie_apart(odd: Callable[..., Path]) -> None:
    """A file that holds q, k and v (or gate and up) as tensors of their own is read as it is."""

    def split(tensors: Tensors) -> None:
        both = tensors.pop("transformer.h.1.mlp.both.weight")
        half = both.shape[1] // 2
        for name, part in (("gate_proj", both[:, :half]), ("up_proj", both[:, half:])):
            tensors[f"transformer.h.1.mlp.{name}.weight"] = np.ascontiguousarray(part)

    folder = odd(change=split)
    with Checkpoint.open(folder) as checkpoint:
        spec = load_model_spec(folder)
        assert check_tensors(spec, checkpoint.tensors, folder) == []
        found = CanonicalTensors(checkpoint, spec).read("model.layers.1.mlp.up_proj.weight")
        assert_same_bits(found, tiny_tensors(CONFIG, seed=3)["model.layers.1.mlp.up_proj.weight"])


def account(folder: Path) -> list[str]:
    with Checkpoint.open(folder) as checkpoint:
        return check_tensors(load_model_spec(folder), checkpoint.tensors, folder)


def test_notes_and_errors_name_what_is_on_disk(odd: Callable[..., Path]) -> None:
    ones = np.ones((3, 3), np.float32)
    assert account(odd(change=lambda t: t.update({"vision.a": ones, "vision.b": ones, "mtp.x": ones}))) == [
        "2 tensors 'vision.*' are not used",
        "tensor 'mtp.x' is not used",
    ]
    fused = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(ModelFormatError, match=rf"1 tensors are missing: '{fused}'; expected"):
        account(odd(change=lambda t: t.pop(fused)))
    with pytest.raises(ModelFormatError, match=rf"tensor '{fused}': shape \[3, 3\]; expected \[64, 128\]"):
        account(odd(change=lambda t: t.update({fused: ones})))
    with pytest.raises(ModelFormatError, match=r"layers past num_hidden_layers 2: 'transformer.h.2.x'"):
        account(odd(change=lambda t: t.update({"transformer.h.2.x": ones})))
    with pytest.raises(UnsupportedModelError, match=r"a llama model does not have: 'transformer.layers.0.x'"):
        account(odd(change=lambda t: t.update({"transformer.layers.0.x": ones})))


@pytest.mark.parametrize("name", ["transformer.h.1.attn.c_attn.weight", "transformer.h.0.mlp.both.bias"])
def test_a_nan_is_named_where_it_is_on_disk(odd: Callable[..., Path], name: str) -> None:
    places = []

    def spoil(tensors: Tensors) -> None:
        flat = tensors[name].reshape(-1)
        places.append(flat.size - 5)
        flat[-5] = np.nan

    folder = odd(change=spoil)
    with pytest.raises(ModelFormatError, match=rf"tensor '{name}': nan at flat index {{}}".format(places[0])):
        pyengine.load(folder, quant="f32", threads=1)


def test_zeros_are_named_as_on_disk(odd: Callable[..., Path]) -> None:
    name = "transformer.h.1.attn.c_proj.weight"
    folder = odd(change=lambda t: t[name].fill(0))
    with pyengine.load(folder, quant="f32", threads=1) as one:
        assert [text.split(": ")[1] for text in one.spec.warnings] == [f"tensor '{name}' is all zero"]


INTERLEAVED = CONFIGS["qwen3_biases"]  # biases and norms of q and k have their order too


@pytest.fixture
def interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["Qwen3ForCausalLM"]
    monkeypatch.setitem(FAMILIES, "Qwen3ForCausalLM", replace(family, rope=RopeForm(partial=0.25, interleaved=True)))


def rotated_in_pairs(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [T, heads, head_dim], dimensions 2 i and 2 i + 1 rotated by angle i, the rest as it is."""
    out, width = x.copy(), 2 * cos.shape[1]
    a, b, cos, sin = x[..., 0:width:2], x[..., 1:width:2], cos[:, None, :], sin[:, None, :]
    out[..., 0:width:2], out[..., 1:width:2] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.usefixtures("interleaved")
def test_interleaved_pairs_are_read_as_half_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the tensors as stored, rotated pair by pair; a part of the head alone is rotated."""
    folder = write_tiny_model(tmp_path, INTERLEAVED, seed=5)
    model = load_reference(folder, np.float64)
    assert model.spec.layers[0].attention.rope.rotary_dim == 8
    logits = model.forward(IDS)
    model.weights = tiny_tensors(INTERLEAVED, seed=5)
    assert np.abs(model.forward(IDS) - logits).max() > 0.1
    monkeypatch.setattr(reference, "apply_rope", rotated_in_pairs)
    np.testing.assert_allclose(model.forward(IDS), logits, rtol=0, atol=1e-9)
    with pyengine.load(folder, quant="f32", threads=1) as engine:
        np.testing.assert_allclose(engine.logits(IDS), logits, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("interleaved")
def test_interleaved_rows_keep_their_place_in_errors(tmp_path: Path) -> None:
    tensors = tiny_tensors(INTERLEAVED)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][33, 7] = np.nan
    folder = write_tiny_model(tmp_path, INTERLEAVED, tensors=tensors)
    with pytest.raises(ModelFormatError, match=f"tensor '{name}': nan at flat index {33 * 96 + 7};"):
        pyengine.load(folder, quant="f32", threads=1)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("text", ["ministral3", "mistral_window"])
def test_report_b29_the_decoder_of_a_model_of_several_parts(text: str, prefix: str, tmp_path: Path) -> None:
    inner = CONFIGS[text]
    tensors = tiny_tensors(inner)
    head = "lm_head.weight" if prefix.startswith("model.") else "language_model.lm_head.weight"
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {key: value for key, value in inner.items() if key != "architectures"},
        "vision_config": {"model_type": "pixtral", "hidden_size": 8},
        "image_token_index": 10,
        "vision_feature_layer": -1,
    }
    stored = {prefix + name.removeprefix("model."): value for name, value in tensors.items() if name[:3] != "lm_"}
    vision = "model.vision_tower." if prefix.startswith("model.") else "vision_tower."
    stored |= {head: tensors["lm_head.weight"], vision + "ln_pre.weight": np.ones(8, np.float32)}
    whole = write_tiny_model(tmp_path / "whole", outer, tensors=stored)
    alone = write_tiny_model(tmp_path / "alone", inner, tensors=tensors)
    with pyengine.load(whole, quant="f32", threads=1) as one, pyengine.load(alone, quant="f32", threads=1) as other:
        assert_same_bits(one.logits(IDS), other.logits(IDS), "the decoder alone")
        assert any(vision in note for note in one.notes)
        assert one.spec.architecture == outer["architectures"][0]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"text_config": None}, ModelFormatError, "key 'text_config': 'None'; expected an object"),
        ({"text_config": {"model_type": "qwen2"}}, UnsupportedModelError, "text_config: key 'architectures' is miss"),
        ({"text_config": {"hidden_size": 0}}, ModelFormatError, "text_config: key 'hidden_size': '0'"),
        ({"tie_word_embeddings": True}, ModelFormatError, "key 'tie_word_embeddings': 'True'; expected 'False'"),
        ({"quantization_config": {"quant_method": "x"}}, UnsupportedModelError, "key 'quantization_config': 'x'"),
        ({"vision_scale": 2.0}, UnsupportedModelError, "key 'vision_scale'"),
    ],
)
def test_a_model_of_several_parts_is_refused_by_name(
    changes: dict[str, object], error: type[Exception], text: str, tmp_path: Path
) -> None:
    inner = {**CONFIGS["ministral3"]}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": inner}
    del inner["architectures"]
    nested = changes.get("text_config")
    changed = {**config, **changes, **({"text_config": {**inner, **nested}} if isinstance(nested, dict) else {})}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(error, match=re.escape(text)):
        load_model_spec(tmp_path)


TIED = {**CONFIGS["llama_tied"]}


@pytest.mark.parametrize("dtype", ["same", "float16"])
def test_a_head_beside_a_tied_embedding_that_equals_it_is_not_used(dtype: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(TIED)
    embedding = tensors["model.embed_tokens.weight"].astype(np.float16).astype(np.float32)
    stored = {**tensors, "model.embed_tokens.weight": embedding}
    alone = write_tiny_model(tmp_path / "alone", TIED, tensors=stored)
    head = embedding if dtype == "same" else embedding.astype(np.float16)
    both = write_tiny_model(tmp_path / "both", TIED, tensors={**stored, "lm_head.weight": head})
    with pyengine.load(both, quant="f32", threads=1) as one, pyengine.load(alone, quant="f32", threads=1) as other:
        assert_same_bits(one.logits(IDS), other.logits(IDS), "tied")
        assert one.notes == ["tensor 'lm_head.weight' is not used"]
        assert one.spec.warnings == ()
        assert one.weights.lm_head == one.weights.embed


@pytest.mark.parametrize("row", [0, 50, 96])
def test_a_head_that_differs_from_a_tied_embedding_is_the_head(
    row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyengine.tensors.COMPARED_WEIGHTS", 20 * TIED["hidden_size"])
    tensors = tiny_tensors(TIED)
    head = tensors["model.embed_tokens.weight"].copy()
    head[row, 3] += 1
    stored = {**tensors, "lm_head.weight": head}
    both = write_tiny_model(tmp_path / "both", TIED, tensors=stored)
    untied = write_tiny_model(tmp_path / "untied", {**TIED, "tie_word_embeddings": False}, tensors=stored)
    with pyengine.load(both, quant="int8", threads=1) as one, pyengine.load(untied, quant="int8", threads=1) as other:
        assert_same_bits(one.logits(IDS), other.logits(IDS), "untied")
        assert len(one.spec.warnings) == 1
        assert "tensor 'lm_head.weight' is not the embedding" in one.spec.warnings[0]
        assert not any("lm_head" in note for note in one.notes)
    assert not load_reference(both).spec.tie_word_embeddings


def test_a_tied_model_may_be_stored_with_its_head_alone(tmp_path: Path) -> None:
    tensors = tiny_tensors(TIED)
    alone = write_tiny_model(tmp_path / "alone", TIED, tensors=tensors)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    head = write_tiny_model(tmp_path / "head", TIED, tensors=tensors)
    with pyengine.load(head, quant="f32", threads=1) as one, pyengine.load(alone, quant="f32", threads=1) as other:
        assert_same_bits(one.logits(IDS), other.logits(IDS), "tied")
        assert one.notes == []
    del tensors["lm_head.weight"]
    neither = write_tiny_model(tmp_path / "neither", TIED, tensors=tensors)
    with pytest.raises(ModelFormatError, match=r"missing: 'model\.embed_tokens\.weight'"):
        pyengine.load(neither)


@pytest.mark.parametrize(
    ("outer", "inner", "ids"),
    [
        ({"eos_token_id": [1, 7]}, {}, (1, 7)),
        ({}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": 5}, {"eos_token_id": 3}, (5, 3)),
    ],
)
def test_ends_of_a_model_of_several_parts(
    outer: dict[str, object], inner: dict[str, object], ids: tuple[int, ...], tmp_path: Path
) -> None:
    text = {
        key: value for key, value in CONFIGS["mistral_window"].items() if key not in ("eos_token_id", "architectures")
    }
    text = {**text, "bos_token_id": None, **inner}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "bos_token_id": 4,
        "text_config": text,
        **outer,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_model_spec(tmp_path)
    assert (spec.bos_token_id, spec.eos_token_ids) == (4, ids)


VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 8},
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "vision_token_id": 94,
}


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_qwen_with_vision_reads_text_as_qwen2_does(form: str, tmp_path: Path) -> None:
    """Of released files the first, saved by transformers 5 the second; both were compared with transformers 5.24."""
    inner = {key: value for key, value in CONFIGS["qwen2_untied"].items() if key not in ("architectures", "rope_theta")}
    tensors = tiny_tensors(CONFIGS["qwen2_untied"])
    if form == "flat":
        rope = {"rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
        config = {**inner, **rope, **VL}
        stored = {**tensors, "visual.patch_embed.proj.weight": np.ones((4, 3), np.float32)}
    else:
        rope = {"rope_type": "default", "type": "mrope", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]}
        text = {**inner, "model_type": "qwen2_5_vl_text", "rope_parameters": rope}
        config = {**VL, "text_config": text, "tie_word_embeddings": False}
        prefix = "model.language_model."
        stored = {
            prefix + name.removeprefix("model.") if name[:5] == "model" else name: v for name, v in tensors.items()
        }
        stored["model.visual.patch_embed.proj.weight"] = np.ones((4, 3), np.float32)
    whole = write_tiny_model(tmp_path / "whole", config, tensors=stored)
    alone = write_tiny_model(tmp_path / "alone", CONFIGS["qwen2_untied"], tensors=tensors)
    with pyengine.load(whole, quant="f32", threads=1) as one, pyengine.load(alone, quant="f32", threads=1) as other:
        assert_same_bits(one.logits(IDS), other.logits(IDS), "the decoder alone")
        assert any("visual.*' are not used" in note for note in one.notes)
        assert one.spec.warnings == ()
        assert one.spec.eos_token_ids == other.spec.eos_token_ids


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}}, ModelFormatError, "8 in all"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8]}}, ModelFormatError, "three whole numbers"),
        ({"rope_scaling": {"type": "mrope", "interleaved": True}}, UnsupportedModelError, "rope_scaling.interleaved"),
        ({"vision_scale": 2.0}, UnsupportedModelError, "key 'vision_scale'"),
        ({"text_config": 3}, ModelFormatError, "key 'text_config': '3'"),
    ],
)
def test_qwen_with_vision_is_refused_by_name(
    changes: dict[str, object], error: type[Exception], says: str, tmp_path: Path
) -> None:
    inner = {key: value for key, value in CONFIGS["qwen2_untied"].items() if key != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps({**inner, **VL, **changes}))
    with pytest.raises(error, match=re.escape(says)):
        load_model_spec(tmp_path)
