"""Stage 7, cli: options, streams, exit codes and the statistics line, over an engine with fixed answers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import ByteTokenizer, FakeEngine, FakeResult

from pyengine import __version__, errors
from pyengine.cli import _options, _output, generate
from pyengine.cli.main import build_parser, describe_error, exit_code, main

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """The engine that every command opens."""
    fake = FakeEngine(folder=tmp_path)
    monkeypatch.setattr(_options, "model_folder", lambda args, **_: tmp_path)
    monkeypatch.setattr(_options, "open_engine", lambda args, folder, **_: fake)
    for name in ("PYENGINE_THREADS", "PYENGINE_DEVICE", "PYENGINE_ISA"):
        monkeypatch.delenv(name, raising=False)
    return fake


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# --- generate: streams


def test_text_goes_alone_to_stdout_and_statistics_to_stderr(engine: FakeEngine, capsys: Any) -> None:
    assert main(["generate", "--raw", "-p", "Hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello"
    assert err.splitlines()[-1] == (
        "prompt 21 tok 0.35 s 60.0 tok/s | decode 1 tok 0.05 s 20.0 tok/s | FFN 71.2 % of decode | 30.0 GB/s | "
        "int8 g64, 2 threads, scalar, raw | peak 1.2 GB"
    )
    assert engine.requests[0]["ids"] == list(b"Hi")
    assert engine.closed


def test_final_newline_only_on_a_terminal(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["generate", "--raw", "-p", "Hi", "-q"]) == 0
    assert terminal.getvalue() == "Hello\n"
    engine.pieces = ("done\n",)
    terminal.truncate(0)
    terminal.seek(0)
    assert main(["generate", "--raw", "-p", "Hi", "-q"]) == 0
    assert terminal.getvalue() == "done\n"


def test_each_piece_is_flushed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []

    class Recorder(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Recorder())
    engine.pieces = ("a", "b", "c")
    assert main(["generate", "--raw", "-p", "Hi", "-q"]) == 0
    assert flushed[:3] == ["a", "ab", "abc"]


def test_json_is_exactly_one_object(engine: FakeEngine, capsys: Any) -> None:
    assert main(["generate", "--raw", "-p", "Hi", "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["text"] == "Hello"
    assert set(record) == set(FakeResult("", "stop", 0, 2).to_json())
    assert err == ""


def test_quiet_leaves_the_text_only(engine: FakeEngine, capsys: Any) -> None:
    assert main(["generate", "--raw", "-p", "Hi", "-q"]) == 0
    assert capsys.readouterr() == ("Hello", "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c_keeps_the_partial_text(engine: FakeEngine, capsys: Any, options: list[str]) -> None:
    engine.pieces = ("Hel", "lo", KeyboardInterrupt())
    assert main(["generate", "--raw", "-p", "Hi", *options]) == 130
    out, err = capsys.readouterr()
    if options:
        record = json.loads(out)
        assert (record["text"], record["finish_reason"]) == ("Hello", "cancelled")
    else:
        assert out == "Hello"
        assert err.splitlines()[-1].startswith("prompt 21 tok")
    assert engine.requests[0]["stream"].closed


def test_ctrl_c_while_loading_is_one_line(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(*_: Any) -> FakeEngine:
        raise KeyboardInterrupt

    monkeypatch.setattr(_options, "open_engine", interrupted)
    assert main(["generate", "--raw", "-p", "Hi"]) == 130
    assert capsys.readouterr() == ("", "pyengine: interrupted\n")


def test_an_error_in_the_middle_leaves_json_stdout_empty(engine: FakeEngine, capsys: Any) -> None:
    engine.pieces = ("Hel", errors.ComputeError("layer 3: NaN"))
    assert main(["generate", "--raw", "-p", "Hi", "--json"]) == 1
    assert capsys.readouterr() == ("", "pyengine: error: layer 3: NaN\n")
    assert engine.closed


def test_a_closed_pipe_ends_quietly() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from fake_engine import FakeEngine\n"
        "from pyengine.cli import _options\n"
        "from pyengine.cli.main import main\n"
        "_options.model_folder = lambda args: None\n"
        "_options.open_engine = lambda args, folder: FakeEngine(pieces=['x' * 1000] * 10000)\n"
        "sys.exit(main(['generate', '--raw', '-p', 'Hi']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(30) == 141
    assert err == b""


# --- generate: where the prompt comes from, and its form


def test_prompt_sources(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "prompt with space.txt"
    file.write_bytes(b"zwei\\n Zeilen\n\n")
    for options, stdin, expected in (
        (["-f", str(file)], b"", b"zwei\\n Zeilen\n"),
        (["-p", "-"], b"from stdin\r\n", b"from stdin"),
        ([], b"piped", b"piped"),
        (["-p", "a\\nb"], b"", b"a\\nb"),
    ):
        set_stdin(monkeypatch, stdin)
        assert main(["generate", "--raw", *options]) == 0
        assert bytes(engine.requests[-1]["ids"]) == expected


def test_wrong_prompts_are_usage_errors(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    for options, says in (
        (["-p", "a", "-f", "b"], "both -p and -f"),
        (["-f", str(tmp_path / "missing")], "missing"),
        (["-f", str(tmp_path)], "readable text file"),
        (["-f", str(tmp_path / "latin1")], "byte 3 is not UTF-8"),
        (["-p", "\udcff"], "not UTF-8"),
        (["-p", ""], "empty prompt"),
    ):
        assert main(["generate", "--raw", *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert says in err
        assert err.count("\n") == 1
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["generate", "--raw"]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_raw_text_is_encoded_with_the_tokenizers_own_special_tokens(engine: FakeEngine) -> None:
    engine.tokenizer = ByteTokenizer(bos=1)
    assert main(["generate", "--raw", "-p", "Hi"]) == 0
    assert engine.requests[0]["ids"] == [1, *b"Hi"]
    assert engine.tokenizer.calls[-1]["parse_special"] is True
    assert main(["generate", "--raw", "-p", "Hi", "--no-special"]) == 0
    assert engine.tokenizer.calls[-1]["parse_special"] is False


def test_without_a_tokenizer_text_is_refused(engine: FakeEngine, capsys: Any) -> None:
    engine.tokenizer = None
    assert main(["generate", "--raw", "-p", "Hi"]) == 5
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["-sys", "s"], ["--chat-template", "f"], ["--template-arg", "a=1"]])
def test_raw_refuses_what_it_would_ignore(engine: FakeEngine, capsys: Any, option: list[str]) -> None:
    assert main(["generate", "--raw", "-p", "Hi", *option]) == 2
    assert "--raw" in capsys.readouterr().err
    assert engine.requests == []


def test_template_arguments_are_json_or_text() -> None:
    assert generate.template_arguments(["a=1", "b=false", "c=x=y", 'd=["e"]', "f="]) == {
        "a": 1,
        "b": False,
        "c": "x=y",
        "d": ["e"],
        "f": "",
    }
    for pairs in (["novalue"], ["=1"], ["a b=1"], ["a=1", "a=2"]):
        with pytest.raises(errors.RequestError):
            generate.template_arguments(pairs)


def test_sampling_defaults_are_greedy_and_options_reach_the_engine(engine: FakeEngine, capsys: Any) -> None:
    greedy = {
        "max_tokens": 256,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
        "ignore_eos": False,
    }
    assert main(["generate", "--raw", "-p", "Hi"]) == 0
    assert {k: engine.requests[0][k] for k in greedy} == greedy
    command = "generate --raw -p Hi -n -1 --temp 0.5 --top-k 40 --top-p 0.9 --min-p 0.05 --repeat-penalty 1.1 --seed 3"
    assert main([*command.split(), "--stop", "\n", "--stop", "END", "--ignore-eos"]) == 0
    assert {k: engine.requests[1][k] for k in greedy} == {
        "max_tokens": -1,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ("\n", "END"),
        "ignore_eos": True,
    }
    assert "raw, seed 3 |" in capsys.readouterr().err


def test_verbose_says_what_is_in_force(engine: FakeEngine, capsys: Any) -> None:
    assert main(["generate", "--raw", "-p", "Hi", "-v", "--temp", "0.5"]) == 0
    assert "temperature 0.5, top_k 0, top_p 1.0" in capsys.readouterr().err


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
        ["generate", "--raw", "-p", "Hi", "--quant", "int8", "--int4-scheme", "symmetric"],
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
    for command in ("generate", "compare", "inspect", "info", "fetch-demo"):
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
        "quant": "int8",
        "group_size": None,
        "kv_dtype": None,
        "threads": None,
        "device": "auto",
        "isa": None,
        "calibration": True,
        "strict": False,
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


def test_cuda_is_not_supported_yet(engine: FakeEngine, capsys: Any) -> None:
    assert main(["generate", "--raw", "-p", "Hi", "--device", "cuda"]) == 4
    assert "no CUDA backend" in capsys.readouterr().err


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
    assert asked[0] == (("org/name@main",), {"offline": False})
    assert asked[1] == (("folder",), {"offline": True})
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
        isas=lambda: isas, cpu_features=lambda: ["sse4.2"], default_threads=lambda: 3, compiler=lambda: "gcc 12"
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
    assert record["devices"] == ["cpu"]
