"""The cuBLASLt of the emulation refuses what the real one would: shapes that do not fit, types it does not have."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

FLOAT, BFLOAT, COMPUTE = 0, 14, 68
TRANSPOSE_A, WORKSPACE, ALIGNMENT_A = 3, 1, 5
INVALID, UNSUPPORTED = 7, 15


class Lt:
    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.handle = self.made("cublasLtCreate")

    def made(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        assert self.library[function](ctypes.byref(out), *arguments) == 0
        return out

    def layout(self, kind: int, rows: int, cols: int, stride: int) -> ctypes.c_void_p:
        return self.made(
            "cublasLtMatrixLayoutCreate", kind, ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(stride)
        )

    def heuristic(
        self, a: tuple[int, int, int, int], b: tuple[int, int, int, int], c: tuple[int, int, int, int],
        workspace: int = 1 << 20, transposed: int = 1,
    ) -> tuple[int, int]:  # fmt: skip
        desc = self.made("cublasLtMatmulDescCreate", COMPUTE, FLOAT)
        operation = ctypes.c_int32(transposed)
        status = self.library.cublasLtMatmulDescSetAttribute(
            desc, TRANSPOSE_A, ctypes.byref(operation), ctypes.c_size_t(4)
        )
        assert status == 0
        preference = self.made("cublasLtMatmulPreferenceCreate")
        size = ctypes.c_uint64(workspace)
        status = self.library.cublasLtMatmulPreferenceSetAttribute(
            preference, WORKSPACE, ctypes.byref(size), ctypes.c_size_t(8)
        )
        assert status == 0
        la, lb, lc = self.layout(*a), self.layout(*b), self.layout(*c)
        result, found = ctypes.create_string_buffer(96), ctypes.c_int()
        status = self.library.cublasLtMatmulAlgoGetHeuristic(
            self.handle, desc, la, lb, lc, lc, preference, 1, result, ctypes.byref(found)
        )
        return status, found.value


@pytest.fixture(scope="module")
def lt(cublaslt: str) -> Lt:
    if os.environ.get("PYENGINE_CUDA_TESTS") == "device":
        pytest.skip("of the emulation")
    return Lt(cublaslt)


A, B, C = (BFLOAT, 64, 32, 64), (BFLOAT, 64, 5, 64), (FLOAT, 32, 5, 48)  # c [5][32] = b [5][64] . a [32][64]^T


def test_what_fits_has_an_algorithm(lt: Lt) -> None:
    assert lt.heuristic(A, B, C) == (0, 1)
    assert lt.heuristic((BFLOAT, 32, 64, 32), B, C, transposed=0) == (0, 1)


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ((BFLOAT, 64, 32, 63), B, C),
        ((FLOAT, 64, 32, 64), B, C),
        (A, (BFLOAT, 65, 5, 65), C),
        (A, B, (FLOAT, 32, 6, 48)),
        (A, B, (BFLOAT, 32, 5, 48)),
        ((BFLOAT, 32, 64, 64), B, C),
        (A, B, (FLOAT, 32, 0, 48)),
    ],
)
def test_shapes_that_do_not_fit(lt: Lt, a: Any, b: Any, c: Any) -> None:
    assert lt.heuristic(a, b, c) == (INVALID, 0)


def test_no_algorithm_without_a_workspace(lt: Lt) -> None:
    assert lt.heuristic(A, B, C, workspace=0) == (UNSUPPORTED, 0)


def test_other_types_and_attributes(lt: Lt) -> None:
    out = ctypes.c_void_p()
    assert lt.library.cublasLtMatmulDescCreate(ctypes.byref(out), 64, FLOAT) == UNSUPPORTED  # float16 sums
    eight = ctypes.c_uint64(8)
    layout = lt.library.cublasLtMatrixLayoutCreate
    assert layout(ctypes.byref(out), 2, eight, eight, ctypes.c_int64(8)) == UNSUPPORTED  # float16
    preference = lt.made("cublasLtMatmulPreferenceCreate")
    value = ctypes.c_uint64(16)
    set_attribute = lt.library.cublasLtMatmulPreferenceSetAttribute
    assert set_attribute(preference, ALIGNMENT_A, ctypes.byref(value), ctypes.c_size_t(8)) == INVALID  # 4 bytes
    assert set_attribute(preference, 99, ctypes.byref(value), ctypes.c_size_t(8)) == INVALID
