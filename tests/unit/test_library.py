"""Another library with the same C ABI, opened by its path: the same results, and every way it can be wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pyengine import _core
from pyengine._core import Backend, Format, Library
from pyengine.errors import RequestError, ResourceError, UnsupportedModelError

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc" / "include" / "pyengine.h"
CPU_LIBRARY = Path(_core.__file__).parent / "libpyengine_cpu.so"

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def fake_library(folder: Path, code: str) -> str:
    """A shared library of this C code."""
    source, target = folder / "fake.c", folder / "fake.so"
    source.write_text(code, encoding="ascii")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True, capture_output=True)
    return str(target)


def test_the_table_is_the_header() -> None:
    declared = set(re.findall(r"^PE_API [^(]*?\bpe_(\w+)\(", HEADER.read_text(encoding="ascii"), re.MULTILINE))
    table = (ROOT / "csrc" / "bindings" / "library.h").read_text(encoding="ascii")
    assert set(re.findall(r"\bF\((\w+)\)", table)) == declared
    assert len(declared) > 30


def test_a_backend_of_an_opened_library_is_like_the_linked_one() -> None:
    library = Library(str(CPU_LIBRARY))
    source = np.random.default_rng(1).standard_normal((40, 72)).astype(np.float32)
    results = []
    for backend in (Backend(1), Backend(1, library=library)):
        tensor = backend.tensor_create(Format.INT4_MIN, 40, 72, 32)
        backend.tensor_pack(tensor, source)
        results.append((backend.tensor_bytes(tensor), backend.tensor_dequantize(tensor)))
        with pytest.raises(RequestError, match="tensor 7"):
            backend.tensor_free(7)
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_library_lives_as_long_as_what_uses_it() -> None:
    backend = Backend(1, library=Library(str(CPU_LIBRARY)))
    assert (backend.threads, backend.device) == (1, "cpu")


def test_the_cpu_library_has_no_other_device() -> None:
    assert Backend(1, device="cpu").device == "cpu"
    for device in ("cuda", "cuda:1", "tpu"):
        with pytest.raises((UnsupportedModelError, ResourceError, RequestError), match=device):
            Backend(1, device=device)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot open .*none\.so: .*No such file"):
        Library(str(tmp_path / "none.so"))


def test_not_a_library(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("text" * 100, encoding="ascii")
    with pytest.raises(ResourceError, match=r"cannot open .*text\.so: .*invalid ELF header"):
        Library(str(tmp_path / "text.so"))


@needs_gcc
def test_another_version(tmp_path: Path) -> None:
    path = fake_library(tmp_path, "int pe_abi_version(void) { return 999; }")
    with pytest.raises(ResourceError, match=rf"fake\.so: ABI version 999; expected {_core.abi_version()}: build it"):
        Library(path)


@needs_gcc
def test_a_function_is_missing(tmp_path: Path) -> None:
    path = fake_library(tmp_path, f"int pe_abi_version(void) {{ return {_core.abi_version()}; }}")
    with pytest.raises(ResourceError, match=r"fake\.so: no function pe_\w+; expected a library with the functions of"):
        Library(path)


@needs_gcc
def test_a_library_without_any_of_them(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no function pe_abi_version"):
        Library(fake_library(tmp_path, "int x;"))
