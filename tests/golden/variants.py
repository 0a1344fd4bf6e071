"""Making a reference model wrong in one way: what registers a variant, and the usual kinds of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyengine.reference import ReferenceModel
from pyengine.spec import AttentionSpec, ModelSpec

Variant = Callable[[ReferenceModel, pytest.MonkeyPatch], None]
VARIANTS: list[tuple[str, str, Variant]] = []  # case, what is wrong, how it is made wrong


def variant(what: str, *cases: str) -> Callable[[Variant], Variant]:
    def register(function: Variant) -> Variant:
        VARIANTS.extend((case, what, function) for case in cases)
        return function

    return register


def with_attention(spec: ModelSpec, change: Callable[[int, AttentionSpec], dict[str, Any]]) -> ModelSpec:
    """The spec with the fields that `change(layer index, attention)` returns replaced in every layer's attention."""
    layers = tuple(
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, **change(layer.index, layer.attention))
        )
        for layer in spec.layers
    )
    return dataclasses.replace(spec, layers=layers)


def set_attention(what: str, *cases: str, **fields: Any) -> None:
    def make_wrong(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
        model.spec = with_attention(model.spec, lambda _index, _attention: fields)

    variant(what, *cases)(make_wrong)


def set_rope(what: str, *cases: str, drop: tuple[str, ...] = (), numbers: dict[str, Any] | None = None, **fields: Any):
    """RoPE with other fields; `numbers` are set in and `drop` taken from the parameters of the scaling type."""

    def change(_index: int, attention: AttentionSpec) -> dict[str, Any]:
        if attention.rope is None:
            return {}
        rope = dataclasses.replace(attention.rope, **fields)
        kept = {key: value for key, value in rope.parameters if key not in drop}
        return {"rope": dataclasses.replace(rope, parameters=tuple(sorted({**kept, **(numbers or {})}.items())))}

    def make_wrong(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
        changed = with_attention(model.spec, change)
        assert changed != model.spec, "the variant changes nothing"
        model.spec = changed

    variant(what, *cases)(make_wrong)


def fill(what: str, suffix: str, value: float, *cases: str) -> None:
    """Every weight whose name ends with `suffix` filled with one value: a dropped bias (0) or norm weight (1)."""

    def make_wrong(model: ReferenceModel, _patch: pytest.MonkeyPatch) -> None:
        names = [name for name in model.weights if name.endswith(suffix)]
        assert names, f"no weight ends with {suffix}"
        model.weights = {**model.weights, **{name: np.full_like(model.weights[name], value) for name in names}}

    variant(what, *cases)(make_wrong)
