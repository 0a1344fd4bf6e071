"""Which device a model runs on, and each way in which CUDA can be missing: one line that says what and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pyengine
from pyengine import _core, cuda
from pyengine.cli.main import main
from pyengine.errors import RequestError, ResourceError

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

VERSION = "int pe_abi_version(void) {{ return {}; }}\n"
FUNCTIONS = """
#include <stdint.h>
const char* pe_last_error(void) {{ return "{error}"; }}
int32_t pe_device_count(void) {{ return {count}; }}
const char* pe_device_name(int32_t i) {{ return i ? "Card B" : "Card A"; }}
int pe_device_bytes(int32_t i, uint64_t* free, uint64_t* total) {{
  *free = 3000000000u;
  *total = 4000000000u;
  return {status};
}}
"""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYENGINE_CUDA_LIBRARY", raising=False)
    monkeypatch.delenv("PYENGINE_DEVICE", raising=False)


def fake_library(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    count: int = 2,
    error: str = "",
    status: int = 0,
    version: int | None = None,
    functions: bool = True,
) -> Path:
    """A library in place of the CUDA one, with the functions that are asked before a backend is made."""
    code = VERSION.format(_core.abi_version() if version is None else version)
    code += FUNCTIONS.format(count=count, error=error, status=status) if functions else ""
    source, target = folder / "fake.c", folder / "libfake.so"
    source.write_text(code, encoding="ascii")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True, capture_output=True)
    monkeypatch.setenv("PYENGINE_CUDA_LIBRARY", str(target))
    return target


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this installation has: no CUDA library beside the core."""
    monkeypatch.setattr(cuda, "LIBRARY", "libpyengine_cuda_of_this_test.so")


# --- words


@pytest.mark.parametrize("word", ["tpu", "", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:0 ", 0, True, b"cpu"])
def test_other_words_are_refused(word: object) -> None:
    with pytest.raises(RequestError, match="expected 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        cuda.choose(word)


def test_cpu_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "devices", None)
    assert cuda.choose("cpu") == "cpu"


def test_auto_is_the_cpu_where_cuda_is_not(not_built: None) -> None:
    assert cuda.choose("auto") == "cpu"


@needs_gcc
def test_auto_is_the_first_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_library(tmp_path, monkeypatch)
    assert [cuda.choose(word) for word in ("auto", "cuda", "cuda:0", "cuda:1")] == [
        "cuda:0",
        "cuda:0",
        "cuda:0",
        "cuda:1",
    ]
    assert cuda.devices()[1] == cuda.Device("cuda:1", "Card B", 3000000000, 4000000000)


@needs_gcc
def test_an_index_past_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_library(tmp_path, monkeypatch)
    with pytest.raises(ResourceError, match=r"^device 'cuda:2': no such .* of cuda:0 \(Card A\), cuda:1 \(Card B\)$"):
        cuda.choose("cuda:2")


# --- each way of missing


def test_the_library_is_not_built(not_built: None) -> None:
    with pytest.raises(ResourceError, match=r"^device 'cuda': this installation has no .*build it: pip install \. -C"):
        cuda.choose("cuda")


def test_the_named_library_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENGINE_CUDA_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(ResourceError, match=r"PYENGINE_CUDA_LIBRARY=.*none\.so: no such file"):
        cuda.choose("cuda")


def test_the_library_cannot_be_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("text" * 100, encoding="ascii")
    monkeypatch.setenv("PYENGINE_CUDA_LIBRARY", str(tmp_path / "text.so"))
    with pytest.raises(ResourceError, match=r"cannot open the CUDA library: .*text\.so: invalid ELF header"):
        cuda.choose("cuda")


@needs_gcc
def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_library(tmp_path, monkeypatch, version=999)
    with pytest.raises(ResourceError, match=rf"ABI version 999; expected {_core.abi_version()}; build it again"):
        cuda.choose("cuda")
    assert cuda.choose("auto") == "cpu"


@needs_gcc
def test_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_library(tmp_path, monkeypatch, functions=False)
    with pytest.raises(ResourceError, match=r"is no CUDA library of pyengine \(.*pe_last_error.*\); build it again"):
        cuda.choose("cuda")


@needs_gcc
@pytest.mark.parametrize("why", ["no driver (libcuda.so.1)", "the driver is older than CUDA 12", "no CUDA device"])
def test_no_driver_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str) -> None:
    """The library knows why; its words are the error's."""
    fake_library(tmp_path, monkeypatch, count=0, error=why)
    with pytest.raises(ResourceError) as caught:
        cuda.choose("cuda:0", "--device")
    assert str(caught.value) == f"--device 'cuda:0': {why}"
    assert cuda.choose("auto") == "cpu"


@needs_gcc
def test_a_device_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_library(tmp_path, monkeypatch, status=4, error="the device is used by another process alone")
    with pytest.raises(ResourceError, match="cuda:0: the device is used by another process alone"):
        cuda.choose("cuda")


# --- where it is asked for


def test_load_refuses_before_it_looks_for_the_model(not_built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match=r"^device 'cuda': this installation has no"):
        pyengine.load("/no/such/folder", device="cuda")
    monkeypatch.setenv("PYENGINE_DEVICE", "cuda")
    with pytest.raises(ResourceError, match=r"^PYENGINE_DEVICE 'cuda': this installation has no"):
        pyengine.load("/no/such/folder")
    with pytest.raises(pyengine.ModelNotFoundError):
        pyengine.load("/no/such/folder", device="cpu")


def test_the_command_line_says_it_in_one_line(not_built: None, capsys: Any) -> None:
    assert main(["generate", "--raw", "-p", "Hi", "--device", "cuda"]) == 6
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "--device 'cuda': this installation has no" in said.err


def test_kernels_are_the_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(cuda, "choose", lambda *_: "cuda:0")
    assert main(["bench", "--kernels", "--device", "cuda"]) == 4
    assert "--kernels times the kernels of the CPU" in capsys.readouterr().err


def test_it_is_said_at_once(tmp_path: Path) -> None:
    """Under half a second, before tokenizer and weights: a second model folder would not even have to exist."""
    command = [sys.executable, "-m", "pyengine", "generate", str(tmp_path), "-p", "Hi", "--device", "cuda"]
    environment = {**os.environ, "PYENGINE_CUDA_LIBRARY": str(tmp_path / "none.so")}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        seconds.append(time.perf_counter() - start)
        assert (done.returncode, done.stdout) == (6, "")
        assert done.stderr.startswith("pyengine: error: --device 'cuda': ")
        assert done.stderr.count("\n") == 1
    assert min(seconds) < 0.5


def test_info_says_why_not(not_built: None, capsys: Any) -> None:
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("devices   cpu")
    assert lines[at + 1].startswith("          cuda: not used: this installation has no")
    assert main(["info", "--json"]) == 0
    assert [one["available"] for one in json.loads(capsys.readouterr().out)["devices"]] == [True, False]


@needs_gcc
def test_info_lists_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    fake_library(tmp_path, monkeypatch)
    assert main(["info"]) == 0
    assert "\n          cuda:1: Card B, 3.0 of 4.0 GB free\n" in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == [
        {"name": "cpu", "available": True},
        {"name": "cuda:0", "available": True, "model": "Card A", "free_bytes": 3000000000, "total_bytes": 4000000000},
        {"name": "cuda:1", "available": True, "model": "Card B", "free_bytes": 3000000000, "total_bytes": 4000000000},
    ]


def test_importing_stays_light() -> None:
    script = (
        "import sys; from pyengine import cuda; cuda.choose('cpu'); print(sorted({'cffi', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
