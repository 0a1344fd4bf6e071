"""Stage 6, kernel_bench: which rows, what an op moves and computes, fractions, and that single ops really run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from compare import assert_close, assert_same_bits
from golden.golden_cases import CONFIGS
from kernel_cases import BEST, EPS, ISAS, normal, unpack

from pyengine import _core, kernels
from pyengine.cli.main import main
from pyengine.config import load_model_spec
from pyengine.errors import RequestError, ResourceError
from pyengine.packer import padded
from pyengine.reports import kernel_bench as kb
from pyengine.reports import kernel_ops as ko
from pyengine.reports import machine
from pyengine.reports.machine import Limits, Timed

TINY = ko.Shape("tiny", 64, 172, 4, 2, 16, 97, 6, 2, 44)
LIMITS = Limits(40.0, 900.0, 200.0)
ROW_KEYS = {"op", "isa", "weights", "m", "n", "k", "gb_per_s", "gops", "fraction"}

by_isa = pytest.mark.parametrize("isa", ISAS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of known limits, short runs, a cache of its own."""
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "measure", lambda *_, **__: LIMITS)
    monkeypatch.setattr(ko, "RUN_BYTES", 1 << 16)
    monkeypatch.setattr(ko, "BUSY_BYTES", 1 << 16)
    monkeypatch.setattr(ko, "SMALL_COPIES", 3)


def wanted(ops: list[str], weights: list[str], batch: list[int], contexts: list[int]) -> list[ko.Job]:
    return list(ko.jobs((TINY,), ops, weights, batch, contexts))


def rows(ops: list[str], weights: list[str], batch: list[int], isa: str = BEST, **options: Any) -> list[kb.Row]:
    made, gauges = kb.run(wanted(ops, weights, batch, [40]), isas=[isa], threads=2, repetitions=2, **options)
    assert list(gauges) == [isa]
    return made


def packed_bytes(name: str, n: int, k: int) -> int:
    fmt = ko.WEIGHTS[name]
    backend = _core.Backend(1)
    return backend.tensor_size(backend.tensor_create(int(fmt.format), n, k, fmt.group)) - 64


# ---- which rows


def test_rows_that_share_weights_stand_together() -> None:
    made = [(j.op, j.weights, j.n, j.k, j.m) for j in wanted(["linear", "lm_head"], ["int4-32", "int8"], [1, 9], [7])]
    assert made == [
        *(("linear", w, *nk, m) for nk in ((128, 64), (64, 172)) for w in ("int4-32", "int8") for m in (1, 9)),
        ("lm_head", "int8", 97, 64, 1),  # int4 keeps an int8 head; past 8 rows there is no use for it
    ]
    made = [(j.op, j.weights, j.m) for j in wanted(["ffn_unfused", "quantize", "ffn"], ["int8", "bf16"], [1, 9], [7])]
    assert made[:8] == [(op, w, m) for w in ("int8", "bf16") for m in (1, 9) for op in ("ffn_unfused", "ffn")]
    assert made[8:] == [("quantize", None, 1), ("quantize", None, 9)]
    assert [(j.weights, j.k, j.m) for j in wanted(["attention"], ["int8"], [1, 9], [7, 40])] == [
        (None, 7, 1),
        (None, 40, 1),
        (None, 40, 9),
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ops": ["gemm"]}, "op 'gemm'; expected one of linear"),
        ({"weights": ["int3"]}, "weights 'int3'"),
        ({"batch": [1, 0]}, "batch 0"),
        ({"contexts": [0]}, "context 0"),
    ],
)
def test_unknown_rows_are_refused(change: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"ops": ["attention"], "weights": ["int8"], "batch": [1], "contexts": [4]}
    with pytest.raises(RequestError, match=says):
        wanted(**{**good, **change})


def test_the_default_shapes_are_known_models() -> None:
    dense, routed = ko.SHAPES[:2], ko.SHAPES[2:]
    assert [(s.hidden, s.ffn, s.heads, s.kv_heads) for s in dense] == [(1536, 8960, 12, 2), (4096, 14336, 32, 8)]
    assert [(s.hidden, s.expert, s.experts, s.top_k) for s in routed] == [(2048, 768, 128, 8), (4096, 14336, 8, 2)]
    assert [s.alone for s in ko.SHAPES] == [False, False, True, True]
    assert set(ko.DEFAULT_WEIGHTS) == {
        *("bf16", "int8", "int4-32", "int4-64", "int4-128"),
        *("int4-sym-32", "int4-sym-64", "int4-sym-128"),
    }


# ---- what an op moves and computes


def test_operations_of_products() -> None:
    def operations(op: str, m: int, n: int, k: int) -> int:
        return ko.Job(TINY, op, "int8", m, n, k).operations

    assert operations("linear", 3, 5, 7) == 2 * 3 * 5 * 7
    assert operations("ffn", 3, 5, 7) == operations("ffn_unfused", 3, 5, 7) == 3 * 2 * 3 * 5 * 7
    assert operations("quantize", 3, 5, 7) == 0
    keys = sum(7 - 3 + i + 1 for i in range(3))  # scores and values: a multiply-add each per key and column
    assert operations("attention", 3, 64, 7) == 4 * 64 * keys


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4-32", "int4-sym-128"])
def test_fused_and_unfused_read_the_same_weights_and_fewer_activations(weights: str) -> None:
    m, h, f = 3, TINY.hidden, TINY.ffn
    fused, apart = rows(["ffn", "ffn_unfused"], [weights], [m])
    assert fused.ratio_to_ffn is None
    assert apart.ratio_to_ffn is not None
    expected = packed_bytes(weights, 2 * padded(f), h) + packed_bytes(weights, h, f)
    assert fused.weight_bytes == apart.weight_bytes == expected
    integer = ko.WEIGHTS[weights].is_integer

    def held(width: int, quantized: bool) -> int:
        return m * (width + 33 * -(-width // 64)) if quantized else 4 * m * width

    x, out, act = held(h, integer), held(h, False), held(f, integer)
    assert fused.activation_bytes == x + 2 * out + 2 * act
    sums = held(2 * padded(f), False)
    rounding = held(f, False) + act if integer else 0
    assert apart.activation_bytes == x + 2 * sums + held(f, False) + rounding + act + out + 3 * out
    assert (fused.barriers, apart.barriers) == (2, 5 if integer else 4)


@by_isa
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4-32", "int4-sym-128"])
def test_the_naive_ffn_is_the_float_ffn_of_the_same_weights(isa: str, weights: str) -> None:
    group = wanted(["ffn", "ffn_naive"], [weights], [3], [1])
    assert [job.op for job in group] == ["ffn", "ffn_naive"]
    assert (group[1].rate, group[1].operations) == ("f32_gflops", group[0].operations)
    bed = ko.Bed(2, isa, 3)
    laid = ko.lay(bed, group, "bf16")
    copy = laid["ffn_naive"][-1]
    names = [_core.OpKind(op["kind"]).name for op in copy]
    assert names == ["DEQUANTIZE", "LINEAR", "ACT_MUL", "DEQUANTIZE", "LINEAR", "ADD"]
    ((fused,),) = laid["ffn"][-1:]
    assert (copy[0]["weight"], copy[3]["weight"]) == (fused["weight"], fused["weight2"])
    y = np.empty((3, TINY.hidden), np.float32)
    tap = ko.op_of(_core.OpKind.TAP, input=copy[4]["output"], head_dim=0)
    program = _core.Program(bed.b.backend, [*bed.b.ops, *copy[:5], tap], bed.b.buffers, 3, 3, False)
    kernels.run(program, bed.hidden, taps=[y])
    both = unpack(bed.b.backend.tensor_bytes(fused["weight"])).values.reshape(-1, 2, 16, TINY.hidden)
    gate, up = (both[:, side].reshape(-1, TINY.hidden)[: TINY.ffn] for side in (0, 1))
    down = unpack(bed.b.backend.tensor_bytes(fused["weight2"])).values
    x = bed.hidden.astype(np.float64)
    g, u = x @ gate.T, x @ up.T
    act = g / (1 + np.exp(-g)) * u
    terms = TINY.hidden + TINY.ffn + 16  # roundings of a sum, of the activation and of the sum over it
    width = np.abs(x) @ np.abs(gate).T * np.abs(u) + np.abs(g) * (np.abs(x) @ np.abs(up).T)
    assert_close(y, act @ down.T, terms * EPS * ((np.abs(act) + 2 * width) @ np.abs(down).T), "naive")


def test_float32_weights_have_no_naive_form() -> None:
    assert wanted(["ffn_naive"], ["f32"], [1], [1]) == []
    assert [job.op for job in wanted(["ffn_naive", "ffn"], ["f32"], [1], [1])] == ["ffn"]


@by_isa
def test_every_op_runs_on_every_isa(isa: str) -> None:
    made = rows(list(ko.OPS), ["bf16", "int8", "int4-64"], [1, 9], isa)
    assert {row.op for row in made} == set(ko.OPS)
    for row in made:
        assert row.isa == isa
        assert row.microseconds is not None
        assert row.microseconds > 0
        assert (row.fraction is None) == (row.op in ("rms_norm", "quantize"))
        apart = 5 - (row.weights == "bf16")
        expected = {
            "ffn": 2,
            "ffn_unfused": apart,
            "ffn_naive": 6,
            "lm_head": 1 + (row.m > 2),
            "moe": 2 if row.m == 1 else 4,
        }
        assert row.barriers == expected.get(row.op, 1)
        assert (row.ratio_to_ffn is None) == (row.op not in ("ffn_unfused", "ffn_naive"))
        assert row.to_json().keys() >= ROW_KEYS


def test_experts_that_are_chosen_count() -> None:
    made = rows(["moe"], ["int8", "bf16"], [1, 40])
    for row in made:
        each = packed_bytes(row.weights or "", 2 * 48, 64) + packed_bytes(row.weights or "", 64, 44)
        assert row.weight_bytes == (2 if row.m == 1 else 6) * each  # 40 tokens choose all six
        assert (row.n, row.k) == (64, 44)
    (job,) = wanted(["moe"], ["int4-32"], [1], [1])
    assert job.operations == 2 * 2 * 3 * 64 * 44
    bed = ko.Bed(1, BEST, 1)
    ((op,),) = ko.lay(bed, [job], "bf16")["moe"]
    for key, count in (("weight", 6), ("weight2", 6)):
        experts = bed.b.backend.tensor_dequantize(op[key]).reshape(count, -1)
        assert experts[0].any()
        for other in experts[1:]:
            assert_same_bits(other, experts[0], "another expert")
    assert not list(ko.jobs((ko.SHAPES[0],), ["moe"], ["int8"], [1], [1]))
    assert {job.op for job in ko.jobs(ko.SHAPES[2:], list(ko.OPS), ["int8"], [1], [1])} == {"moe"}


def test_the_shape_of_a_model_with_experts_and_latent_attention(tmp_path: Path) -> None:
    shape = ko.Shape.of("x", load_model_spec(write_tiny_model(tmp_path, CONFIGS["deepseek_v3_experts"])))
    assert (shape.ffn, shape.experts, shape.top_k, shape.expert, shape.latent) == (172, 8, 3, 48, True)
    made = list(ko.jobs((shape,), ["linear", "attention", "moe"], ["int8"], [1], [8]))
    assert [(job.op, job.n, job.k) for job in made] == [("linear", 64, 172), ("moe", 64, 48)]


def test_attention_reads_its_context_and_decode_past_a_partition_has_one_barrier_more() -> None:
    made, _ = kb.run(wanted(["attention"], [], [1], [40, 300]), isas=[BEST], threads=2, repetitions=1)
    token = 2 * 2 * 16 * 2  # K and V of two heads of 16 in bfloat16
    assert [row.weight_bytes for row in made] == [40 * token, 300 * token]
    assert [row.barriers for row in made] == [1, 2]
    (wide,), _ = kb.run(wanted(["attention"], [], [1], [40]), isas=[BEST], threads=2, repetitions=1, kv_dtype="f32")
    assert wide.weight_bytes == 40 * 2 * token
    (narrow,), _ = kb.run(wanted(["attention"], [], [1], [40]), isas=[BEST], threads=2, repetitions=1, kv_dtype="int8")
    assert narrow.weight_bytes == 40 * (token // 2 + 2 * 2 * 4)  # and a float32 scale for each


def test_a_run_reads_enough_copies() -> None:
    (job,) = wanted(["ffn"], ["int8"], [1], [1])
    bed = ko.Bed(1, BEST, 1)
    laid = ko.lay(bed, [job], "bf16")
    fused, apart = laid["ffn"], laid["ffn_unfused"]
    assert len(fused) * bed.weight_bytes >= ko.RUN_BYTES
    assert len({op["weight"] for (op,) in fused}) == len(fused) == len(apart) > 1
    assert [(op["weight"], op["weight2"]) for (op,) in fused] == [(ops[0]["weight"], ops[3]["weight"]) for ops in apart]
    raw = [bed.b.backend.tensor_bytes(op["weight2"]) for (op,) in fused]
    for other in raw[1:]:
        assert_same_bits(other, raw[0], "a copy")
    assert raw[0][64:].any()


def test_weights_are_packed_once_for_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens compute long enough: one copy. The row is the same as alone."""
    laid: list[tuple[int, int]] = []
    lay = kb.lay

    def note(bed: ko.Bed, group: list[ko.Job], kv_dtype: str) -> dict[str, list[ko.Ops]]:
        made = lay(bed, group, kv_dtype)
        laid.append((bed.tokens, len(made["ffn"])))
        return made

    monkeypatch.setattr(kb, "lay", note)
    together, (alone,) = rows(["ffn"], ["int8"], [9, 1]), rows(["ffn"], ["int8"], [9])
    assert [tokens for tokens, _ in laid] == [9, 9]
    assert laid[0][1] > 1
    assert laid[1][1] == 1
    names = ("m", "weight_bytes", "activation_bytes", "barriers")
    assert [getattr(together[0], name) for name in names] == [getattr(alone, name) for name in names]
    assert [row.m for row in together] == [9, 1]


# ---- fractions


def row_of(job: ko.Job, **fields: int) -> kb.Row:
    return kb.replace(kb.empty_row(job, "avx2"), **fields)


def runs(*seconds: float) -> list[Timed]:
    return [Timed(s, LIMITS, LIMITS) for s in seconds]


def test_the_fraction_is_of_the_limit_that_binds() -> None:
    job = ko.Job(TINY, "linear", "int8", 1, 1000, 1000)
    row = kb.conclude(row_of(job, weight_bytes=1_000_000), job, runs(50e-6), None)
    assert (row.microseconds, row.gb_per_s, row.gops) == (pytest.approx(50), pytest.approx(20), pytest.approx(40))
    assert (row.bound, row.fraction, row.rounds_used, row.steady) == ("read", pytest.approx(0.5), 1, True)
    many = ko.Job(TINY, "linear", "int8", 90, 1000, 1000)
    row = kb.conclude(row_of(many, weight_bytes=1_000_000), many, runs(400e-6), None)
    assert (row.bound, row.fraction) == ("int8", pytest.approx(0.5))  # 450 of 900 Gop/s, 2.5 of 40 GB/s
    floats = ko.Job(TINY, "linear", "bf16", 90, 1000, 1000)
    row = kb.conclude(row_of(floats, weight_bytes=2_000_000), floats, runs(1800e-6), None)
    assert (row.bound, row.fraction) == ("f32", pytest.approx(0.5))  # 100 of 200 GFLOP/s
    norm = ko.Job(TINY, "rms_norm", None, 1, 64, 64)
    row = kb.conclude(row_of(norm, activation_bytes=512), norm, runs(1e-6), None)
    assert (row.gb_per_s, row.gops, row.fraction, row.bound) == (pytest.approx(0.512), None, None, None)
    assert (row.rounds_used, row.steady) == (None, None)


def test_a_row_leaves_out_rounds_in_which_the_limit_changed() -> None:
    job = ko.Job(TINY, "linear", "int8", 1, 1000, 1000)
    fast = Limits(70.0, 900.0, 200.0)
    timed = [Timed(50e-6, LIMITS, LIMITS), Timed(50e-6, LIMITS, fast), Timed(25e-6, fast, fast), *runs(50e-6)]
    row = kb.conclude(row_of(job, weight_bytes=1_000_000), job, timed, None)
    assert (row.fraction, row.rounds_used, row.steady) == (pytest.approx(0.5), 3, True)  # of 0.5, 4/7 and 0.5


def test_ratios_are_of_rounds() -> None:
    job = ko.Job(TINY, "ffn_unfused", "int8", 1, 1000, 1000)
    row = kb.conclude(row_of(job, weight_bytes=1), job, runs(2.0, 9.0, 4.0), runs(1.0, 3.0, 4.0))
    assert row.ratio_to_ffn == 2.0  # of 2, 3 and 1


def test_what_would_take_too_long_is_left_empty_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(kb, "MAX_SECONDS", 2 * 2 * 64 * 128 / 200e9)  # of two tokens at the float32 limit
    made = rows(["linear"], ["bf16"], [1, 3], note=said.append)[:2]
    assert [row.microseconds is None for row in made] == [False, True]
    assert (made[1].fraction, made[1].barriers) == (None, None)
    assert "linear bf16 m 3" in said[0]


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kb, "available_memory", lambda: 70_000)
    with pytest.raises(ResourceError, match=r"linear 128 x 64 in bf16 .* 70000 are available"):
        rows(["linear"], ["bf16"], [1])
    weights = 3 * TINY.hidden * TINY.ffn
    monkeypatch.setattr(kb, "available_memory", lambda: (kb.RUN_BYTES + kb.BUSY_BYTES) + 5 * weights)
    rows(["ffn"], ["bf16"], [1])
    with pytest.raises(ResourceError, match="ffn 64 x 172 in bf16"):
        rows(["ffn", "ffn_naive"], ["bf16"], [1])


# ---- the core


def test_tensor_write_takes_the_bytes_of_a_tensor_like_it() -> None:
    backend = _core.Backend(1)
    first, second, other = (backend.tensor_create(2, 33, k, 64) for k in (172, 172, 100))
    backend.tensor_pack(first, normal(1, 33, 172))
    raw = backend.tensor_bytes(first)
    backend.flush_caches()
    backend.tensor_write(second, raw)
    assert_same_bits(backend.tensor_bytes(second), raw, "written")
    for wrong in (raw[:-1], np.append(raw, np.uint8(0)), backend.tensor_bytes(other)):
        with pytest.raises(RequestError, match="tensor_write"):
            backend.tensor_write(second, wrong)
    with pytest.raises(RequestError, match="does not exist"):
        backend.tensor_write(9, raw)


# ---- the command


def test_kernels_json_and_table(tmp_path: Path, capsys: Any) -> None:
    folder = write_tiny_model(tmp_path / "llama", CONFIGS["llama"])
    argv = ["bench", str(folder), "--kernels", "--ops", "ffn,attention", "--weights", "int8,bf16", "--batch", "1,2"]
    argv += ["-d", "33", "-r", "1", "-t", "2", "--isa", "all"]
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record["limits"]) == ISAS[::-1]
    assert record["machine"]["isa"] == BEST
    assert [row["isa"] for row in record["results"]] == [isa for isa in ISAS[::-1] for _ in range(6)]
    assert record["results"][0].keys() >= ROW_KEYS
    assert (record["results"][0]["n"], record["results"][0]["k"]) == (64, 172)
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.count("limits: read 40.0 GB/s") == len(ISAS)
    assert len([line for line in out.splitlines() if line.startswith("| ffn ")]) == 4 * len(ISAS)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kernels", "-p", "5"], "-p with --kernels"),
        (["--kernels", "--quant", "int8"], "--quant with --kernels"),
        (["--kernels", "--no-calibration"], "--no-calibration with --kernels"),
        (["--kernels", "--no-cache"], "--no-cache with --kernels"),
        (["--kernels", "--strict"], "--strict with --kernels"),
        (["--kernels", "--offline"], "--offline with --kernels"),
        (["--kernels", "--ops", "ffn", "--kv-dtype", "int8"], "--kv-dtype without attention"),
        (["--ops", "ffn"], "--ops without --kernels"),
        (["--batch", "1"], "--batch without --kernels"),
        (["--kernels", "--ops", "gemm"], "op 'gemm'"),
        (["--kernels", "--batch", "0"], "batch 0"),
        (["--kernels", "--ops", "lm_head", "--weights", "int4-32"], "no kernel is left"),
        (["--kernels", "-t", "0"], "0 threads"),
    ],
)
def test_wrong_options_are_one_line(capsys: Any, argv: list[str], says: str) -> None:
    assert main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
