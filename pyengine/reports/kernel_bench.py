"""Stage 6, kernel_bench: single ops of the core alone, each beside the limit of the machine that binds it.

An op runs in a program of its own, several times over copies of its weights (or over several layers of KV cache), so
that a run reads at least RUN_BYTES; before every run all of it is flushed from the caches, so weights come from memory
as they do in a model. The time is the core's own clock around the op, barrier included, without Python; a row shows the
median over the runs. Activations are what the op before left in the cache.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine import kernels
from pyengine._core import KV_BLOCK, Activation, Format, KvDtype, OpKind, Program, Stage
from pyengine.engine import available_memory
from pyengine.errors import RequestError, ResourceError
from pyengine.fuse import fuse
from pyengine.quantize import PackedFormat, choose
from pyengine.reports.machine import Gauge, Limits, measure
from pyengine.spec import ModelSpec
from pyengine.weights import padded

OPS = ("linear", "ffn", "ffn_unfused", "lm_head", "attention", "rms_norm", "quantize")
WEIGHTS = {
    **{name: choose(name).layers for name in ("f32", "bf16", "int8")},
    **{f"int4-{group}": choose("int4", group).layers for group in (32, 64, 128)},
    **{f"int4-sym-{group}": choose("int4", group, "symmetric").layers for group in (32, 64, 128)},
}
DEFAULT_WEIGHTS = tuple(name for name in WEIGHTS if name != "f32")
HEAD_WEIGHTS = ("f32", "bf16", "int8")  # under int4 the head is int8
HEAD_ROWS = 8  # rows of logits in a run, at most
RUN_BYTES = 64 << 20
KV_BYTES = {"f32": 4, "bf16": 2, "int8": 1}  # of a number in the KV cache, its scale left out
SMALL_COPIES = 64  # of an op without weights
BLOCK_ROWS = 1024  # random rows that a matrix repeats
RESIDUAL = (OpKind.ADD, OpKind.LINEAR_RESIDUAL, OpKind.GATED_FFN_RESIDUAL)  # ops that read their output, too
MAX_SECONDS = 10.0  # a row whose single run would take longer at the machine's best rate is left empty

Progress = Callable[[int, int, str], None]
Float32 = npt.NDArray[np.float32]


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

    @classmethod
    def of(cls, name: str, spec: ModelSpec) -> Shape:
        """Of a model's first layer."""
        a, ffn = spec.layers[0].attention, spec.layers[0].ffn.intermediate_size
        return cls(name, spec.hidden_size, ffn, a.num_heads, a.num_kv_heads, a.head_dim, spec.vocab_size)


SHAPES = (
    Shape("Qwen2.5-1.5B", 1536, 8960, 12, 2, 128, 151936),
    Shape("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128256),
)


@dataclass(frozen=True)
class Row:
    """A row of `bench --kernels --json`. m tokens; n, k: the matrix (ffn: hidden, FFN size; attention: columns, keys).

    gb_per_s counts `weight_bytes` (weights, or keys and values), of rms_norm and quantize `activation_bytes`. fraction
    is the larger of bytes over the read limit and operations over the rate of `bound`; None where activations in the
    cache are all there is. Times and what follows from them are None if the op would take too long.
    """

    model: str
    op: str
    isa: str
    weights: str | None
    m: int
    n: int
    k: int
    microseconds: float | None
    gb_per_s: float | None
    gops: float | None
    fraction: float | None
    bound: str | None
    weight_bytes: int
    activation_bytes: int
    barriers: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    def operations(self) -> int:
        """Of its products; a multiply-add is two. Row norms and rounding have none that count."""
        products = {
            "linear": self.n * self.k,
            "lm_head": self.n * self.k,
            "ffn": 3 * self.n * self.k,
            "ffn_unfused": 3 * self.n * self.k,
        }
        if self.op == "attention":  # row i sees k - m + i + 1 keys
            seen = self.m * self.k - self.m * (self.m - 1) // 2
            return 4 * self.n * seen
        return 2 * self.m * products.get(self.op, 0)


def jobs(
    shapes: tuple[Shape, ...], ops: list[str], weights: list[str], batch: list[int], contexts: list[int]
) -> Iterator[Job]:
    """Rows in the order they are measured: those that share packed weights stand together.

    RequestError for an unknown op or format, an M below 1, or a context that an attention row of M does not fit.
    """
    for what, given, known in (("op", ops, OPS), ("weights", weights, tuple(WEIGHTS))):
        for name in given:
            if name not in known:
                raise RequestError(f"{what} {name!r}; expected one of {', '.join(known)}")
    if min(batch) < 1 or ("attention" in ops and min(contexts) < 1):
        raise RequestError(f"batch {min(batch)}, context {min(contexts)}; expected at least 1")
    for shape, op in itertools.product(shapes, ops):
        s = shape
        qkv = (padded(s.heads * s.head_dim) + padded(s.kv_heads * s.head_dim) + s.kv_heads * s.head_dim, s.hidden)
        sizes = {
            "linear": [qkv, (s.hidden, s.ffn)],
            "ffn": [(s.hidden, s.ffn)],
            "ffn_unfused": [(s.hidden, s.ffn)],
            "lm_head": [(s.vocab, s.hidden)],
            "attention": [(s.heads * s.head_dim, context) for context in contexts],
            "rms_norm": [(s.hidden, s.hidden)],
            "quantize": [(s.ffn, s.ffn)],
        }[op]
        formats: list[Any] = [None] if op in ("attention", "rms_norm", "quantize") else list(weights)
        if op == "lm_head":
            formats = [name for name in formats if name in HEAD_WEIGHTS]
        for (n, k), fmt in itertools.product(sizes, formats):
            for m in batch:
                if (op != "lm_head" or m <= HEAD_ROWS) and (op != "attention" or m <= k):
                    yield Job(shape, op, fmt, m, n, k)


class Bed:
    """A small backend whose program repeats one op over copies: ops before `measured` only prepare its input."""

    def __init__(self, threads: int, isa: str, tokens: int) -> None:
        self.b = kernels.Bench(threads, isa)
        self.tokens = tokens  # at most, in a run
        self.measured: list[dict[str, Any]] = []
        self.weight_bytes = 0  # of a copy
        self.table: npt.NDArray[np.int32] | None = None
        self.hidden = np.empty((0, 0), np.float32)

    def source(self, width: int) -> int:
        """A buffer of random values [tokens, width]."""
        self.hidden = np.random.default_rng(0).standard_normal((self.tokens, width), np.float32)
        loaded = self.b.buffer(width)
        self.b.op(OpKind.LOAD_HIDDEN, output=loaded)
        return loaded

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

    def measure(self, kind: OpKind, **fields: Any) -> None:
        self.measured.append({"kind": int(kind), "stage": int(Stage.FFN), **fields})

    def traffic(self, ops: list[dict[str, Any]], m: int) -> int:
        """Bytes of buffers that the ops write and read with m tokens, each once."""
        total = 0
        for op in ops:
            for name, times in (("input", 1), ("output", 1), ("scratch", 2)):
                if op.get(name, -1) >= 0:
                    twice = name == "output" and op["kind"] in map(int, RESIDUAL)
                    total += m * self.row_bytes(op[name]) * (2 if twice else times)
        return total

    def row_bytes(self, buffer: int) -> int:
        quantized, width = self.b.buffers[buffer]
        return width + 33 * -(-width // 64) if quantized else 4 * width

    def times(self, job: Job, ops: list[dict[str, Any]], repetitions: int) -> tuple[list[float], float]:
        """Seconds of the ops together, in each run after an untimed one; and their barriers."""
        before = list(self.b.ops)
        program = Program(self.b.backend, before + ops, self.b.buffers, job.m, job.m, True)
        seconds: list[float] = []
        for run in range(repetitions + 1):
            self.b.backend.flush_caches()
            self.run(program, job)
            ops_ns, _, _ = program.times(True)
            if run:
                seconds.append(float(ops_ns[len(before) :].sum()) / 1e9)
        barriers = program.info()["barriers"] / (repetitions + 1) - len(before)
        return seconds, barriers

    def run(self, program: Program, job: Job) -> None:
        first = job.k - job.m if job.op == "attention" else 0
        positions = np.arange(first, first + job.m, dtype=np.int32)
        ends = np.array([0, job.m], np.int32)
        rows = np.arange(job.m, dtype=np.int32) if job.op == "lm_head" else kernels.EMPTY
        tables = [] if self.table is None else [self.table]
        hidden = self.hidden[: job.m]
        program.run(kernels.EMPTY, positions, ends, tables, rows, None, None, hidden, [], None, True)


def copies_of(job: Job, bytes_each: float) -> int:
    """Enough for RUN_BYTES; one where computing takes the time."""
    return 1 if job.m > HEAD_ROWS else max(1, math.ceil(RUN_BYTES / bytes_each))


def bits(fmt: PackedFormat) -> float:
    """Of a weight, nearly: enough to count copies."""
    return {Format.F32: 32.0, Format.BF16: 16.0, Format.INT8: 8.25}.get(fmt.format, 4 + 16 / max(fmt.group, 1))


def lay_linear(bed: Bed, job: Job, fmt: PackedFormat) -> int:
    count = copies_of(job, job.n * job.k * bits(fmt) / 8)
    x, out = bed.b.quantized(bed.source(job.k), fmt), bed.b.buffer(job.n)
    for weight in bed.copies(fmt, job.n, job.k, count):
        bed.measure(OpKind.LINEAR, input=x, output=out, weight=weight)
    return count


def lay_ffn(bed: Bed, job: Job, fmt: PackedFormat) -> int:
    """Gate and up, activation, rounding, down, residual: five ops (four for float weights), or fused into one."""
    count = copies_of(job, 3 * job.n * job.k * bits(fmt) / 8)
    x, out = bed.b.quantized(bed.source(job.n), fmt), bed.b.buffer(job.n)
    sums, act, branch = bed.b.buffer(2 * padded(job.k)), bed.b.buffer(job.k), bed.b.buffer(job.n)
    rounded = bed.b.buffer(job.k, quantized=True) if fmt.is_integer else act
    gate_up, down = bed.copies(fmt, 2 * padded(job.k), job.n, count), bed.copies(fmt, job.n, job.k, count)
    for first, second in zip(gate_up, down, strict=True):
        bed.measure(OpKind.LINEAR, input=x, output=sums, weight=first)
        bed.measure(OpKind.ACT_MUL, input=sums, output=act, activation=int(Activation.SILU))
        if fmt.is_integer:
            bed.measure(OpKind.QUANTIZE, input=act, output=rounded)
        bed.measure(OpKind.LINEAR, input=rounded, output=branch, weight=second)
        bed.measure(OpKind.ADD, input=branch, output=out)
    if job.op == "ffn":
        bed.measured = fuse(bed.measured)
    return count


def lay_lm_head(bed: Bed, job: Job, fmt: PackedFormat) -> int:
    x, norm = bed.source(job.k), bed.b.vector(np.ones(job.k, np.float32))
    (weight,) = bed.copies(fmt, job.n, job.k, 1)
    bed.measure(OpKind.LM_HEAD, input=x, weight=weight, norm=norm, eps=1e-6)
    return 1


def lay_attention(bed: Bed, job: Job, kv_dtype: str) -> int:
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
    for layer in range(layers):
        scale = 1 / math.sqrt(s.head_dim)
        bed.measure(OpKind.ATTENTION, input=x, output=out, kv_layer=layer, window=0, scale=scale, **heads)
    bed.weight_bytes = b.backend.kv_block_bytes(group) * job.k // (KV_BLOCK * layers)
    return layers


def lay_rows(bed: Bed, job: Job) -> int:
    x = bed.source(job.k)
    if job.op == "rms_norm":
        norm, out = bed.b.vector(np.ones(job.k, np.float32)), bed.b.buffer(job.k)
        for _ in range(SMALL_COPIES):
            bed.measure(OpKind.NORM, input=x, output=out, norm=norm, eps=1e-6)
    else:
        out = bed.b.buffer(job.k, quantized=True)
        for _ in range(SMALL_COPIES):
            bed.measure(OpKind.QUANTIZE, input=x, output=out)
    return SMALL_COPIES


def lay(bed: Bed, job: Job, kv_dtype: str) -> int:
    """Put the job's op into `bed`; how many times it stands there."""
    if job.op == "attention":
        return lay_attention(bed, job, kv_dtype)
    if job.weights is None:
        return lay_rows(bed, job)
    layers = {"linear": lay_linear, "lm_head": lay_lm_head, "ffn": lay_ffn, "ffn_unfused": lay_ffn}
    return layers[job.op](bed, job, WEIGHTS[job.weights])


def rate_of(job: Job) -> str | None:
    """Which compute limit the job's products run against."""
    if job.weights is None:
        return "f32" if job.op == "attention" else None
    return "int8" if WEIGHTS[job.weights].is_integer else "f32"


def conclude(row: Row, job: Job, seconds: float, limits: Limits) -> Row:
    """The row with what follows from a time and the limits."""
    rate = rate_of(job)
    gb_per_s = (row.weight_bytes or row.activation_bytes) / seconds / 1e9
    row = replace(row, microseconds=seconds * 1e6, gb_per_s=gb_per_s)
    if rate is None:
        return row
    gops = job.operations / seconds / 1e9
    fractions = {
        "read": gb_per_s / limits.read_gb_per_s,
        rate: gops / (limits.int8_gops if rate == "int8" else limits.f32_gflops),
    }
    bound = max(fractions, key=lambda name: fractions[name])
    return replace(row, gops=gops, fraction=fractions[bound], bound=bound)


def check_memory(job: Job, kv_dtype: str) -> None:
    """ResourceError before a matrix that does not fit is made."""
    weights = 3 * job.n * job.k if job.op.startswith("ffn") else job.n * job.k
    wanted = weights * bits(WEIGHTS[job.weights]) / 8 if job.weights is not None else 0.0
    if job.op == "attention":
        wanted = 2 * job.shape.kv_heads * padded(job.shape.head_dim) * job.k * KV_BYTES[kv_dtype]
    available = available_memory()
    if available is not None and 2 * wanted + RUN_BYTES > available:
        raise ResourceError(
            f"{job.op} {job.n} x {job.k} in {job.weights} takes {int(2 * wanted)} bytes, {available} are available"
        )


def run(
    wanted: list[Job],
    *,
    isas: list[str],
    threads: int,
    repetitions: int,
    kv_dtype: str = "bf16",
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> tuple[list[Row], dict[str, Gauge]]:
    """Every job on every ISA, and each ISA's gauge: limits are measured before, after and between groups of jobs."""
    rows: list[Row] = []
    gauges: dict[str, Gauge] = {}
    done, total = 0, len(wanted) * len(isas)
    for isa in isas:
        backend = kernels.Bench(threads, isa).backend
        gauge = gauges[isa] = Gauge(lambda backend=backend: measure(backend))  # type: ignore[misc]
        gauge.sample()
        timed: list[tuple[Job, Row, float | None]] = []
        for _, group in itertools.groupby(wanted, key=lambda job: (job.shape, job.op, job.n, job.k, job.weights)):
            some = list(group)
            if progress is not None:
                progress(done, total, f"{some[0].op} {some[0].weights or ''} {isa}")
            done += len(some)
            able = [job for job in some if not too_long(job, gauge.limits)]
            made = time_jobs(able, isa, threads, repetitions, kv_dtype) if able else {}
            for job in some:
                if job not in made and note is not None:
                    what = f"{job.op} {job.weights or ''} m {job.m} on {isa}"
                    note(f"{what} would take over {MAX_SECONDS:g} s; left empty")
                timed.append((job, *made.get(job, (empty_row(job, isa), None))))
            gauge.sample()
        rows += [row if s is None else conclude(row, job, s, gauge.limits) for job, row, s in timed]
    if progress is not None:
        progress(total, total, "done")
    return rows, gauges


def empty_row(job: Job, isa: str) -> Row:
    return Row(
        model=job.shape.name,
        op=job.op,
        isa=isa,
        weights=job.weights,
        m=job.m,
        n=job.n,
        k=job.k,
        microseconds=None,
        gb_per_s=None,
        gops=None,
        fraction=None,
        bound=None,
        weight_bytes=0,
        activation_bytes=0,
        barriers=None,
    )


def too_long(job: Job, limits: Limits) -> bool:
    """Whether a single run takes MAX_SECONDS even at the machine's best."""
    rate = limits.int8_gops if rate_of(job) == "int8" else limits.f32_gflops
    return job.operations / 1e9 / rate > MAX_SECONDS


def time_jobs(
    group: list[Job], isa: str, threads: int, repetitions: int, kv_dtype: str
) -> dict[Job, tuple[Row, float]]:
    """For jobs that differ in m alone: the row without what follows from its time, and the median seconds of one op."""
    check_memory(group[0], kv_dtype)
    bed = Bed(threads, isa, max(job.m for job in group))
    count = lay(bed, min(group, key=lambda job: job.m), kv_dtype)
    made: dict[Job, tuple[Row, float]] = {}
    for job in group:
        used = 1 if job.m > HEAD_ROWS and job.op not in ("rms_norm", "quantize") else count
        ops = bed.measured[: len(bed.measured) // count * used]
        seconds, barriers = bed.times(job, ops, repetitions)
        moved = bed.traffic(ops, job.m) // used
        row = replace(
            empty_row(job, isa), weight_bytes=bed.weight_bytes, activation_bytes=moved, barriers=barriers / used
        )
        made[job] = row, statistics.median(seconds) / used
    return made
