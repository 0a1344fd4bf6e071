"""What test_quantized_goldens.py holds of a quantized engine: its values, its experts, its logits (derived there)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from golden.packed_model import group_bound, group_error, packed_matrices, value_bound
from kernel_cases import Array, Unpacked, quantize_activations

import pyengine
from pyengine import reference_moe
from pyengine.hooks import Hooks
from pyengine.reference import ReferenceModel, load_reference
from pyengine.spec import ModelSpec, MoESpec, RouterSpec

EXACT = 1e-4  # of float64 against float32, as in test_goldens.py
DRAWS = 3
TOKEN = 1 + np.sqrt(2 * np.log(1e9))
FLOAT_INPUTS = ("mlp.gate", "mlp.shared_expert_gate")  # of the reference's matrices: not rounded for them

Weights = dict[str, Array]
Routes = list[Array]  # by layer with experts: ids [T, top_k]


# ---- the reference, with errors put in -------------------------------------------------------------------------------


class Disturbed(ReferenceModel):
    """A float64 reference whose quantized inputs are each half a step off, at random; `draw` None: as they are."""

    draw: np.random.Generator | None = None

    def forward(self, *arguments: Any, **options: Any) -> Array:
        self.inputs: dict[int, tuple[Array, Array]] = {}  # q, k and v, gate and up share one rounding
        return super().forward(*arguments, **options)

    def linear(self, x: Array, name: str, bias: bool = False) -> Array:
        if self.draw is not None and not name.endswith(FLOAT_INPUTS):
            if id(x) not in self.inputs:
                _, scale, apart = quantize_activations(x)
                half = np.where(apart != 0, 0, scale / 2)
                self.inputs[id(x)] = x, x + half * self.draw.choice([-1.0, 1.0], x.shape)
            x = self.inputs[id(x)][1]
        return super().linear(x, name, bias)


@contextmanager
def experts_given(routes: Routes) -> Iterator[None]:
    """Routers give these experts, in order of layers, with the weights that their own scores give those."""
    waiting, right = iter(routes), reference_moe.route

    def route(logits: Array, router: RouterSpec, _bias: Array | None = None) -> tuple[Array, Array]:
        ids = next(waiting)
        scores = reference_moe.scores_of(logits, router.scoring)
        weights = np.take_along_axis(scores, ids, axis=-1)
        if router.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + router.eps)
        return ids, weights * router.scale

    reference_moe.route = route
    try:
        yield
    finally:
        reference_moe.route = right


def forward(
    spec: ModelSpec, weights: Weights, ids: list[int], routes: Routes, draw: np.random.Generator | None = None
) -> Array:
    model = Disturbed(spec, weights, np.float64)
    model.draw = draw
    with experts_given(routes):
        return model.forward(ids)


def root_mean_square(x: Array, *axes: int) -> Array:
    return np.asarray(np.sqrt(np.square(x).mean(axis=axes or None)))


def hold(error: Array, draws: list[Array], what: str) -> None:
    """error [T, V] against what errors of whole half steps did, by whole and by token."""
    noise = np.stack(draws)
    sizes, tokens = root_mean_square(error, 1), EXACT + TOKEN * root_mean_square(noise, 0, 2)
    assert_close(root_mean_square(error), np.zeros(()), EXACT + float(root_mean_square(noise)), f"{what}: all logits")
    assert_close(sizes, np.zeros(len(sizes)), tokens, f"{what}: a token's logits")


# ---- what is held ----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """An engine's logits [T, V] of a golden's ids, and what its routers read and chose, by layer."""

    spec: ModelSpec
    packed: dict[str, Unpacked]
    exact: Weights  # what is not packed, as the engine holds it
    logits: Array
    taps: dict[tuple[int, str], Array]

    @classmethod
    def of(cls, folder: Path, ids: list[int], load: dict[str, Any], change: Callable[[Any], None] | None) -> Run:
        with pyengine.load(folder, kv_dtype="f32", threads=1, cache=False, **load) as engine:
            if change is not None:
                change(engine)
            moe = [layer.index for layer in engine.spec.layers if isinstance(layer.ffn, MoESpec)]
            taps: dict[tuple[int, str], Array] = {}
            keys = tuple((layer, tap) for layer in moe for tap in ("ffn_norm", "routing"))
            logits = engine.logits(ids, program=engine.build(hooks=Hooks(taps=keys)), taps=taps)
            tensors = {f"model.layers.{n}.mlp.gate.weight": engine.weights.layers[n].router for n in moe}
            exact = {name: engine.backend.tensor_dequantize(tensor) for name, tensor in tensors.items()}
            return cls(engine.spec, packed_matrices(engine), exact, logits, taps)

    @property
    def routes(self) -> Routes:
        return [
            self.taps[layer.index, "routing"][:, layer.ffn.router.top_k :].astype(np.int64)
            for layer in self.spec.layers
            if isinstance(layer.ffn, MoESpec)
        ]


def check_values(run: Run, stored: Weights) -> None:
    """Every packed value, every group, and the routers."""
    matrices = {name for name, w in stored.items() if w.ndim == 2} - set(run.exact)
    rows = {"model.embed_positions.weight"} | (set() if run.spec.tie_word_embeddings else {"model.embed_tokens.weight"})
    gates = {name for name in matrices if name.endswith("shared_expert_gate.weight")}
    assert set(run.packed) == matrices - rows - gates
    for name, w in run.packed.items():
        assert_close(w.values, stored[name], value_bound(w, stored[name]), name)
        if w.group:
            error, bound = group_error(w, stored[name]), group_bound(w, stored[name])
            assert_close(error, np.zeros(error.shape), bound, f"{name}: groups")
    for name, w in run.exact.items():
        assert_same_bits(w, stored[name].astype(np.float32), name)


def check_routes(run: Run, stored: Weights) -> None:
    """The experts are those of float64 from the same input, and so are their weights to float32."""
    for layer in run.spec.layers:
        if not isinstance(layer.ffn, MoESpec):
            continue
        router, p = layer.ffn.router, f"model.layers.{layer.index}.mlp.gate."
        x, chosen = (run.taps[layer.index, tap].astype(np.float64) for tap in ("ffn_norm", "routing"))
        bias = stored[p + "e_score_correction_bias"] if router.selection_bias else None
        ids, weights = reference_moe.route(x @ stored[p + "weight"].T, router, bias)
        assert_same_bits(chosen[:, router.top_k :], ids.astype(np.float64), f"experts of layer {layer.index}")
        assert_close(chosen[:, : router.top_k], weights, 1e-5 * router.scale, f"their weights in layer {layer.index}")


def check_logits(run: Run, stored: Weights, ids: list[int], golden: Array | None) -> None:
    """golden: transformers' logits [T, V] of the stored weights; None where there are none."""
    routes, packed = run.routes, {**stored, **{name: w.values for name, w in run.packed.items()}}
    base, quantized = forward(run.spec, stored, ids, routes), forward(run.spec, packed, ids, routes)
    own, same = own_forward(run.spec, stored, ids, routes) if routes else (base, len(ids))
    if golden is not None:
        assert_close(own, golden.astype(np.float64), EXACT, "the reference against transformers")
    if same:
        assert_close(base[:same], own[:same], EXACT, "the reference with the experts given")
    draws = [np.random.default_rng(seed) for seed in range(DRAWS)]
    arithmetic = [forward(run.spec, packed, ids, routes, draw) - quantized for draw in draws]
    hold(run.logits - quantized, arithmetic, "the engine against its own values")
    rounding = []
    for draw in draws:
        moved = {
            name: stored[name] + value_bound(w, stored[name]) * draw.choice([-1.0, 1.0], w.q.shape)
            for name, w in run.packed.items()
        }
        rounding.append(forward(run.spec, {**stored, **moved}, ids, routes) - base)
    hold(quantized - base, rounding, "values as packed against the checkpoint's")


def own_forward(spec: ModelSpec, stored: Weights, ids: list[int], routes: Routes) -> tuple[Array, int]:
    """The reference's logits with the experts that it chooses itself, and the first token with others than `routes`."""
    seen: Routes = []
    right = reference_moe.route

    def route(*arguments: Any) -> tuple[Array, Array]:
        chosen = right(*arguments)
        seen.append(np.sort(chosen[0], axis=1))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_moe, "route", route)
        logits = ReferenceModel(spec, stored, np.float64).forward(ids)
    differs = np.zeros(len(ids), bool)
    for own, given in zip(seen, routes, strict=True):
        differs |= (own != np.sort(given, axis=1)).any(axis=1)
    return logits, int(differs.argmax()) if differs.any() else len(ids)


def float64(folder: Path) -> Weights:
    return {name: w.astype(np.float64) for name, w in load_reference(folder).weights.items()}
