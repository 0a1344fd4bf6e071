"""The numpy reference against values worked out by hand and against the same formulas in naive loops."""

from __future__ import annotations

import dataclasses
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from safetensors.numpy import save_file

from pyengine import reference, rope
from pyengine.errors import RequestError
from pyengine.reference import ReferenceCache, ReferenceModel, load_reference
from pyengine.spec import AttentionSpec, FFNSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec

HIDDEN, INTER, VOCAB, DIM = 24, 40, 50, 8
EXACT = 1e-11  # float64 against float64


def make_spec(**attention: Any) -> ModelSpec:
    heads, kv_heads = attention.pop("num_heads", 3), attention.pop("num_kv_heads", 1)
    spec = AttentionSpec(heads, kv_heads, DIM, DIM**-0.5, RopeSpec("default", 10000.0, DIM), **attention)
    layers = tuple(LayerSpec(i, spec, FFNSpec(INTER)) for i in range(2))
    return ModelSpec("llama", "LlamaForCausalLM", HIDDEN, VOCAB, NormSpec(1e-5), 512, False, layers)


def make_weights(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    a = spec.layers[0].attention
    q, kv = a.num_heads * DIM, a.num_kv_heads * DIM
    shapes = {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
    shapes |= {"self_attn.o_proj": (HIDDEN, q), "mlp.gate_proj": (INTER, HIDDEN), "mlp.up_proj": (INTER, HIDDEN)}
    shapes |= {"mlp.down_proj": (HIDDEN, INTER)}
    w = {
        "model.embed_tokens.weight": rng.normal(size=(VOCAB, HIDDEN)),
        "lm_head.weight": rng.normal(size=(VOCAB, HIDDEN)),
    }
    w["model.norm.weight"] = rng.uniform(0.5, 1.5, HIDDEN)
    for layer in range(spec.num_layers):
        p = f"model.layers.{layer}."
        for name, shape in shapes.items():
            w[f"{p}{name}.weight"] = rng.normal(size=shape) / math.sqrt(shape[1])
            w[f"{p}{name}.bias"] = rng.normal(size=shape[0])
        for name, size in (
            ("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", DIM), ("self_attn.k_norm", DIM),
        ):  # fmt: skip
            w[f"{p}{name}.weight"] = rng.uniform(0.5, 1.5, size)
    return {name: value.astype(np.float32) for name, value in w.items()}


def model_of(dtype: Any = np.float64, seed: int = 0, **attention: Any) -> ReferenceModel:
    spec = make_spec(**attention)
    return ReferenceModel(spec, make_weights(spec, seed), dtype)


def some_ids(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, VOCAB, count)


# ---- functions


def test_silu_values_and_its_ends() -> None:
    x = np.array([1.0, -1.0, -1.278, 0.0, 1e4, -1e4])
    assert_close(reference.silu(x)[:3], np.array([0.731, -0.269, -0.278]), 5e-4)
    assert reference.silu(x)[3:].tolist() == [0.0, 1e4, 0.0]


def test_swiglu_by_hand() -> None:
    gate = np.array([[1.0, 0, 1], [0, 1, -1]]).T
    up = np.array([[1, 0.5, 0], [1, 0, 2]]).T
    down = np.array([[1.0, 0], [0, 1], [1, -1]]).T
    x = np.array([[1.0, 2.0]])
    assert_close(reference.swiglu_ffn(x, gate, up, down), np.array([[1.117, 1.957]]), 5e-4)
    swapped = reference.swiglu_ffn(x, up, gate, down)  # silu on the wrong half
    assert np.abs(swapped - [[1.117, 1.957]]).max() > 0.1


def test_rms_norm_by_hand() -> None:
    x = np.array([[3.0, 4.0]])  # mean square 12.5
    got = reference.rms_norm(x, np.array([2.0, 0.5]), 3.5)  # 12.5 + 3.5 = 16
    assert_close(got, np.array([[1.5, 0.5]]), 1e-15)
    assert reference.rms_norm(x.astype(np.float32), np.ones(2, np.float32), 1e-5).dtype == np.float32


def test_softmax_of_large_values() -> None:
    got = reference.softmax(np.array([[1000.0, 1000.0 + math.log(3)], [-np.inf, 0.0]]))
    assert_close(got, np.array([[0.25, 0.75], [0.0, 1.0]]), 1e-12)


def test_rope_rotates_the_pair_i_and_i_plus_half() -> None:
    x = np.arange(1.0, 7.0).reshape(1, 1, 6)
    angle = np.array([0.3, 1.1])
    got = reference.apply_rope(x, np.cos(angle)[None], np.sin(angle)[None])[0, 0]
    for i in range(2):  # as complex numbers
        rotated = complex(x[0, 0, i], x[0, 0, i + 2]) * np.exp(1j * angle[i])
        assert_close(got[[i, i + 2]], np.array([rotated.real, rotated.imag]), 1e-14)
    assert got[4:].tolist() == [5.0, 6.0]  # beyond rotary_dim


def naive_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, start: int, window: int | None) -> Any:
    tokens, heads, dim = q.shape
    out = np.zeros((tokens, heads * dim))
    for t in range(tokens):
        for h in range(heads):
            g = h * k.shape[1] // heads
            seen = [p for p in range(start + t + 1) if window is None or start + t - p < window]
            weights = np.array([math.exp(scale * float(q[t, h] @ k[p, g])) for p in seen])
            mixed = sum(w * v[p, g] for w, p in zip(weights / weights.sum(), seen, strict=True))
            out[t, h * dim : (h + 1) * dim] = mixed
    return out


@pytest.mark.parametrize("ratio", [1, 3, 7])
@pytest.mark.parametrize("window", [None, 1, 8, 500])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 17), (5, 12), (30, 1)])
def test_attention_against_loops(ratio: int, window: int | None, start: int, tokens: int) -> None:
    rng = np.random.default_rng(ratio)
    q = rng.normal(size=(tokens, 2 * ratio, 4))
    k, v = rng.normal(size=(2, start + tokens, 2, 4))
    got = reference.attention(q, k, v, 0.7, start, window)
    assert_close(got, naive_attention(q, k, v, 0.7, start, window), EXACT)
    if window == 8 and start + tokens > 8:
        assert np.abs(got - naive_attention(q, k, v, 0.7, start, 9)).max() > 1e-3
        assert np.abs(got - naive_attention(q, k, v, 0.7, start, 7)).max() > 1e-3


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9, 13])
@pytest.mark.parametrize("window", [None, 3])
def test_query_blocks_change_nothing(tokens: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(tokens)
    q, k, v = rng.normal(size=(tokens, 3, 4)), *rng.normal(size=(2, tokens + 6, 1, 4))
    whole = reference.attention(q, k, v, 0.5, 6, window)
    monkeypatch.setattr(reference, "QUERY_BLOCK", 4)
    assert_close(reference.attention(q, k, v, 0.5, 6, window), whole, EXACT)


# ---- the model

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many heads": {"num_heads": 7, "num_kv_heads": 7},
    "window": {"window": 8},
    "biases": {"qkv_bias": True, "o_bias": True},
    "qk norm": {"qk_norm": "head", "num_heads": 4, "num_kv_heads": 2},
}


def naive_logits(model: ReferenceModel, ids: np.ndarray) -> np.ndarray:
    """The decoder again, one token at a time and with the formulas written out."""
    spec, w = model.spec, {name: value.astype(np.float64) for name, value in model.weights.items()}
    a = spec.layers[0].attention

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / math.sqrt(float(x @ x) / len(x) + spec.norm.eps) * w[name + ".weight"]

    def project(x: np.ndarray, name: str, bias: bool) -> np.ndarray:
        return w[name + ".weight"] @ x + (w[name + ".bias"] if bias else 0)

    def heads(x: np.ndarray, count: int, name: str, position: int) -> np.ndarray:
        out = x.reshape(count, DIM).copy()
        for h in range(count):
            if a.qk_norm:
                out[h] = norm(out[h], name)
            for i in range(DIM // 2):
                angle = np.float32(position) * np.float32(10000.0 ** (-2 * i / DIM))
                turned = complex(out[h, i], out[h, i + DIM // 2]) * np.exp(1j * float(angle))
                out[h, i], out[h, i + DIM // 2] = turned.real, turned.imag
        return out

    x = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(spec.num_layers):
        p = f"model.layers.{layer}."
        s = p + "self_attn."
        normed = [norm(row, p + "input_layernorm") for row in x]
        q, k = (
            np.stack(
                [heads(project(r, s + n + "_proj", a.qkv_bias), c, s + n + "_norm", t) for t, r in enumerate(normed)]
            )
            for n, c in (("q", a.num_heads), ("k", a.num_kv_heads))
        )
        v = np.stack([project(r, s + "v_proj", a.qkv_bias).reshape(-1, DIM) for r in normed])
        mixed = naive_attention(q, k, v, a.scale, 0, a.window)
        for t in range(len(x)):
            x[t] = x[t] + project(mixed[t], s + "o_proj", a.o_bias)
            r = norm(x[t], p + "post_attention_layernorm")
            gate, up = project(r, p + "mlp.gate_proj", False), project(r, p + "mlp.up_proj", False)
            x[t] = x[t] + project(gate / (1 + np.exp(-gate)) * up, p + "mlp.down_proj", False)
    return np.stack([w["lm_head.weight"] @ norm(row, "model.norm") for row in x])


@pytest.mark.parametrize("name", VARIANTS)
def test_model_against_the_formulas_written_out(name: str) -> None:
    model, ids = model_of(**VARIANTS[name]), some_ids(21)
    expected = naive_logits(model, ids)
    assert expected.std() > 0.5
    # cos and sin are float32 in rope.py, so about 1e-7 of each rotated value
    assert_close(model.forward(ids), expected, 2e-5)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "plain"])
def test_each_mechanism_shows(name: str) -> None:
    model, ids = model_of(**VARIANTS[name]), some_ids(21)
    right = model.forward(ids)
    off = {"window": None, "qkv_bias": False, "o_bias": False, "qk_norm": None}
    if name == "many heads":  # the query heads read the KV heads in another order
        for layer in range(2):
            key = f"model.layers.{layer}.self_attn.k_proj.weight"
            model.weights = {**model.weights, key: np.roll(model.weights[key], DIM, axis=0)}
        assert np.abs(model.forward(ids) - right).max() > 1e-2
        return
    for field in set(off) & set(VARIANTS[name]):
        layers = tuple(
            dataclasses.replace(one, attention=dataclasses.replace(one.attention, **{field: off[field]}))
            for one in model.spec.layers
        )
        changed = ReferenceModel(dataclasses.replace(model.spec, layers=layers), model.weights, np.float64)
        assert np.abs(changed.forward(ids) - right).max() > 1e-2, field


@pytest.mark.parametrize("chunk", [1, 2, 7, 39])
@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_through_the_cache_equal_one_pass(name: str, chunk: int) -> None:
    model, ids = model_of(**VARIANTS[name]), some_ids(40)
    cache = ReferenceCache()
    parts = [model.forward(ids[at : at + chunk], at, cache) for at in range(0, 40, chunk)]
    assert cache.length == 40
    assert_close(np.concatenate(parts), model.forward(ids), EXACT)


def test_a_window_forgets_and_no_window_does_not() -> None:
    ids = some_ids(40)
    other = ids.copy()
    other[0] = (ids[0] + 1) % VOCAB
    windowed = model_of(window=8)  # two layers see 2 * 8 - 1 tokens
    a, b = windowed.forward(ids), windowed.forward(other)
    assert_close(a[15:], b[15:], EXACT)
    assert np.abs(a[14] - b[14]).max() > 1e-9
    full = model_of()
    assert np.abs(full.forward(ids)[39] - full.forward(other)[39]).max() > 1e-6


def test_tied_embedding_is_the_head() -> None:
    model, ids = model_of(), some_ids(5)
    untied = model.forward(ids)
    tied = ReferenceModel(dataclasses.replace(model.spec, tie_word_embeddings=True), model.weights, np.float64)
    weights = {**model.weights, "lm_head.weight": model.weights["model.embed_tokens.weight"]}
    assert_same_bits(tied.forward(ids), ReferenceModel(model.spec, weights, np.float64).forward(ids))
    assert np.abs(tied.forward(ids) - untied).max() > 0.1


def test_taps_are_the_values_on_the_way() -> None:
    model, ids, taps = model_of(), some_ids(9), {}
    logits = model.forward(ids, taps=taps)
    widths = {"attn_norm": HIDDEN, "attention": 3 * DIM, "ffn_norm": HIDDEN, "act": INTER, "hidden": HIDDEN}
    assert {name: [a.shape for a in values] for name, values in taps.items()} == {
        name: [(9, width)] * 2 for name, width in widths.items()
    }
    w = {name: value.astype(np.float64) for name, value in model.weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(2):
        p = f"model.layers.{layer}."
        assert_close(taps["attn_norm"][layer], reference.rms_norm(x, w[p + "input_layernorm.weight"], 1e-5), EXACT)
        x = x + taps["attention"][layer] @ w[p + "self_attn.o_proj.weight"].T
        normed = reference.rms_norm(x, w[p + "post_attention_layernorm.weight"], 1e-5)
        assert_close(taps["ffn_norm"][layer], normed, EXACT)
        x = x + taps["act"][layer] @ w[p + "mlp.down_proj.weight"].T
        assert_close(taps["hidden"][layer], x, EXACT)
    assert_close(reference.rms_norm(x, w["model.norm.weight"], 1e-5) @ w["lm_head.weight"].T, logits, EXACT)
    assert_same_bits(model.forward(ids), logits)  # tapping changed nothing


def test_ffn_skip_equals_a_down_proj_of_zeros() -> None:
    model, ids, taps = model_of(), some_ids(9), {}
    key = "model.layers.1.mlp.down_proj.weight"
    zeroed = ReferenceModel(model.spec, {**model.weights, key: np.zeros_like(model.weights[key])}, np.float64)
    skipped = model.forward(ids, taps=taps, ffn_skip={1})
    assert_close(skipped, zeroed.forward(ids), EXACT)
    assert np.abs(skipped - model.forward(ids)).max() > 1e-2
    assert [a.shape for a in taps["act"]] == [(9, INTER), (0, INTER)]
    assert [a.shape for a in taps["ffn_norm"]] == [(9, HIDDEN), (0, HIDDEN)]


def test_neuron_mask_equals_zeroed_columns_of_down_proj() -> None:
    model, ids, taps = model_of(), some_ids(9), {}
    neurons = np.array([0, 3, INTER - 1])
    key = "model.layers.0.mlp.down_proj.weight"
    columns = model.weights[key].copy()
    columns[:, neurons] = 0
    zeroed = ReferenceModel(model.spec, {**model.weights, key: columns}, np.float64)
    masked = model.forward(ids, taps=taps, neuron_mask={0: neurons})
    assert_close(masked, zeroed.forward(ids), EXACT)
    assert np.abs(masked - model.forward(ids)).max() > 1e-3
    assert not taps["act"][0][:, neurons].any()
    assert taps["act"][1][:, neurons].all()


def test_float32_and_float64_agree_and_keep_their_dtype() -> None:
    ids = some_ids(33)
    low, high = model_of(np.float32).forward(ids), model_of(np.float64).forward(ids)
    assert (low.dtype, high.dtype) == (np.float32, np.float64)
    assert_close(low, high, 2e-5 * float(np.abs(high).max()))
    assert np.abs(low - high).max() > 0


@pytest.mark.parametrize("ids", [[], [VOCAB], [-1], [[1, 2]]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[Any]) -> None:
    with pytest.raises(RequestError, match="token ids"):
        model_of().forward(ids)


def test_a_start_the_cache_does_not_match_is_refused() -> None:
    model, cache = model_of(), ReferenceCache()
    with pytest.raises(RequestError, match="start 3: expected 0"):
        model.forward([1], start=3)
    model.forward([1, 2], 0, cache)
    with pytest.raises(RequestError, match="start 0: expected 2"):
        model.forward([1], 0, cache)


@pytest.mark.parametrize("hooks", [{"ffn_skip": {2}}, {"neuron_mask": {5: [0]}}, {"neuron_mask": {0: [INTER]}},
                                   {"neuron_mask": {0: [-1]}}])  # fmt: skip
def test_hooks_for_what_is_not_there_are_refused(hooks: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="layer"):
        model_of().forward([1], **hooks)


def test_activations_and_norms_by_hand() -> None:
    x = np.array([-1.0, 0.0, 1.0, 2.0])
    assert_close(reference.gelu(x), np.array([-0.15865525, 0, 0.84134475, 1.95449974]), 1e-8)
    assert_close(reference.gelu_tanh(x), np.array([-0.15880801, 0, 0.84119199, 1.95459769]), 1e-8)
    assert_close(reference.relu(x), np.array([0, 0, 1.0, 2]), 0)
    assert_close(reference.silu(x), np.array([-0.26894142, 0, 0.73105858, 1.76159416]), 1e-8)
    assert_close(reference.capped(np.array([1e9, -2.0, 0]), 2.0), np.array([2, -2 * math.tanh(1), 0]), 1e-12)
    row = np.array([[1.0, 3.0]])  # mean 2, deviations -1 and 1
    normed = reference.layer_norm(row, np.array([2.0, 4.0]), np.array([10.0, 20.0]), 3.0)
    assert_close(normed, np.array([[9.0, 22.0]]), 1e-12)
    spec = NormSpec(3.0, "layer", bias=True, plus_one=True)
    assert_close(reference.normalize(row, spec, np.array([1.0, 3.0]), np.array([10.0, 20.0])), normed, 1e-12)


def test_two_matrix_ffn_by_hand() -> None:
    x, up, down = np.array([[1.0, 2]]), np.array([[1.0, 0], [0, 1], [1, -1]]), np.array([[1.0, 0, 1], [0, 1, -1]])
    assert_close(reference.ffn(x, up, down, None, None, "relu"), np.array([[1.0, 2.0]]), 0)
    biased = reference.ffn(x, up, down, np.array([0.0, 0, 3]), np.array([10.0, 20]), "relu")
    assert_close(biased, np.array([[13.0, 20.0]]), 0)


def test_attention_memory_grows_with_tokens_not_their_square() -> None:
    def peak(tokens: int) -> int:
        q, k, v = np.ones((tokens, 2, 4), np.float32), *np.ones((2, tokens, 1, 4), np.float32)
        tracemalloc.start()
        reference.attention(q, k, v, 1.0, 0)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(4096) < 6 * peak(1024)  # 16 times if scores were held whole


def test_load_reference_reads_a_folder(tmp_path: Path) -> None:
    spec = make_spec()
    weights = {
        n: w for n, w in make_weights(spec).items() if not n.endswith((".bias", "q_norm.weight", "k_norm.weight"))
    }
    save_file(weights, tmp_path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTER,
        "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": DIM,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, ids = load_reference(tmp_path), some_ids(12)
    assert_same_bits(loaded.forward(ids), ReferenceModel(spec, weights).forward(ids))
    assert load_reference(tmp_path, np.float64).forward(ids).dtype == np.float64


def test_rope_table_is_the_one_the_model_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong table must show: angles shifted by one position per pair change every logit but those of token 0."""
    model, ids = model_of(), some_ids(6)
    right, tables = model.forward(ids), rope.cos_sin
    monkeypatch.setattr(reference.rope, "cos_sin", lambda spec, start, stop: tables(spec, 2 * start, 2 * stop)[:])
    with pytest.raises(ValueError, match="broadcast"):
        model.forward(ids)

    def doubled(spec: RopeSpec, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = tables(spec, 2 * start, 2 * stop)
        return cos[::2], sin[::2]

    monkeypatch.setattr(reference.rope, "cos_sin", doubled)
    wrong = model.forward(ids)
    assert_close(wrong[0], right[0], EXACT)
    assert np.abs(wrong[1:] - right[1:]).max(axis=1).min() > 1e-3
