"""Every mechanism done wrong must show: the goldens would otherwise prove nothing.

Each variant breaks one thing in the numpy reference (a weight, the spec, or one of its functions) and must be more than
1e-2 away from the stored logits of transformers, a hundred times the bound that the right model is held to.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import variants_moe
from golden.golden_cases import build, load_golden
from golden.variants import VARIANTS, Variant, fill, set_attention, set_rope, variant, with_attention

from pyengine import reference
from pyengine.reference import ReferenceModel, load_reference
from pyengine.spec import NormSpec

DIFFERS = 1e-2
HERE = Path(__file__).parent
assert variants_moe.MOE  # they register themselves

for part in ("q_proj", "k_proj", "v_proj"):
    fill(f"{part} bias dropped", f"{part}.bias", 0.0, "qwen2", "qwen2_window", "llama_biases", "qwen3_biases")
fill("o_proj bias dropped", "o_proj.bias", 0.0, "llama_biases", "qwen3_biases")
for part in ("gate_proj", "up_proj", "down_proj"):
    fill(f"{part} bias dropped", f"{part}.bias", 0.0, "llama_biases")
for part in ("input_layernorm", "post_attention_layernorm", "model.norm"):
    fill(f"{part} weight dropped", f"{part}.weight", 1.0, "llama", "mistral_window", "qwen2", "qwen3")
for part in ("q_norm", "k_norm"):
    fill(f"{part} weight dropped", f"{part}.weight", 1.0, "qwen3", "qwen3_window")

for part in ("post_self_attn_layernorm", "post_mlp_layernorm", "q_norm", "k_norm"):
    fill(f"{part} weight dropped", f"{part}.weight", 1.0, "olmo2")


@variant("norms before the branches", "olmo2")
def norms_before(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    layers = tuple(dataclasses.replace(layer, norm_before=True, norm_after=False) for layer in model.spec.layers)
    names = {"input_layernorm": "post_self_attn_layernorm", "post_attention_layernorm": "post_mlp_layernorm"}
    for layer in layers:
        p = f"model.layers.{layer.index}."
        moved = {f"{p}{new}.weight": model.weights[f"{p}{old}.weight"] for new, old in names.items()}
        model.weights = {**model.weights, **moved}
    model.spec = dataclasses.replace(model.spec, layers=layers)


@variant("q/k norm per head", "olmo2")
def norm_per_head(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    a = model.spec.layers[0].attention
    right = model.norm

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        if not name.endswith(("q_norm", "k_norm")):
            return right(x, name)
        weight = model.weight(name + ".weight").reshape(-1, a.head_dim)
        heads = x.reshape(len(x), -1, a.head_dim)
        return reference.rms_norm(heads, weight, model.spec.norm.eps).reshape(x.shape)

    model.norm = norm


set_attention("no q/k norm", "qwen3", "qwen3_biases", "olmo2", qk_norm=None)
set_attention("window one too wide", "mistral_window", window=9)
set_attention("window one too narrow", "mistral_window", "rope_linear_mistral", window=7)
set_attention("window ignored", "mistral_window", "qwen2_window", "qwen3_window", window=None)
set_attention("window in every layer", "qwen2_window", "qwen3_window", "qwen2_window_off", window=8)
set_attention("scale of another head_dim", "llama_head_dim", scale=16**-0.5)
set_attention("scale of hidden / heads", "mistral_nemo", scale=20**-0.5)
set_attention("scale of hidden / heads", "qwen3", scale=16**-0.5)

set_rope("theta 10000", "rope_default_v4", "rope_default_v5", "qwen2", theta=10000.0)
set_rope("theta 1e6", "llama_defaults", theta=1e6)
SCALED = ("rope_linear_v4", "rope_dynamic_v4", "rope_llama3_v4", "rope_yarn_v4", "rope_yarn_qwen2", "rope_yarn_qwen3")
set_rope("scaling ignored", *SCALED, rope_type="default", parameters=())
set_rope("linear for llama3", "rope_llama3_v4", rope_type="linear", parameters=(("factor", 8.0),))
set_rope("linear for yarn", "rope_yarn_v5", rope_type="linear", parameters=(("factor", 4.0),))
set_rope("linear for dynamic", "rope_dynamic_v5", rope_type="linear", parameters=(("factor", 4.0),))
set_rope("scaled inside the limit", "rope_dynamic_within", numbers={"original_max_position_embeddings": 16})
set_rope("llama3 zones moved", "rope_llama3_v5", numbers={"high_freq_factor": 16.0})
set_rope(
    "attention_factor ignored", "rope_yarn_attention_factor", "rope_yarn_attention_factor_1", drop=("attention_factor",)
)
set_rope("mscale ignored", "rope_yarn_mscale_equal", "rope_yarn_mscale_ratio", drop=("mscale", "mscale_all_dim"))
set_rope(
    "mscale without mscale_all_dim used", "rope_yarn_mscale_alone", numbers={"attention_factor": 0.05 * np.log(4) + 1}
)
set_rope("truncated", "rope_yarn_no_truncate", numbers={"truncate": 1.0})
set_rope("not truncated", "rope_yarn_v4", numbers={"truncate": 0.0})
set_rope("betas ignored", "rope_yarn_betas", numbers={"beta_fast": 32.0, "beta_slow": 1.0})
set_rope(
    "original_max_position_embeddings of another length",
    "rope_yarn_original_absent",
    numbers={"original_max_position_embeddings": 2048},
)


def set_model(what: str, *cases: str, **fields: Any) -> None:
    def make_wrong(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
        model.spec = dataclasses.replace(model.spec, **fields)

    variant(what, *cases)(make_wrong)


set_model("embedding not multiplied", "granite", embedding_scale=1.0)
set_model("residual not multiplied", "granite", residual_scale=1.0)
set_model("logits not divided", "granite", logits_scale=1.0)
set_model("logits multiplied", "granite", logits_scale=1 / 3)
set_attention("scale of head_dim", "granite", "granite_defaults", scale=16**-0.5)
set_rope("theta 10000", "smollm3", "smollm3_listed", theta=10000.0)
set_rope("q not scaled by position", "ministral3", drop=("llama_4_scaling_beta",))
set_rope("q scaled by the position itself", "ministral3", numbers={"original_max_position_embeddings": 1})


@variant("RoPE in every layer", "smollm3", "smollm3_listed")
def rope_everywhere(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    ropes = [layer.attention.rope for layer in model.spec.layers]
    assert None in ropes
    rope = next(rope for rope in ropes if rope is not None)
    model.spec = with_attention(model.spec, lambda _index, _attention: {"rope": rope})


@variant("no_rope_layers read the other way round", "smollm3", "smollm3_listed")
def rope_where_there_is_none(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    rope = next(layer.attention.rope for layer in model.spec.layers if layer.attention.rope is not None)
    model.spec = with_attention(model.spec, lambda _index, a: {"rope": rope if a.rope is None else None})


@variant("k scaled by position too", "ministral3")
def k_scaled(model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    from pyengine import rope

    right = rope.cos_sin

    def cos_sin(spec: Any, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        by = rope.q_scale(spec, start, stop)
        assert by is not None
        cos, sin = right(spec, start, stop)
        return cos * by[:, None], sin * by[:, None]

    patch.setattr(reference.rope, "cos_sin", cos_sin)


for part in (
    "input_layernorm",
    "post_attention_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "model.norm",
):
    fill(f"{part} weight dropped", f"{part}.weight", 0.0, "gemma2", "gemma3")
    fill(f"{part} weight dropped", f"{part}.weight", 1.0, "glm4")
for part in ("input_layernorm", "post_attention_layernorm", "model.norm"):
    fill(f"{part} bias dropped", f"{part}.bias", 0.0, "gpt2", "gpt2_gelu")
for part in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"):  # without RoPE k's bias moves all scores alike
    fill(f"{part} bias dropped", f"{part}.bias", 0.0, "gpt2_relu")
fill("positions dropped", "embed_positions.weight", 0.0, "gpt2", "gpt2_relu")
set_attention("attention softcap dropped", "gemma2", softcap=None)
set_attention("scale of head_dim", "gemma2", "gemma3", scale=32**-0.5)
set_attention("window ignored", "gemma2", "gemma3", "olmo3", window=None)
set_attention("window in every layer", "gemma2", "gemma3", "olmo3", window=8)
set_rope("the whole head rotated", "glm4", "glm4_no_bias", rotary_dim=16)
set_rope("one theta", "gemma3", theta=1000000.0)
set_rope("one theta", "gemma3_v5", theta=10000.0)
set_rope("scaling ignored", "gemma3_v5", "olmo3_yarn", rope_type="default", parameters=())


def set_spec(what: str, *cases: str, **fields: Any) -> None:
    def make_wrong(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
        changed = dataclasses.replace(model.spec, **fields)
        assert changed != model.spec, "the variant changes nothing"
        model.spec = changed

    variant(what, *cases)(make_wrong)


set_spec("final softcap dropped", "gemma2", logits_softcap=None)
set_spec("embedding not scaled", "gemma2", "gemma3", embedding_scale=1.0)
set_spec("weight for 1 + weight", "gemma2", "gemma3_v5", norm=NormSpec(1e-6))
set_spec("RMSNorm for LayerNorm", "gpt2", norm=NormSpec(1e-5, bias=True))


def set_activation(what: str, activation: str, *cases: str) -> None:
    def make_wrong(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
        layers = tuple(
            dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, activation=activation))
            for layer in model.spec.layers
        )
        model.spec = dataclasses.replace(model.spec, layers=layers)

    variant(what, *cases)(make_wrong)


set_activation("SiLU for GELU", "silu", "gemma2", "gemma3", "gpt2")
set_activation("GELU for ReLU", "gelu", "gpt2_relu")


@variant("interleaving ignored", "glm4", "glm4_no_bias")
def half_split_pairs(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    """Rows of q and k in the order on disk, where pairs stand side by side."""
    for name in [name for name in model.weights if "q_proj" in name or "k_proj" in name]:
        w = model.weights[name]
        heads = w.reshape(-1, 16, *w.shape[1:])
        stored = heads.copy()
        stored[:, 0:8:2], stored[:, 1:8:2] = heads[:, :4], heads[:, 4:8]
        model.weights = {**model.weights, name: stored.reshape(w.shape)}


@variant("interleaved RoPE", "llama", "mistral_window", "qwen2", "qwen3")
def interleaved_rope(_model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        out = x.copy()
        a, b, cos, sin = x[..., 0::2], x[..., 1::2], cos[:, None, :], sin[:, None, :]
        out[..., 0::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin
        return out

    patch.setattr(reference, "apply_rope", apply_rope)


@variant("half of the head rotated", "llama", "qwen3")
def half_rotated(_model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    right = reference.apply_rope
    patch.setattr(reference, "apply_rope", lambda x, cos, sin: right(x, cos[:, ::2], sin[:, ::2]))


@variant("q/k norm after RoPE", "qwen3", "qwen3_window")
def norm_after_rope(model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    """Norm and rotation swapped: q_norm and k_norm do nothing when asked for, and run on the rotated vectors."""
    right_norm, right_rope, waiting = model.norm, reference.apply_rope, []

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        if not name.endswith(("q_norm", "k_norm")):
            return right_norm(x, name)
        waiting.append(name)
        return x

    def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        return right_norm(right_rope(x, cos, sin), waiting.pop(0))

    patch.setattr(model, "norm", norm)
    patch.setattr(reference, "apply_rope", apply_rope)


@variant("query heads dealt to KV heads in turn", "llama", "llama_ratio_7", "qwen3")
def heads_in_turn(_model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    right = reference.attention

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: Any) -> np.ndarray:
        heads, kv_heads = q.shape[1], k.shape[1]
        order = np.argsort(np.arange(heads) % kv_heads, kind="stable")
        out = right(q[:, order], k, v, *rest).reshape(q.shape)
        return out[:, np.argsort(order)].reshape(len(q), -1)

    patch.setattr(reference, "attention", attention)


@variant("silu on up instead of gate", "llama", "mistral_window", "qwen2", "qwen3", "llama_biases")
def silu_on_up(model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    def gated(x: np.ndarray, spec: Any, prefix: str) -> np.ndarray:
        gate, up = (model.linear(x, prefix + name, spec.bias) for name in ("gate_proj", "up_proj"))
        return gate * reference.silu(up)

    patch.setattr(model, "activated", gated)


@variant("embedding used as the head of an untied model", "llama", "qwen2_untied", "mistral_window", "qwen3_biases")
def tied_head(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    assert not model.spec.tie_word_embeddings
    model.spec = dataclasses.replace(model.spec, tie_word_embeddings=True)


@variant("another head than the embedding in a tied model", "llama_tied", "qwen2", "qwen3")
def untied_head(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    assert model.spec.tie_word_embeddings
    assert "lm_head.weight" not in model.weights
    embedding = model.weights["model.embed_tokens.weight"]
    model.weights = {**model.weights, "lm_head.weight": np.roll(embedding, 1, axis=0)}
    model.spec = dataclasses.replace(model.spec, tie_word_embeddings=False)


@variant("eps of another config", "qwen3_eps")
def other_eps(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    model.spec = dataclasses.replace(model.spec, norm=NormSpec(1e-6))


@variant("window on the first layers instead of the last", "qwen2_window", "qwen3_window")
def window_reversed(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    model.spec = with_attention(model.spec, lambda index, _attention: {"window": 8 if index < 2 else None})


@variant("dynamic frequencies of the whole prompt", "rope_dynamic_v4")
def dynamic_of_the_whole_prompt(_model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    """Every position rotated with the last one's frequencies: prefill would then disagree with decode."""
    from pyengine import rope

    def cos_sin(spec: Any, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        inv_freq, factor = rope.inv_freq(spec, stop)
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * inv_freq
        return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)

    patch.setattr(reference.rope, "cos_sin", cos_sin)


# What users of other engines ran into, by the ids of robustness/case_ids.txt.
REPORTED = {
    "attention_factor ignored": "report-C05",
    "embedding used as the head of an untied model": "report-B31",
    "eps of another config": "report-C19",
    "interleaved RoPE": "report-C17",
    "mscale ignored": "report-C06",
    "no sigmoid on the shared expert's gate": "report-D17",
    "query heads dealt to KV heads in turn": "report-C20-C21",
    "raw logits as weights": "report-D05",
    "scale dropped": "report-D06",
    "scale of hidden / heads": "report-C14-C15",
    "scaling ignored": "report-C01",
    "sigmoid scores": "report-D09",
    "silu on up instead of gate": "report-A30",
    "softmax over the chosen alone": "report-D03-D04",
    "softmax scores": "report-D09",
    "theta 10000": "report-C10-C39",
    "weights normalised": "report-D07",
    "weights not normalised": "report-D01-D07",
    "weights with the selection bias in them": "report-D09",
    "window ignored": "report-C30",
    "window in every layer": "report-C31",
    "window on the first layers instead of the last": "report-C31",
    "window one too narrow": "report-C25",
    "window one too wide": "report-C23-C24",
}


def test_reported_variants_are_there() -> None:
    assert set(REPORTED) <= {what for _, what, _ in VARIANTS}


@pytest.mark.parametrize(
    ("case", "what", "make_wrong"),
    VARIANTS,
    ids=[f"{REPORTED[w]}-{c}: {w}" if w in REPORTED else f"{c}: {w}" for c, w, _ in VARIANTS],
)
def test_wrong_variant_differs(
    case: str, what: str, make_wrong: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = load_golden(HERE / f"tiny_{case}.npz")
    model = load_reference(build(tmp_path, golden.config, golden.seed))
    assert np.abs(model.forward(golden.ids) - golden.logits).max() <= 1e-4, "the right model must pass first"
    make_wrong(model, monkeypatch)
    difference = np.abs(model.forward(golden.ids) - golden.logits).max()
    assert difference > DIFFERS, f"{what}: only {difference:.2e} away from the right logits"
