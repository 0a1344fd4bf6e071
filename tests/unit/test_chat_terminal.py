"""`pyengine chat` at a pseudo-terminal: keys, paste, Ctrl-C, Ctrl-D, resizing; what a person sees."""

from __future__ import annotations

import readline
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_chat import program
from pseudo_terminal import AtTerminal

GNU = "libedit" not in (readline.__doc__ or "")
UP, LEFT, CTRL_D, BACKSPACE = "\x1b[A", "\x1b[D", "\x04", "\x7f"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"
gnu_only = pytest.mark.skipif(not GNU, reason="this Python has libedit, which knows no bracketed paste")


@pytest.fixture(scope="module")
def started() -> Iterator[AtTerminal]:
    """One program for most tests: starting it takes longer than they do."""
    with AtTerminal(program(["chat", "--seed", "1"])) as one:
        one.expect("/help lists commands, Ctrl-D leaves\n> ")
        yield one
        leave(one)


@pytest.fixture
def chat(started: AtTerminal) -> AtTerminal:
    """At the prompt, without a conversation, whatever the test before has left."""
    started.interrupt()
    started.expect("Ctrl-D or /quit leaves\n> ")
    started.send("/clear\n")
    started.expect("/clear\n> ")
    return started


def leave(chat: AtTerminal) -> None:
    chat.send(CTRL_D)
    assert chat.wait() == 0
    assert chat.shown.endswith("\n")
    assert "Traceback" not in chat.shown


def test_a_conversation(chat: AtTerminal) -> None:
    chat.send("one\n")
    assert chat.expect("\n> ") == "one\n1:'one'\n> "
    chat.send("\n  \ntw\u00f6\n")  # nothing typed is no message
    assert chat.expect("3:'tw\u00f6'\n> ")


def test_arrow_keys_edit_and_find_what_was_typed(chat: AtTerminal) -> None:
    chat.send("first\n")
    chat.expect("1:'first'\n> ")
    chat.send("second\n")
    chat.expect("3:'second'\n> ")
    chat.send(UP + UP + "!" + LEFT + BACKSPACE + "\n")  # first! -> firs!
    chat.expect("5:'firs!'\n> ")
    chat.send(UP + "\n")
    chat.expect("7:'firs!'\n> ")


def test_a_backslash_continues_a_message(chat: AtTerminal) -> None:
    chat.send("one\\\n")
    chat.expect("... ")
    chat.send("two\\\n")
    chat.expect("... ")
    chat.send("three\n")
    chat.expect("1:'one\\ntwo\\nthree'\n> ")


@gnu_only
def test_a_paste_of_several_lines_is_one_message(chat: AtTerminal) -> None:
    chat.send(PASTE + "one\n/quit\n\ttwo\\\n" + PASTED + "end")
    chat.send("\n")
    chat.expect("1:'one\\n/quit\\n\\ttwo\\\\\\nend'\n> ")


@gnu_only
def test_a_huge_paste_is_refused_in_one_line(chat: AtTerminal) -> None:
    chat.send(PASTE + ("x" * 79 + "\n") * 2500 + PASTED)
    chat.send("\n")
    chat.expect("pyengine: error: this message takes 200000 tokens, the context has 128; expected a shorter one\n> ")
    chat.send("Hi\n")
    chat.expect("1:'Hi'\n> ")


def test_ctrl_c_stops_an_answer_and_keeps_what_is_there(chat: AtTerminal) -> None:
    chat.send("slow\n")
    chat.expect("1:'slow'....")
    chat.interrupt()
    chat.expect("\n> ")
    chat.send("and\n")
    chat.expect("3:'and'\n> ")  # the message, the partial answer, the message
    chat.send("/regen\n")
    chat.expect("3:'and'\n> ")


def test_ctrl_c_at_the_prompt_drops_the_line_and_says_how_to_leave(chat: AtTerminal) -> None:
    for typed in ("", "half a li", "one\\\nmore"):
        chat.send(typed)
        if typed:
            chat.expect(typed[-3:])
        chat.interrupt()
        chat.expect("pyengine: Ctrl-D or /quit leaves\n> ")
    chat.send("Hi\n")
    chat.expect("1:'Hi'\n> ")


def test_ctrl_c_before_the_first_word_drops_the_message() -> None:
    """The engine is still reading the prompt."""
    with AtTerminal(program(["chat"], "EchoEngine(pieces=[KeyboardInterrupt()])")) as chat:
        chat.expect("\n> ")
        chat.send("one\n")
        chat.expect("one\n\n> ")
        chat.send("/regen\n")
        chat.expect("there is no answer yet")
        chat.expect("\n> ")
        leave(chat)


def test_errors_are_messages_and_the_chat_goes_on(chat: AtTerminal) -> None:
    for line, says in (
        ("/nothing", "pyengine: error: /nothing: no such command"),
        ("/set heat 3", "pyengine: error: /set heat: no such value"),
        ("/regen", "pyengine: error: /regen: there is no answer yet"),
        ("x" * 200, "pyengine: error: this message takes 200 tokens"),
    ):
        chat.send(line + "\n")
        chat.expect(says)
        chat.expect("\n> ")
    chat.send("Hi\n")
    chat.expect("1:'Hi'\n> ")


def test_a_full_context_can_be_cleared(chat: AtTerminal) -> None:
    chat.send("x" * 100 + "\n")
    chat.expect(
        "pyengine: the context is full: 128 tokens of 128; /clear starts over, or a start with -c above 128\n> "
    )
    chat.send("y\n")
    chat.expect("pyengine: error: the context is full: 129 tokens of 128; /clear starts over")
    chat.send("/clear\ny\n")
    chat.expect("1:'y'\n> ")


def test_quit_leaves() -> None:
    with AtTerminal(program(["chat", "-q"])) as chat:
        chat.expect("> ")  # -q: nothing in front of it
        chat.send("/quit\n")
        assert chat.wait() == 0
        assert chat.shown.strip() == "> /quit"


def test_resizing_changes_nothing(chat: AtTerminal) -> None:
    chat.send("one " * 8)
    chat.expect("one one ")
    chat.resize(10, 20)
    chat.send("two\n")
    chat.expect(f"1:{'one ' * 8 + 'two'!r}\n> ")
    chat.send("slow\n")
    chat.expect("3:'slow'....")
    chat.resize(40, 120)
    chat.expect("....")
    chat.interrupt()
    chat.expect("\n> ")


def test_a_terminal_that_goes_away_ends_the_program() -> None:
    with AtTerminal(program(["chat"])) as chat:
        chat.expect("\n> ")
        chat.process.send_signal(signal.SIGHUP)
        assert chat.wait() == -signal.SIGHUP


def test_answers_into_a_file_while_the_person_types_at_a_terminal(tmp_path: Path) -> None:
    with (tmp_path / "answers").open("wb") as file, AtTerminal(program(["chat"]), stdout=file.fileno()) as chat:
        chat.expect("\n> ")
        chat.send("one\n")
        chat.expect("> ")
        chat.send("two\\\n")
        chat.expect("... ")
        chat.send("more\n")
        chat.expect("> ")
        chat.send(b"caf\xe9\n")
        chat.expect("pyengine: error: the line is not UTF-8; expected UTF-8 text\n> ")
        leave(chat)
    assert (tmp_path / "answers").read_text() == "1:'one'\n3:'two\\nmore'\n"
