"""The core reads and writes nothing past the end of the caller's arrays: each ends at a page nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from compare import assert_same_bits
from kernel_cases import FORMATS, ISAS, bfloat16_bits, normal

from pyengine import kernels
from pyengine._core import Format, OpKind
from pyengine.quantize import PackedFormat, choose

PAGE = mmap.PAGESIZE

by_isa = pytest.mark.parametrize("isa", ISAS)
by_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())


def guarded(a: np.ndarray) -> np.ndarray:
    """A copy of which the last byte is the last of a page; the page behind it may not be touched."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pages = -(-a.nbytes // PAGE)
    whole = np.frombuffer(mmap.mmap(-1, (pages + 1) * PAGE), np.uint8)
    assert libc.mprotect(whole.ctypes.data + pages * PAGE, PAGE, 0) == 0
    out = whole[pages * PAGE - a.nbytes : pages * PAGE].view(a.dtype).reshape(a.shape)
    out[...] = a
    return out


def lm_head(x: np.ndarray, norm: np.ndarray, weight: np.ndarray, logits: np.ndarray, isa: str, **options: Any) -> None:
    b = kernels.Bench(2, isa)
    source, vocab = b.buffer(x.shape[1]), len(weight)
    table = b.tensor(
        choose(options["quant"], options.get("group_size"), options.get("scheme")).layers, vocab, [(weight, 0, 1)]
    )
    vector = b.tensor(PackedFormat(Format.VECTOR_F32), 1, [(norm, 0, 1)])
    b.op(OpKind.LOAD_HIDDEN, output=source)
    b.op(OpKind.LM_HEAD, input=source, weight=table, norm=vector, eps=1e-6)
    kernels.run(b.program(None, len(x)), x, logits=logits)


@by_isa
@by_format
def test_nothing_past_the_end_is_touched(isa: str, options: dict[str, Any]) -> None:
    for n, k in ((1, 1), (17, 33), (31, 65), (33, 172)):
        weight, importance = normal(1, n, k), np.abs(normal(2, k)) + np.float32(0.1)
        sources = (weight, weight.astype(np.float16), bfloat16_bits(weight))
        for source in sources:
            plain = kernels.Linear(source, importance=importance, threads=2, isa=isa, **options)
            fenced = kernels.Linear(guarded(source), importance=guarded(importance), threads=2, isa=isa, **options)
            assert_same_bits(fenced.packed(), plain.packed(), f"{n} x {k} of {source.dtype}")
        for m in (1, 9):
            x, norm = normal(3, m, k), np.abs(normal(4, k)) + np.float32(0.5)
            tap, logits = guarded(np.zeros((m, n), np.float32)), guarded(np.zeros((m, n), np.float32))
            b = plain._bench
            kernels.run(b.program(plain._out, m), guarded(x), taps=[tap])
            assert_same_bits(tap.copy(), plain(x), f"{n} x {k}, {m} tokens")
            lm_head(guarded(x), guarded(norm), guarded(weight), logits, isa, **options)
            expected = kernels.lm_head(x, norm, weight, threads=1, isa=isa, **options)
            assert_same_bits(logits.copy(), expected, f"{n} x {k}, {m} rows of logits")
