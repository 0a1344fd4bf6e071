"""tests/core/core_bits.cc, the test of the core that needs no Python, built against the installed library and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from core_programs import LIBRARY, ROOT, compiled

from pyengine import _core

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("core"), "core_bits", *LIBRARY)


def test_every_op_has_the_bits_of_scalar_on_every_isa(program: Path) -> None:
    names = [isa["name"] for isa in _core.isas() if isa["available"]]
    done = subprocess.run([program, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in names:
        counts = re.search(rf"^{name}: (\d+) of (\d+) outputs", done.stdout, re.MULTILINE)
        assert counts is not None, done.stdout
        assert int(counts[1]) == int(counts[2]) > 1000
    refused = [isa["name"] for isa in _core.isas() if not isa["available"]]
    for name in ["abacus", *refused]:
        assert f"{name}: refused: ISA '{name}' is " in done.stdout


def test_it_fails_for_an_isa_that_the_cpu_lacks(program: Path) -> None:
    done = subprocess.run([program, "scalar", "abacus"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this CPU was found to have: scalar" in done.stderr


def test_it_fails_where_an_isa_computes_something_else(program: Path, tmp_path: Path) -> None:
    """One value of every run is off by one, but not yet when the scalar results are taken. Scalar alone is enough."""
    code = """
#include <dlfcn.h>
#include "pyengine.h"
int32_t pe_isa_count(void) { return 1; }
pe_status pe_program_run(pe_program* program, const pe_batch* batch) {
  static int runs;
  pe_status (*run)(pe_program*, const pe_batch*) = dlsym(RTLD_NEXT, "pe_program_run");
  pe_status status = run(program, batch);
  if (++runs > 3000 && batch->taps) batch->taps[0][0] += 1;
  return status;
}
"""
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(code, encoding="ascii")
    options = ["-D_GNU_SOURCE", "-shared", "-fPIC", f"-I{ROOT / 'csrc' / 'include'}"]
    subprocess.run(["g++", "-x", "c", *options, str(source), "-o", str(shim)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run([program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "differs from scalar" in done.stderr
