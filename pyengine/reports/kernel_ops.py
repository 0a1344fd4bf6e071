"""Stage 6, kernel_ops: the ops that `bench --kernels` times, each in a small program of its own.

An op runs several times over copies of its weights (or over several layers of KV cache), so that a run reads at least
RUN_BYTES; before every run all of it is flushed from the caches, so weights come from memory as they do in a model.
Where the memory is the limit, BUSY_BYTES of other weights are read in the same run before: virtual machines may grant
twice the bandwidth for some milliseconds after a pause, and a model makes none. The time is the core's own clock around
the op, barrier included, without Python. Activations are what the op before left in the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine import kernels
from pyengine._core import KV_BLOCK, Activation, Format, KvDtype, OpKind, Program, Stage
from pyengine.decoder import router_fields
from pyengine.errors import RequestError
from pyengine.fuse import fuse
from pyengine.packer import padded
from pyengine.quantize import PackedFormat, choose
from pyengine.spec import MLASpec, ModelSpec, MoESpec, RouterSpec

FFN = ("ffn", "ffn_unfused", "ffn_naive")  # ops on the same weights
OPS = ("linear", *FFN, "moe", "lm_head", "attention", "rms_norm", "quantize")
WEIGHTS = {
    **{name: choose(name).layers for name in ("f32", "bf16", "int8")},
    **{f"int4-{group}": choose("int4", group).layers for group in (32, 64, 128)},
    **{f"int4-sym-{group}": choose("int4", group, "symmetric").layers for group in (32, 64, 128)},
}
DEFAULT_WEIGHTS = tuple(name for name in WEIGHTS if name != "f32")
HEAD_WEIGHTS = ("f32", "bf16", "int8")  # under int4 the head is int8
HEAD_ROWS = 8  # rows of logits in a run, at most
RUN_BYTES = 64 << 20
BUSY_BYTES = 256 << 20
KV_BYTES = {"f32": 4, "bf16": 2, "int8": 1}  # of a number in the KV cache, its scale left out
SMALL_COPIES = 64  # of an op without weights
BLOCK_ROWS = 1024  # random rows that a matrix repeats
# ops that read their output, too
RESIDUAL = (OpKind.ADD, OpKind.LINEAR_RESIDUAL, OpKind.GATED_FFN_RESIDUAL, OpKind.MOE_FFN_RESIDUAL)
OWN_TOKENS = 2  # of the core: up to there a router has no barrier inside


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's ops."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0  # of a layer; 0: none
    top_k: int = 0
    expert: int = 0  # columns of one's hidden values
    latent: bool = False  # latent attention: no row of [q | k | v], none of attention
    alone: bool = False  # the experts alone are measured

    @classmethod
    def of(cls, name: str, spec: ModelSpec) -> Shape:
        """Of a model's first layer, and of the first with experts."""
        a, ffn = spec.layers[0].attention, spec.layers[0].ffn
        ffn = ffn.expert if isinstance(ffn, MoESpec) else ffn
        moe = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoESpec)), None)
        return cls(
            name,
            spec.hidden_size,
            ffn.intermediate_size,
            a.num_heads,
            a.num_kv_heads,
            a.head_dim,
            spec.vocab_size,
            moe.router.num_experts if moe else 0,
            moe.router.top_k if moe else 0,
            moe.expert.intermediate_size if moe else 0,
            isinstance(a, MLASpec),
        )


SHAPES = (
    Shape("Qwen2.5-1.5B", 1536, 8960, 12, 2, 128, 151936),
    Shape("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128256),
    Shape("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, 151936, 128, 8, 768, alone=True),
    Shape("Mixtral-8x7B", 4096, 14336, 32, 8, 128, 32000, 8, 2, 14336, alone=True),
)


@dataclass(frozen=True)
class Job:
    """One row to be."""

    shape: Shape
    op: str
    weights: str | None
    m: int
    n: int
    k: int

    @property
    def matrix(self) -> tuple[int, int, str | None]:
        return self.n, self.k, self.weights

    @property
    def operations(self) -> int:
        """Of its products; a multiply-add is two. Row norms and rounding have none that count."""
        if self.op == "attention":  # row i sees k - m + i + 1 keys
            seen = self.m * self.k - self.m * (self.m - 1) // 2
            return 4 * self.n * seen
        matrices = 3 if self.op in FFN else int(self.op in ("linear", "lm_head"))
        if self.op == "moe":
            matrices = 3 * self.shape.top_k
        return 2 * self.m * matrices * self.n * self.k

    @property
    def rate(self) -> str | None:
        """The field of Limits that its products run against; None where there are none that count."""
        if self.op == "attention":
            return "f32_gflops"
        if self.weights is None:
            return None
        return "int8_gops" if WEIGHTS[self.weights].is_integer and self.op != "ffn_naive" else "f32_gflops"


def jobs(
    shapes: tuple[Shape, ...], ops: list[str], weights: list[str], batch: list[int], contexts: list[int]
) -> Iterator[Job]:
    """Rows in the order they are measured: those that share packed weights stand together, ops of the FFN side by side.

    RequestError for an unknown op or format, an M below 1, or a context that an attention row of M does not fit.
    """
    for what, given, known in (("op", ops, OPS), ("weights", weights, tuple(WEIGHTS))):
        for name in given:
            if name not in known:
                raise RequestError(f"{what} {name!r}; expected one of {', '.join(known)}")
    if min(batch) < 1 or ("attention" in ops and min(contexts) < 1):
        raise RequestError(f"batch {min(batch)}, context {min(contexts)}; expected at least 1")
    together = [op for op in ops if op in FFN]
    for shape, op in itertools.product(shapes, ops):
        if op in together[1:]:
            continue
        s = shape
        if (op == "moe" and not s.experts) or (op != "moe" and s.alone) or (op == "attention" and s.latent):
            continue
        qkv = (padded(s.heads * s.head_dim) + padded(s.kv_heads * s.head_dim) + s.kv_heads * s.head_dim, s.hidden)
        sizes = {
            "linear": [*([] if s.latent else [qkv]), (s.hidden, s.ffn)],
            "moe": [(s.hidden, s.expert)],
            "lm_head": [(s.vocab, s.hidden)],
            "attention": [(s.heads * s.head_dim, context) for context in contexts],
            "rms_norm": [(s.hidden, s.hidden)],
            "quantize": [(s.ffn, s.ffn)],
        }.get(op, [(s.hidden, s.ffn)])
        formats: list[Any] = [None] if op in ("attention", "rms_norm", "quantize") else list(weights)
        if op == "lm_head":
            formats = [name for name in formats if name in HEAD_WEIGHTS]
        for (n, k), fmt, m in itertools.product(sizes, formats, batch):
            if (op != "lm_head" or m <= HEAD_ROWS) and (op != "attention" or m <= k):
                same = [name for name in together if name != "ffn_naive" or fmt != "f32"] if op in FFN else [op]
                yield from (Job(shape, name, fmt, m, n, k) for name in same)


Ops = list[dict[str, Any]]


def op_of(kind: OpKind, **fields: Any) -> dict[str, Any]:
    return {"kind": int(kind), "stage": int(Stage.FFN), **fields}


class Bed:
    """A small backend with weights, and the ops that prepare the input of what is timed."""

    def __init__(self, threads: int, isa: str, tokens: int) -> None:
        self.b = kernels.Bench(threads, isa)
        self.tokens = tokens  # at most, in a run
        self.weight_bytes = 0  # of a copy
        self.table: npt.NDArray[np.int32] | None = None
        self.hidden = np.empty((0, 0), np.float32)
        self.loaded = -1
        self.other: dict[str, Any] | None = None

    def source(self, width: int) -> int:
        """A buffer of random values [tokens, width]."""
        self.hidden = np.random.default_rng(0).standard_normal((self.tokens, width), np.float32)
        self.loaded = self.b.buffer(width)
        self.b.op(OpKind.LOAD_HIDDEN, output=self.loaded)
        return self.loaded

    def busy(self) -> dict[str, Any]:
        """An op that reads BUSY_BYTES of weights of its own."""
        if self.other is None:
            before, width = self.weight_bytes, self.hidden.shape[1]
            rows = padded(BUSY_BYTES // (2 * width))
            (weight,) = self.copies(PackedFormat(Format.BF16), rows, width, 1)
            self.weight_bytes = before
            self.other = op_of(OpKind.LINEAR, input=self.loaded, output=self.b.buffer(rows), weight=weight)
        return self.other

    def copies(self, fmt: PackedFormat, rows: int, cols: int, count: int) -> list[int]:
        """`count` equal packed matrices of random values."""
        backend, block = self.b.backend, min(rows, BLOCK_ROWS)
        values = np.random.default_rng(1).standard_normal((block, cols), np.float32) / math.sqrt(cols)
        first = backend.tensor_create(int(fmt.format), rows, cols, fmt.group)
        for begin in range(0, rows, BLOCK_ROWS):
            backend.tensor_pack(first, values[: rows - begin].astype(np.float16), begin // 16, 1, None)
        made = [first]
        raw = backend.tensor_bytes(first) if count > 1 else None
        for _ in range(count - 1):
            made.append(backend.tensor_create(int(fmt.format), rows, cols, fmt.group))
            assert raw is not None
            backend.tensor_write(made[-1], raw)
        self.weight_bytes += backend.tensor_size(first) - 64
        return made

    def stack(self, fmt: PackedFormat, rows: int, cols: int, count: int) -> int:
        """A tensor of `count` equal packed matrices, one behind the other, each from a panel border."""
        backend, before = self.b.backend, self.weight_bytes
        (one,) = self.copies(fmt, rows, cols, 1)
        made = backend.tensor_create(int(fmt.format), count * padded(rows), cols, fmt.group)
        header = 64
        raw = backend.tensor_bytes(made)
        raw[header:].reshape(count, -1)[:] = backend.tensor_bytes(one)[header:]
        backend.tensor_write(made, raw)
        backend.tensor_free(one)
        self.weight_bytes = before + len(raw) - header
        return made

    def traffic(self, ops: Ops, m: int) -> int:
        """Bytes of buffers that the ops write and read with m tokens, each once."""
        total = 0
        for op in ops:
            for name, times in (("input", 1), ("output", 1), ("scratch", 2), ("rows", 2 if m > 1 else 0)):
                if op.get(name, -1) >= 0:
                    twice = name == "output" and op["kind"] in map(int, RESIDUAL)
                    total += m * self.row_bytes(op[name]) * (2 if twice else times)
        return total

    def row_bytes(self, buffer: int) -> int:
        quantized, width = self.b.buffers[buffer]
        return self.b.rows[buffer] * (width + 33 * -(-width // 64) if quantized else 4 * width)


class Timer:
    """A program of a job's op over `copies`, behind what prepares its input."""

    def __init__(self, bed: Bed, job: Job, copies: list[Ops]) -> None:
        self.bed, self.job, self.copies, self.runs = bed, job, len(copies), 0
        ops = [*bed.b.ops, *([bed.busy()] if job.m <= HEAD_ROWS else [])]
        self.before = len(ops)
        ops += itertools.chain.from_iterable(copies)
        self.program = Program(bed.b.backend, ops, bed.b.descs, job.m, job.m, True)

    def seconds(self) -> float:
        """Of one copy, in a run of all with everything out of the caches."""
        job, bed = self.job, self.bed
        bed.b.backend.flush_caches()
        first = job.k - job.m if job.op == "attention" else 0
        positions = np.arange(first, first + job.m, dtype=np.int32)
        ends = np.array([0, job.m], np.int32)
        rows = np.arange(job.m, dtype=np.int32) if job.op == "lm_head" else kernels.EMPTY
        tables = [] if bed.table is None else [bed.table]
        self.program.times(True)
        self.program.run(kernels.EMPTY, positions, ends, tables, rows, None, None, bed.hidden[: job.m], [], None, True)
        self.runs += 1
        return float(self.program.times()[0][self.before :].sum()) / 1e9 / self.copies

    @property
    def barriers(self) -> float:
        """Of one copy."""
        before = self.before + int(self.job.op == "moe" and self.job.m > OWN_TOKENS)
        return (self.program.info()["barriers"] / self.runs - before) / self.copies

    @property
    def weight_bytes(self) -> int:
        """What one copy reads: of experts, those that a token is sent to."""
        if self.job.op != "moe":
            return self.bed.weight_bytes
        return self.bed.weight_bytes * int(np.count_nonzero(self.program.routing())) // self.job.shape.experts


def copies_of(job: Job, bytes_each: float) -> int:
    """Enough for RUN_BYTES; one where computing takes the time."""
    return 1 if job.m > HEAD_ROWS else max(1, math.ceil(RUN_BYTES / bytes_each))


def bits(fmt: PackedFormat) -> float:
    """Of a weight, nearly: enough to count copies."""
    return {Format.F32: 32.0, Format.BF16: 16.0, Format.INT8: 8.25}.get(fmt.format, 4 + 16 / max(fmt.group, 1))


def lay_linear(bed: Bed, job: Job, fmt: PackedFormat) -> list[Ops]:
    count = copies_of(job, job.n * job.k * bits(fmt) / 8)
    x, out = bed.b.quantized(bed.source(job.k), fmt), bed.b.buffer(job.n)
    weights = bed.copies(fmt, job.n, job.k, count)
    return [[op_of(OpKind.LINEAR, input=x, output=out, weight=weight)] for weight in weights]


def lay_ffn(bed: Bed, job: Job, fmt: PackedFormat, naive: bool) -> dict[str, list[Ops]]:
    """Gate and up, activation, rounding, down, residual: five ops (four for float weights), or fused into one.

    The naive form makes float32 matrices of the same weights in memory, every time, and multiplies floats with them.
    """
    count = copies_of(job, 3 * job.n * job.k * bits(fmt) / 8)
    source = bed.source(job.n)
    x, out = bed.b.quantized(source, fmt), bed.b.buffer(job.n)
    sums, act, branch = bed.b.buffer(2 * padded(job.k)), bed.b.buffer(job.k), bed.b.buffer(job.n)
    rounded = bed.b.buffer(job.k, quantized=True) if fmt.is_integer else act
    gate_up, down = bed.copies(fmt, 2 * padded(job.k), job.n, count), bed.copies(fmt, job.n, job.k, count)
    unfused = [
        [
            op_of(OpKind.LINEAR, input=x, output=sums, weight=first),
            op_of(OpKind.ACT_MUL, input=sums, output=act, activation=int(Activation.SILU)),
            *([op_of(OpKind.QUANTIZE, input=act, output=rounded)] if fmt.is_integer else []),
            op_of(OpKind.LINEAR, input=rounded, output=branch, weight=second),
            op_of(OpKind.ADD, input=branch, output=out),
        ]
        for first, second in zip(gate_up, down, strict=True)
    ]
    laid = {"ffn": [fuse(ops) for ops in unfused], "ffn_unfused": unfused}
    if naive:
        floats = [
            bed.b.backend.tensor_create(int(Format.F32), *size) for size in ((2 * padded(job.k), job.n), (job.n, job.k))
        ]
        laid["ffn_naive"] = [
            [
                op_of(OpKind.DEQUANTIZE, weight=first, weight2=floats[0]),
                op_of(OpKind.LINEAR, input=source, output=sums, weight=floats[0]),
                op_of(OpKind.ACT_MUL, input=sums, output=act, activation=int(Activation.SILU)),
                op_of(OpKind.DEQUANTIZE, weight=second, weight2=floats[1]),
                op_of(OpKind.LINEAR, input=act, output=branch, weight=floats[1]),
                op_of(OpKind.ADD, input=branch, output=out),
            ]
            for first, second in zip(gate_up, down, strict=True)
        ]
    return laid


def lay_moe(bed: Bed, job: Job, fmt: PackedFormat) -> list[Ops]:
    """All experts of a layer, behind a router that is not timed: one copy, of which a run reads what is chosen."""
    s, b = job.shape, bed.b
    source, experts = bed.source(job.n), s.experts
    router = np.random.default_rng(3).standard_normal((experts, job.n), np.float32) / math.sqrt(job.n)
    routing, scores = b.buffer(2 * s.top_k), b.buffer(experts)
    fields = router_fields(RouterSpec(experts, s.top_k, normalise=True))
    weight = b.tensor(PackedFormat(Format.F32), experts, [(router, 0, 1)])
    b.op(OpKind.ROUTER, input=source, output=routing, scratch=scores, weight=weight, **fields)
    x, out, branch = b.quantized(source, fmt), b.buffer(job.n), b.buffer(job.n)
    act, rows = b.buffer(job.k, rows=s.top_k), b.buffer(job.n, rows=s.top_k)
    rounded = b.buffer(job.k, quantized=True, rows=s.top_k) if fmt.is_integer else act
    gate_up = bed.stack(fmt, 2 * padded(job.k), job.n, experts)
    down = bed.stack(fmt, job.n, job.k, experts)
    common = {"experts": experts, "top_k": s.top_k, "routing": routing, "rows": rows}
    silu = int(Activation.SILU)
    ops = [
        op_of(OpKind.MOE_GATE_UP, input=x, output=act, weight=gate_up, activation=silu, **common),
        *([op_of(OpKind.QUANTIZE, input=act, output=rounded)] if fmt.is_integer else []),
        op_of(OpKind.MOE_DOWN, input=rounded, output=branch, weight2=down, **common),
        op_of(OpKind.ADD, input=branch, output=out),
    ]
    return [fuse(ops)]


def lay_lm_head(bed: Bed, job: Job, fmt: PackedFormat) -> list[Ops]:
    x, norm = bed.source(job.k), bed.b.vector(np.ones(job.k, np.float32))
    (weight,) = bed.copies(fmt, job.n, job.k, 1)
    return [[op_of(OpKind.LM_HEAD, input=x, weight=weight, norm=norm, eps=1e-6)]]


def lay_attention(bed: Bed, job: Job, kv_dtype: str) -> list[Ops]:
    """The last m of k positions, over a KV group of as many layers as a run needs."""
    s, b = job.shape, bed.b
    layer_bytes = 2 * s.kv_heads * padded(s.head_dim) * job.k * KV_BYTES[kv_dtype]
    layers = copies_of(job, layer_bytes)
    group = b.backend.kv_create(layers, s.kv_heads, s.head_dim, s.head_dim, int(KvDtype.__members__[kv_dtype.upper()]))
    blocks = -(-job.k // KV_BLOCK)
    b.backend.kv_reserve(group, blocks)
    bed.table = np.arange(blocks, dtype=np.int32).reshape(1, blocks)
    heads = {"heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim, "kv_group": group}
    width = padded(s.heads * s.head_dim) + padded(s.kv_heads * s.head_dim) + s.kv_heads * s.head_dim
    fill: list[dict[str, Any]] = [{"kind": int(OpKind.LOAD_HIDDEN), "stage": int(Stage.ATTENTION), "output": 0}]
    append = {"kind": int(OpKind.KV_APPEND), "stage": int(Stage.ATTENTION), "input": 0, **heads}
    fill += [{**append, "kv_layer": layer} for layer in range(layers)]
    values = np.random.default_rng(2).standard_normal((min(job.k, 512), width), np.float32)
    program = Program(b.backend, fill, [(False, width)], len(values), 1, False)
    for start in range(0, job.k, len(values)):
        kernels.run(program, values[: job.k - start], start=start, table=bed.table)
    x, out = bed.source(width), b.buffer(s.heads * s.head_dim)
    bed.weight_bytes = b.backend.kv_block_bytes(group) * job.k // (KV_BLOCK * layers)
    fields = {"input": x, "output": out, "window": 0, "scale": 1 / math.sqrt(s.head_dim), **heads}
    return [[op_of(OpKind.ATTENTION, kv_layer=layer, **fields)] for layer in range(layers)]


def lay_rows(bed: Bed, job: Job) -> list[Ops]:
    x = bed.source(job.k)
    if job.op == "rms_norm":
        norm, out = bed.b.vector(np.ones(job.k, np.float32)), bed.b.buffer(job.k)
        return [[op_of(OpKind.NORM, input=x, output=out, norm=norm, eps=1e-6)]] * SMALL_COPIES
    out = bed.b.buffer(job.k, quantized=True)
    return [[op_of(OpKind.QUANTIZE, input=x, output=out)]] * SMALL_COPIES


def lay(bed: Bed, group: list[Job], kv_dtype: str) -> dict[str, list[Ops]]:
    """Weights and buffers that the jobs share, in `bed`; for each op, what it consists of, once for every copy."""
    job = min(group, key=lambda job: job.m)
    if job.op in FFN:
        assert job.weights is not None
        return lay_ffn(bed, job, WEIGHTS[job.weights], any(job.op == "ffn_naive" for job in group))
    if job.op == "attention":
        return {job.op: lay_attention(bed, job, kv_dtype)}
    if job.weights is None:
        return {job.op: lay_rows(bed, job)}
    layers = {"linear": lay_linear, "lm_head": lay_lm_head, "moe": lay_moe}
    return {job.op: layers[job.op](bed, job, WEIGHTS[job.weights])}
