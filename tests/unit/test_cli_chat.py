"""Stage 7, cli chat: options, messages over a pipe, commands, ends; over an engine that says what it was asked."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from fake_chat import EchoEngine, install_chat, program
from fake_engine import Terminal

from pyengine import errors
from pyengine.chat import DEFAULTS, ChatSampling
from pyengine.cli import chat
from pyengine.cli._chat_input import MAX_LINE_BYTES
from pyengine.cli.main import build_parser, main
from pyengine.sampling import SamplingParams


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EchoEngine:
    return install_chat(monkeypatch, tmp_path)


@pytest.fixture
def talk(engine: EchoEngine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs `chat` with these bytes on stdin: exit code, lines of stdout, lines of stderr."""

    def run(data: bytes, *argv: str) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = main(["chat", *argv])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


# --- options


def test_the_help_and_the_engine_have_the_same_defaults() -> None:
    parser = build_parser()
    args = parser.parse_args(["chat"])
    options = chat.sampling_options()
    assert {getattr(args, name) for name in options} == {None}
    assert DEFAULTS == {"max_tokens": -1, "temperature": 0.7, "top_p": 0.9}
    text = next(a for a in parser._actions if a.dest == "command").choices["chat"].format_help()  # type: ignore[index]
    for option, default in (("-n N", "-1 = until"), ("--temp X", "0.7;"), ("--top-p X", "0.9;")):
        assert default in text[text.index(option, text.index("sampling (")) :][:80]


def test_options_reach_the_engine_and_what_is_not_given_is_its_own(engine: EchoEngine, talk: Any) -> None:
    engine.own = ChatSampling({"max_tokens": -1, "temperature": 0.2, "top_p": 0.9, "top_k": 5}, {}, ())
    assert talk(b"Hi\n")[0] == 0
    defaults = vars(SamplingParams())
    assert {name: engine.requests[0][name] for name in defaults} == {
        **defaults,
        "max_tokens": -1,
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 5,
    }
    command = "-n 9 --temp 0.5 --top-k 40 --top-p 0.8 --min-p 0.05 --repeat-penalty 1.1 --seed 3 --stop END"
    assert talk(b"Hi\n", *command.split(), "--speculate", "ngram", "--template-arg", "style=[1]")[0] == 0
    asked = engine.requests[1]
    assert {name: asked[name] for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")} == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.8,
        "min_p": 0.05,
        "seed": 3,
        "stop": ("END",),
    }
    assert (asked["repetition_penalty"], asked["speculate"]) == (1.1, "ngram")
    assert asked["template_args"] == {"style": [1]}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--raw"], "unrecognized arguments: --raw (see `pyengine chat --help`)"),
        (["--json"], "unrecognized arguments: --json"),
        (["-p", "Hi"], "unrecognized arguments: -p"),
        (["--ignore-eos"], "unrecognized arguments: --ignore-eos"),
        (["--no-special"], "unrecognized arguments: --no-special"),
        (["-n", "0"], "max_tokens 0; expected at least 1, or -1"),
        (["--temp", "-1"], "temperature -1"),
        (["--seed", "-1"], "seed -1"),
        (["--template-arg", "style"], "--template-arg 'style'"),
        (["--template-arg", "styel=1"], "does not use template argument 'styel'; expected one of style"),
        (["--template-arg", "messages=1"], "the engine's own"),
        (["-sys", ""], "the system message is empty"),
        (["-sys", "no"], "no system; expected no system message"),
        (["-m", "a", "b"], "two models"),
    ],
)
def test_wrong_options_are_one_line(
    engine: EchoEngine, monkeypatch: pytest.MonkeyPatch, talk: Any, argv: list[str], says: str
) -> None:
    if "two" in says:
        monkeypatch.undo()
    code, out, err = talk(b"Hi\n", *argv)
    assert (code, out, len(err)) == (2, [], 1)
    assert says in err[0]
    assert engine.requests == []


def test_a_model_without_a_template_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["chat", str(tmp_path)]) == 5
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no chat template" in err
    assert "--chat-template" in err
    assert main(["chat", str(tmp_path), "--chat-template", str(tmp_path / "missing")]) == 5
    assert "missing: no such file" in capsys.readouterr().err
    (tmp_path / "config.json").unlink()
    assert main(["chat", str(tmp_path)]) == 3  # nothing is there: not the template is what is missing
    assert "config.json: no such file" in capsys.readouterr().err


# --- messages over a pipe


def test_a_message_a_line_and_answers_alone_on_stdout(engine: EchoEngine, talk: Any) -> None:
    code, out, err = talk(b"one\r\n\n  \ntwo \\\nlines\\\n\nthr\xc3\xa9e", "-sys", "S")
    assert code == 0
    assert out == ["2:'one'", "4:'two \\nlines\\n'", "6:'thr\u00e9e'"]
    assert err == []
    assert engine.requests[-1]["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "2:'one'"},
        {"role": "user", "content": "two \nlines\n"},
        {"role": "assistant", "content": "4:'two \\nlines\\n'"},
        {"role": "user", "content": "thr\u00e9e"},
    ]
    assert engine.closed


def test_an_answer_that_ends_with_a_line_break_gets_no_other(engine: EchoEngine, talk: Any) -> None:
    engine.pieces = ("a\n", "", "b\n")
    assert talk(b"Hi\nHo\n")[1] == ["a", "b", "a", "b"]


def test_control_characters_reach_a_pipe_and_no_terminal(
    engine: EchoEngine, talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.pieces = ("\x1b[31mred\x9b\t\u200d\u00e9",)
    assert talk(b"Hi\n")[1] == ["\x1b[31mred\x9b\t\u200d\u00e9"]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    talk(b"Hi\n")
    assert terminal.getvalue() == "\\x1b[31mred\\x9b\t\u200d\u00e9\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"Hi\ncaf\xe9\n", "stdin: line 2, byte 3 is not UTF-8"),
        (b"Hi\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\n", f"stdin: line 2 has over {MAX_LINE_BYTES} bytes"),
        (b"Hi\n/nothing\n", "/nothing: no such command; expected one of /help's, or a space before the /"),
        (b"Hi\n/set temperature hot\n", "temperature 'hot'"),
    ],
)
def test_over_a_pipe_an_error_ends_the_chat(engine: EchoEngine, talk: Any, data: bytes, says: str) -> None:
    code, out, err = talk(data)
    assert (code, out, len(err)) == (2, ["1:'Hi'"], 1)
    assert says in err[0]
    assert engine.closed


def test_errors_of_the_engine_keep_their_exit_code(engine: EchoEngine, talk: Any) -> None:
    engine.pieces = ("Hel", errors.ComputeError("layer 3: NaN"))
    assert talk(b"Hi\n") == (1, ["Hel"], ["pyengine: error: layer 3: NaN"])


def test_a_line_as_long_as_allowed(engine: EchoEngine, talk: Any) -> None:
    engine.ctx_size, engine.pieces = 2 * MAX_LINE_BYTES, ("ok",)
    assert talk(b"x" * MAX_LINE_BYTES + b"\r\n") == (0, ["ok"], [])
    assert len(engine.requests[0]["messages"][0]["content"]) == MAX_LINE_BYTES


# --- the context


def test_a_full_context_says_what_to_do(engine: EchoEngine, talk: Any) -> None:
    code, out, err = talk(b"x" * 128 + b"\n")
    assert (code, out) == (2, [])
    assert err == ["pyengine: error: this message takes 128 tokens, the context has 128; expected a shorter one"]
    code, out, err = talk(b"a\n" + b"x" * 124 + b"\n")
    assert (code, out) == (2, ["1:'a'"])
    full = "the context is full: 130 tokens of 128; /clear starts over, or a start with -c above 128"
    assert err == [f"pyengine: error: {full}"]
    engine.spec.max_context = 128
    assert talk(b"a\n" + b"x" * 124 + b"\n")[2] == [f"pyengine: error: {full.split(', or')[0]}"]


def test_an_answer_that_is_cut_says_why(engine: EchoEngine, talk: Any) -> None:
    cut = "pyengine: stopped after 3 tokens (max_tokens)"
    assert talk(b"Hi\n/clear\n/set seed 1\n", "-n", "3") == (0, ["1:'"], [cut])  # said once
    assert talk(b"Hi\n", "-n", "3", "-q") == (0, ["1:'"], [])
    code, out, err = talk(b"x" * 120 + b"\n")
    assert (code, len(out[0])) == (0, 8)
    assert err == ["pyengine: the context is full: 128 tokens of 128; /clear starts over, or a start with -c above 128"]


# --- commands


def test_help_lists_every_command(talk: Any) -> None:
    code, out, err = talk(b"/help\n")
    assert (code, out) == (0, [])
    assert {line.split()[0] for line in err if line.startswith("/")} == {
        *("/help", "/set", "/system", "/clear", "/regen", "/quit")
    }


def test_quit_ends_and_the_rest_is_not_read(engine: EchoEngine, talk: Any) -> None:
    assert talk(b"one\n/quit\ntwo\n") == (0, ["1:'one'"], [])


def test_lines_that_only_look_like_commands_are_messages(engine: EchoEngine, talk: Any) -> None:
    assert talk(b" /quit\n/usr/bin\n/\n/* x */\n")[1] == ["1:' /quit'", "3:'/usr/bin'", "5:'/'", "7:'/* x */'"]


def test_clear_keeps_the_system_message(engine: EchoEngine, talk: Any) -> None:
    assert talk(b"one\n/clear\ntwo\n", "-sys", "S")[1] == ["2:'one'", "2:'two'"]
    assert engine.requests[1]["messages"][0]["content"] == "S"


def test_the_system_message_is_shown_set_and_removed(engine: EchoEngine, talk: Any) -> None:
    code, out, err = talk(b"/system\n/system Be\\\nbrief\n/system\none\n/system -\ntwo\n/system\n")
    assert (code, out) == (0, ["2:'one'", "3:'two'"])
    assert err == ["no system message", "Be brief", "no system message"]
    assert engine.requests[0]["messages"][0] == {"role": "system", "content": "Be\nbrief"}


def test_regen_asks_the_same_with_another_seed(engine: EchoEngine, talk: Any) -> None:
    code, out, _ = talk(b"one\n/regen\ntwo\n/regen\n", "--seed", "7")
    assert (code, out) == (0, ["1:'one'", "1:'one'", "3:'two'", "3:'two'"])
    assert [request["seed"] for request in engine.requests] == [7, 8, 9, 10]
    assert [len(request["messages"]) for request in engine.requests] == [1, 1, 3, 3]
    assert talk(b"/regen\n")[2] == ["pyengine: error: /regen: there is no answer yet; expected a message first"]
    code, out, err = talk(b"one\n/regen\n", "--temp", "0")
    assert (code, len(out)) == (2, 1)
    assert "/set temperature" in err[0]


def test_set_shows_changes_and_takes_back(engine: EchoEngine, talk: Any) -> None:
    engine.own = ChatSampling({**DEFAULTS, "top_k": 5}, {**dict.fromkeys(DEFAULTS, "default"), "top_k": "file"}, ())
    lines = b'/set temp 0.25\n/set --top-k 3\n/set stop ["\\n", "END"]\n/set seed 4\n/set logit_bias {"7": -5}\n'
    lines += b"/set\na\n/set top_k default\nb\n"
    code, _, err = talk(lines, "--min-p", "0.1")
    assert code == 0
    assert set(err) == {
        "max_tokens -1 (default)",
        "temperature 0.25 (/set)",
        "top_k 3 (/set)",
        "top_p 0.9 (default)",
        "min_p 0.1 (option)",
        "repetition_penalty 1.0 (default)",
        "seed 4 (/set)",
        "stop '\\n', 'END' (/set)",
        "speculate none (default)",
        "frequency_penalty 0.0 (default)",
        "presence_penalty 0.0 (default)",
        "logit_bias {7: -5.0} (/set)",
    }
    first, second = engine.requests
    assert (first["temperature"], first["top_k"], first["seed"], first["min_p"]) == (0.25, 3, 4, 0.1)
    assert list(first["stop"]) == ["\n", "END"]
    assert first["logit_bias"] == {7: -5}
    assert (second["temperature"], second["top_k"], second["seed"]) == (0.25, 5, 5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"/set temperature", "nothing to set it to; expected /set temperature VALUE"),
        (b"/set heat 5", "/set heat: no such value; expected one of max_tokens, temperature"),
        (b"/set ignore_eos true", "no such value"),
        (b"/set top_p 2", "top_p 2"),
        (b"/set max_tokens 0", "max_tokens 0"),
        (b"/set seed 1.5", "seed '1.5'"),
        (b"/set top_k [[[", "top_k '[[['"),
        (b"/system no", "no system; expected no system message"),
        (b"/quit now", "/quit takes nothing"),
        (b"/regen 5", "/regen takes nothing"),
    ],
)
def test_wrong_commands(engine: EchoEngine, talk: Any, line: bytes, says: str) -> None:
    code, out, err = talk(line + b"\n")
    assert (code, out, len(err)) == (2, [], 1)
    assert says in err[0]


# --- what is said besides


def test_verbose_gives_the_values_in_force_and_statistics_with_what_was_cached(engine: EchoEngine, talk: Any) -> None:
    code, out, err = talk(b"Hi\n", "-v", "--seed", "3")
    assert (code, out) == (0, ["1:'Hi'"])
    assert err[0].startswith("pyengine: max_tokens -1 (default), temperature 0.7 (default), top_k 0 (default)")
    assert "seed 3 (option)" in err[0]
    assert err[1].startswith("prompt 21 tok 0.35 s 60.0 tok/s | decode 5 tok")
    assert ", seed 3 |" in err[1]
    engine.cached = 480
    assert "prompt 21 tok 0.35 s 60.0 tok/s | 480 tok cached | decode" in talk(b"Hi\n", "-v")[2][1]
    assert "seed" not in talk(b"Hi\n", "-v", "--temp", "0")[2][1]


def test_what_generation_config_asks_for_in_vain_is_a_warning(engine: EchoEngine, talk: Any) -> None:
    engine.own = ChatSampling(DEFAULTS, {}, ("generation_config.json: num_beams '4' changes nothing here",))
    assert talk(b"Hi\n")[2] == ["pyengine: warning: generation_config.json: num_beams '4' changes nothing here"]
    assert talk(b"Hi\n", "-q")[2] == []


# --- ends


def test_a_closed_pipe_ends_quietly() -> None:
    command = program(["chat"], "EchoEngine(pieces=['x' * 1000] * 10000, ctx_size=10**6)")
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 141
    assert err == b""


def test_sigint_over_a_pipe_ends_with_the_partial_answer_and_130() -> None:
    with subprocess.Popen(program(["chat", "-v"]), stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"slow\nmore\n")
        process.stdin.flush()
        begun = process.stdout.read(12)
        process.send_signal(signal.SIGINT)
        out, err = begun + process.stdout.read(), process.stderr.read().decode()
        assert process.wait(60) == 130
    assert out.startswith(b"1:'slow'....")
    assert out.count(b"\n") == 1
    assert err.splitlines()[-1].startswith("prompt 21 tok")
    assert "Traceback" not in err
