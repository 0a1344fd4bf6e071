"""Ops of latent attention alone: small matrices by head, and a cache row that all heads share, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from kernel_cases import EPS, ISAS, normal

from pyengine import reference
from pyengine._core import KV_BLOCK, Format, KvDtype, OpKind
from pyengine.errors import RequestError
from pyengine.kernels import Bench, padded
from pyengine.quantize import PackedFormat

by_isa = pytest.mark.parametrize("isa", ISAS)
F32 = PackedFormat(Format.F32)
ANGLES = 6  # rotated columns


def tables(tokens: int, dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    angles = normal(seed, tokens, dim // 2)
    return np.cos(angles), np.sin(angles)


def by_head(b: Bench, weight: np.ndarray) -> int:
    """weight [heads, N, K], each head from a panel border."""
    step = padded(weight.shape[1])
    return b.tensor(F32, len(weight) * step, [(head, h * step // 16, 1) for h, head in enumerate(weight)])


def head_linear(x: np.ndarray, weight: np.ndarray, rest: int, **where: Any) -> np.ndarray:
    """x [T, heads, K + rest], weight [heads, N, K]: [T, heads, N + rest], the rest rotated by `tables`."""
    tokens, heads, head_dim = x.shape
    b = Bench(where.get("threads", 1), where["isa"])
    out_head = weight.shape[1] + rest
    source, out = b.buffer(heads * head_dim), b.buffer(heads * out_head)
    fields: dict[str, Any] = {}
    if rest:
        joined = np.concatenate(tables(tokens, rest, 9), axis=1)
        fields["rope"] = b.backend.rope_set(-1, np.ascontiguousarray(joined, np.float32))
    b.op(OpKind.LOAD_HIDDEN, output=source)
    b.op(
        OpKind.HEAD_LINEAR,
        input=source,
        output=out,
        weight=by_head(b, weight),
        heads=heads,
        head_dim=head_dim,
        **fields,
    )
    flat = b.show(b.program(out, tokens), x.reshape(tokens, -1), heads * out_head)
    return flat.reshape(tokens, heads, out_head)


@by_isa
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 30])
@pytest.mark.parametrize(
    ("rows", "cols", "rest"), [(1, 1, 0), (15, 2, 2), (16, 31, 6), (17, 32, 0), (33, 17, 6), (64, 128, 2)]
)
def test_head_linear(rows: int, cols: int, rest: int, tokens: int, isa: str) -> None:
    heads = 5
    x, weight = normal(rows, tokens, heads, cols + rest), normal(cols, heads, rows, cols)
    y = head_linear(x, weight, rest, isa=isa)
    wide = np.einsum("thk,hnk->thn", x[..., :cols].astype(np.float64), weight.astype(np.float64))
    sizes = np.einsum("thk,hnk->thn", np.abs(x[..., :cols]), np.abs(weight))
    assert_close(y[..., :rows], wide, (cols + 1) * EPS * sizes, "the products")
    if rest:
        cos, sin = tables(tokens, rest, 9)
        turned = reference.apply_rope(x[..., cols:].astype(np.float64), cos.astype(np.float32), sin.astype(np.float32))
        assert_close(y[..., rows:], turned, 4 * EPS * np.abs(x[..., cols:]).max(), "the rest")
    assert_same_bits(y, head_linear(x, weight, rest, isa=ISAS[0], threads=3), "scalar, 3 threads")
    assert_same_bits(y[:1], head_linear(x[:1], weight, rest, isa=isa), "the first token alone")


def latent_attention(row: np.ndarray, q: np.ndarray, norm: np.ndarray, chunk: int, **where: Any) -> np.ndarray:
    """row [T, rank + ANGLES], q [T, heads, rank + ANGLES]: [T, heads, rank], `chunk` tokens at a time."""
    (tokens, heads, dim), rank = q.shape, len(norm)
    b = Bench(where.get("threads", 1), where["isa"])
    group = b.backend.kv_create(1, 1, dim, rank, int(KvDtype.F32))
    blocks = -(-tokens // KV_BLOCK)
    b.backend.kv_reserve(group, blocks)
    table = np.arange(blocks, dtype=np.int32).reshape(1, blocks)
    joined = np.concatenate(tables(tokens, ANGLES, 9), axis=1)
    rope = b.backend.rope_set(-1, np.ascontiguousarray(joined, np.float32))
    cache = {"heads": heads, "kv_heads": 1, "head_dim": dim, "kv_group": group, "kv_layer": 0}
    both, latent, wide, out = b.buffer(dim + heads * dim), b.buffer(dim), b.buffer(heads * dim), b.buffer(heads * rank)
    pick = [np.eye(dim, dim + heads * dim, dtype=np.float32), np.eye(heads * dim, dim + heads * dim, dim, np.float32)]
    b.op(OpKind.LOAD_HIDDEN, output=both)
    b.op(OpKind.LINEAR, input=both, output=latent, weight=b.tensor(F32, dim, [(pick[0], 0, 1)]))
    b.op(OpKind.LINEAR, input=both, output=wide, weight=b.tensor(F32, heads * dim, [(pick[1], 0, 1)]))
    b.op(OpKind.LATENT_APPEND, input=latent, norm=b.vector(norm), eps=1e-6, rope=rope, **cache)
    b.op(OpKind.ATTENTION, input=wide, output=out, scale=0.2, **cache)
    hidden = np.concatenate([row, q.reshape(tokens, -1)], axis=1)
    program = b.program(out, tokens)
    parts = [b.show(program, hidden[at : at + chunk], heads * rank, at, table) for at in range(0, tokens, chunk)]
    return np.concatenate(parts).reshape(tokens, heads, rank)


@by_isa
@pytest.mark.parametrize(("heads", "rank", "tokens"), [(1, 16, 40), (3, 20, 40), (34, 12, 40), (6, 15, 270)])
def test_latent_attention(heads: int, rank: int, tokens: int, isa: str) -> None:
    """34 heads of one KV head go in two tasks; 270 tokens cross a partition."""
    row, q, norm = normal(1, tokens, rank + ANGLES), normal(2, tokens, heads, rank + ANGLES), normal(3, rank)
    y = latent_attention(row, q, norm, tokens, isa=isa)
    latent = reference.rms_norm(row[:, :rank].astype(np.float64), norm.astype(np.float64), 1e-6)
    cos, sin = (table.astype(np.float32) for table in tables(tokens, ANGLES, 9))
    key = reference.apply_rope(row[:, None, rank:].astype(np.float64), cos, sin)
    k = np.concatenate([latent[:, None], key], axis=-1)
    expected = reference.attention(q.astype(np.float64), k, latent[:, None], 0.2, 0).reshape(y.shape)
    assert_close(y, expected, 2e-5 * np.abs(latent).max(), "float64")
    few = latent_attention(row[:40], q[:40], norm, 1, isa=ISAS[0], threads=3)
    assert_same_bits(y[:40], few, "scalar, 3 threads, token by token")


def test_shapes_that_do_not_fit_are_refused() -> None:
    def refused(text: str, kind: OpKind, width: int = 40, **change: Any) -> None:
        b = Bench(1, ISAS[-1])
        group = b.backend.kv_create(1, 1, 20, 16, int(KvDtype.F32))
        rope = b.backend.rope_set(-1, np.ones((4, 4), np.float32))
        source, out = b.buffer(width), b.buffer(32)
        fields = {"heads": 2, "kv_heads": 1, "head_dim": 20, "kv_group": group, "kv_layer": 0, "rope": rope}
        if kind == OpKind.HEAD_LINEAR:
            fields |= {"weight": by_head(b, normal(1, 2, 12, 16)), "output": out}
        else:
            fields["norm"] = b.vector(normal(1, 16))
        b.op(OpKind.LOAD_HIDDEN, output=source)
        b.op(kind, input=source, **{**fields, **change})
        with pytest.raises(RequestError, match=text):
            b.program(None, 4)

    refused("does not fit the heads", OpKind.HEAD_LINEAR, head_dim=15)
    refused("needs float32 heads", OpKind.HEAD_LINEAR, heads=3)
    refused("does not fit the rest", OpKind.HEAD_LINEAR, rope=-1)
    refused("k_dim and a norm", OpKind.LATENT_APPEND)
    refused("another shape", OpKind.LATENT_APPEND, width=20, head_dim=18)
    refused("does not fit the key", OpKind.LATENT_APPEND, width=20, rope=-1)
