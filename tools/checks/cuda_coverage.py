#!/usr/bin/env python3
"""What the CUDA core has: ops, formats of weights and of the cache, each tried on a device, or on the emulated one.

    PYENGINE_CUDA_LIBRARY=FILE python tools/checks/cuda_coverage.py

Exit 1 if an op of pyengine.h has no case in csrc/cuda, or the library refuses a format that the CPU has.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

from pyengine import cuda
from pyengine._core import Backend, Format, KvDtype, OpKind
from pyengine.errors import PyEngineError
from pyengine.kernel_program import Bench
from pyengine.quantize import PackedFormat

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = [
    *(PackedFormat(Format.F32), PackedFormat(Format.BF16), PackedFormat(Format.INT8, 64)),
    *(PackedFormat(fmt, group) for fmt in (Format.INT4_SYM, Format.INT4_MIN) for group in (32, 64, 128)),
]


def lacking_ops() -> list[str]:
    """Ops without a case in the CUDA program."""
    text = "".join(path.read_text(encoding="ascii") for path in sorted((ROOT / "csrc" / "cuda").glob("*.cc")))
    has = set(re.findall(r"case PE_OP_(\w+):", text))
    return [name for name in OpKind.__members__ if name not in has]


def refusal(backend: Backend, fmt: PackedFormat) -> str | None:
    """Why a linear op with weights of this format does not run; None where it does."""
    bench = Bench(None, None, backend)
    x = bench.buffer(128)
    bench.op(OpKind.LOAD_HIDDEN, output=x)
    out = bench.buffer(16)
    try:
        weight = bench.tensor(fmt, 16, [(np.ones((16, 128), np.float32), 0, 1)])
        bench.op(OpKind.LINEAR, input=bench.quantized(x, fmt), output=out, weight=weight)
        got = bench.show(bench.program(out, 1), np.ones((1, 128), np.float32), 16)
    except PyEngineError as error:
        return str(error)
    return None if np.allclose(got, 128, rtol=0.02) else f"wrong results: {got[0]}"


def cache_refusal(backend: Backend, dtype: KvDtype) -> str | None:
    try:
        backend.kv_reserve(backend.kv_create(1, 1, 16, 16, int(dtype)), 1)
    except PyEngineError as error:
        return str(error)
    return None


def main() -> int:
    backend = cuda.open_backend(cuda.choose("cuda"), None, None)
    lacks = lacking_ops()
    tried = {
        f"weights {fmt.format.name}{f' g{fmt.group}' if fmt.group else ''}": refusal(backend, fmt) for fmt in WEIGHTS
    }
    tried |= {f"KV {name}": cache_refusal(backend, dtype) for name, dtype in KvDtype.__members__.items()}
    print(f"{backend.device}: ops: {len(OpKind.__members__) - len(lacks)} of {len(OpKind.__members__)}")
    print(f"has: {', '.join(name for name, why in tried.items() if why is None)}")
    for name in lacks:
        print(f"lacks the op {name}")
    for name, why in tried.items():
        if why is not None:
            print(f"lacks {name}: {why}")
    return 1 if lacks or any(tried.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
