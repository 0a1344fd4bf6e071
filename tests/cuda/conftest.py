"""Kernels of csrc/cuda alone: compiled with a driver of flat C functions, called with numpy arrays.

By default the host compiler builds them over tests/cuda_emulation; with PYENGINE_CUDA_TESTS=device nvcc does, for the
GPU that is there. A driver (tests/cuda/*_driver.cc) copies arrays to the device and back with the helpers of driver.h.
Its functions take int64_t, float and pointers, and return a pe_status.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATION = ROOT / "tests" / "cuda_emulation"
INCLUDES = ["-Icsrc", "-Icsrc/include", "-Itests/cuda"]
HOST = ["g++", "-std=c++20", "-O1", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
HOST += ["-Wno-unknown-pragmas", "-ffp-contract=off"]
DEVICE = ["nvcc", "-std=c++20", "-arch=native", "--fmad=false", "-shared", "-Xcompiler", "-fPIC,-Wall,-Wextra"]


class Kernels:
    """kernels("function", array, 3, 0.5, None) calls one function of the driver; an error it reports is raised."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.driver_error.restype = ctypes.c_char_p

    def __call__(self, function: str, *arguments: Any) -> None:
        status = self._library[function](*map(_plain, arguments))
        if status:
            raise RuntimeError(f"{function}: status {status}: {self._library.driver_error().decode()}")


def _plain(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def on_device() -> bool:
    return os.environ.get("PYENGINE_CUDA_TESTS") == "device"


def compile_kernels(folder: Path, sources: list[str], changed: dict[str, str] | None = None) -> Path:
    """A library of those files, named from the repository's root, kept in `folder` for as long as no source changes.

    changed: file -> other text of it, for tests of seeded mistakes.
    """
    files = [*sources, "csrc/core/status.cc"]
    command = [*DEVICE, *INCLUDES] if on_device() else [*HOST, f"-I{EMULATION}", *INCLUDES, "-x", "c++"]
    if not on_device():
        files += [str(p.relative_to(ROOT)) for p in sorted((EMULATION / "emulated").glob("*.cc"))]
    digest = hashlib.sha256(repr((command, files, sorted((changed or {}).items()))).encode())
    for part in (ROOT / "csrc", EMULATION, ROOT / "tests" / "cuda"):
        for path in sorted(p for p in part.rglob("*") if p.suffix in (".h", ".cc", ".cu", ".cuh")):
            digest.update(path.read_bytes())
    library = folder / f"{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    for name, text in (changed or {}).items():
        path = folder / f"{digest.hexdigest()[:32]}-{Path(name).name}"
        path.write_text(text)
        files[files.index(name)] = str(path)
    made = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, *files, "-o", str(made), "-ldl", "-lpthread"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    made.rename(library)
    return library


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest) -> Callable[..., Kernels]:
    """build("tests/cuda/rows_driver.cc", "csrc/cuda/rows.cu") -> Kernels"""
    assert request.config.cache is not None
    folder = Path(str(request.config.cache.mkdir("cuda_kernels")))
    return lambda *sources, changed=None: Kernels(compile_kernels(folder, list(sources), changed))
