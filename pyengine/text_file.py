"""Stage 0, text_file: texts that a user names: a file or stdin, UTF-8, of bounded length."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from pyengine import system
from pyengine.errors import RequestError

MAX_TEXT_BYTES = 64 << 20


def read(path: str | os.PathLike[str]) -> bytes:
    """All of a file or, for '-', of stdin.

    Errors: RequestError for what cannot be read and for over MAX_TEXT_BYTES, ResourceError: `system.lacking`.
    """
    stdin = path == "-"
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if stdin else Path(path).open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        wrong = RequestError(f"{path}: {error.strerror or error}; expected a readable text file")
        raise system.lacking(path, error) or wrong from error
    if len(data) > MAX_TEXT_BYTES:  # /dev/zero, or a program that never stops writing
        raise RequestError(f"{name_of(path)}: over {MAX_TEXT_BYTES} bytes; expected a shorter text")
    return data


def decode(data: bytes, name: str, *, offset: int = 0) -> str:
    """RequestError for bytes that are not UTF-8, counted from `offset`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: byte {offset + error.start} is not UTF-8; expected UTF-8 text") from None


def name_of(path: str | os.PathLike[str]) -> str:
    return "stdin" if path == "-" else os.fspath(path)
