"""Stage 6, files: where reports are written: a whole file or none."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from pyengine import system
from pyengine.errors import RequestError, ResourceError


def check_writable(path: Path) -> None:
    """RequestError, before anything is measured, where `write` could not put a file."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise RequestError(f"{path}: not a regular file; expected a file to write to")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise RequestError(f"{path}: its folder is not there or not writable; expected a file that can be written")


def write(path: Path, content: str | bytes) -> None:
    """The whole file or none: written beside `path` under another name, then renamed.

    A link is followed. Errors: RequestError where there cannot be such a file, ResourceError for a full disk.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise RequestError(f"{path}: not a regular file; expected a file to write to")
    part = target.with_name(f".{target.name[:100]}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        file = part.open("xb")
        try:
            with file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        lacking = system.lacking(path, error)
        if lacking is not None:
            raise lacking from error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = ResourceError if full else RequestError
        expected = "room for the file" if full else "a file that can be written"
        raise kind(f"{path}: {error.strerror or error}; expected {expected}") from error
