"""Wrong variants of mixtures of experts and of latent attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from golden.variants import fill, set_attention, variant

from pyengine import reference_moe
from pyengine.reference import ReferenceModel
from pyengine.spec import MoESpec


def set_router(what: str, *cases: str, **fields: Any) -> None:
    """Every layer's router with other fields."""

    def make_wrong(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
        layers = tuple(
            dataclasses.replace(
                layer, ffn=dataclasses.replace(layer.ffn, router=dataclasses.replace(layer.ffn.router, **fields))
            )
            if isinstance(layer.ffn, MoESpec)
            else layer
            for layer in model.spec.layers
        )
        assert layers != model.spec.layers, "the variant changes nothing"
        model.spec = dataclasses.replace(model.spec, layers=layers)

    variant(what, *cases)(make_wrong)


MOE = ("mixtral", "qwen2_moe", "qwen2_moe_steps", "qwen3_moe", "olmoe")
set_router("one expert less", "mixtral", "qwen3_moe", "olmoe", top_k=1)
set_router("one expert more", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", top_k=4)
set_router("weights not normalised", "mixtral", "qwen3_moe", "qwen2_moe_normalised", normalise=False)
set_router("softmax over the chosen alone", "qwen2_moe", "qwen3_moe_not_normalised", "olmoe", normalise=True)
set_router("sigmoid scores", *MOE, scoring="sigmoid")
set_router("weights scaled", *MOE, scale=1.5)
set_router("in groups", "qwen3_moe", "olmoe", groups=4, top_groups=2)
fill("no gate of the shared expert (its sigmoid is 1/2)", "shared_expert_gate.weight", 0.0, "qwen2_moe")
set_attention("no q/k norm", "olmoe", "qwen3_moe", qk_norm=None)


@variant("no sigmoid on the shared expert's gate", "qwen2_moe", "qwen2_moe_steps")
def plain_gate(_model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    right = reference_moe.scores_of
    patch.setattr(reference_moe, "scores_of", lambda x, kind: x if kind == "sigmoid" else right(x, kind))


@variant("no shared expert", "qwen2_moe", "qwen2_moe_steps", "deepseek_v3_experts", "deepseek_v2_experts")
def no_shared(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    layers = tuple(
        dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, shared=None))
        if isinstance(layer.ffn, MoESpec)
        else layer
        for layer in model.spec.layers
    )
    model.spec = dataclasses.replace(model.spec, layers=layers)


@variant("raw logits as weights", *MOE)
def raw_logits(_model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference_moe, "scores_of", lambda x, _kind: x)


@variant("the neighbour's experts", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
def other_experts(_model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    right = reference_moe.route

    def route(logits: np.ndarray, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
        ids, weights = right(logits, *rest)
        return (ids + 1) % logits.shape[1], weights

    patch.setattr(reference_moe, "route", route)


MLA = ("deepseek_v3", "deepseek_v3_mscale", "deepseek_v2", "deepseek_v2_yarn")
set_attention("eps of the config for the latents", "deepseek_v3", "deepseek_v2", latent_eps=0.05)
set_attention("scale without mscale squared", "deepseek_v3_mscale", "deepseek_v2_yarn", scale=24**-0.5)
set_attention("scale of the first part of q", *MLA, scale=16**-0.5)
set_attention("scale of the cache's row", "deepseek_v3", scale=40**-0.5)
for part in ("q_a_proj", "kv_a_proj_with_mqa"):
    fill(f"{part} bias dropped", f"{part}.bias", 0.0, "deepseek_v3_biases")
for part in ("gate_proj", "up_proj", "down_proj"):
    fill(f"{part} bias of shared experts dropped", f"shared_expert.{part}.bias", 0.0, "deepseek_v2_biases")
fill("norm of q's latent dropped", "q_a_layernorm.weight", 1.0, "deepseek_v3")
fill("norm of the latent dropped", "kv_a_layernorm.weight", 1.0, "deepseek_v3", "deepseek_v2")


ROUTED = ("deepseek_v3_experts", "deepseek_v3_not_normalised", "deepseek_v2_experts", "deepseek_v2_groups")
THIRD = ROUTED[:2]
set_router("no groups", *THIRD, "deepseek_v2_groups", groups=1, top_groups=1)
set_router("one group more", *THIRD, "deepseek_v2_groups", top_groups=3)
set_router("a group's best expert for its two best", *THIRD, group_score="max")
set_router("softmax scores", *THIRD, scoring="softmax")
set_router("sigmoid scores", *ROUTED[2:], scoring="sigmoid")
set_router("scale dropped", *THIRD, "deepseek_v2_groups", scale=1.0)
set_router("weights not normalised", "deepseek_v3_experts", normalise=False)
set_router("weights normalised", *ROUTED[1:], normalise=True)
set_router("no selection bias", *THIRD, selection_bias=False)


@variant("weights with the selection bias in them", *THIRD)
def biased_weights(_model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    right = reference_moe.scores_of
    bias = {}

    def route(logits: np.ndarray, spec: Any, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bias["now"] = given
        return right_route(logits, dataclasses.replace(spec, selection_bias=False), np.zeros_like(given))

    right_route = reference_moe.route
    patch.setattr(reference_moe, "scores_of", lambda x, kind: right(x, kind) + bias["now"])
    patch.setattr(reference_moe, "route", route)


@variant("experts in the first layer too", *ROUTED)
def first_layer_routed(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    layers = model.spec.layers
    for name in [name for name in model.weights if name.startswith("model.layers.1.mlp.")]:
        model.weights = {**model.weights, name.replace("layers.1.", "layers.0."): model.weights[name]}
    model.spec = dataclasses.replace(
        model.spec, layers=(dataclasses.replace(layers[0], ffn=layers[1].ffn), *layers[1:])
    )


@variant("rotary pairs of latent attention taken as half-split", *MLA)
def latent_half_split(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    """The rows as they are on disk, rotated as if they were half-split."""
    from pyengine.tensors import row_orders

    for layer in model.spec.layers:
        for name, rows in row_orders(layer).items():
            full = f"model.layers.{layer.index}.{name}"
            if full in model.weights:
                model.weights = {**model.weights, full: model.weights[full][np.argsort(rows)]}


@variant("values before keys in kv_b_proj", *MLA)
def values_first(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
    for layer in model.spec.layers:
        full = f"model.layers.{layer.index}.self_attn.kv_b_proj.weight"
        heads = model.weights[full].reshape(layer.attention.num_heads, 2, 16, -1)
        model.weights = {**model.weights, full: heads[:, ::-1].reshape(model.weights[full].shape)}
