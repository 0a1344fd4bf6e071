"""ffn.cu and gemm.cu: the FFN is, to the bit, the linears and activations it fuses; many tokens by cuBLASLt within the
rounding of bfloat16; what is not there is said."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from cuda_linear import LINEAR_SOURCES, PACKING, packed, run_linear
from cuda_rows import HostQuant, assert_quantized, scalar_op
from kernel_cases import EPS, FORMATS, TINY, Array, normal, quantize_activations, unpack, up

from pyengine._core import OpKind
from pyengine.decoder import ACTIVATIONS
from pyengine.kernel_program import Bench
from pyengine.kernels import Linear
from pyengine.quantize import choose

SOURCES = (
    "tests/cuda/gemm_driver.cc", "csrc/cuda/linear.cu", "csrc/cuda/ffn.cu", "csrc/cuda/rows.cu",
    "csrc/cuda/gemm.cu", "csrc/cuda/gemm.cc", *PACKING,
)  # fmt: skip
SOME = ("f32", "bf16", "int8", "int4_minimum_32", "int4_symmetric_128")


@pytest.fixture(scope="module")
def gemm(build: Callable[..., Any]) -> Any:
    return build(*SOURCES)


@pytest.fixture(scope="module")
def lin(build: Callable[..., Any]) -> Any:
    return build(*LINEAR_SOURCES)


def text(value: str) -> Array:
    return np.frombuffer(value.encode() + b"\0", np.uint8)


@pytest.fixture(scope="module")
def library(cublaslt: str) -> Array:
    return text(cublaslt)


def interleaved(matrices: list[Array], options: dict[str, Any]) -> Array:
    """Gate and up with their panels side by side, or one matrix, as a packed tensor."""
    fmt = choose(options["quant"], options.get("group_size"), options.get("scheme")).layers
    b = Bench(1, "scalar")
    parts = [(m, i, len(matrices)) for i, m in enumerate(matrices)]
    return b.backend.tensor_bytes(b.tensor(fmt, len(matrices) * up(len(matrices[0]), 16), parts))


def vectors(seed: int, sides: int, width: int) -> Array:
    """A bias for every row of an interleaved tensor, 0 in the padding."""
    bias = np.zeros((sides, up(width, 16)), np.float32)
    bias[:, :width] = normal(seed, sides, width)
    return np.ascontiguousarray(bias.reshape(sides, -1, 16).transpose(1, 0, 2)).reshape(-1)


def run_ffn(
    gemm: Any, raws: tuple[Array, Array], x: Array, biases: tuple[Array, Array] | None, activation: int, gated: bool,
    sizes: tuple[int, int], factor: float = 0.0, out: Array | None = None, library: Array | None = None,
) -> tuple[Array, HostQuant, Array]:  # fmt: skip
    """(hidden as floats, hidden as int8, output) of an FFN of `sizes`, intermediate and output."""
    hidden, quant = np.full((len(x), sizes[0]), np.nan, np.float32), HostQuant(len(x), sizes[0])
    y = np.zeros((len(x), up(sizes[1], 16)), np.float32)
    if out is not None:
        y[:, : sizes[1]] = out
    bias, bias2 = biases or (None, None)
    gemm("gemm_ffn", *raws, x, len(x), bias, bias2, activation, int(gated), factor, hidden, quant, y, library)
    return hidden, quant, np.ascontiguousarray(y[:, : sizes[1]])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_ffn_is_what_it_fuses(gemm: Any, lin: Any, name: str, gated: bool) -> None:
    options, integer = FORMATS[name], name.startswith("int")
    activations = sorted(ACTIVATIONS.values(), key=int)
    for case, (width, k, n, tokens) in enumerate(
        [(40, 72, 17, 1), (64, 200, 33, 3), (150, 136, 8, 8), (80, 40, 16, 10)]
    ):
        activation, sides = activations[case], 2 if gated else 1
        matrices = [normal(case + 10 * s, width, k) for s in range(sides)]
        raws = interleaved(matrices, options), packed(normal(case + 5, n, width), options)
        x, bias, bias2 = normal(case, tokens, k), vectors(case, sides, width), vectors(case + 3, 1, n)
        hidden, quant, out = run_ffn(gemm, raws, x, (bias, bias2), int(activation), gated, (width, n))
        sums = run_linear(lin, raws[0], len(bias), x, bias)
        kind = OpKind.ACT_MUL if gated else OpKind.ACT
        wanted = scalar_op(kind, sums if gated else np.ascontiguousarray(sums[:, :width]), width, activation=activation)
        if integer:
            assert_quantized(quant, wanted, f"{name} {width}")
        else:
            small = np.abs(wanted) < 1e-34  # the CPU flushes to 0, before it multiplies by up
            assert np.abs(hidden[small]).max(initial=0) < 1e-34
            assert_same_bits(np.where(small, 0, hidden), np.where(small, 0, wanted), f"{name} {width}")
            wanted = hidden
        assert_same_bits(out, run_linear(lin, raws[1], n, wanted, bias2[:n]), f"{name} output")
        base = normal(case + 7, tokens, n)
        added = run_ffn(gemm, raws, x, (bias, bias2), int(activation), gated, (width, n), 0.5, base)[2]
        assert_same_bits(added, run_linear(lin, raws[1], n, wanted, bias2[:n], 0.5, base), f"{name} residual")


def test_ffn_of_long_rows(gemm: Any, lin: Any) -> None:
    """8 panels a block, their activations loaded tile by tile: the sums are those of one panel a block."""
    options, width, k, tokens = FORMATS["int4_minimum_32"], 64, 2600, 8
    gate, up_matrix = normal(1, width, k), normal(2, width, k)
    raws = interleaved([gate, up_matrix], options), packed(normal(3, 16, width), options)
    x = normal(4, tokens, k)
    quant = run_ffn(gemm, raws, x, None, int(ACTIVATIONS["silu"]), True, (width, 16))[1]
    sums = run_linear(lin, raws[0], 2 * width, x)
    assert_quantized(quant, scalar_op(OpKind.ACT_MUL, sums, width, activation=ACTIVATIONS["silu"]))


def activations_of(x: Array, raw: Array) -> tuple[Array, Array]:
    """(the activations that a weight multiplies, the weight's values) in float64."""
    w = unpack(raw)
    if w.group == 0:
        return x.astype(np.float64), w.values
    q, scale, apart = quantize_activations(x)
    return q * scale + apart, w.values


@pytest.mark.parametrize("name", FORMATS)
def test_many_tokens(gemm: Any, library: Array, name: str) -> None:
    """Both sides rounded to bfloat16, 2^-9 each, sums in float32: 2^-8 + 2^-18 + (K + 8) 2^-23 of sum |terms|."""
    for n, k, tokens in [(40, 200, 33), (17, 72, 40)]:
        w, x, bias, base = normal(n, n, k), normal(k, tokens, k), normal(1, n), normal(2, tokens, n)
        x[3, k // 2] = 70
        raw = packed(w, FORMATS[name])
        inputs, values = activations_of(x, raw)
        size = np.abs(inputs) @ np.abs(values).T
        rounding = 0 if name == "f32" else 2.0**-8 + 2.0**-18
        bound = (rounding + (k + 8) * EPS) * size + k * TINY
        y = run_linear(gemm, raw, n, x, None, 0.0, None, "gemm_run", library)
        assert_close(y, inputs @ values.T, bound, f"{name} {n} x {k}")
        added = run_linear(gemm, raw, n, x, bias, 0.25, base, "gemm_run", library)
        exact = base.astype(np.float64) + 0.25 * (inputs @ values.T + bias)
        assert_close(added, exact, bound + 4 * EPS * (np.abs(base) + np.abs(bias) + size), f"{name} residual")


@pytest.mark.parametrize("gated", [True, False])
def test_ffn_of_many_tokens(gemm: Any, library: Array, gated: bool) -> None:
    """By cuBLASLt or in chunks of 8, the same FFN: bfloat16 moves its sums by 2^-8 of sum |terms|."""
    width, k, n, tokens = 72, 136, 24, 33
    for name in ("int8", "bf16", "f32"):
        matrices = [normal(s, width, k) for s in range(2 if gated else 1)]
        raws = interleaved(matrices, FORMATS[name]), packed(normal(5, n, width), FORMATS[name])
        x = normal(6, tokens, k)
        args = raws, x, None, int(ACTIVATIONS["silu"]), gated, (width, n)
        few, many = run_ffn(gemm, *args)[2], run_ffn(gemm, *args, library=library)[2]
        relative = np.linalg.norm(few - many) / np.linalg.norm(few)
        assert relative < (0.03 if name != "f32" else 1e-5), name
        assert (relative > 0) or name == "f32"  # it was another path


def test_nan_stays_with_its_token(gemm: Any, library: Array) -> None:
    x = normal(1, 34, 136)
    x[7, 5] = np.nan
    y = run_linear(gemm, packed(normal(2, 16, 136), FORMATS["int8"]), 16, x, None, 0.0, None, "gemm_run", library)
    assert np.isnan(y[7]).all()
    assert np.isfinite(np.delete(y, 7, axis=0)).all()


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "f32"])
def test_dequantize_gives_the_values_of_the_cpu(gemm: Any, name: str) -> None:
    for n, k in [(17, 72), (40, 200), (16, 8)]:
        layer = Linear(normal(3, n, k), isa="scalar", threads=1, **FORMATS[name])
        out = np.full((up(n, 16), k), np.nan, np.float32)
        gemm("gemm_dequantize", layer.packed(), packed(np.zeros((n, k), np.float32), FORMATS["f32"]), out)
        assert_same_bits(np.ascontiguousarray(out[:n]), layer.dequantized(), f"{name} {n} x {k}")


def test_fewer_tokens_keep_their_bits(gemm: Any, lin: Any, library: Array) -> None:
    """Up to 32 tokens (16 of float weights) the chunks of 8 move fewer bytes."""
    for name, most in (("int8", 32), ("bf16", 16)):
        raw, x = packed(normal(1, 16, 72), FORMATS[name]), normal(2, most + 1, 72)
        chunks = run_linear(lin, raw, 16, x)
        y = run_linear(gemm, raw, 16, x[:most], None, 0.0, None, "gemm_run", library)
        assert_same_bits(y, chunks[:most], f"{name} {most}")
        assert (run_linear(gemm, raw, 16, x, None, 0.0, None, "gemm_run", library) != chunks).any()


def test_a_missing_library_is_said_and_the_chunks_are_used(gemm: Any, lin: Any, library: Array, tmp_path: Path) -> None:
    said = ctypes.create_string_buffer(300)
    for path, why in [("/nowhere/libcublasLt.so.13", ""), ("libm.so.6", ": lacks cublasLtCreate")]:
        gemm("gemm_describe", text(path), np.frombuffer(said, np.uint8), 300)
        assert said.value.startswith(f"own kernels, 8 tokens at a time: {path}{why}".encode()), said.value
    gemm("gemm_describe", library, np.frombuffer(said, np.uint8), 300)
    assert said.value.startswith(b"cuBLASLt 1")
    raw, x = packed(normal(1, 16, 72), FORMATS["int8"]), normal(2, 35, 72)
    y = run_linear(gemm, raw, 16, x, None, 0.0, None, "gemm_run", text("/nowhere"))
    assert_same_bits(y, run_linear(lin, raw, 16, x), "in chunks")
