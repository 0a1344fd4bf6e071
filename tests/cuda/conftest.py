"""Kernels of csrc/cuda alone: compiled with a driver of flat C functions, called with numpy arrays.

By default the host compiler builds them over tests/cuda_emulation, with AddressSanitizer where PYENGINE_CUDA_TESTS is
`sanitized`; where it is `device` nvcc does, for the GPU that is there. A driver (tests/cuda/*_driver.cc) copies arrays
to the device and back with the helpers of driver.h. Its functions take int64_t, float and pointers, and return a
pe_status.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import _core

ROOT = Path(__file__).resolve().parents[2]
EMULATION = ROOT / "tests" / "cuda_emulation"
INCLUDES = ["-Icsrc", "-Icsrc/include", "-Itests/cuda"]
HOST = ["g++", "-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
HOST += ["-Wno-unknown-pragmas", "-ffp-contract=off"]
if (
    os.environ.get("PYENGINE_CUDA_TESTS") == "sanitized"
):  # with its libasan.so, libubsan.so and libstdc++.so in LD_PRELOAD
    HOST += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
DEVICE = ["nvcc", "-std=c++20", "-arch=native", "--fmad=false", "-Xcompiler", "-fPIC,-Wall,-Wextra"]


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


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@functools.cache
def _preprocessed(command: tuple[str, ...]) -> str:
    return _run(list(command))


def _kept(path: Path, make: Callable[[Path], object]) -> Path:
    """The file, made if it is not there; two that make it at once do not see each other's half."""
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}{path.suffix}")
        make(made)
        made.rename(path)
    return path


def compile_kernels(folder: Path, sources: list[str], changed: dict[str, str] | None = None) -> Path:
    """A library of those files, named from the repository's root; objects and library are kept in `folder`.

    changed: file -> other text of it, for tests of seeded mistakes; headers among them, too.
    """
    files, changed = [*sources, "csrc/core/status.cc"], changed or {}
    compiler = [*DEVICE, *INCLUDES] if on_device() else [*HOST, f"-I{EMULATION}", *INCLUDES, "-x", "c++"]
    if not on_device():
        files += [str(p.relative_to(ROOT)) for p in sorted((EMULATION / "emulated").glob("*.cc"))]
    common = hashlib.sha256(repr(compiler).encode())
    shadow = folder / "changed" / hashlib.sha256(repr(sorted(changed.items())).encode()).hexdigest()[:16]
    for name, text in changed.items():
        (shadow / name).parent.mkdir(parents=True, exist_ok=True)
        (shadow / name).write_text(text)
    plain = compiler.copy()
    if changed:
        compiler.insert(1, f"-I{shadow / 'csrc'}")  # headers there are found first
    objects = []
    for name in files:
        path = (shadow if name in changed else ROOT) / name
        digest = common.copy()
        text = _preprocessed((*plain, "-E", str(path)))  # so a header touches its users alone
        if any(header in text for header in changed):
            text = _run([*compiler, "-E", str(path)])
        digest.update(text.encode())
        object_file = folder / f"{digest.hexdigest()[:32]}.o"
        objects.append(_kept(object_file, lambda to, path=path: _run([*compiler, "-c", str(path), "-o", str(to)])))
    digest = hashlib.sha256(repr([o.name for o in objects]).encode())
    link = [compiler[0], "-shared", *map(str, objects), "-ldl", "-lpthread"]
    return _kept(folder / f"{digest.hexdigest()[:32]}.so", lambda to: _run([*link, "-o", str(to)]))


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest) -> Callable[..., Kernels]:
    """build("tests/cuda/rows_driver.cc", "csrc/cuda/rows.cu") -> Kernels"""
    assert request.config.cache is not None
    folder = Path(str(request.config.cache.mkdir("cuda_kernels")))
    return lambda *sources, changed=None: Kernels(compile_kernels(folder, list(sources), changed))


@pytest.fixture(scope="session")
def cublaslt(request: pytest.FixtureRequest) -> str:
    """What to open as cuBLASLt: on a device the system's, else the emulation's."""
    if on_device():
        return "libcublasLt.so.13"
    assert request.config.cache is not None
    folder = Path(str(request.config.cache.mkdir("cuda_kernels")))
    compiler, source = [*HOST, "-shared"], str(EMULATION / "cublaslt" / "cublaslt_emulated.cc")
    digest = hashlib.sha256(repr(compiler).encode() + _run([*compiler, "-E", source]).encode()).hexdigest()[:32]
    return str(_kept(folder / f"{digest}-cublaslt.so", lambda to: _run([*compiler, source, "-o", str(to)])))


def library_file() -> Path | None:
    """PYENGINE_CUDA_LIBRARY, or the emulated library beside the core, or of a build here; the newest."""
    named = os.environ.get("PYENGINE_CUDA_LIBRARY")
    if named:
        return Path(named)
    folders = [Path(_core.__file__).resolve().parent, *ROOT.glob("build*")]
    files = [folder / "tests" / "cuda_emulation" / "libpyengine_cuda_emulated.so" for folder in folders]
    return max((file for file in files if file.is_file()), key=lambda file: file.stat().st_mtime, default=None)


@pytest.fixture(scope="session")
def library() -> Any:
    """The whole CUDA library as _core.Library; PYENGINE_CUDA_LIBRARY is set to its file."""
    file = library_file()
    if file is None:
        pytest.skip("no emulated library: tools/checks/cuda.sh, or the CMake target pyengine_cuda_emulated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYENGINE_CUDA_LIBRARY", str(file))
        yield _core.Library(str(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only where they are asked for by name: the suite's own run need not compile the CUDA core."""
    here = Path(__file__).parent
    if any(here in (path := Path(arg.partition("::")[0]).absolute()).parents or path == here for arg in config.args):
        return
    skip = pytest.mark.skip(reason="of the CUDA core: tools/checks/cuda.sh runs these")
    for item in items:
        if here in item.path.parents:
            item.add_marker(skip)
