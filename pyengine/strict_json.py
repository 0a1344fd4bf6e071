"""Stage 0, strict_json: JSON of model files, with everything refused that two readers could understand differently."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine import system
from pyengine.errors import ModelFormatError, PyEngineError

MAX_NUMBER_CHARACTERS = 64
MAX_DEPTH = 64
MAX_SHOWN = 200
SCAN_BYTES = 1 << 17  # of the text looked at at once; the arrays made of it are twenty times as large

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_LONG_NUMBER = re.compile(rb"[-+.0-9eE]{%d}" % MAX_NUMBER_CHARACTERS)
_STRING = re.compile(rb'"[^"]*"')  # once escapes are gone
_NEGATIVE_ZERO = re.compile(rb"(?<![0-9eE.])-0(?=[\s,\]}])")
_UNICODE_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_BRACKET = np.zeros(256, np.int8)
_BRACKET[list(b"{[")] = 1
_BRACKET[list(b"}]")] = -1
_NUMBER = np.zeros(256, np.bool_)
_NUMBER[list(b"-+.0123456789eE")] = True


class _Twice(dict[str, Any]):
    """An object in which `key` came twice."""

    key = ""


def shown(value: object) -> str:
    """A value from a file as it may stand in a message: escaped, at most 200 characters."""
    text = value if isinstance(value, str) else repr(value)
    escaped = text[: MAX_SHOWN + 1].encode("unicode_escape").decode("ascii")
    if len(escaped) > MAX_SHOWN:
        escaped = escaped[:MAX_SHOWN] + "..."
    return f"'{escaped}'"


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """A regular file, whole. ModelFormatError if it is none, cannot be read, or has more than max_bytes; ResourceError
    without a file descriptor or memory.

    Opened without blocking, so that a FIFO or a device in its place is an error and not a hang.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise open_error(path, error) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFormatError(f"{path}: not a regular file; expected a readable file")
        if status.st_size > max_bytes:
            raise ModelFormatError(f"{path}: {status.st_size} bytes; expected at most {max_bytes}")
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(status.st_size + 1)  # a buffer of max_bytes would be allocated whole
    except OSError as error:
        raise open_error(path, error) from None
    finally:
        os.close(fd)
    if len(data) != status.st_size:
        raise ModelFormatError(f"{path}: changed while loading; expected {status.st_size} bytes")
    return data


def open_error(path: Path, error: OSError) -> PyEngineError:
    """What went wrong with opening or reading a file that should be there: the file, or what the process may have."""
    lacking = system.lacking(path, error)
    if lacking is not None:
        return lacking
    if error.errno == errno.ENOENT:
        return ModelFormatError(f"{path}: no such file; expected a readable file")
    if error.errno == errno.ENXIO:  # a socket, or a device without a driver
        return ModelFormatError(f"{path}: not a regular file; expected a readable file")
    return ModelFormatError(f"{path}: {error.strerror or error}; expected a readable file")


def loads(
    data: bytes,
    *,
    where: str,
    max_bytes: int,
    max_depth: int = MAX_DEPTH,
    max_objects: int | None = None,
    objects: str = "objects",
    duplicate: Callable[[tuple[str, ...], str], str] | None = None,
) -> Any:
    """Parse UTF-8 JSON. `where` opens every message (a file, or a file and what part of it).

    Errors: ModelFormatError for too many bytes, a BOM, bytes that are not UTF-8, nesting over max_depth, more than
    max_objects objects (called `objects` in the message), a number of 64 characters or more or out of range, -0 as an
    integer, duplicate keys (called what `duplicate` makes of the path to the object and the key), NaN or Infinity, an
    unpaired surrogate, or anything that is not JSON; with the position in bytes where there is one.
    """
    if len(data) > max_bytes:
        raise ModelFormatError(f"{where}: {len(data)} bytes; expected at most {max_bytes}")
    if data.startswith(b"\xef\xbb\xbf"):
        raise ModelFormatError(f"{where}: starts with a byte order mark, BOM not allowed; expected JSON")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{where}: not UTF-8 at byte {error.start}; expected UTF-8 JSON") from None
    _check_outside_strings(data, where, max_depth, max_objects, objects)
    _check_surrogates(data, where)
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) == len(items):
            return value
        seen: set[str] = set()
        marked = _Twice(value)
        marked.key = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        twice.append(marked.key)
        return marked

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        position = len(text[: error.pos].encode())
        what = "trailing characters" if error.msg == "Extra data" else error.msg
        raise ModelFormatError(f"{where}: not JSON: {what} at byte {position}; expected JSON") from None
    except ValueError as error:
        raise ModelFormatError(f"{where}: {error}; expected JSON") from None
    if twice:
        path, key = _find_twice(value) or ((), twice[0])
        what = (duplicate or _duplicate)(path, key)
        raise ModelFormatError(f"{where}: duplicate {what}; expected each once")
    return value


def _duplicate(path: tuple[str, ...], key: str) -> str:
    place = " in " + ".".join(shown(part) for part in path) if path else ""
    return f"key {shown(key)}{place}"


def _constant(name: str) -> Any:
    raise ValueError(f"the literal {name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text} is out of range")
    return value


def _find_twice(value: Any) -> tuple[tuple[str, ...], str] | None:
    """Path and key of the first object with a duplicate key, outermost first."""
    queue: deque[tuple[tuple[str, ...], Any]] = deque([((), value)])
    while queue:
        path, item = queue.popleft()
        if isinstance(item, _Twice):
            return path, item.key
        if isinstance(item, dict):
            queue += [((*path, key), child) for key, child in item.items() if isinstance(child, (dict, list))]
        elif isinstance(item, list):
            queue += [((*path, str(at)), child) for at, child in enumerate(item) if isinstance(child, (dict, list))]
    return None


def _check_outside_strings(data: bytes, where: str, max_depth: int, max_objects: int | None, called: str) -> None:
    """Nesting, numbers and objects, counted before the parser builds anything: it is recursive and its numbers are not
    bounded. Text that is not JSON may be misjudged from its first error on; the parser stops there anyway."""
    depth = objects = 0
    inside = 0
    data = _ESCAPE.sub(b"  ", data) if b"\\" in data else data
    last = b""  # the end of the piece before
    long_run = False
    for at in range(0, len(data), SCAN_BYTES):
        piece: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8, min(SCAN_BYTES, len(data) - at), at)
        parity = (np.cumsum(piece == 0x22, dtype=np.uint8) + np.uint8(inside)) & 1  # wrapping keeps the parity
        inside = int(parity[-1])
        masked = np.where(parity == 1, np.uint8(0x22), piece)
        steps = _BRACKET[masked]
        depths = depth + np.cumsum(steps[steps != 0], dtype=np.int64)
        if depths.size:
            if int(depths.max()) > max_depth:
                raise ModelFormatError(f"{where}: nesting deeper than {max_depth}; expected flatter JSON")
            depth = int(depths[-1])
        objects += int(np.count_nonzero(masked == 0x7B))
        if max_objects is not None and objects > max_objects:
            raise ModelFormatError(f"{where}: more than {max_objects} {called}; expected fewer")
        whole = masked.size // 32 * 32
        # A run of 64 fills one aligned block of 32 at least.
        long_run = long_run or bool(_NUMBER[masked[:whole]].reshape(-1, 32).all(axis=1).any())
        outside = last + masked.tobytes()
        zero = _NEGATIVE_ZERO.search(outside) if b"-0" in outside else None
        if zero:
            position = at - len(last) + zero.start()
            raise ModelFormatError(f"{where}: not JSON that all readers agree on: -0 at byte {position}; expected 0")
        last = outside[-4:]
    if long_run and _LONG_NUMBER.search(_STRING.sub(b'""', data)):
        raise ModelFormatError(f"{where}: number too large; expected fewer than {MAX_NUMBER_CHARACTERS} characters")


def _check_surrogates(data: bytes, where: str) -> None:
    """Half a surrogate pair is a valid escape of JSON and no character."""
    if not re.search(rb"\\u[dD][89a-fA-F]", data):
        return
    high_end = -1  # where the high half that waits for its other half ends
    for match in _UNICODE_ESCAPE.finditer(data):
        if high_end >= 0 and match.start() != high_end:
            break
        code = int(match.group(1), 16) if match.group(1) else 0
        if high_end >= 0 and not 0xDC00 <= code < 0xE000:
            break
        if high_end < 0 and 0xDC00 <= code < 0xE000:
            high_end = match.start()
            break
        high_end = match.end() if high_end < 0 and 0xD800 <= code < 0xDC00 else -1
    if high_end >= 0:
        raise ModelFormatError(f"{where}: bad escape, an unpaired surrogate at byte {high_end}; expected text")
