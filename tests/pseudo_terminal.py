"""A program at a pseudo-terminal: what a person types and sees. No fixed sleeps: everything waits for what it needs."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
UNFINISHED = re.compile(r"(?:\x1b(?:\[[0-9;?]*)?)?$")
SECONDS = 120.0


class AtTerminal:
    """`argv` at a terminal of its own, 80 x 24. stdout: a descriptor in its place, if not the terminal."""

    def __init__(self, argv: Sequence[str], *, stdout: int | None = None, **environment: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(24, 80)
        variables = {**os.environ, "TERM": "xterm", "INPUTRC": "/dev/null", **environment}
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave if stdout is None else stdout, stderr=slave, start_new_session=True,
            env=variables,
        )  # fmt: skip
        os.close(slave)
        self.shown = ""  # everything so far, without escapes and carriage returns
        self._seen = 0
        self._held = ""  # the beginning of an escape
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> AtTerminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, text: str | bytes) -> None:
        """Type. A terminal takes only some bytes at a time: what is shown meanwhile is read."""
        data = text.encode() if isinstance(text, str) else text
        end = time.monotonic() + SECONDS
        while data:
            assert time.monotonic() < end, f"{len(data)} bytes were not taken; shown: {self.shown[-500:]!r}"
            readable, writable, _ = select.select([self.master], [self.master], [], 1.0)
            if readable:
                self._read()
            if writable:
                data = data[os.write(self.master, data[:1024]) :]

    def interrupt(self) -> None:
        """Ctrl-C, once the program waits for something: Python loses the key in the moment before input() waits."""
        end = time.monotonic() + SECONDS
        stat = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        while stat.read_text().rpartition(") ")[2][0] != "S":
            assert time.monotonic() < end, "the program never waits"
            time.sleep(0.001)
        self.send("\x03")

    def expect(self, text: str) -> str:
        """Wait until `text` is shown after what was expected before; everything up to it."""
        end = time.monotonic() + SECONDS
        while (at := self.shown.find(text, self._seen)) < 0:
            ready, _, _ = select.select([self.master], [], [], max(end - time.monotonic(), 0))
            more = bool(ready) and self._read()
            assert more, f"no {text!r} in {self.shown[self._seen :][-2000:]!r}"
        begin, self._seen = self._seen, at + len(text)
        return self.shown[begin : self._seen]

    def wait(self) -> int:
        """Read to the end; the exit code."""
        end = time.monotonic() + SECONDS
        while self._ended() is None:
            assert time.monotonic() < end, f"still running; shown: {self.shown[-500:]!r}"
            if select.select([self.master], [], [], 0.05)[0] and not self._read():
                break
        while select.select([self.master], [], [], 0)[0] and self._read():
            pass
        return self.process.wait(SECONDS)

    def _ended(self) -> int | None:
        return self.process.poll()

    def _read(self) -> bool:
        try:
            data = os.read(self.master, 65536)
        except OSError:  # EIO: the last one at the other end has left
            return False
        text = self._held + self._decoder.decode(data)
        whole = len(text) - len(UNFINISHED.search(text).group())  # type: ignore[union-attr]
        self._held = text[whole:]
        self.shown += ESCAPE.sub("", text[:whole]).replace("\r", "").replace("\0", "")
        return bool(data)
