"""What someone new does on `generate` and `chat`, by mistake or by chance: one line that says what to do."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from pseudo_terminal import AtTerminal
from tiny_tokenizers import byte_level, write

from pyengine import text_file
from pyengine.cli import _options
from pyengine.cli.main import main

CONFIG = {**CONFIGS["llama"], "vocab_size": 258, "max_position_embeddings": 256, "eos_token_id": 257}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
COMMANDS = ("generate", "chat")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("user") / "a model", CONFIG, seed=4)
    return write(folder, byte_level(), eos_token="<|im_end|>", chat_template=TEMPLATE)


def prompt(command: str) -> list[str]:
    """How either command gets a message: `chat` reads it from stdin."""
    return ["-p", "Hi"] if command == "generate" else []


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs the command line in place: its exit code and its one line on stderr."""

    def run(*argv: str, stdin: bytes = b"Hi\n") -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = main(argv)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert err.startswith("pyengine: error: ")
        return code, err.strip()

    return run


def run(*argv: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The program itself, with a limit of time."""
    command = [sys.executable, "-m", "pyengine", *argv]
    given = {"input": b"Hi\n", "stdout": PIPE, **options}
    if "stdin" in given:
        del given["input"]
    return subprocess.run(command, stderr=PIPE, timeout=120, check=False, **given)


# --- the model


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_path(says: Any, tmp_path: Path, command: str) -> None:
    missing = tmp_path / "missing"
    assert says(command, str(missing), *prompt(command)) == (
        3,
        f"pyengine: error: {missing}: no such folder; expected a model folder or org/name",
    )
    (tmp_path / "empty").mkdir()
    code, err = says(command, str(tmp_path / "empty"), *prompt(command))
    assert code == 3
    assert "config.json: no such file" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_in_place_of_the_folder(says: Any, model: Path, command: str) -> None:
    code, err = says(command, str(model / "model.safetensors"), *prompt(command))
    assert code == 2
    assert "expected the folder of a model" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_is_none_and_an_id_without_a_network(
    says: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    code, err = says(command, "smollm2", *prompt(command))
    assert code == 2
    assert "'smollm2' is neither a folder nor org/name; expected one of them" in err
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, err = says(command, "SomeOrg/SmolLM2-Instuct", "--offline", *prompt(command))
    assert code == 3
    assert "run `hf download SomeOrg/SmolLM2-Instuct` with a network" in err


def test_no_network(tmp_path: Path) -> None:
    """A hub that nobody answers for: refused soon, without a traceback of the client."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_CACHE": str(tmp_path)}
    done = run("generate", "org/name", "-p", "Hi", env={**environment, "HF_HUB_OFFLINE": "0"})
    assert (done.returncode, done.stdout) == (3, b"")
    line = done.stderr.decode()
    assert line.count("\n") == 1, line
    assert "cannot be downloaded" in line
    assert "run `hf download org/name`" in line


# --- the prompt


def test_an_empty_prompt(says: Any, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_options, "open_engine", None)  # refused before anything is loaded
    (tmp_path / "empty").touch()
    for options in (["-p", ""], ["-f", str(tmp_path / "empty")], []):
        code, err = says("generate", str(model), *options, stdin=b"")
        assert (code, err) == (2, "pyengine: error: empty prompt; expected text, or --raw to start from nothing")


def test_a_prompt_without_quotes(says: Any, model: Path) -> None:
    code, err = says("generate", str(model), "Why", "is", "the", "sky", "blue?")
    assert code == 2
    assert "unrecognized arguments: Why is the sky blue? (a prompt goes in quotes behind -p; see" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_megabyte_pasted_is_refused_with_its_length(says: Any, model: Path, command: str) -> None:
    text = b"x" * 1_000_000 + b"\n"
    code, err = says(command, str(model), stdin=text)
    assert code == 2
    assert "1000007 tokens" in err
    assert "256; expected " in err


def test_a_prompt_file_without_end(says: Any, model: Path) -> None:
    code, err = says("generate", str(model), "-f", "/dev/zero")
    assert code == 2
    assert f"/dev/zero: over {text_file.MAX_TEXT_BYTES} bytes; expected a shorter text" in err


# --- the template


def test_a_wrong_template_file_is_refused_before_anything_is_loaded(
    says: Any, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_options, "open_engine", None)
    for command in COMMANDS:
        code, err = says(command, str(model), "--chat-template", str(tmp_path / "missing"), *prompt(command))
        assert code == 5
        assert "missing: no such file" in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("styel=1", "does not use template argument 'styel'; expected no template arguments"),
        ("allow_special=true", "does not use template argument 'allow_special'"),
        ("add_generation_prompt=false", "is the engine's own"),
        ("x=" + "[" * 100_000, "--template-arg x: nested too deep"),
    ],
)
def test_template_arguments_that_would_do_nothing(
    says: Any, model: Path, command: str, argument: str, text: str
) -> None:
    code, err = says(command, str(model), "--template-arg", argument, *prompt(command))
    assert code == 2
    assert text in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_system_message_that_the_template_leaves_out(says: Any, model: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "a.jinja").write_text("{{ messages[-1].content }}", encoding="utf-8")
    options = ["--chat-template", str(tmp_path / "a.jinja"), "-sys", "Be brief"]
    code, err = says(command, str(model), *options, *prompt(command))
    assert code == 2
    assert "a.jinja leaves a system message out; expected none" in err


# --- the process


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_behind_stdout(model: Path, command: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run(command, str(model), "-n", "4", *prompt(command), stdout=full)
    assert done.returncode == 6
    line = "pyengine: error: No space left on device; expected room where the output goes\n"
    assert done.stderr.decode() == line


@pytest.mark.parametrize("command", COMMANDS)
def test_streams_that_are_closed(model: Path, command: str) -> None:
    """As a service or a cron job may start it."""
    for closed, code in ((0, {"generate": 2, "chat": 0}[command]), (1, 0), (2, 0)):
        arguments = [sys.executable, "-m", "pyengine", command, str(model), "-n", "2", "-q"]
        shell = f'exec "$@" {closed}>&-'
        done = subprocess.run(
            ["sh", "-c", shell, "sh", *arguments], input=b"Hi\n", capture_output=True, timeout=120, check=False
        )
        assert done.returncode == code, (closed, done.stderr)
        assert b"internal error" not in done.stderr
        assert b"Traceback" not in done.stderr
        assert bool(done.stdout) == (closed == 2)


def test_two_at_once(model: Path) -> None:
    command = [sys.executable, "-m", "pyengine", "generate", str(model), "-p", "Hi", "-n", "8", "-q", "--ignore-eos"]
    both = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert results[0] == results[1]
    assert results[0][1] == b""


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["generate", "--tempature", "1"], "did you mean --temperature? see `pyengine generate --help`)"),
        (["bench", "--threds=2"], "did you mean --threads? see"),
        (["--verson"], "did you mean --version? see"),
        (["generate", "--zzz"], "--zzz (see"),
        (["generate", "--no"], "--no (see"),
    ],
)
def test_an_option_almost_spelled_right(argv: list[str], meant: str, capsys: Any) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert meant in err


START = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "pyengine.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.argv = ["pyengine", "info", "-q"]
if "ignored" in sys.orig_argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if "after" in sys.orig_argv:
    import pyengine.cli.main as program
    program.main = lambda: int(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
else:
    sys.meta_path.insert(0, Interrupt())
runpy.run_module("pyengine", run_name="__main__")
"""


@pytest.mark.parametrize(("case", "code"), [("imports", -signal.SIGINT), ("ignored", 0), ("after", 0)])
def test_ctrl_c_while_modules_are_imported(case: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", START, case], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, b"")


def test_an_old_python() -> None:
    script = (
        "import sys, runpy\n"
        "sys.version_info = (3, 9, 2, 'final', 0)\n"
        "runpy.run_module('pyengine', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == "pyengine: error: Python 3.9; expected 3.10 or newer\n"


def test_the_whole_program_at_a_terminal(model: Path) -> None:
    """No part of it faked: a tiny model answers, the terminal is resized, Ctrl-C and Ctrl-D do what they should."""
    argv = [sys.executable, "-c", "import os, sys\nos.close(os.open(os.ttyname(0), os.O_RDWR))\n"]
    argv[2] += f"from pyengine.cli.main import main\nsys.exit(main(['chat', {str(model)!r}, '-n', '20', '-v']))\n"
    with AtTerminal(argv) as chat:
        chat.expect("/help lists commands, Ctrl-D leaves\n> ")
        chat.send("Hi\n")
        chat.expect("prompt 9 tok")
        chat.expect("\n> ")
        chat.resize(10, 40)
        chat.send("x" * 300 + "\n")
        chat.expect("pyengine: error: ")
        chat.expect("\n> ")
        chat.send("/clear\nHo\n")
        chat.expect("prompt 9 tok")
        chat.expect("\n> ")
        chat.interrupt()
        chat.expect("Ctrl-D or /quit leaves\n> ")
        chat.send("\x04")
        assert chat.wait() == 0
