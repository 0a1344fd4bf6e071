"""Stage 7, cli chat_input: where the lines of a chat come from: a terminal with history, or a pipe."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from pyengine.errors import RequestError

PROMPT, CONTINUED = "> ", "... "
MAX_LINE_BYTES = 4 << 20


class TerminalInput:
    """Messages typed at a terminal, with the line editor of Python's readline: arrow keys, history, bracketed paste.

    A `\\` at the end of a line continues the message on the next one. The history lives as long as the program.
    notes: what this Python's editor cannot do.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._edits = sys.stdout.isatty()
        if not self._edits:
            return
        readline: Any = None
        with contextlib.suppress(ImportError):
            readline = importlib.import_module("readline")  # from here on input() edits
        if readline is None:
            self.notes.append("this Python has no readline: no arrow keys, and every pasted line is a message")
        elif "libedit" in (readline.__doc__ or ""):
            self.notes.append(r"this Python edits with libedit: every pasted line is a message, but for a \ at its end")
        else:
            readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str | None:
        """The next message; None after Ctrl-D. Ctrl-C is KeyboardInterrupt, and what was typed is gone."""
        lines: list[str] = []
        while True:
            try:
                line = self._line(CONTINUED if lines else PROMPT)
                line.encode("utf-8")  # in some locales what is not UTF-8 comes as surrogates
            except EOFError:
                print(file=sys.stderr)
                return None
            except UnicodeError:
                raise RequestError("the line is not UTF-8; expected UTF-8 text") from None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str:
        if self._edits:
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # stdout is a file: it has the answers alone
        return input()


class PipeInput:
    """Messages of a pipe or a file: one a line, or several lines with a `\\` at the end of each but the last."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._number = 0

    def read(self) -> str | None:
        """The next message; None at the end. Errors: RequestError for a line that is too long or not UTF-8."""
        lines: list[str] = []
        while data := sys.stdin.buffer.readline(MAX_LINE_BYTES + 2):
            self._number += 1
            if len(data.rstrip(b"\r\n")) > MAX_LINE_BYTES:
                raise RequestError(f"stdin: line {self._number} has over {MAX_LINE_BYTES} bytes; expected fewer")
            try:
                line = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                where = f"stdin: line {self._number}, byte {error.start}"
                raise RequestError(f"{where} is not UTF-8; expected UTF-8 text") from None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
        return "\n".join(lines) if lines else None


def open_input() -> TerminalInput | PipeInput:
    return TerminalInput() if sys.stdin.isatty() else PipeInput()
