"""The check of the ISA objects finds each fault it is there for, in small objects compiled here."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from tool_scripts import load_tool

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("g++", "nm", "objdump")

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64"),
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason="needs g++, nm and objdump"),
]

GOOD = """
namespace { void scale(float* x) { for (int i = 0; i < 64; ++i) x[i] *= 2; } }
struct Table { void (*scale)(float*); };
extern const Table kernels;
const Table kernels = {scale};
"""


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    return load_tool("checks/isa_objects")


def compile_object(folder: Path, isa: str, code: str, *flags: str, compiler: str = "g++") -> Path:
    source, target = folder / f"isa_{isa}.cc", folder / f"isa_{isa}.cc.o"
    source.write_text(code, encoding="utf-8")
    options = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", *flags]
    subprocess.run([compiler, *options, "-c", str(source), "-o", str(target)], check=True, capture_output=True)
    return target


DOT = "#include <immintrin.h>\nnamespace { [[gnu::used]] __m256i dot(__m256i x) { return %s(x, x, x); } }"
VEX, EVEX = GOOD + DOT % "_mm256_dpbusd_avx_epi32", GOOD + DOT % "_mm256_dpbusd_epi32"
EVEX_FLAGS = ["-mavx512vl", "-mavx512vnni"]
TILE = 'namespace { [[gnu::used]] void tile() { __asm__("tilezero %tmm0"); } }'


@pytest.mark.parametrize(("isa", "flags"), [("scalar", []), ("avx2", ["-mavx2"]), ("avx512vnni", ["-mavx512f"])])
def test_a_good_object_has_no_findings(checker: ModuleType, tmp_path: Path, isa: str, flags: list[str]) -> None:
    assert checker.check(compile_object(tmp_path, isa, GOOD, *flags)) == []


@pytest.mark.parametrize(
    ("isa", "code", "flags"), [("avxvnni", VEX, ["-mavxvnni"]), ("avxvnni_evex", EVEX, EVEX_FLAGS)]
)
def test_dot_products_are_good_in_their_own_object(
    checker: ModuleType, tmp_path: Path, isa: str, code: str, flags: list[str]
) -> None:
    assert checker.check(compile_object(tmp_path, isa, code, *flags)) == []


MASK = 'namespace { [[gnu::used]] void mask() { __asm__("kxorw %k1, %k1, %k1"); } }'


@pytest.mark.parametrize(
    ("isa", "code", "flags"),
    [
        ("scalar", GOOD, ["-mavx2"]),
        ("scalar", GOOD, ["-mavx"]),
        ("scalar", GOOD, ["-mavx", "-mprefer-vector-width=128"]),
        ("avx2", GOOD, ["-mavx512f", "-mprefer-vector-width=512"]),
        ("avx2", GOOD + MASK, ["-mavx2"]),
        ("avx2", VEX, ["-mavxvnni"]),
        ("avx512vnni", VEX, ["-mavxvnni"]),
        ("avxvnni", EVEX, EVEX_FLAGS),
        ("avx512vnni", GOOD + TILE, []),
    ],
)
def test_instructions_of_a_wider_isa_are_found(
    checker: ModuleType, tmp_path: Path, isa: str, code: str, flags: list[str]
) -> None:
    findings = checker.check(compile_object(tmp_path, isa, code, *flags))
    assert len(findings) == 1
    assert "instructions beyond" in findings[0]


ARM = "aarch64-linux-gnu-g++"
ARM_DOT = (
    "#include <arm_neon.h>\nnamespace { [[gnu::used]] int32x4_t dot(int32x4_t s, %s x, int8x16_t y) { return %s; } }"
)
SDOT = GOOD + ARM_DOT % ("int8x16_t", "vdotq_s32(s, x, y)")
USDOT = GOOD + ARM_DOT % ("uint8x16_t", "vusdotq_s32(s, x, y)")
DOTPROD, I8MM = "-march=armv8.2-a+dotprod", "-march=armv8.2-a+dotprod+i8mm"


@pytest.mark.skipif(shutil.which(ARM) is None, reason="needs g++-aarch64-linux-gnu")
@pytest.mark.parametrize(
    ("isa", "code", "flag", "good"),
    [
        ("scalar", GOOD, "-march=armv8-a", True),
        ("neon", GOOD, "-march=armv8-a", True),
        ("neon_dotprod", SDOT, DOTPROD, True),
        ("neon_i8mm", USDOT, I8MM, True),
        ("scalar", SDOT, DOTPROD, False),
        ("neon", SDOT, DOTPROD, False),
        ("neon_dotprod", USDOT, I8MM, False),
        ("neon_i8mm", GOOD, "-march=armv8.2-a+sve", False),
    ],
)
def test_objects_for_aarch64(checker: ModuleType, tmp_path: Path, isa: str, code: str, flag: str, good: bool) -> None:
    findings = checker.check(compile_object(tmp_path, isa, code, flag, compiler=ARM))
    assert [("instructions beyond" in finding) for finding in findings] == ([] if good else [True])


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("int second() { return 2; }", "expected exactly one constant table"),
        ("inline int shared(int x) { return x * 3; }\nnamespace { [[gnu::used]] int (*keep)(int) = shared; }", "weak"),
        ("int make();\nnamespace { [[gnu::used]] int value = make(); }", "static initialiser"),
        ("int make();\nnamespace { [[gnu::used]] int value = make(); }", "section .init_array"),
    ],
)
def test_symbols_that_must_not_be_there_are_found(checker: ModuleType, tmp_path: Path, extra: str, says: str) -> None:
    findings = checker.check(compile_object(tmp_path, "avx2", GOOD + extra, "-mavx2"))
    assert any(says in finding for finding in findings), findings


def test_a_table_that_can_be_written_is_found(checker: ModuleType, tmp_path: Path) -> None:
    code = GOOD.replace("const Table", "Table")
    findings = checker.check(compile_object(tmp_path, "avx2", code, "-mavx2"))
    assert any("expected read-only data" in finding for finding in findings), findings


def test_baseline_objects_are_checked_too_and_an_empty_build_fails(
    checker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checker.main([str(tmp_path)]) == 1
    compile_object(tmp_path, "avx2", GOOD, "-mavx2")
    assert checker.main([str(tmp_path)]) == 0
    assert "1 checked, 0 baseline objects, 0 failed" in capsys.readouterr().out
    compile_object(tmp_path, "avx2", GOOD, "-mavx2").rename(tmp_path / "program.cc.o")
    compile_object(tmp_path, "avx2", GOOD, "-mavx2")
    assert checker.main([str(tmp_path)]) == 1
    assert "beyond baseline" in capsys.readouterr().err
