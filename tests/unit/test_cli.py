"""Stage 7, cli: usage errors, exit codes, engine options, messages and the statistics line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeResult, Terminal, install

from pyengine import __version__, errors
from pyengine.cli import _options, _output
from pyengine.cli.main import build_parser, describe_error, exit_code, main


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """The engine that every command opens."""
    return install(monkeypatch, tmp_path)


# --- usage, exit codes, errors


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["generate", "--no-such-option"],
        ["generate", "-p"],
        ["generate", "--raw", "-p", "Hi", "-n", "many"],
        ["generate", "--raw", "-p", "Hi", "--quan", "int8"],  # no abbreviations
        ["generate", "--raw", "-p", "Hi", "--quant", "int3"],
        ["generate", "--raw", "-p", "Hi", "-t", "0"],
        ["generate", "--raw", "-p", "Hi", "--quant", "bf16", "--group-size", "64"],
        ["generate", "--raw", "-p", "Hi", "--quant", "none", "--no-calibration"],
        ["generate", "--raw", "-p", "Hi", "--quant", "bf16", "--no-calibration"],
        ["generate", "--raw", "-p", "Hi", "--quant", "int8", "--int4-scheme", "symmetric"],
        ["generate", "--raw", "-p", "Hi", "--no-cache", "--cache-limit", "3"],
        ["generate", "--raw", "-p", "Hi", "--cache-limit", "-1"],
        ["generate", "--raw", "-p", "Hi", "--cache-limit", "nan"],
        ["cache", "--clear", "everything"],
        ["--version", "info"],
        ["compare", "--max-kld", "nan"],
        ["compare", "--text-offset", "-1"],
    ],
)
def test_usage_errors_are_one_line_and_exit_2(engine: FakeEngine, capsys: Any, argv: list[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pyengine: error: ")
    assert err.count("\n") == 1
    assert engine.requests == []


def test_no_command_shows_the_help(capsys: Any) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for command in ("generate", "compare", "bench", "inspect", "info", "fetch-demo"):
        assert command in err


def test_every_error_class_has_its_exit_code() -> None:
    expected = {
        errors.ModelNotFoundError: 3,
        errors.ModelFormatError: 3,
        errors.UnsupportedModelError: 4,
        errors.TokenizerError: 5,
        errors.ChatTemplateError: 5,
        errors.RequestError: 2,
        errors.ResourceError: 6,
        errors.ComputeError: 1,
        MemoryError: 6,
        ValueError: 1,
    }
    for kind, code in expected.items():
        assert exit_code(kind("x")) == code
    assert exit_code(OSError(28, "No space left on device")) == 6
    assert exit_code(OSError(5, "Input/output error")) == 1


def test_messages_are_one_line_without_control_characters(capsys: Any) -> None:
    _output.message("first\n  second\x1b[31m\r\n")
    assert capsys.readouterr().err == "pyengine: first second\\x1b[31m\n"
    assert "internal error, KeyError" in describe_error(KeyError("x"))


def test_traceback_only_with_debug(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(*_: Any) -> FakeEngine:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(_options, "open_engine", broken)
    assert main(["generate", "--raw", "-p", "Hi"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "ZeroDivisionError: boom" in err
    assert main(["generate", "--raw", "-p", "Hi", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


# --- engine options


def parse(*argv: str) -> Any:
    return build_parser().parse_args(["generate", "-p", "x", *argv])


def test_engine_arguments_of_the_options(engine: FakeEngine) -> None:
    assert _options.engine_arguments(parse()) == {
        "quant": None,
        "group_size": None,
        "kv_dtype": None,
        "threads": None,
        "device": "auto",
        "isa": None,
        "calibration": True,
        "strict": False,
        "cache": True,
    }
    options = (
        "--quant int4 --group-size 32 --int4-scheme symmetric --no-calibration --kv-dtype f32 -t 3 --device cpu -c 99"
    )
    assert _options.engine_arguments(parse(*options.split(), "--strict")) == {
        "quant": "int4",
        "group_size": 32,
        "int4_scheme": "symmetric",
        "kv_dtype": "f32",
        "threads": 3,
        "device": "cpu",
        "isa": None,
        "calibration": False,
        "strict": True,
        "cache": True,
        "ctx_size": 99,
    }


def test_environment_twins_and_their_precedence(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENGINE_THREADS", "5")
    monkeypatch.setenv("PYENGINE_DEVICE", "cpu")
    monkeypatch.setenv("PYENGINE_ISA", "scalar")
    arguments = _options.engine_arguments(parse())
    assert (arguments["threads"], arguments["device"], arguments["isa"]) == (5, "cpu", "scalar")
    assert _options.engine_arguments(parse("-t", "2"))["threads"] == 2
    monkeypatch.setenv("PYENGINE_THREADS", "two")
    with pytest.raises(errors.RequestError, match="PYENGINE_THREADS"):
        _options.engine_arguments(parse())
    monkeypatch.setenv("PYENGINE_THREADS", "")
    monkeypatch.setenv("PYENGINE_DEVICE", "tpu")
    with pytest.raises(errors.RequestError, match="PYENGINE_DEVICE"):
        _options.engine_arguments(parse())


def test_open_engine_passes_the_folder_and_prints_warnings(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def load(folder: Path, **arguments: Any) -> FakeEngine:
        calls.append((folder, arguments))
        arguments["progress"](1, 2, "packing")
        return FakeEngine()

    monkeypatch.setitem(sys.modules, "pyengine.engine", SimpleNamespace(load=load))
    monkeypatch.setattr("pyengine.engine", SimpleNamespace(load=load), raising=False)
    _options.open_engine(parse(), Path("a folder"))
    assert calls[0][0] == Path("a folder")
    assert capsys.readouterr() == ("", "pyengine: warning: an odd key\n")
    _options.open_engine(parse("-q"), Path("a folder"))
    assert capsys.readouterr() == ("", "")


def test_model_is_a_path_an_id_or_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def record(*args: Any, **options: Any) -> Path:
        asked.append((args, options))
        return tmp_path

    modules: dict[str, Callable[..., Path]] = {"hub": record, "demo": record}
    monkeypatch.setitem(sys.modules, "pyengine.hub", SimpleNamespace(resolve=modules["hub"]))
    monkeypatch.setattr("pyengine.hub", SimpleNamespace(resolve=modules["hub"]), raising=False)
    monkeypatch.setitem(sys.modules, "pyengine.demo", SimpleNamespace(demo_folder=modules["demo"]))
    monkeypatch.setattr("pyengine.demo", SimpleNamespace(demo_folder=modules["demo"]), raising=False)
    assert _options.model_folder(parse("org/name@main")) == tmp_path
    assert _options.model_folder(parse("-m", "folder", "--offline")) == tmp_path
    assert _options.model_folder(parse(), degrid_demo=True) == tmp_path
    assert [args for args, _ in asked[:2]] == [("org/name@main",), ("folder",)]
    assert [options["offline"] for _, options in asked[:2]] == [False, True]
    assert all(options["bar"] and callable(options["log"]) for _, options in asked[:2])
    assert asked[2][1]["degrid"] is True
    with pytest.raises(errors.RequestError, match="two models"):
        _options.model_folder(parse("one", "-m", "two"))


# --- output helpers


def test_statistics_line_leaves_out_what_is_null() -> None:
    record = FakeResult("", "length", 7, 0).to_json()
    line = _output.statistics_line(record, sampled=False)
    assert "decode 0 tok |" in line
    assert "FFN" not in line
    assert "GB/s" not in line
    assert "seed" not in line


def test_progress_waits_a_second_and_needs_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(_output.time, "monotonic", lambda: clock[0])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = _output.Progress()
    clock[0] = 0.9
    progress(1, 2)
    assert terminal.getvalue() == ""
    clock[0] = 1.5
    progress(1, 2, "packing")
    assert "packing [###############...............]  50 %" in terminal.getvalue()
    clock[0] = 40.9  # 12 in the 40 s since the first call, 3 to go
    progress(13, 16)
    assert terminal.getvalue().rstrip().endswith("81 %, 0:10 left")
    clock[0] = 50.0
    progress(16, 16)
    assert terminal.getvalue().rstrip().endswith("100 %")
    progress.close()
    assert terminal.getvalue().endswith(" \r")
    quiet = Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    silent = _output.Progress(quiet=True)
    clock[0] = 9.0
    silent(1, 2)
    silent.close()
    assert quiet.getvalue() == ""


def test_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        _output.print_json({"x": float("nan")})


def test_version_matches_the_package(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    isas = [
        {"name": "scalar", "available": True, "chosen": True},
        {"name": "avx2", "available": False, "chosen": False},
    ]
    core = SimpleNamespace(
        isas=lambda: isas,
        cpu_features=lambda: ["sse4.2"],
        default_threads=lambda: 3,
        compiler=lambda: "gcc 12",
        __file__="/nowhere/_core.so",
    )
    monkeypatch.setitem(sys.modules, "pyengine._core", core)
    monkeypatch.setattr("pyengine._core", core, raising=False)
    monkeypatch.delenv("PYENGINE_THREADS", raising=False)
    assert main(["--version"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == f"pyengine {__version__}"
    assert "scalar, of scalar, avx2 (not on this CPU)" in text
    assert main(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["version"], record["isa"], record["threads"]) == (__version__, "scalar", 3)
    assert [device["name"] for device in record["devices"]] == ["cpu", "cuda"]
