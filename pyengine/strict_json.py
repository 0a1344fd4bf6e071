"""Stage 0, strict_json: JSON of model files, with everything refused that two readers could understand differently."""

from __future__ import annotations

import json
import re
from typing import Any

from pyengine.errors import ModelFormatError

MAX_NUMBER_DIGITS = 64
MAX_DEPTH = 64
MAX_SHOWN = 200

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LONG_NUMBER = re.compile(rb"\d{%d}" % MAX_NUMBER_DIGITS)


class DuplicateKeyError(ValueError):
    """Carries the key that appears twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"duplicate key {shown(key)}")
        self.key = key


def shown(value: object) -> str:
    """A value from a file as it may stand in a message: escaped, at most 200 characters."""
    text = value if isinstance(value, str) else repr(value)
    escaped = text.encode("unicode_escape").decode("ascii")
    if len(escaped) > MAX_SHOWN:
        escaped = escaped[:MAX_SHOWN] + "..."
    return f"'{escaped}'"


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DuplicateKeyError(key)
        result[key] = value
    return result


def _constant(name: str) -> Any:
    raise ValueError(f"the literal {name} is not JSON")


def _depth(data: bytes) -> int:
    """The deepest nesting of brackets outside strings, without recursion."""
    deepest = depth = 0
    for match in re.finditer(rb"[\[{\]}]", _STRING.sub(b"", data)):
        if match.group() in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def loads(data: bytes, *, where: str, max_bytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """Parse UTF-8 JSON. `where` opens every message (a file, or a file and what part of it).

    Errors: ModelFormatError for too many bytes, a BOM, bytes that are not UTF-8, nesting over max_depth, a number of 64
    digits or more, duplicate keys, NaN or Infinity, an unpaired surrogate, or anything that is not JSON; with the
    position where there is one.
    """
    if len(data) > max_bytes:
        raise ModelFormatError(f"{where}: {len(data)} bytes; expected at most {max_bytes}")
    if data.startswith(b"\xef\xbb\xbf"):
        raise ModelFormatError(f"{where}: starts with a byte order mark, BOM not allowed; expected JSON")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{where}: not UTF-8 at byte {error.start}; expected UTF-8 JSON") from None
    depth = _depth(data)
    if depth > max_depth:
        raise ModelFormatError(f"{where}: nesting deeper than {max_depth} ({depth}); expected flat JSON")
    if _LONG_NUMBER.search(_STRING.sub(b"", data)):
        raise ModelFormatError(f"{where}: number too large; expected fewer than {MAX_NUMBER_DIGITS} digits")
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except json.JSONDecodeError as error:
        position = len(text[: error.pos].encode("utf-8", "surrogatepass"))
        what = "trailing characters" if error.msg == "Extra data" else f"not JSON: {error.msg}"
        raise ModelFormatError(f"{where}: {what} at byte {position}; expected JSON") from None
    except DuplicateKeyError as error:
        raise ModelFormatError(f"{where}: {error}; expected each key once") from None
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where}: {error}; expected JSON") from None
    if "\\u" in text and re.search(r"\\u[dD][89a-fA-F]", text):
        _check_surrogates(value, where)
    return value


def _check_surrogates(value: Any, where: str) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise ModelFormatError(
                    f"{where}: bad escape, an unpaired surrogate in {shown(item)}; expected text"
                ) from None
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            stack += item
