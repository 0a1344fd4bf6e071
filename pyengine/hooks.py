"""Stage 4, hooks: what a program shows of itself and leaves out, checked against the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from pyengine.errors import RequestError
from pyengine.spec import FFNSpec, LayerSpec, MLASpec, ModelSpec, MoESpec

TAPS = ("attn_norm", "attention", "ffn_norm", "act", "hidden")
LATENT_TAPS = ("q_latent",)  # what q_b_proj reads: layers of latent attention with a q_lora_rank have it
NEVER = -1e30  # added to a masked expert's score for the choice: below any other


@dataclass(frozen=True)
class Hooks:
    """What a program shows and leaves out.

    taps: (layer, name) pairs, name one of taps_of(layer). ffn_skip: layers whose FFN adds nothing. neuron_mask: layer
    -> indices of the FFN's neurons held at zero. expert_mask: layer -> experts that no token goes to: the router
    chooses among the others as if these had the lowest scores, and weights stay what it gives those it chose.
    """

    taps: tuple[tuple[int, str], ...] = ()
    ffn_skip: frozenset[int] = frozenset()
    neuron_mask: Mapping[int, Collection[int]] = field(default_factory=dict)
    expert_mask: Mapping[int, Collection[int]] = field(default_factory=dict)


def taps_of(layer: LayerSpec) -> tuple[str, ...]:
    """Names of what a program can show of a layer. "act" of experts is [T, top_k * intermediate], by slot."""
    a, f = layer.attention, layer.ffn
    names = TAPS + (LATENT_TAPS if isinstance(a, MLASpec) and a.q_lora_rank is not None else ())
    shared = isinstance(f, MoESpec) and f.shared is not None
    return names + (("routing",) if isinstance(f, MoESpec) else ()) + (("shared_act",) if shared else ())


def check_hooks(spec: ModelSpec, hooks: Hooks) -> None:
    """RequestError for a layer, tap or neuron that is not there, or a tap named twice."""
    layers = range(spec.num_layers)
    if len(set(hooks.taps)) < len(hooks.taps):
        raise RequestError(f"taps {hooks.taps!r}; expected each once")
    for layer, name in hooks.taps:
        names = taps_of(spec.layers[layer]) if layer in layers else TAPS
        if layer not in layers or name not in names:
            raise RequestError(
                f"tap {name!r} of layer {layer}; expected layers 0 to {len(layers) - 1}, {', '.join(names)}"
            )
        if layer in hooks.ffn_skip and name in ("ffn_norm", "act", "routing", "shared_act"):
            raise RequestError(f"tap {name!r} of layer {layer}, whose FFN is skipped; expected one that exists")
    for layer in [*hooks.ffn_skip, *hooks.neuron_mask, *hooks.expert_mask]:
        if layer not in layers:
            raise RequestError(f"layer {layer}; expected 0 to {len(layers) - 1}")
    check_masks(spec, hooks.neuron_mask, hooks.expert_mask)


def check_masks(
    spec: ModelSpec, neuron_mask: Mapping[int, Collection[int]], expert_mask: Mapping[int, Collection[int]]
) -> None:
    """RequestError for a neuron or expert that is not there, or experts without which a token could not be routed.

    The layers are there.
    """

    def check(what: str, layer: int, given: Collection[int], size: int) -> None:
        bad = [n for n in given if not isinstance(n, (int, np.integer)) or not 0 <= n < size]
        if bad:
            raise RequestError(f"{what} {bad[0]} of layer {layer}; expected 0 to {size - 1}")

    for layer, neurons in neuron_mask.items():
        ffn = spec.layers[layer].ffn
        if isinstance(ffn, MoESpec):
            raise RequestError(f"neurons of layer {layer}, which has experts; expected a layer of one FFN")
        check("neuron", layer, neurons, ffn.intermediate_size)
    for layer, experts in expert_mask.items():
        ffn = spec.layers[layer].ffn
        if isinstance(ffn, FFNSpec):
            raise RequestError(f"experts of layer {layer}, which has none; expected a layer of experts")
        router = ffn.router
        check("expert", layer, experts, router.num_experts)
        kept = np.ones(router.num_experts, np.int64)
        kept[list(experts)] = 0
        fewest = np.sort(kept.reshape(router.groups, -1).sum(axis=1))[: router.top_groups].sum()
        if fewest < router.top_k:
            where = f" in some {router.top_groups} of {router.groups} groups" if router.groups > 1 else ""
            raise RequestError(
                f"layer {layer} keeps {fewest} experts{where}; expected at least {router.top_k}, those of a token"
            )
