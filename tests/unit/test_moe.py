"""Models with experts: files, keys, calibration, counters, and what a token's bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_close, assert_same_bits
from config_models import BAD, UNSUPPORTED, refused
from golden.golden_cases import CONFIGS
from tiny_moe import stacked

import pyengine
from pyengine.calibrate import FEW, Calibrator, mean_square
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.config_moe import ffn_specs
from pyengine.config_values import ConfigValues
from pyengine.families import FAMILIES
from pyengine.family import Experts
from pyengine.hooks import Hooks
from pyengine.pack_layer import read_expert, read_layer
from pyengine.quantize import choose
from pyengine.reference import load_reference
from pyengine.routing import entropy
from pyengine.spec import FFNSpec, MoESpec, RouterSpec
from pyengine.tensors import CanonicalTensors
from pyengine.weights import load_weights

IDS = np.random.default_rng(3).integers(0, 97, 60).tolist()


@pytest.mark.parametrize("case", ["qwen2_moe_steps", "qwen3_moe", "olmoe"])
def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path, case: str) -> None:
    tensors = tiny_tensors(CONFIGS[case], seed=4)
    write_tiny_model(tmp_path / "apart", CONFIGS[case], tensors=tensors)
    write_tiny_model(tmp_path / "stacked", CONFIGS[case], tensors=stacked(tensors))
    for quant in ("f32", "int4"):
        with (
            pyengine.load(tmp_path / "apart", quant=quant) as one,
            pyengine.load(tmp_path / "stacked", quant=quant) as other,
        ):
            assert_same_bits(other.logits(IDS), one.logits(IDS), quant)


def test_a_stack_of_too_few_experts_is_refused(tmp_path: Path) -> None:
    tensors = stacked(tiny_tensors(CONFIGS["qwen3_moe"]))
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name][:7].copy()
    write_tiny_model(tmp_path, CONFIGS["qwen3_moe"], tensors=tensors)
    refused(tmp_path, BAD, name, "shape [7, 96, 48]", "expected [8, 96, 48]")


def test_report_a27_an_expert_that_is_missing_or_not_finite_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIGS["mixtral"])
    name = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 7] = np.nan
    write_tiny_model(tmp_path / "nan", CONFIGS["mixtral"], tensors=tensors)
    with pytest.raises(pyengine.ModelFormatError, match=r"experts\.5\.w3\.weight': nan at flat index 199"):
        pyengine.load(tmp_path / "nan", quant="int8", calibration=False)
    del tensors[name]
    write_tiny_model(tmp_path / "gone", CONFIGS["mixtral"], tensors=tensors)
    refused(tmp_path / "gone", BAD, "1 tensors are missing", name)


KEYS: list[tuple[str, dict[str, Any], Any, tuple[str, ...]]] = [
    ("qwen3_moe", {"num_experts_per_tok": 0}, BAD, ("num_experts_per_tok", "1 to 8")),
    ("qwen3_moe", {"num_experts_per_tok": 9}, BAD, ("num_experts_per_tok", "1 to 8")),
    ("qwen3_moe", {"num_experts": 0}, BAD, ("num_experts", "1 to 4096")),
    ("qwen3_moe", {"num_experts": 10**9}, BAD, ("num_experts", "1 to 4096")),
    ("qwen3_moe", {"moe_intermediate_size": 0}, BAD, ("moe_intermediate_size",)),
    ("qwen3_moe", {"norm_topk_prob": 1}, BAD, ("norm_topk_prob", "true or false")),
    ("qwen3_moe", {"mlp_only_layers": [True]}, BAD, ("mlp_only_layers", "a list of layers")),
    ("qwen3_moe", {"decoder_sparse_step": 0}, BAD, ("decoder_sparse_step",)),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, UNSUPPORTED, ("use_sliding_window",)),
    ("qwen2_moe", {"qkv_bias": False}, UNSUPPORTED, ("qkv_bias",)),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, BAD, ("shared_expert_intermediate_size",)),
    ("mixtral", {"num_local_experts": 0}, BAD, ("num_local_experts",)),
    ("mixtral", {"norm_topk_prob": False}, UNSUPPORTED, ("norm_topk_prob", "true")),
    ("olmoe", {"clip_qkv": 8.0}, UNSUPPORTED, ("clip_qkv",)),
    ("llama", {"num_experts": 8}, UNSUPPORTED, ("num_experts",)),
]


@pytest.mark.parametrize(("case", "changes", "error", "texts"), KEYS)
def test_malformed_d22_report_d21_bad_keys_are_refused_by_name(
    tmp_path: Path, case: str, changes: dict[str, Any], error: Any, texts: tuple[str, ...]
) -> None:
    write_tiny_model(tmp_path, {**CONFIGS[case], **changes}, tensors=tiny_tensors(CONFIGS[case]))
    refused(tmp_path, error, "config.json", *texts)


def test_layers_without_experts_are_where_the_keys_say() -> None:
    config = ConfigValues(Path("config.json"), CONFIGS["qwen2_moe_steps"], {})
    experts = Experts(("num_experts",), "moe_intermediate_size", normalise=None, steps=True)
    kinds = [isinstance(f, MoESpec) for f in ffn_specs(config, experts, FFNSpec(172), 4)]
    assert kinds == [False, True, False, False]
    first = Experts(("num_experts",), "moe_intermediate_size", normalise=None, first_dense_key="first_k_dense_replace")
    values = ConfigValues(Path("config.json"), {**CONFIGS["qwen2_moe"], "first_k_dense_replace": 3}, {})
    assert [isinstance(f, MoESpec) for f in ffn_specs(values, first, FFNSpec(172), 4)] == [False] * 3 + [True]


V2, V3 = (FAMILIES[f"Deepseek{name}ForCausalLM"].experts for name in ("V2", "V3"))
DEEPSEEK = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip


def test_grouped_routing_of_a_config() -> None:
    (moe,) = ffn_specs(ConfigValues(Path("config.json"), DEEPSEEK, {}), V3, FFNSpec(18432), 1)
    router = RouterSpec(256, 8, "sigmoid", True, 1e-20, 2.5, 8, 4, "top2_sum", True)
    assert moe == MoESpec(router, FFNSpec(2048), FFNSpec(2048))
    older = {**DEEPSEEK, "topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    (moe,) = ffn_specs(ConfigValues(Path("config.json"), older, {}), V2, FFNSpec(18432), 1)
    assert isinstance(moe, MoESpec)
    assert moe.router == RouterSpec(256, 8, "softmax", False, 0.0, 2.5, 8, 4, "max", False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_group": 7}, "n_group"),
        ({"n_group": 256, "topk_group": 8}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"n_group": 64, "topk_group": 1}, "topk_group"),
        ({"topk_method": "other"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_malformed_d24_report_d16_groups_that_cannot_be_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(pyengine.PyEngineError, match=f"key '{text}'"):
        ffn_specs(ConfigValues(Path("config.json"), {**DEEPSEEK, **changes}, {}), V3, FFNSpec(18432), 1)


def test_report_a25_d11_the_router_stays_float_and_a_token_reads_its_experts_alone(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS["qwen3_moe"])
    with pyengine.load(tmp_path, quant="int4", calibration=False) as one:
        w, weights = one.weights.layers[0], one.weights
        router = one.backend.tensor_dequantize(w.router)
        assert_same_bits(router, tiny_tensors(CONFIGS["qwen3_moe"])["model.layers.0.mlp.gate.weight"], "router")

        def size(*ids: int) -> int:
            return sum(one.backend.tensor_size(tensor) - 64 for tensor in ids)

        layer = size(w.qkv, w.o, w.router) + size(w.gate_up, w.down) // 8 * 3
        assert weights.bytes_per_token == 2 * layer + weights.head_bytes
        assert 4 < one.bits_per_weight < 9  # rows of 48 and 96 columns: scales and padding weigh


@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "qwen3_moe_dense_layer"])
def test_calibration_sees_what_the_reference_computes(tmp_path: Path, case: str) -> None:
    write_tiny_model(tmp_path, CONFIGS[case], seed=5)
    taps: dict[str, list[np.ndarray]] = {}
    reference = load_reference(tmp_path)
    reference.forward(IDS, taps=taps)
    spec, fewer, enough = load_model_spec(tmp_path), 0, 0
    with Checkpoint.open(tmp_path) as checkpoint:
        observe = Calibrator(checkpoint, spec, IDS, threads=2, isa="")
        source = CanonicalTensors(checkpoint, spec)
        for layer in spec.layers:
            seen = observe(layer, read_layer(source, layer))
            assert ("shared_down" in seen) == (case == "qwen2_moe")
            if not isinstance(layer.ffn, MoESpec):
                continue
            assert "down" not in seen
            x, name = taps["ffn_norm"][layer.index], f"model.layers.{layer.index}.mlp.gate"
            ids = np.argsort(-reference.linear(x, name), axis=1)[:, : layer.ffn.router.top_k]
            acts = taps["act"][layer.index].reshape(len(x), layer.ffn.router.top_k, -1)
            for e in range(layer.ffn.router.num_experts):
                importance = observe.expert(layer, e, read_expert(source, layer, e))
                mine = ids == e
                few = mine.sum() < FEW
                fewer, enough = fewer + few, enough + (not few)
                expected = mean_square(x if few else x[mine.any(axis=1)])
                assert_close(importance["gate_up"], expected, 1e-4 * float(expected.max()), f"gate and up of {e}")
                assert ("down" in importance) == (not few)
                if not few:
                    expected = mean_square(acts[mine])
                    assert_close(importance["down"], expected, 1e-4 * float(expected.max()), f"down of {e}")
            hidden = taps["hidden"][layer.index]
            assert_close(observe.hidden, hidden, 1e-5 * float(np.abs(hidden).max()), "hidden state")
    assert enough
    assert fewer or case == "mixtral"


def test_one_expert_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, CONFIGS["qwen3_moe"])
    spec, names = load_model_spec(tmp_path), []
    read = CanonicalTensors.read
    monkeypatch.setattr(CanonicalTensors, "read", lambda self, name: (names.append(name), read(self, name))[1])
    with Checkpoint.open(tmp_path) as checkpoint:
        load_weights(pyengine._core.Backend(1, ""), checkpoint, spec, choose("int8"))
    experts = [int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name]
    assert experts == [e for _ in range(2) for e in range(8) for _ in range(3)]


def test_routing_counts_every_token_of_every_layer(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS["qwen2_moe_steps"])
    with pyengine.load(tmp_path, quant="f32") as one:
        assert {layer: int(counts.sum()) for layer, counts in one.routing().items()} == {1: 0}
        one.logits(IDS)
        assert one.routing()[1].sum() == 2 * len(IDS)
        result = one.generate(IDS[:7], max_tokens=5, ignore_eos=True)
        assert one.routing()[1].sum() == 2 * (len(IDS) + 7 + 4)
        record = result.to_json()["routing"]
        assert record["top_k"] == 2
        (layer,) = record["layers"]
        assert layer["layer"] == 1
        assert sum(layer["tokens_per_expert"]) == 2 * (7 + 4)
        assert 0 < layer["entropy"] <= np.log(8)
        taps: dict[tuple[int, str], np.ndarray] = {}
        one.logits(IDS, program=one.build(hooks=Hooks(taps=((1, "routing"),))), taps=taps)
        chosen = np.bincount(taps[1, "routing"][:, 2:].astype(int).ravel(), minlength=8)
        before = one.routing()[1].astype(int)
        one.logits(IDS)
        assert (one.routing()[1].astype(int) - before).tolist() == chosen.tolist()
        stream = one.stream(IDS[:3], max_tokens=2)
    stream.close()
    assert stream.result is not None
    write_tiny_model(tmp_path / "dense", CONFIGS["llama"])
    with pyengine.load(tmp_path / "dense", quant="f32") as one:
        assert one.routing() == {}
        assert "routing" not in one.generate(IDS[:3], max_tokens=2).to_json()


def test_entropy_of_counts() -> None:
    assert entropy(np.zeros(4, np.uint64)) is None
    assert entropy(np.array([5, 0, 0], np.uint64)) == 0
    assert entropy(np.full(8, 3, np.uint64)) == pytest.approx(np.log(8))


@pytest.mark.parametrize("quant", ["f32", "int8"])
def test_taps_of_experts_do_not_depend_on_chunks_or_fusion(tmp_path: Path, quant: str) -> None:
    write_tiny_model(tmp_path, CONFIGS["qwen2_moe"], seed=2)
    keys = ((0, "ffn_norm"), (0, "routing"), (1, "act"), (1, "shared_act"), (1, "hidden"))
    with pyengine.load(tmp_path, quant=quant, threads=2, calibration=False) as one:
        shown: list[dict[tuple[int, str], np.ndarray]] = []
        expected = one.logits(IDS)
        for fused, chunk in ((True, None), (False, None), (True, 1), (False, 7)):
            program = one.build(hooks=Hooks(taps=keys), fused=fused)
            shown.append({})
            assert_same_bits(one.logits(IDS, program=program, taps=shown[-1], chunk=chunk), expected, "logits")
            for key in keys:
                assert_same_bits(shown[-1][key], shown[0][key], f"{key}, fused {fused}, chunk {chunk}")
        with pytest.raises(pyengine.RequestError, match="which has experts"):
            one.build(hooks=Hooks(neuron_mask={0: [1]}))
        with pytest.raises(pyengine.RequestError, match="expected layers"):
            one.build(hooks=Hooks(taps=((0, "nothing"),)))
    taps: dict[str, list[np.ndarray]] = {}
    if quant == "f32":
        load_reference(tmp_path).forward(IDS, taps=taps)
        assert_close(shown[0][1, "act"], taps["act"][1], 1e-4, "act")


def test_malformed_f14_nan_in_the_router_names_the_layer(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIGS["qwen3_moe"])
    tensors["model.layers.0.mlp.experts.0.down_proj.weight"] = np.full((96, 48), 3e38, np.float32)
    tensors["model.layers.0.mlp.gate.weight"] = np.zeros((8, 96), np.float32)
    write_tiny_model(tmp_path, CONFIGS["qwen3_moe"], tensors=tensors)
    with (
        pyengine.load(tmp_path, quant="f32") as one,
        pytest.raises(pyengine.ComputeError, match=r"NaN or Inf in the router of layer 1 at position \d+"),
    ):
        one.logits(IDS)


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe_dense_layer", "deepseek_v3_experts"])
def test_masked_experts_are_the_references(tmp_path: Path, case: str) -> None:
    """Softmax over the chosen or over all, sigmoid with groups and a bias: nobody goes to them, others keep weights."""
    write_tiny_model(tmp_path, CONFIGS[case], seed=6)
    reference, layer = load_reference(tmp_path), 1 if case in ("mixtral", "qwen2_moe") else 2
    masked = {layer: [3] if case == "deepseek_v3_experts" else [0, 5]}
    with pyengine.load(tmp_path, quant="f32", threads=2) as one:
        plain = one.logits(IDS)
        program = one.build(hooks=Hooks(expert_mask=masked, taps=((layer, "routing"),)))
        taps: dict[tuple[int, str], np.ndarray] = {}
        logits = one.logits(IDS, program=program, taps=taps)
        assert_close(logits, reference.forward(IDS, expert_mask=masked), 1e-4, "masked")
        assert np.abs(logits - plain).max() > 1e-2
        top_k = taps[layer, "routing"].shape[1] // 2
        assert not np.isin(taps[layer, "routing"][:, top_k:], masked[layer]).any()
        for fused, chunk in ((False, None), (True, 1), (False, 7)):
            program = one.build(hooks=Hooks(expert_mask=masked), fused=fused)
            assert_same_bits(one.logits(IDS, program=program, chunk=chunk), logits, f"fused {fused}, chunk {chunk}")
        assert_same_bits(one.logits(IDS), plain, "the engine's own program")


def test_masking_what_nobody_chose_changes_no_bit(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS["deepseek_v2_groups"])
    with pyengine.load(tmp_path, quant="int8", calibration=False) as one:
        ids = IDS[:3]
        plain = one.logits(ids)
        idle = {layer: np.flatnonzero(counts == 0).tolist()[:2] for layer, counts in one.routing().items()}
        assert all(idle.values())
        assert_same_bits(one.logits(ids, program=one.build(hooks=Hooks(expert_mask=idle))), plain, "idle experts")


@pytest.mark.parametrize(
    ("case", "mask", "says"),
    [
        ("qwen3_moe", {0: [8]}, "expert 8 of layer 0; expected 0 to 7"),
        ("qwen3_moe", {0: [-1]}, "expert -1 of layer 0"),
        ("qwen3_moe", {0: [0.5]}, "expert 0.5 of layer 0"),
        ("qwen3_moe", {2: [0]}, "layer 2; expected 0 to 1"),
        ("qwen3_moe", {1: range(6)}, "layer 1 keeps 2 experts; expected at least 3"),
        ("qwen3_moe_dense_layer", {1: [0]}, "experts of layer 1, which has none"),
        ("deepseek_v3_experts", {1: [0, 2]}, "layer 1 keeps 2 experts in some 2 of 4 groups; expected at least 3"),
    ],
)
def test_masks_of_experts_that_cannot_be_are_refused(tmp_path: Path, case: str, mask: Any, says: str) -> None:
    write_tiny_model(tmp_path, CONFIGS[case])
    with (
        pyengine.load(tmp_path, quant="f32") as one,
        pytest.raises(pyengine.RequestError, match=says),
    ):
        one.build(hooks=Hooks(expert_mask=mask))
    with pytest.raises(pyengine.RequestError, match=says):
        load_reference(tmp_path).forward(IDS, expert_mask=mask)
