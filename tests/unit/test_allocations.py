"""No memory is taken per decode token: malloc, mmap and their kin are counted inside pe_program_run, on all threads."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS

from pyengine import _core

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);
static atomic_int inside;
atomic_long counted_allocations, counted_runs;
static void note(void) { if (inside) ++counted_allocations; }
void *malloc(size_t n) { note(); return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { note(); return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { note(); return __libc_realloc(p, n); }
void *aligned_alloc(size_t a, size_t n) { note(); return __libc_memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) { note(); return (*p = __libc_memalign(a, n)) ? 0 : ENOMEM; }
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
  note();
  return (void *)syscall(SYS_mmap, at, n, protection, flags, fd, offset);
}
int pe_program_run(void *program, const void *batch) {
  static int (*run)(void *, const void *);
  if (!run) *(void **)&run = dlsym(dlopen(getenv("COUNTED_LIBRARY"), RTLD_NOW | RTLD_NOLOAD), "pe_program_run");
  inside = 1;
  int status = run(program, batch);
  inside = 0;
  ++counted_runs;
  return status;
}
"""

SCRIPT = """
import ctypes, sys
import numpy as np
import pyengine
from pyengine.kv_cache import Sequence

counter = ctypes.CDLL(None)
def counted():
    return [ctypes.c_long.in_dll(counter, "counted_" + name).value for name in ("allocations", "runs")]

with pyengine.load(sys.argv[1], quant="int8", kv_dtype=sys.argv[2], threads=2) as engine:
    sequence = Sequence(engine.pool)
    ids = np.arange(9, dtype=np.int32)
    sampled = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 1, "step": 2,
        "repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5, "penalty_ids": ids,
        "penalty_counts": ids, "bias_ids": ids, "bias_values": np.ones(9, np.float32)}
    values = [None, sampled]
    rows = {"rows": np.zeros(1, np.int32), "top": 20, "targets": np.ones(1, np.int32)}
    def decode(tokens):
        before = counted()
        for token in range(tokens):
            engine.forward([(sequence, [token % 97])], sampling=[values[token % 2]], **rows)
        return [after - at for at, after in zip(before, counted())]
    engine.forward([(sequence, list(range(90)) * 5)])
    print(*decode(3), *decode(400))
"""


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_report_g14_no_allocation_per_token_after_the_first(tmp_path: Path, kv_dtype: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs cc and glibc")
    (tmp_path / "counter.c").write_text(COUNTER)
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", "counter.so", "counter.c", "-ldl"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    folder = write_tiny_model(tmp_path / "model", {**CONFIGS["qwen2_window"], "max_position_embeddings": 1024}, seed=1)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(tmp_path / "counter.so"),
        "COUNTED_LIBRARY": str(Path(_core.__file__).parent / "libpyengine_cpu.so"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), kv_dtype],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first_allocations, first_runs, allocations, runs = map(int, done.stdout.split())
    assert (first_runs, runs) == (3, 400)
    assert first_allocations > 0, "the partial results of a long context are allocated once, and seen here"
    assert allocations == 0
