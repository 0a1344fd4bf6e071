"""Linear layers of every format on every ISA, against float64 models of the stored weights and activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from kernel_cases import (
    BEST,
    EPS,
    FORMATS,
    INTEGER,
    ISAS,
    THREADS,
    TINY,
    Unpacked,
    bfloat16_bits,
    linear_oracle,
    normal,
    quantize_activations,
    to_bfloat16,
    unpack,
)

from pyengine import kernels
from pyengine._core import Format, OpKind, Program, Stage
from pyengine.errors import ModelFormatError, RequestError

# every tail of rows and of columns; the large sides meet small ones
SIZES = [
    (1, 1440), (2, 576), (15, 172), (16, 1), (17, 2), (31, 15), (32, 16), (33, 17), (63, 31), (64, 32), (65, 33),
    (127, 63), (128, 64), (129, 65), (172, 127), (576, 128), (1440, 129), (17, 1440), (1440, 15),
]  # fmt: skip
TOKENS = (1, 2, 7, 8, 9, 12)
BF16_MAX = 3.3895313892515355e38

by_isa = pytest.mark.parametrize("isa", ISAS)
by_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
by_integer = pytest.mark.parametrize("options", INTEGER.values(), ids=INTEGER.keys())


def stored(layer: kernels.Linear) -> Unpacked:
    return unpack(layer.packed())


def check(layer: kernels.Linear, x: np.ndarray, what: str) -> np.ndarray:
    """The layer's output, after comparing it with the oracle."""
    y = layer(x)
    expected, bound = linear_oracle(x, stored(layer))
    assert_close(y, expected, bound, what)
    return y


@by_isa
@by_format
def test_report_a09_a29_every_size_against_float64_and_every_batch_has_the_same_bits(
    isa: str, options: dict[str, Any]
) -> None:
    for seed, (n, k) in enumerate(SIZES):
        x = normal(seed, 13, k)
        layer = kernels.Linear(normal(100 + seed, n, k), threads=1, isa=isa, **options)
        y = check(layer, x, f"{n} x {k}")
        for m in TOKENS:
            assert_same_bits(layer(x[:m]), y[:m], f"{n} x {k}, {m} tokens")


@by_isa
@pytest.mark.parametrize("options", [*INTEGER.values(), FORMATS["bf16"]], ids=[*INTEGER, "bf16"])
def test_weights_as_float32_in_memory_are_those_that_rows_give(isa: str, options: dict[str, Any]) -> None:
    for seed, (n, k) in enumerate(SIZES):
        layer = kernels.Linear(normal(seed, n, k), threads=1 + seed % 3, isa=isa, **options)
        backend = layer._bench.backend
        copy = backend.tensor_create(int(Format.F32), n, k, 0)
        backend.tensor_pack(copy, normal(99, n, k))
        op = {"kind": int(OpKind.DEQUANTIZE), "stage": int(Stage.FFN), "weight": layer._tensor, "weight2": copy}
        kernels.run(Program(backend, [op], [(False, 1)], 1, 1, False), None, ids=np.zeros(1, np.int32))
        assert_same_bits(backend.tensor_dequantize(copy), layer.dequantized(), f"{n} x {k}")
        assert_close(layer.dequantized(), stored(layer).values, EPS * stored(layer).parts, f"{n} x {k}")


def test_a_weight_becomes_float32_of_its_own_size_only() -> None:
    layer = kernels.Linear(normal(1, 17, 33), threads=1)
    backend = layer._bench.backend
    same, other = (backend.tensor_create(int(Format.F32), n, 33, 0) for n in (17, 16))

    def make(weight: int, weight2: int) -> Program:
        op = {"kind": int(OpKind.DEQUANTIZE), "stage": int(Stage.FFN), "weight": weight, "weight2": weight2}
        return Program(backend, [op], [(False, 1)], 1, 1, False)

    make(layer._tensor, same)
    for weight, weight2 in ((same, same), (layer._tensor, other), (layer._tensor, layer._tensor), (-1, same)):
        with pytest.raises(RequestError, match="op dequantize"):
            make(weight, weight2)


@by_isa
@by_format
def test_a_row_does_not_depend_on_its_neighbours(isa: str, options: dict[str, Any]) -> None:
    x = normal(1, 33, 172)
    layer = kernels.Linear(normal(2, 65, 172), threads=1, isa=isa, **options)
    y = check(layer, x, "33 tokens")
    for m in range(1, 14):
        assert_same_bits(layer(x[33 - m :]), y[33 - m :], f"the last {m} of 33")
    assert_same_bits(layer(x[::-1].copy()), y[::-1].copy(), "reversed")


@by_format
def test_threads_and_instruction_sets_give_the_same_bits(options: dict[str, Any]) -> None:
    """Not only the integer sums: every trait has 16 lanes and the same order of operations, so the floats agree too."""
    x, w = normal(3, 13, 576), normal(4, 129, 576)
    first = kernels.Linear(w, threads=1, isa=ISAS[0], **options)
    for isa in ISAS:
        for threads in THREADS if isa == BEST else (1, 3):
            layer = kernels.Linear(w, threads=threads, isa=isa, **options)
            assert_same_bits(layer.packed(), first.packed(), f"{isa}, {threads} threads: packed")
            assert_same_bits(layer.dequantized(), first.dequantized(), f"{isa}: dequantized")
            for m in (1, 5, 13):
                assert_same_bits(layer(x[:m]), first(x[:m]), f"{isa}, {threads} threads, {m} tokens")


@by_isa
@by_format
def test_bias_is_added_once_to_every_row(isa: str, options: dict[str, Any]) -> None:
    x, w, bias = normal(5, 9, 63), normal(6, 33, 63), normal(7, 33)
    plain = kernels.linear(x, w, threads=1, isa=isa, **options)
    y = kernels.linear(x, w, bias, threads=1, isa=isa, **options)
    assert_same_bits(y, plain + bias, "with bias")
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(y, plain)


def test_wrong_arithmetic_is_outside_the_bound() -> None:
    """The bound is tight enough to tell each of these mistakes from rounding."""
    x, w = normal(8, 9, 172), normal(9, 33, 172)
    for name, options in FORMATS.items():
        layer = kernels.Linear(w, **options)
        y, right = layer(x), stored(layer)
        expected, bound = linear_oracle(x, right)
        assert_close(y, expected, bound, name)
        last = x.copy()
        last[:, -1] = 0
        wrongs = {"last column dropped": linear_oracle(last, right)[0], "rows shifted": np.roll(expected, 1, axis=1)}
        if name in INTEGER:
            wrongs["float activations"] = x.astype(np.float64) @ right.values.T
            q, scale, apart = quantize_activations(x)
            wrongs["scale of the neighbour group"] = (q * np.roll(scale, 64, axis=1) + apart) @ right.values.T
            wrongs["one step too much"] = ((q + 1) * scale + apart) @ right.values.T
        for what, wrong in wrongs.items():
            with pytest.raises(AssertionError, match="out of bound"):
                assert_close(y, wrong, bound, what)


@pytest.mark.parametrize("quant", ["f32", "bf16"])
def test_float_formats_store_the_nearest_value(quant: str) -> None:
    w = normal(10, 33, 65)
    expected = w if quant == "f32" else to_bfloat16(w)
    assert_same_bits(kernels.quantize_dequantize(w, quant=quant), expected, quant)
    assert_same_bits(unpack(kernels.Linear(w, quant=quant).packed()).values.astype(np.float32), expected, "unpacked")


@by_format
def test_source_types_hold_the_same_values(options: dict[str, Any]) -> None:
    w = to_bfloat16(normal(11, 17, 63).astype(np.float16).astype(np.float32))
    w = w.astype(np.float16).astype(np.float32)
    both = to_bfloat16(w)  # 8 significant bits and a float16 exponent: the same number in all three
    reference = kernels.quantize_dequantize(both, **options)
    assert_same_bits(kernels.quantize_dequantize(both.astype(np.float16), **options), reference, "float16")
    assert_same_bits(kernels.quantize_dequantize(bfloat16_bits(both), **options), reference, "bfloat16 bits")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert_same_bits(kernels.quantize_dequantize(both.astype(ml_dtypes.bfloat16), **options), reference, "bfloat16")


# ---- extreme data --------------------------------------------------------------------------------------------------


@by_isa
@by_integer
def test_the_largest_integers_do_not_saturate(isa: str, options: dict[str, Any]) -> None:
    """Weights near both ends of their range against activations of +-127. test_c_abi.py writes the ends themselves."""
    k = 256
    signs = np.where(np.arange(k) % 3 == 0, -1, 1).astype(np.float32)
    weights = 127 * np.stack([np.ones(k), -np.ones(k), signs, -signs]).astype(np.float32).repeat(5, axis=0)
    low, high = {"int8": (-120, 120), "minimum": (0, 15), "symmetric": (-7, 7)}[options.get("scheme", "int8")]
    for column in range(5, k, 8):  # values between the ends, or smaller integers would fit as well
        weights[:, column] = 127 * (2 * (column // 8 % 15 + 0.5) / 15 - 1)
    weights[:, ::32] *= -1
    rows = [np.ones(k), -np.ones(k), signs, np.where(weights[0] < 0, -1, 1), np.where(weights[7] < 0, -1, 1)]
    x = np.stack(rows).astype(np.float32) * 3
    layer = kernels.Linear(weights, threads=1, isa=isa, **options)
    assert np.abs(quantize_activations(x)[0]).min() == 127
    q = stored(layer).q
    assert q.min() <= low
    assert q.max() >= high
    y = check(layer, x, "ends")
    assert_same_bits(layer(np.tile(x, (3, 1))), np.tile(y, (3, 1)), "as a GEMM")


@by_isa
@by_integer
def test_malformed_f04_report_a26_zero_groups_mean_exactly_zero(isa: str, options: dict[str, Any]) -> None:
    w = normal(12, 20, 300)
    w[:, 128:256] = 0
    w[3] = 0
    values = kernels.quantize_dequantize(w, threads=1, isa=isa, **options)
    assert not values[:, 128:256].any()
    assert not values[3].any()
    x = normal(13, 9, 300)
    x[2] = 0
    x[:, :128] = 0
    bias = normal(14, 20)
    y = kernels.linear(x, w, bias, threads=1, isa=isa, **options)
    assert_same_bits(y[2], bias, "a zero row of activations")
    assert_same_bits(y[:, 3], np.full(9, bias[3]), "a zero row of weights")


@by_isa
@by_integer
def test_malformed_f06_one_outlier_costs_the_precision_of_its_own_group_only(isa: str, options: dict[str, Any]) -> None:
    """1e30 among values of 1e-3, in weights and in activations: finite, and bounded by the steps of the groups."""
    w, x = normal(15, 17, 576) * np.float32(1e-3), normal(16, 9, 576) * np.float32(1e-3)
    w[5, 7] = 1e30
    layer = kernels.Linear(w, threads=1, isa=isa, **options)
    y = check(layer, x, "outlier among the weights")
    values = layer.dequantized()
    assert np.isfinite(values).all()
    assert np.abs(values[5, 7] - 1e30) <= 0.05 * 1e30
    assert np.abs(values[5, 128:]).max() <= 1e30 / 15  # the row shares its units with the outlier
    calm = np.delete(np.arange(17), 5)
    assert np.abs(values[calm] - w[calm]).max() <= 1e-3
    tame = kernels.Linear(w[calm], threads=1, isa=isa, **options)
    assert_same_bits(y[:, calm], tame(x), "the other rows")
    x[4, 200] = -1e30
    check(tame, x, "outlier among the activations")


@by_isa
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 15, 16, 17, 33])
def test_groups_of_activations_that_share_their_reductions_do_not_mix(isa: str, groups: int) -> None:
    """16 groups of a row at once, fewer at its end: each keeps its own maximum, value apart, sums and scale."""
    k = 64 * groups - 5
    w = np.ones((16, k), np.float32)
    layer = kernels.Linear(w, quant="int8", threads=1, isa=isa)
    for g in range(groups):  # one group that differs from the others, in every place
        columns = slice(64 * g, min(64 * g + 64, k))
        for name, change in {
            "large": lambda part: part * np.float32(1e4),
            "one stands alone": lambda part: np.where(np.arange(part.size) == 3, np.float32(77), part),
            "two of that size": lambda part: np.where(np.arange(part.size) % 50 == 3, np.float32(-77), part),
            "zero": lambda part: np.zeros_like(part),
            "denormal": lambda part: part * np.float32(1e-41),
        }.items():
            x = normal(groups, 1, k)
            x[0, columns] = change(x[0, columns])
            check(layer, x, f"group {g} of {groups}: {name}")


@by_isa
@by_format
@pytest.mark.parametrize("top", [65504.0, float(np.finfo(np.float32).max), BF16_MAX], ids=["f16", "f32", "bf16"])
def test_values_near_the_largest_float(isa: str, options: dict[str, Any], top: float) -> None:
    """No Inf in a scale, no overflow of maximum less minimum; products stay in range through small activations."""
    w = (np.sign(normal(17, 17, 129)) * np.float32(top)).astype(np.float32)
    w[:, 5:20] *= np.float32(0.5)
    x = normal(18, 9, 129) * np.float32(1e-5)
    layer = kernels.Linear(w, threads=1, isa=isa, **options)
    values = layer.dequantized().astype(np.float64)
    assert np.isfinite(values).all()
    assert np.abs(values - w).max() <= top * 0.07  # half a step of 15 over the range of 2 top
    check(layer, x, f"{top}")
    big = np.sign(normal(19, 9, 129)) * np.float32(top / 128)  # the sum of a group of 64 has to fit too
    tame = kernels.Linear(normal(20, 17, 129) * np.float32(1e-4), threads=1, isa=isa, **options)
    check(tame, big, f"activations of {top}")


@by_isa
@by_format
def test_report_g26_denormals_are_zero_and_the_callers_mode_comes_back(isa: str, options: dict[str, Any]) -> None:
    small = np.full((17, 65), 1e-40, np.float32)
    small[::2, ::3] *= -1
    x = normal(21, 9, 65)
    layer = kernels.Linear(small, threads=3, isa=isa, **options)
    assert np.abs(layer.dequantized()).max() <= 1e-40
    y = layer(x)
    assert np.abs(y).max() <= 65 * TINY
    bias = normal(22, 17)
    tiny_x = np.full((9, 65), 1e-40, np.float32)
    tiny_x = kernels.linear(tiny_x, normal(23, 17, 65), bias, threads=3, isa=isa, **options)
    assert np.abs(tiny_x - bias).max() <= 65 * TINY
    assert (small * np.float32(0.5) != 0).all(), "denormal arithmetic of the calling thread is gone"
    assert np.float32(TINY) * np.float32(0.5) > 0


@by_isa
@by_format
def test_nan_and_inf_of_one_row_stay_in_it(isa: str, options: dict[str, Any]) -> None:
    x, w = normal(24, 12, 96), normal(25, 33, 96)
    layer = kernels.Linear(w, threads=1, isa=isa, **options)
    y = layer(x)
    for value in (np.nan, np.inf, -np.inf):
        bad = x.copy()
        bad[4, 50] = value
        got = layer(bad)
        assert not np.isfinite(got[4]).any()
        keep = [0, 1, 2, 3, *range(5, 12)]
        assert_same_bits(got[keep], y[keep], f"rows beside one with {value}")


@by_isa
@by_format
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_place(isa: str, options: dict[str, Any], value: float) -> None:
    w = normal(26, 40, 50)
    w[33, 49] = value
    w[35, 2] = value
    with pytest.raises(ModelFormatError, match="row 33, column 49"):
        kernels.Linear(w, threads=2, isa=isa, **options)


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_importance_lowers_the_weighted_error_and_is_checked() -> None:
    w = normal(27, 64, 256)
    h = np.exp(2 * normal(28, 256)).astype(np.float32)
    for name, options in INTEGER.items():
        plain, weighted = (kernels.quantize_dequantize(w, importance=i, **options) for i in (None, h))
        cost = [float((h * (v.astype(np.float64) - w) ** 2).sum()) for v in (weighted, plain)]
        assert cost[0] < cost[1], name
    for bad in (np.full(256, np.nan, np.float32), np.full(256, -1, np.float32), h[:255], h.astype(np.float64)):
        with pytest.raises(RequestError, match="importance"):
            kernels.Linear(w, importance=bad)


X, W = np.ones((2, 5), np.float32), np.ones((4, 5), np.float32)


@pytest.mark.parametrize(
    ("x", "weight", "options", "says"),
    [
        (np.ones((2, 3), np.float32), W, {}, r"x has shape \[2, 3\]; expected \[any, 5\]"),
        (np.ones(5, np.float32), W, {}, "x has shape"),
        (np.ones((0, 5), np.float32), W, {}, "not empty"),
        (np.ones((2, 5)), W, {}, "x is float64"),
        (np.ones((2, 5), np.int32), W, {}, "x is int32"),
        (X, np.ones((4, 5)), {}, "weight is float64"),
        (X, np.ones(5, np.float32), {}, "weight has shape"),
        (X, W, {"bias": np.ones(3, np.float32)}, "bias has shape"),
        (X, W, {"quant": "int3"}, "quant 'int3'"),
        (X, W, {"quant": "f32", "group_size": 32}, "no groups"),
        (X, W, {"quant": "int4", "group_size": 48}, "group size 48"),
        (X, W, {"threads": 0}, "threads is 0"),
        (X, W, {"threads": 1025}, "threads is 1025"),
    ],
)
def test_arguments_that_do_not_fit(x: Any, weight: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        kernels.linear(x, weight, **options)


def test_a_noncontiguous_input_is_taken_as_it_reads() -> None:
    x, w = normal(29, 40, 18)[::2, ::2], normal(30, 9, 33).T
    y = kernels.linear(x, w, quant="f32")
    assert_same_bits(y, kernels.linear(x.copy(), w.copy(), quant="f32"), "views")
