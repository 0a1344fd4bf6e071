"""Stage 7, cli generate: streams, prompt sources and prompt forms, over an engine with fixed answers."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from fake_engine import ByteTokenizer, FakeEngine, FakeResult, Terminal, install

from pyengine import errors
from pyengine.cli import _options, _output, generate
from pyengine.cli.main import main
from pyengine.sampling import SamplingParams

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """The engine that every command opens."""
    return install(monkeypatch, tmp_path)


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


def test_speculation_is_shown_where_it_was_asked_for(engine: FakeEngine, capsys: Any) -> None:
    for counts, says in (((30, 24), "30 tok drafted, 24 accepted (80 %)"), ((0, 0), "0 tok drafted")):
        engine.speculation = counts
        assert main(["generate", "--raw", "-p", "Hi", "--speculate", "ngram"]) == 0
        assert f"| FFN 71.2 % of decode | {says} | 30.0 GB/s |" in capsys.readouterr().err
        assert main(["generate", "--raw", "-p", "Hi", "--speculate", "ngram", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["speculation"] == {"drafted": counts[0], "accepted": counts[1]}
    for options in (["--speculate"], ["--speculate", "draft"]):
        assert main(["generate", "--raw", "-p", "Hi", *options]) == 2


def test_the_bandwidth_counts_steps_not_tokens() -> None:
    record = FakeResult("", "stop", 7, 9).to_json()
    assert "| 30.0 GB/s |" in _output.statistics_line(record, sampled=False)
    record["timings"]["decode_steps"] = 4
    assert "| 15.0 GB/s |" in _output.statistics_line(record, sampled=False)


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


def generate_script(engine: str, *options: str) -> str:
    """A program that is `pyengine generate --raw -p Hi` over the engine of the expression."""
    return (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from fake_engine import FakeEngine\n"
        "from pyengine.cli import _options\n"
        "from pyengine.cli.main import main\n"
        "_options.model_folder = lambda args: None\n"
        f"_options.open_engine = lambda args, folder: {engine}\n"
        f"sys.exit(main(['generate', '--raw', '-p', 'Hi', *{options!r}]))\n"
    )


def test_a_closed_pipe_ends_quietly() -> None:
    script = generate_script("FakeEngine(pieces=['x' * 1000] * 10000)")
    with subprocess.Popen([sys.executable, "-c", script], stdout=PIPE, stderr=PIPE, cwd=TESTS) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(30) == 141
    assert err == b""


@pytest.mark.skipif(sys.platform == "win32", reason="signals to one process")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_sigint_ends_with_text_statistics_and_130(options: tuple[str, ...]) -> None:
    script = generate_script("FakeEngine(pieces=['x'] * 100000, delay=0.01)", *options)
    with subprocess.Popen([sys.executable, "-c", script], stdout=PIPE, stderr=PIPE, cwd=TESTS) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"the first step\n"
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read().decode()
        assert process.wait(30) == 130
    assert "Traceback" not in err
    if options:
        record = json.loads(out)
        assert record["finish_reason"] == "cancelled"
        assert set(record["text"]) <= {"x"}
    else:
        assert set(out) <= set(b"x")
        assert err.startswith("prompt 21 tok")


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
    greedy = dataclasses.asdict(SamplingParams())
    assert main(["generate", "--raw", "-p", "Hi"]) == 0
    assert {k: engine.requests[0][k] for k in greedy} == greedy
    command = "generate --raw -p Hi -n -1 --temp 0.5 --top-k 40 --top-p 0.9 --min-p 0.05 --repeat-penalty 1.1 --seed 3"
    command += " --frequency-penalty 0.5 --presence-penalty -1 --logit-bias 5=1.5 --logit-bias 7=-inf"
    assert main([*command.split(), "--stop", "\n", "--stop", "END", "--ignore-eos", "--speculate", "ngram"]) == 0
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
        "speculate": "ngram",
        "frequency_penalty": 0.5,
        "presence_penalty": -1.0,
        "logit_bias": {5: 1.5, 7: float("-inf")},
        "logprobs": 0,
        "prompt_logprobs": False,
    }
    assert "raw, seed 3 |" in capsys.readouterr().err


def test_log_probabilities_come_with_json_alone(engine: FakeEngine, capsys: Any) -> None:
    command = ["generate", "--raw", "-p", "Hi", "--logprobs", "3", "--prompt-logprobs"]
    assert main([*command, "--json"]) == 0
    assert (engine.requests[0]["logprobs"], engine.requests[0]["prompt_logprobs"]) == (3, True)
    for options, says in (
        (command[:-1], "--logprobs without --json"),
        ([*command[:4], "--prompt-logprobs"], "--prompt-"),
    ):
        capsys.readouterr()
        assert main(options) == 2
        assert says in capsys.readouterr().err
    assert len(engine.requests) == 1


@pytest.mark.parametrize("pairs", [["5"], ["a=1"], ["5=x"], ["=1"], ["5=1", "5=2"], ["5.0=1"]])
def test_other_biases_are_usage_errors(engine: FakeEngine, capsys: Any, pairs: list[str]) -> None:
    options = [option for pair in pairs for option in ("--logit-bias", pair)]
    assert main(["generate", "--raw", "-p", "Hi", *options]) == 2
    assert "--logit-bias" in capsys.readouterr().err
    assert engine.requests == []


def test_verbose_says_what_is_in_force(engine: FakeEngine, capsys: Any) -> None:
    assert main(["generate", "--raw", "-p", "Hi", "-v", "--temp", "0.5"]) == 0
    assert "temperature 0.5, top_k 0, top_p 1.0" in capsys.readouterr().err
