"""cffi as the second client of pyengine.h: it gets bit for bit what the extension gets; a wrong call gets a status."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c_client import CANCELLED, FORMAT, REQUEST, RESOURCE, UNSUPPORTED, Client
from compare import assert_close, assert_same_bits
from kernel_cases import ISAS, linear_oracle, normal, unpack

from pyengine import _core, kernels


@pytest.fixture(scope="module")
def c() -> Client:
    return Client()


@pytest.fixture
def backend(c: Client) -> Iterator[Any]:
    made = c.backend(ISAS[-1], threads=2)
    yield made
    c.lib.pe_backend_destroy(made)


def test_the_library_says_what_the_extension_says(c: Client) -> None:
    assert c.lib.pe_abi_version() == c.lib.PE_ABI_VERSION == _core.abi_version()
    names = [c.ffi.string(c.lib.pe_isa_name(i)).decode() for i in range(c.lib.pe_isa_count())]
    assert names == [isa["name"] for isa in _core.isas()]
    assert [bool(c.lib.pe_isa_available(i)) for i in range(len(names))] == [isa["available"] for isa in _core.isas()]
    assert c.ffi.string(c.lib.pe_compiler()).decode() == _core.compiler()
    assert c.ffi.string(c.lib.pe_commit()).decode() == _core.commit()
    assert c.ffi.string(c.lib.pe_cpu_features()).decode().split() == _core.cpu_features()
    assert c.lib.pe_default_threads() == _core.default_threads()
    assert c.lib.PE_KV_BLOCK == _core.KV_BLOCK
    for i in (-1, len(names)):
        assert c.lib.pe_isa_name(i) == c.ffi.NULL
        assert not c.lib.pe_isa_available(i)


def test_enums_of_the_extension_are_those_of_the_header(c: Client) -> None:
    prefixes = {
        _core.Format: "PE_",
        _core.OpKind: "PE_OP_",
        _core.Stage: "PE_STAGE_",
        _core.Activation: "PE_",
        _core.Norm: "PE_",
        _core.KvDtype: "PE_KV_",
        _core.Limit: "PE_LIMIT_",
        _core.Scoring: "PE_",
        _core.GroupScore: "PE_GROUP_",
    }
    for enum, prefix in prefixes.items():
        for name, member in enum.__members__.items():
            assert getattr(c.lib, prefix + name) == int(member), name
    assert len(_core.OpKind.__members__) == c.lib.PE_OP_COUNT
    assert len(_core.Stage.__members__) == c.lib.PE_STAGE_COUNT
    assert len(_core.Limit.__members__) == c.lib.PE_LIMIT_COUNT


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["INT8", "INT4_SYM", "INT4_MIN"])
def test_pack_and_run_give_the_bits_of_the_extension(c: Client, isa: str, name: str) -> None:
    n, k, m = 33, 172, 9
    weight, bias, x = normal(1, n, k), normal(2, 48), normal(3, m, k)
    options = {"quant": "int8"} if name == "INT8" else {"quant": "int4", "group_size": 64}
    scheme = {"INT4_SYM": "symmetric", "INT4_MIN": "minimum"}.get(name)
    layer = kernels.Linear(weight, bias[:n], scheme=scheme, threads=1, isa=isa, **options)

    backend = c.backend(isa)
    tensor = c.tensor(backend, getattr(c.lib, "PE_" + name), n, k, 64)
    c.good(c.lib.pe_tensor_pack(backend, tensor, c.pack_args(weight)))
    assert_same_bits(c.data(backend, tensor).copy(), layer.packed(), "packed")
    values = np.empty((n, k), np.float32)
    c.good(c.lib.pe_tensor_dequantize(backend, tensor, c.array(values)))
    assert_same_bits(values, layer.dequantized(), "dequantized")
    vector = c.tensor(backend, c.lib.PE_VECTOR_F32, 1, 48)
    c.good(c.lib.pe_tensor_pack(backend, vector, c.pack_args(np.append(bias[:n], np.zeros(15, np.float32)), rows=1)))
    program = c.program(backend, c.linear_ops(tensor, vector), [(0, k), (1, k), (0, n)], m)
    y = np.empty((m, n), np.float32)
    c.good(c.lib.pe_program_run(program, c.batch(x, y)))
    assert_same_bits(y, layer(x), "run")
    runs = c.ffi.new("uint64_t*")
    c.good(c.lib.pe_program_times(program, c.ffi.NULL, runs, c.ffi.NULL, 1))
    assert runs[0] == 1
    arena = c.ffi.new("size_t*")
    c.good(c.lib.pe_program_info(program, arena, c.ffi.NULL, c.ffi.NULL))
    assert arena[0] >= m * (k + n) * 4
    c.lib.pe_program_destroy(program)
    c.good(c.lib.pe_tensor_free(backend, tensor))
    c.bad(c.lib.pe_tensor_free(backend, tensor), REQUEST, f"tensor {tensor} does not exist")
    c.lib.pe_backend_destroy(backend)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "byte"),
    [("INT8", 0), ("INT8", 1), ("INT8", 255), ("INT4_SYM", 0), ("INT4_SYM", 255), ("INT4_MIN", 0), ("INT4_MIN", 255)],
)
def test_bytes_at_both_ends_never_saturate(c: Client, isa: str, name: str, byte: int) -> None:
    """All bytes of the data 0 or 255 (int8: also 1, which is -127), activations +-127: exact in every path."""
    n, k = 16, 256
    backend = c.backend(isa)
    tensor = c.tensor(backend, getattr(c.lib, "PE_" + name), n, k, 64)
    c.good(c.lib.pe_tensor_pack(backend, tensor, c.pack_args(normal(4, n, k))))
    raw = c.data(backend, tensor)
    raw[len(raw) - n * k // (1 if name == "INT8" else 2) :] = byte
    assert len(np.unique(unpack(raw).q)) == 1
    signs = np.where(np.arange(k) % 3 == 0, -1, 1)
    x = np.stack([np.ones(k), -np.ones(k), signs] * 4).astype(np.float32)
    program = c.program(backend, c.linear_ops(tensor), [(0, k), (1, k), (0, n)], 12)
    y = np.empty((12, n), np.float32)
    c.good(c.lib.pe_program_run(program, c.batch(x, y)))
    assert_close(y, *linear_oracle(x, unpack(raw)), f"byte {byte}")
    few = np.empty((3, n), np.float32)
    c.good(c.lib.pe_program_run(program, c.batch(x[:3].copy(), few)))
    assert_same_bits(few, y[:3].copy(), "3 tokens")
    c.lib.pe_program_destroy(program)
    c.lib.pe_backend_destroy(backend)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("limit", ["READ", "INT8", "F32", "HOP"])
def test_limits_are_measured_pass_by_pass(c: Client, isa: str, limit: str) -> None:
    """Every pass is written, nothing else is. That the probes do their work the core checks itself, by their sums."""
    backend = c.backend(isa, threads=2)
    rates = np.full(5, -1.0)
    args = {"limit": getattr(c.lib, "PE_LIMIT_" + limit), "passes": 4, "per_second": c.array(rates, "double*")}
    for work in (1, 1_000_003):
        c.good(c.lib.pe_limit_measure(backend, c.struct("pe_limit_args", work=work, **args)))
        assert (rates[:4] > 0).all()
        assert rates[4] == -1
        rates[:4] = -1
    c.lib.pe_backend_destroy(backend)


def test_limits_that_cannot_be_measured(c: Client, backend: Any) -> None:
    lib, null, rates = c.lib, c.ffi.NULL, c.array(np.zeros(1), "double*")
    good = {"limit": lib.PE_LIMIT_READ, "work": 1 << 20, "passes": 1, "per_second": rates}
    for change, says in (
        ({"limit": 4}, "limit 4 is unknown"),
        ({"limit": -1}, "limit -1"),
        ({"work": 0}, "work 0 in 1 passes"),
        ({"work": (1 << 32) + 1}, "expected 1 to 4294967296"),
        ({"limit": lib.PE_LIMIT_F32, "work": (1 << 48) + 1}, "expected 1 to 281474976710656"),
        ({"limit": lib.PE_LIMIT_HOP, "work": (1 << 32) + 1}, "expected 1 to 4294967296"),
        ({"passes": 0}, "in 0 passes"),
        ({"passes": 10001}, "in 1 to 10000"),
        ({"per_second": null}, "per_second is NULL"),
        ({"struct_size": 4}, "struct_size 4"),
    ):
        c.bad(lib.pe_limit_measure(backend, c.struct("pe_limit_args", **{**good, **change})), REQUEST, says)
    c.bad(lib.pe_limit_measure(null, c.struct("pe_limit_args", **good)), REQUEST, "backend is NULL")
    c.bad(lib.pe_limit_measure(backend, null), REQUEST, "args is NULL")
    alone = c.backend(ISAS[0], threads=1)
    hop = c.struct("pe_limit_args", **{**good, "limit": lib.PE_LIMIT_HOP})
    c.bad(lib.pe_limit_measure(alone, hop), UNSUPPORTED, "this backend has one")
    lib.pe_backend_destroy(alone)


# ---- wrong calls -----------------------------------------------------------------------------------------------------


def test_null_pointers_are_refused(c: Client, backend: Any) -> None:
    null, lib = c.ffi.NULL, c.lib
    out, i32 = c.ffi.new("pe_backend**"), c.ffi.new("int32_t*")
    for make, says in (
        (lambda: lib.pe_backend_create(null, out), "config is NULL"),
        (lambda: lib.pe_backend_create(c.struct("pe_backend_config"), null), "out is NULL"),
        (lambda: lib.pe_tensor_create(null, c.struct("pe_tensor_desc"), i32), "backend is NULL"),
        (lambda: lib.pe_tensor_create(backend, null, i32), "desc is NULL"),
        (lambda: lib.pe_tensor_create(backend, c.struct("pe_tensor_desc"), null), "id is NULL"),
        (lambda: lib.pe_tensor_pack(backend, 0, null), "args is NULL"),
        (lambda: lib.pe_tensor_data(null, 0, null, null), "backend is NULL"),
        (lambda: lib.pe_tensor_dequantize(backend, 0, null), "out is NULL"),
        (lambda: lib.pe_tensor_free(null, 0), "backend is NULL"),
        (lambda: lib.pe_flush_caches(null), "backend is NULL"),
        (lambda: lib.pe_rope_set(backend, i32, null, 1, 2, null), "table is NULL"),
        (lambda: lib.pe_kv_create(backend, null, i32), "desc is NULL"),
        (lambda: lib.pe_kv_reserve(null, 0, 1), "backend is NULL"),
        (lambda: lib.pe_kv_block_bytes(backend, 0, null), "bytes is NULL"),
        (lambda: lib.pe_program_create(backend, null, c.ffi.new("pe_program**")), "desc is NULL"),
        (lambda: lib.pe_program_create(backend, c.struct("pe_program_desc"), c.ffi.new("pe_program**")), "ops is NULL"),
        (lambda: lib.pe_program_run(null, null), "program is NULL"),
        (lambda: lib.pe_program_times(null, null, null, null, 0), "program is NULL"),
        (lambda: lib.pe_program_info(null, null, null, null), "program is NULL"),
    ):
        c.bad(make(), REQUEST, says)
    assert lib.pe_backend_isa(null) == null
    assert lib.pe_backend_threads(null) == 0
    lib.pe_backend_destroy(null)
    lib.pe_program_destroy(null)


@pytest.mark.parametrize("size", [0, 4, 1 << 20])
def test_a_struct_of_another_size_is_refused(c: Client, backend: Any, size: int) -> None:
    lib, i32 = c.lib, c.ffi.new("int32_t*")
    out, made = c.ffi.new("pe_backend**"), c.ffi.new("pe_program**")
    tensor = c.tensor(backend, lib.PE_INT8, 16, 64, 64)
    says = f"struct_size {size}; expected"
    x = normal(5, 2, 64)
    program = c.program(backend, c.linear_ops(tensor), [(0, 64), (1, 64), (0, 16)], 2)

    def wrong(s: Any) -> Any:
        s.struct_size = size
        return s

    c.bad(lib.pe_backend_create(wrong(c.struct("pe_backend_config")), out), REQUEST, "config has " + says)
    c.bad(lib.pe_tensor_create(backend, wrong(c.struct("pe_tensor_desc")), i32), REQUEST, "desc has " + says)
    c.bad(lib.pe_tensor_pack(backend, tensor, wrong(c.pack_args(x))), REQUEST, "args has " + says)
    c.bad(lib.pe_kv_create(backend, wrong(c.struct("pe_kv_desc")), i32), REQUEST, "desc has " + says)
    ops, buffers = c.linear_ops(tensor), [(0, 64), (1, 64), (0, 16)]
    c.bad(lib.pe_program_create(backend, wrong(c.program_desc(ops, buffers, 2)), made), REQUEST, "desc has " + says)
    c.bad(lib.pe_program_run(program, wrong(c.batch(x, np.empty((2, 16), np.float32)))), REQUEST, "batch has " + says)
    ops[2].struct_size = size
    c.bad(lib.pe_program_create(backend, c.program_desc(ops, buffers, 2), made), REQUEST, f"op 2: {says}")
    narrow = c.program_desc(c.linear_ops(tensor), buffers, 2)
    narrow.buffers[1].struct_size = size
    c.bad(lib.pe_program_create(backend, narrow, made), REQUEST, f"buffer 1: {says}")
    lib.pe_program_destroy(program)


def test_backends_and_tensors_that_cannot_be_made(c: Client, backend: Any) -> None:
    lib, i32, out = c.lib, c.ffi.new("int32_t*"), c.ffi.new("pe_backend**")
    for threads in (-1, 1025):
        config = c.struct("pe_backend_config", threads=threads)
        c.bad(lib.pe_backend_create(config, out), REQUEST, f"threads is {threads}")
    name = c.ffi.new("char[]", b"abacus")
    c.bad(lib.pe_backend_create(c.struct("pe_backend_config", isa=name), out), RESOURCE, "abacus")
    good = {"format": lib.PE_INT4_MIN, "rows": 16, "cols": 64, "group": 32}
    for change, status, says in (
        ({"format": 99}, REQUEST, "format 99 is unknown"),
        ({"format": -1}, REQUEST, "format -1"),
        ({"rows": 0}, REQUEST, "0 x 64"),
        ({"cols": -5}, REQUEST, "16 x -5"),
        ({"cols": 1 << 40}, REQUEST, "expected sides"),
        ({"group": 48}, UNSUPPORTED, "group size 48"),
        ({"format": lib.PE_INT8}, UNSUPPORTED, "int8 group size 32"),
        ({"format": lib.PE_F32}, REQUEST, "f32 has no groups"),
        ({"format": lib.PE_VECTOR_F32, "group": 0}, REQUEST, "one row"),
    ):
        desc = c.struct("pe_tensor_desc", **{**good, **change})
        c.bad(lib.pe_tensor_create(backend, desc, i32), status, says)
    huge = c.struct("pe_tensor_desc", format=lib.PE_F32, rows=(1 << 31) - 1, cols=(1 << 31) - 1)
    c.bad(lib.pe_tensor_create(backend, huge, i32), RESOURCE, "cannot allocate")


def test_packing_that_does_not_fit(c: Client, backend: Any) -> None:
    lib = c.lib
    tensor = c.tensor(backend, lib.PE_INT8, 40, 64, 64)
    x = normal(6, 40, 64)
    for fields, says in (
        ({"source": c.ffi.NULL}, "do not fit"),
        ({"rows": 0}, "do not fit"),
        ({"rows": 49}, "do not fit"),
        ({"panel_offset": 1}, "do not fit"),
        ({"panel_offset": -1}, "do not fit"),
        ({"panel_stride": 0}, "do not fit"),
        ({"panel_stride": 2}, "do not fit"),
        ({"source_dtype": 7}, "source dtype 7"),
    ):
        c.bad(lib.pe_tensor_pack(backend, tensor, c.pack_args(x, **fields)), REQUEST, says)
    x[21, 3] = np.inf
    c.bad(lib.pe_tensor_pack(backend, tensor, c.pack_args(x)), FORMAT, "row 21, column 3")
    for missing in (-1, tensor + 1, 1 << 30):
        c.bad(lib.pe_tensor_pack(backend, missing, c.pack_args(x)), REQUEST, f"tensor {missing} does not exist")
        c.bad(lib.pe_tensor_data(backend, missing, c.ffi.NULL, c.ffi.NULL), REQUEST, "does not exist")


def test_programs_that_are_wrong(c: Client, backend: Any) -> None:
    lib, made = c.lib, c.ffi.new("pe_program**")
    tensor = c.tensor(backend, lib.PE_INT8, 16, 64, 64)
    buffers = [(0, 64), (1, 64), (0, 16)]

    def refused(says: str, status: int = REQUEST, buffers: list[tuple[int, int]] = buffers, **change: Any) -> None:
        ops = c.linear_ops(tensor)
        for field, value in change.items():
            setattr(ops[2], field, value)
        c.bad(lib.pe_program_create(backend, c.program_desc(ops, buffers, 4), made), status, says)

    refused("tensor 77 does not exist", weight=77)
    refused("a buffer id does not exist", input=3)
    refused("op 2: kind 1000", UNSUPPORTED, kind=1000)
    refused("integer weights take int8 activations", input=0)
    refused("output's width differs", buffers=[(0, 64), (1, 64), (0, 17)])
    refused("input's width differs", buffers=[(0, 65), (1, 65), (0, 16)])
    refused("the bias is not a vector", bias=tensor)
    refused("buffer 2 has width 0", buffers=[(0, 64), (1, 64), (0, 0)])
    ops = c.linear_ops(tensor)
    for fields, says in (
        ({"op_count": 0}, "needs ops"),
        ({"buffer_count": -1}, "needs ops and buffers"),
        ({"max_batch_tokens": 0}, "max_batch_tokens 0"),
        ({"max_sequences": 1 << 30}, "max_sequences"),
    ):
        c.bad(lib.pe_program_create(backend, c.program_desc(ops, buffers, 4, **fields), made), REQUEST, says)


def test_batches_that_are_wrong_leave_the_program_usable(c: Client, backend: Any) -> None:
    lib, null = c.lib, c.ffi.NULL
    weight, x = normal(7, 16, 64), normal(8, 3, 64)
    tensor = c.tensor(backend, lib.PE_INT8, 16, 64, 64)
    c.good(lib.pe_tensor_pack(backend, tensor, c.pack_args(weight)))
    program = c.program(backend, c.linear_ops(tensor), [(0, 64), (1, 64), (0, 16)], 3)
    y = np.empty((3, 16), np.float32)
    gap = c.array(np.array([0, 2, 3], np.int32), "int32_t*")
    below = c.array(np.array([-1, 0, 1], np.int32), "int32_t*")
    flag = c.array(np.ones(1, np.int32), "int32_t*")
    for fields, status, says in (
        ({"tokens": 4}, REQUEST, "batch of 4 tokens; expected 1 to 3"),
        ({"tokens": 0}, REQUEST, "batch of 0 tokens"),
        ({"sequences": 0}, REQUEST, "0 sequences"),
        ({"positions": null}, REQUEST, "query_start"),
        ({"query_start": null}, REQUEST, "query_start"),
        ({"positions": gap}, REQUEST, "not consecutive"),
        ({"positions": below}, REQUEST, "negative"),
        ({"hidden": null}, REQUEST, "no hidden state"),
        ({"taps": null}, REQUEST, "taps"),
        ({"logits_count": 1}, REQUEST, "logits_rows"),
        ({"cancel": flag}, CANCELLED, "cancelled"),
    ):
        c.bad(lib.pe_program_run(program, c.batch(x, y, **fields)), status, says)
    c.good(lib.pe_program_run(program, c.batch(x, y)))
    assert_same_bits(y, kernels.linear(x, weight), "after the refusals")
    c.lib.pe_program_destroy(program)


def test_a_program_keeps_the_tensors_it_uses(c: Client, backend: Any) -> None:
    weight, x = normal(9, 16, 64), normal(10, 3, 64)
    tensor = c.tensor(backend, c.lib.PE_INT8, 16, 64, 64)
    c.good(c.lib.pe_tensor_pack(backend, tensor, c.pack_args(weight)))
    program = c.program(backend, c.linear_ops(tensor), [(0, 64), (1, 64), (0, 16)], 3)
    c.good(c.lib.pe_tensor_free(backend, tensor))
    other = c.tensor(backend, c.lib.PE_INT8, 16, 64, 64)
    assert other == tensor, "ids are used again"
    y = np.empty((3, 16), np.float32)
    c.good(c.lib.pe_program_run(program, c.batch(x, y)))
    assert_same_bits(y, kernels.linear(x, weight), "freed, yet held")
    c.lib.pe_program_destroy(program)


def test_rope_tables_and_kv_groups(c: Client, backend: Any) -> None:
    lib, i32, size = c.lib, c.ffi.new("int32_t*", -1), c.ffi.new("size_t*")
    table = c.array(normal(11, 4, 8))
    c.good(lib.pe_rope_set(backend, i32, table, 4, 8, c.ffi.NULL))
    c.bad(lib.pe_rope_set(backend, i32, table, 4, 6, c.ffi.NULL), REQUEST, "rotary_dim 6; the table has 8")
    for positions, dim in ((0, 8), (4, 7), (4, 0)):
        c.bad(lib.pe_rope_set(backend, i32, table, positions, dim, c.ffi.NULL), REQUEST, "rope table of")
    i32[0] = 9
    c.bad(lib.pe_rope_set(backend, i32, table, 4, 8, c.ffi.NULL), REQUEST, "rope table 9 does not exist")
    good = {"layers": 2, "kv_heads": 3, "k_dim": 8, "v_dim": 24, "dtype": lib.PE_KV_BF16}
    c.good(lib.pe_kv_create(backend, c.struct("pe_kv_desc", **good), i32))
    c.good(lib.pe_kv_block_bytes(backend, i32[0], size))
    assert size[0] == 2 * 3 * 32 * (8 + 32) * 2  # values are padded to 32 columns
    c.good(lib.pe_kv_reserve(backend, i32[0], 5))
    c.bad(lib.pe_kv_reserve(backend, 7, 5), REQUEST, "KV group 7 does not exist")
    c.bad(lib.pe_kv_create(backend, c.struct("pe_kv_desc", **{**good, "layers": 0}), i32), REQUEST, "0 layers")
    for dtype in (-1, 3):
        other = c.struct("pe_kv_desc", **{**good, "dtype": dtype})
        c.bad(lib.pe_kv_create(backend, other, i32), UNSUPPORTED, f"KV dtype {dtype}")
    int8 = c.struct("pe_kv_desc", **{**good, "k_dim": 6, "dtype": lib.PE_KV_INT8})
    c.good(lib.pe_kv_create(backend, int8, i32))
    c.good(lib.pe_kv_block_bytes(backend, i32[0], size))
    assert size[0] == 2 * 3 * 32 * ((8 + 4) + (32 + 4))  # keys are padded to 4 columns; a scale each


def test_tensors_are_gathered(c: Client, backend: Any) -> None:
    """They keep their bits and can be written; a program that had one goes on with what it had."""
    weights, x = [normal(seed, 32, 64) for seed in (1, 2)], normal(3, 1, 64)
    tensors = [c.tensor(backend, c.lib.PE_INT8, 32, 64, 64) for _ in weights]
    big = c.tensor(backend, c.lib.PE_ROWS_F32, 4 << 10, 1 << 10)  # with its header over 16 MiB: it stays

    def run(program: Any) -> np.ndarray:
        y = np.empty((1, 32), np.float32)
        c.good(c.lib.pe_program_run(program, c.batch(x, y)))
        return y

    def program(tensor: int) -> Any:
        return c.program(backend, c.linear_ops(tensor), [(0, 64), (1, 64), (0, 32)], 1)

    def addresses() -> list[int]:
        return [c.data(backend, tensor).ctypes.data for tensor in (*tensors, big)]

    for tensor, weight in zip(tensors, weights, strict=True):
        c.good(c.lib.pe_tensor_pack(backend, tensor, c.pack_args(weight)))
    first = program(tensors[0])
    before, there = [c.data(backend, tensor).copy() for tensor in tensors], addresses()
    ids = c.ffi.new("int32_t[]", [tensors[1], tensors[0], big, tensors[1]])
    c.good(c.lib.pe_tensors_gather(backend, ids, 4))
    now = addresses()
    assert now[2] == there[2]
    assert not {now[0], now[1]} & set(there)
    assert abs(now[0] - now[1]) < 1 << 14
    for tensor, bits in zip(tensors, before, strict=True):
        assert_same_bits(c.data(backend, tensor), bits, "data")
    c.good(c.lib.pe_tensor_pack(backend, tensors[0], c.pack_args(weights[1])))
    assert_same_bits(run(first), kernels.linear(x, weights[0]), "the program from before")
    after = program(tensors[0])
    assert_same_bits(run(after), kernels.linear(x, weights[1]), "a new program")
    for made in (first, after):
        c.lib.pe_program_destroy(made)

    c.good(c.lib.pe_tensors_gather(backend, c.ffi.NULL, 0))
    c.bad(c.lib.pe_tensors_gather(backend, c.ffi.NULL, 1), REQUEST, "ids is NULL")
    c.bad(c.lib.pe_tensors_gather(backend, ids, -1), REQUEST, "-1 tensors")
    ids[1] = 99
    c.bad(c.lib.pe_tensors_gather(backend, ids, 2), REQUEST, "tensor 99 does not exist")
    c.bad(c.lib.pe_tensors_gather(c.ffi.NULL, ids, 1), REQUEST, "backend is NULL")


def test_tensors_go_to_a_file_and_back(c: Client, backend: Any, tmp_path: Path) -> None:
    weight = normal(5, 40, 90)
    tensors = [c.tensor(backend, c.lib.PE_INT8, 40, 90, 64), c.tensor(backend, c.lib.PE_VECTOR_F32, 1, 48)]
    c.good(c.lib.pe_tensor_pack(backend, tensors[0], c.pack_args(weight)))
    written = c.ffi.new("uint64_t*")
    ids = c.ffi.new("int32_t[]", tensors)
    descs = c.ffi.new("pe_tensor_desc[]", 2)
    for desc, fields in zip(descs, ((c.lib.PE_INT8, 40, 90, 64), (c.lib.PE_VECTOR_F32, 1, 48, 0)), strict=True):
        desc.struct_size = c.ffi.sizeof("pe_tensor_desc")
        desc.format, desc.rows, desc.cols, desc.group = fields
    path = tmp_path / "tensors"
    with path.open("w+b") as file:
        given = {"fd": file.fileno(), "offset": 64, "count": 2, "ids": ids}
        c.good(c.lib.pe_tensors_write(backend, c.struct("pe_tensor_file", **given), written))
        assert written[0] == sum(c.data(backend, tensor).size for tensor in tensors) == path.stat().st_size - 64
        mapped = c.ffi.new("int32_t[]", 2)
        whole = c.struct("pe_tensor_file", **{**given, "ids": mapped}, descs=descs)
        c.good(c.lib.pe_tensors_map(backend, whole))
        for old, new in zip(tensors, mapped, strict=True):
            assert_same_bits(c.data(backend, new)[64:], c.data(backend, old)[64:], "data")
        c.bad(c.lib.pe_tensor_pack(backend, mapped[0], c.pack_args(weight)), REQUEST, "mapped")

        for fields, says in (({"count": 0}, "0 tensors"), ({"offset": 8}, "byte 8"), ({"ids": c.ffi.NULL}, "ids")):
            c.bad(c.lib.pe_tensors_map(backend, c.struct("pe_tensor_file", **{**given, **fields})), REQUEST, says)
        c.bad(c.lib.pe_tensors_map(backend, c.struct("pe_tensor_file", **given)), REQUEST, "descs is NULL")
        c.bad(c.lib.pe_tensors_write(backend, c.struct("pe_tensor_file", **given), c.ffi.NULL), REQUEST, "bytes")
        whole.offset = 0
        c.bad(c.lib.pe_tensors_map(backend, whole), FORMAT, "bytes; expected")
        whole.offset, whole.fd = 64, 10_000
        c.bad(c.lib.pe_tensors_map(backend, whole), FORMAT, "Bad file descriptor")
    with path.open("rb") as file:
        closed = c.struct("pe_tensor_file", **{**given, "fd": file.fileno()})
        c.bad(c.lib.pe_tensors_write(backend, closed, written), RESOURCE, "Bad file descriptor")
