"""Stage 4, kernels: the core's kernels alone, on numpy arrays. Each call builds and runs a program of a few ops.

    from pyengine import kernels
    y = kernels.swiglu_ffn(x, gate, up, down, quant="int4", group_size=64)

Conventions. M tokens, N output features, K input features; matrices are [N, K] as on disk. Arrays of values are
float32 or float16, matrices also bfloat16 (as ml_dtypes.bfloat16, or as its bits in uint16); everything computed is
float32. `quant` is "f32", "bf16", "int8" or "int4", with `group_size` and `scheme` as for pyengine.load. `threads` None
is the default number, `isa` None the best one that this CPU has; results depend on neither the number of threads nor
on the other rows of a call. For int8 and int4 matrices each row of the input is first rounded to int8 in groups of 64.

Errors: RequestError for a shape, dtype or option that does not fit, ModelFormatError for NaN or Inf in a matrix or
vector of weights, ResourceError for an ISA that the CPU lacks. NaN or Inf in activations come out as NaN.

A matrix used more than once is packed once by `Linear`, the class behind `linear`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine._core import KV_BLOCK, Backend, Format, KvDtype, Norm, OpKind, Program, Stage
from pyengine.decoder import ACTIVATIONS
from pyengine.errors import RequestError
from pyengine.fuse import fuse
from pyengine.quantize import PackedFormat, choose
from pyengine.weights import padded

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

KV_DTYPES = {"float32": KvDtype.F32, "bfloat16": KvDtype.BF16, "int8": KvDtype.INT8}
MAX_TOKENS = 1 << 20  # of the core, in one call
EMPTY = np.empty(0, np.int32)


def values(array: Any, name: str, *shape: int | None) -> Float32:
    """`array` as C-contiguous float32 of that shape (None: any length); RequestError says what does not fit."""
    array = np.asarray(array)
    if array.dtype.kind != "f" or array.dtype.itemsize > 4:
        raise RequestError(f"{name} is {array.dtype}; expected float32 or float16")
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    if not fits or not array.size:
        raise RequestError(f"{name} has shape {list(array.shape)}; expected {wanted}, not empty")
    return np.ascontiguousarray(array, np.float32)


def matrix(array: Any, name: str, rows: int | None = None, cols: int | None = None) -> Array:
    """A [N, K] matrix as the core packs it: float32, float16, or uint16 holding bfloat16."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    if array.dtype not in (np.float32, np.float16, np.uint16):
        raise RequestError(f"{name} is {array.dtype}; expected float32, float16 or bfloat16")
    wanted = f"[{rows or 'N'}, {cols or 'K'}]"
    if array.ndim != 2 or not array.size or rows not in (None, len(array)) or cols not in (None, array.shape[1]):
        raise RequestError(f"{name} has shape {list(array.shape)}; expected {wanted}, not empty")
    return np.ascontiguousarray(array)


def weighting(importance: Any, cols: int) -> Float32 | None:
    if importance is None:
        return None
    h = values(importance, "importance", cols)
    if not (np.isfinite(h) & (h >= 0)).all():
        raise RequestError("importance has a negative value, NaN or Inf; expected E[x^2] of each input channel")
    return h


class Bench:
    """A backend with the ops and buffers of one small program."""

    def __init__(self, threads: int | None, isa: str | None) -> None:
        if threads is not None and (isinstance(threads, bool) or threads < 1):
            raise RequestError(f"threads is {threads}; expected at least 1, or None for the default")
        self.backend = Backend(threads or 0, isa or "")
        self.ops: list[dict[str, Any]] = []
        self.buffers: list[tuple[bool, int]] = []

    def tensor(
        self, fmt: PackedFormat, rows: int, parts: list[tuple[Array, int, int]], importance: Float32 | None = None
    ) -> int:
        """A tensor of `rows` rows, filled with matrices at (first panel, panel stride)."""
        tensor = self.backend.tensor_create(int(fmt.format), rows, parts[0][0].shape[-1], fmt.group)
        for source, offset, stride in parts:
            self.backend.tensor_pack(tensor, source, offset, stride, importance)
        return tensor

    def vector(self, source: Float32, size: int | None = None) -> int:
        """float32 values, then zeros up to `size`."""
        padding = np.zeros((size or len(source)) - len(source), np.float32)
        return self.tensor(PackedFormat(Format.VECTOR_F32), 1, [(np.concatenate([source, padding]), 0, 1)])

    def buffer(self, width: int, quantized: bool = False) -> int:
        self.buffers.append((quantized, width))
        return len(self.buffers) - 1

    def op(self, kind: OpKind, **fields: Any) -> None:
        self.ops.append({"kind": int(kind), "stage": int(Stage.FFN), **fields})

    def quantized(self, source: int, fmt: PackedFormat) -> int:
        """The buffer that a matrix of `fmt` reads: `source`, or its int8 form."""
        if not fmt.is_integer:
            return source
        out = self.buffer(self.buffers[source][1], quantized=True)
        self.op(OpKind.QUANTIZE, input=source, output=out)
        return out

    def program(self, output: int | None, max_tokens: int, fused: bool = False) -> Program:
        """The ops so far as a program that shows the buffer `output`."""
        if max_tokens > MAX_TOKENS:
            raise RequestError(f"{max_tokens} tokens; expected at most {MAX_TOKENS}")
        ops = fuse(self.ops) if fused else list(self.ops)
        if output is not None:
            ops.append({"kind": int(OpKind.TAP), "stage": int(Stage.FFN), "input": output, "head_dim": 0})
        return Program(self.backend, ops, self.buffers, max_tokens, max_tokens, False)

    def show(
        self, program: Program, hidden: Float32, width: int, start: int = 0, table: Int32 | None = None
    ) -> Float32:
        """Run on hidden [T, ...] at positions start, start + 1 ...; returns the output buffer [T, width]."""
        out = np.empty((len(hidden), width), np.float32)
        run(program, hidden, start=start, taps=[out], table=table)
        return out


def run(
    program: Program,
    hidden: Float32 | None,
    *,
    start: int = 0,
    ids: Int32 = EMPTY,
    taps: list[Float32] | None = None,
    table: Int32 | None = None,
    logits: Float32 | None = None,
) -> None:
    """One batch of one sequence."""
    tokens = len(ids) if hidden is None else len(hidden)
    positions = np.arange(start, start + tokens, dtype=np.int32)
    ends = np.array([0, tokens], np.int32)
    rows = EMPTY if logits is None else np.arange(tokens, dtype=np.int32)
    tables = [] if table is None else [table]
    program.run(ids, positions, ends, tables, rows, logits, None, hidden, taps or [], None, True)


class Linear:
    """A packed matrix with its optional bias, for repeated use: y = layer(x).

    weight [N, K], bias [N] or None, importance [K] float32 or None: how much the squared error of each input channel
    counts while scales are searched (E[x^2] over typical inputs; None counts all the same).
    """

    def __init__(
        self,
        weight: Any,
        bias: Any = None,
        *,
        quant: str = "int8",
        group_size: int | None = None,
        scheme: str | None = None,
        importance: Any = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        weight = matrix(weight, "weight")
        self.out_features, self.in_features = weight.shape
        self.format = choose(quant, group_size, scheme).layers
        b = self._bench = Bench(threads, isa)
        self._tensor = b.tensor(
            self.format, self.out_features, [(weight, 0, 1)], weighting(importance, self.in_features)
        )
        ids = {"weight": self._tensor}
        if bias is not None:
            ids["bias"] = b.vector(values(bias, "bias", self.out_features), padded(self.out_features))
        x, self._out = b.buffer(self.in_features), b.buffer(self.out_features)
        b.op(OpKind.LOAD_HIDDEN, output=x)
        b.op(OpKind.LINEAR, input=b.quantized(x, self.format), output=self._out, **ids)

    def __call__(self, x: Any) -> Float32:
        """x [M, K] -> x @ weight.T + bias: float32 [M, N]."""
        x = values(x, "x", None, self.in_features)
        return self._bench.show(self._bench.program(self._out, len(x)), x, self.out_features)

    def dequantized(self) -> Float32:
        """What the packed weight means: float32 [N, K]."""
        return self._bench.backend.tensor_dequantize(self._tensor)

    def packed(self) -> npt.NDArray[np.uint8]:
        """A copy of the packed bytes, header included (docs/packed_formats.md)."""
        return self._bench.backend.tensor_bytes(self._tensor)


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    quant: str = "int8",
    group_size: int | None = None,
    scheme: str | None = None,
    importance: Any = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Float32:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: float32 [M, N]. The other arguments: see Linear."""
    options: dict[str, Any] = {"quant": quant, "group_size": group_size, "scheme": scheme, "importance": importance}
    return Linear(weight, bias, threads=threads, isa=isa, **options)(x)


def quantize_dequantize(
    weight: Any,
    *,
    quant: str = "int8",
    group_size: int | None = None,
    scheme: str | None = None,
    importance: Any = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Float32:
    """The values that a weight [N, K] stands for once it is packed: float32 [N, K]."""
    options: dict[str, Any] = {"quant": quant, "group_size": group_size, "scheme": scheme, "importance": importance}
    return Linear(weight, threads=threads, isa=isa, **options).dequantized()


def swiglu_ffn(
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    *,
    quant: str = "int8",
    group_size: int | None = None,
    scheme: str | None = None,
    activation: str = "silu",
    fused: bool = True,
    threads: int | None = None,
    isa: str | None = None,
) -> Float32:
    """(act(x @ gate.T) * (x @ up.T)) @ down.T for x [M, K]; gate, up [F, K]; down [N, F]: float32 [M, N].

    activation: "silu" (SwiGLU, Shazeer 2020) or "gelu_tanh" (GeGLU). The intermediate [M, F] is rounded to int8 under
    int8 and int4. fused=False runs the same arithmetic op by op, with the same bits.
    """
    if activation not in ACTIVATIONS:
        raise RequestError(f"activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    gate = matrix(gate, "gate")
    inter, cols = gate.shape
    up, down = matrix(up, "up", inter, cols), matrix(down, "down", None, inter)
    x = values(x, "x", None, cols)
    fmt, out_features = choose(quant, group_size, scheme).layers, len(down)
    b = Bench(threads, isa)
    gate_up = b.tensor(fmt, 2 * padded(inter), [(gate, 0, 2), (up, 1, 2)])
    loaded, sums, act = b.buffer(cols), b.buffer(2 * padded(inter)), b.buffer(inter)
    branch, out = b.buffer(out_features), b.buffer(out_features)
    b.op(OpKind.LOAD_HIDDEN, output=loaded)
    b.op(OpKind.MASK_COLUMNS, output=out, norm=b.vector(np.zeros(out_features, np.float32)))  # the fused op adds to it
    b.op(OpKind.LINEAR, input=b.quantized(loaded, fmt), output=sums, weight=gate_up)
    b.op(OpKind.ACT_MUL, input=sums, output=act, activation=int(ACTIVATIONS[activation]))
    weight = b.tensor(fmt, out_features, [(down, 0, 1)])
    b.op(OpKind.LINEAR, input=b.quantized(act, fmt), output=branch, weight=weight)
    b.op(OpKind.ADD, input=branch, output=out)
    return b.show(b.program(out, len(x), fused), x, out_features)


def rms_norm(x: Any, weight: Any, *, eps: float = 1e-6, threads: int | None = None, isa: str | None = None) -> Float32:
    """x / sqrt(mean(x^2) + eps) * weight over rows of x [M, K], weight [K]: float32 [M, K] (Zhang, Sennrich 2019)."""
    x = values(x, "x", None, None)
    width = x.shape[1]
    b = Bench(threads, isa)
    source, out = b.buffer(width), b.buffer(width)
    b.op(OpKind.LOAD_HIDDEN, output=source)
    b.op(OpKind.NORM, input=source, output=out, norm=b.vector(values(weight, "weight", width)), eps=eps)
    return b.show(b.program(out, len(x)), x, width)


def layer_norm(
    x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5, threads: int | None = None, isa: str | None = None
) -> Float32:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias over rows of x [M, K]: float32 [M, K].

    weight [K]; bias [K], or None for none (Ba et al. 2016).
    """
    x = values(x, "x", None, None)
    width = x.shape[1]
    b = Bench(threads, isa)
    source, out = b.buffer(width), b.buffer(width)
    ids = {"norm": b.vector(values(weight, "weight", width))}
    if bias is not None:
        ids["norm_bias"] = b.vector(values(bias, "bias", width))
    b.op(OpKind.LOAD_HIDDEN, output=source)
    b.op(OpKind.NORM, input=source, output=out, norm_kind=int(Norm.LAYER_NORM), eps=eps, **ids)
    return b.show(b.program(out, len(x)), x, width)


def rope(x: Any, cos: Any, sin: Any, *, threads: int | None = None, isa: str | None = None) -> Float32:
    """Rotate x [M, heads, head_dim], row t by the angles of cos, sin [M, rotary_dim / 2]: float32 like x.

    Half-split (Su et al. 2021 in the layout of GPT-NeoX): dimension i pairs with i + rotary_dim / 2, and dimensions
    from rotary_dim on pass through. pyengine.rope.cos_sin makes the tables.
    """
    x = values(x, "x", None, None, None)
    tokens, heads, dim = x.shape
    cos = values(cos, "cos", tokens, None)
    sin = values(sin, "sin", *cos.shape)
    if 2 * cos.shape[1] > dim:
        raise RequestError(f"cos and sin have {cos.shape[1]} columns; expected at most head_dim / 2, {dim} / 2")
    b = Bench(threads, isa)
    table = b.backend.rope_set(-1, np.concatenate([cos, sin], axis=1))
    width = padded(heads * dim) + padded(dim) + dim  # [q | k | v] with one KV head, whose part is zeros
    hidden = np.zeros((tokens, width), np.float32)
    hidden[:, : heads * dim] = x.reshape(tokens, -1)
    rotated = b.buffer(width)
    b.op(OpKind.LOAD_HIDDEN, output=rotated)
    b.op(OpKind.ROPE, input=rotated, rope=table, heads=heads, kv_heads=1, head_dim=dim)
    out = b.show(b.program(rotated, tokens), hidden, width)
    return np.ascontiguousarray(out[:, : heads * dim]).reshape(tokens, heads, dim)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    kv_dtype: str = "float32",
    threads: int | None = None,
    isa: str | None = None,
) -> Float32:
    """Causal softmax attention: q [M, heads, head_dim], k and v [S, kv_heads, head_dim], S >= M: float32 like q.

    The queries are the last M of the S positions, and keys before them are the cache. heads is a multiple of kv_heads;
    query head h reads KV head h // (heads / kv_heads). scale None is 1 / sqrt(head_dim). A query at position p sees the
    keys max(0, p - window + 1) .. p; window None is all. kv_dtype: "float32"; "bfloat16" to round k and v as the
    default KV cache does; "int8" as kv_dtype="int8" does, per token and head, with q as 15-bit integers.
    """
    q, k = values(q, "q", None, None, None), values(k, "k", None, None, None)
    v = values(v, "v", *k.shape)
    (tokens, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    if k.shape[2] != dim or heads % kv_heads or keys < tokens:
        raise RequestError(
            f"k has shape {list(k.shape)} for q {list(q.shape)}; expected [S >= {tokens}, a divisor of {heads}, {dim}]"
        )
    if kv_dtype not in KV_DTYPES:
        raise RequestError(f"kv_dtype {kv_dtype!r}; expected one of {', '.join(KV_DTYPES)}")
    if window is not None and window < 1:
        raise RequestError(f"window {window}; expected at least 1, or None")
    at_k = padded(heads * dim)
    at_v = at_k + padded(kv_heads * dim)
    hidden = np.zeros((keys, at_v + kv_heads * dim), np.float32)
    start = keys - tokens
    hidden[start:, : heads * dim] = q.reshape(tokens, -1)
    hidden[:, at_k : at_k + kv_heads * dim] = k.reshape(keys, -1)
    hidden[:, at_v:] = v.reshape(keys, -1)

    b = Bench(threads, isa)
    group = b.backend.kv_create(1, kv_heads, dim, dim, int(KV_DTYPES[kv_dtype]))
    blocks = -(-keys // KV_BLOCK)
    b.backend.kv_reserve(group, blocks)
    table = np.arange(blocks, dtype=np.int32).reshape(1, blocks)
    cache = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "kv_group": group, "kv_layer": 0}
    joined, out = b.buffer(hidden.shape[1]), b.buffer(heads * dim)
    b.op(OpKind.LOAD_HIDDEN, output=joined)
    b.op(OpKind.KV_APPEND, input=joined, **cache)
    if start:
        run(b.program(None, start), hidden[:start], table=table)
    factor = 1 / math.sqrt(dim) if scale is None else scale
    b.op(OpKind.ATTENTION, input=joined, output=out, window=window or 0, scale=factor, **cache)
    shown = b.show(b.program(out, tokens), hidden[start:], heads * dim, start, table)
    return shown.reshape(tokens, heads, dim)


def lm_head(
    x: Any,
    norm: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    quant: str = "int8",
    group_size: int | None = None,
    scheme: str | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Float32:
    """Logits rms_norm(x, norm) @ weight.T of x [M, K], norm [K], weight [V, K]: float32 [M, V].

    ComputeError when a logit is NaN or Inf.
    """
    weight = matrix(weight, "weight")
    vocab, cols = weight.shape
    x = values(x, "x", None, cols)
    fmt = choose(quant, group_size, scheme).layers
    b = Bench(threads, isa)
    source = b.buffer(cols)
    b.op(OpKind.LOAD_HIDDEN, output=source)
    ids = {"weight": b.tensor(fmt, vocab, [(weight, 0, 1)]), "norm": b.vector(values(norm, "norm", cols))}
    b.op(OpKind.LM_HEAD, input=source, eps=eps, **ids)
    logits = np.empty((len(x), vocab), np.float32)
    run(b.program(None, len(x)), x, logits=logits)
    return logits


def embed(
    ids: Any,
    weight: Any,
    *,
    quant: str = "int8",
    group_size: int | None = None,
    scheme: str | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Float32:
    """Rows ids [M] (integers) of weight [V, K] as a packed, tied table gives them: float32 [M, K]."""
    weight = matrix(weight, "weight")
    ids = np.asarray(ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise RequestError(f"ids are {ids.dtype} {list(ids.shape)}; expected integers [M], not empty")
    if ids.min() < 0 or ids.max() >= len(weight):
        raise RequestError(f"ids from {ids.min()} to {ids.max()}; expected 0 to {len(weight) - 1}")
    b = Bench(threads, isa)
    out = b.buffer(weight.shape[1])
    b.op(
        OpKind.EMBED,
        output=out,
        weight=b.tensor(choose(quant, group_size, scheme).layers, len(weight), [(weight, 0, 1)]),
    )
    rows = np.empty((len(ids), weight.shape[1]), np.float32)
    run(b.program(out, len(ids)), None, ids=ids.astype(np.int32), taps=[rows])
    return rows
