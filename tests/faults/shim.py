"""fault_shim.c, built for a test, and the environment that preloads it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def build(folder: Path) -> Path:
    """The shared object, made in `folder`. Skips the test without a compiler or glibc, whose names it replaces."""
    compiler = shutil.which("cc")
    if compiler is None or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs cc and glibc")
    shim = folder / "fault_shim.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(shim), str(HERE / "fault_shim.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return shim


def environment(shim: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "LD_PRELOAD": str(shim), **variables}
