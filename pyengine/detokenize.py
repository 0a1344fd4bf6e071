"""Stage 5, detokenize: token ids -> text, one token at a time; and stop strings found across token borders.

A token is a run of bytes, and text is what those bytes are in UTF-8. So a stream and a full decode are the same thing:
bytes that may still become a character are held back, bytes that cannot become one are U+FFFD at once (one per maximal
subpart, as the Unicode standard recommends). A token costs time in its own length only.

The three kinds of decoder that BPE tokenizers have are read from tokenizer.json: ByteLevel (a character of the token
stands for a byte), Metaspace, and the steps of converted SentencePiece models (Replace, ByteFallback, Fuse, Strip). For
ByteLevel this is what the `tokenizers` package decodes. With ByteFallback the package turns each byte of a run with a
wrong byte anywhere in it into U+FFFD, the right characters of the run too; here those stay.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyengine.strict_json import shown

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> dict[str, int]:
    """The characters that stand for the 256 bytes in byte-level BPE: printable Latin-1 for itself, U+0100.. the rest.

    Source: the byte encoder of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


BYTE_OF = byte_characters()


@dataclass(frozen=True)
class TokenDecoder:
    """The decoder of a tokenizer.json. token_bytes: token -> its bytes, the same wherever it stands.

    strip: so many `strip_content` characters are dropped where the whole text starts with them. first_drops: this
    character is dropped wherever it is in the very first token (Metaspace).
    """

    token_bytes: Callable[[str], bytes]
    strip: int = 0
    strip_content: str = " "
    first_drops: str = ""


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(BYTE_OF.__getitem__, token))
    except KeyError:  # an added token with, say, a space in it stands for itself
        return token.encode("utf-8")


def _sentencepiece(replaced: Sequence[tuple[str, str]], byte_fallback: bool) -> Callable[[str], bytes]:
    def token_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        byte = BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        return bytes([int(byte.group(1), 16)]) if byte else token.encode("utf-8")

    return token_bytes


def read_decoder(decoder: Mapping[str, Any] | None) -> TokenDecoder:
    """The `decoder` of tokenizer.json. Errors: ValueError naming what is not supported."""
    if decoder is None:
        raise ValueError("decoder null is not supported; expected ByteLevel, Metaspace or a Sequence")
    steps = list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [str(step.get("type") if isinstance(step, dict) else step) for step in steps]  # null may stand in a list
    if kinds == ["ByteLevel"]:
        return TokenDecoder(_byte_level)
    if kinds == ["Metaspace"]:
        return _read_metaspace(steps[0])
    if not re.fullmatch(r"(Replace,)*(ByteFallback,)?(Fuse,(Strip,)?)?", "".join(f"{kind}," for kind in kinds)):
        raise ValueError(f"decoder of steps {shown(', '.join(kinds))}; expected Replace, ByteFallback, Fuse, Strip")
    replaced = []
    for step in steps:
        if step["type"] == "Replace":
            pattern, content = step.get("pattern"), step.get("content")
            old = pattern.get("String") if isinstance(pattern, dict) else None
            if not isinstance(old, str) or not old or not isinstance(content, str):
                raise ValueError(f"decoder step {shown(step)}; expected a Replace of one string by another")
            replaced.append((old, content))
    token_bytes = _sentencepiece(replaced, "ByteFallback" in kinds)
    if "Strip" not in kinds:
        return TokenDecoder(token_bytes)
    content, start, stop = (steps[-1].get(key) for key in ("content", "start", "stop"))
    if not isinstance(content, str) or len(content) != 1 or type(start) is not int or start < 0 or stop != 0:
        raise ValueError(f"decoder step {shown(steps[-1])}; expected a Strip of one character, at the start alone")
    return TokenDecoder(token_bytes, strip=start, strip_content=content)


def _read_metaspace(step: Mapping[str, Any]) -> TokenDecoder:
    space = step.get("replacement", "\u2581")
    if not isinstance(space, str) or len(space) != 1:
        raise ValueError(f"decoder replacement {shown(space)}; expected one character")
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
    return TokenDecoder(_sentencepiece([(space, " ")], False), first_drops="" if scheme == "never" else space)


class StreamDecoder:
    """Text of one sequence of tokens as they come. `token` maps an id to its text, None where it has none."""

    def __init__(self, decoder: TokenDecoder, token: Callable[[int], str | None]) -> None:
        self._decoder = decoder
        self._token = token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._strip = decoder.strip

    def push(self, token_id: int) -> str:
        """The complete new text after this token: maybe empty, an unfinished character is held back.

        Special tokens, and ids the tokenizer does not have (padding rows of the model's vocabulary), have no text.
        """
        token = self._token(token_id)
        if token is None:
            return ""
        if self._first:
            self._first = False
            if self._decoder.first_drops:
                token = token.replace(self._decoder.first_drops, "")
        return self._stripped(self._utf8.decode(self._decoder.token_bytes(token)))

    def finish(self) -> str:
        """The end: a character that was never finished is one U+FFFD."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._decoder.strip_content:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class StopMatcher:
    """Finds stop strings in text that comes in pieces; where the pieces are cut makes no difference.

    Text that may be the beginning of a stop string is held back. The first stop string to be complete ends the text
    (of several that end at the same character, the longest); neither it nor anything after it is passed on. Once
    stopped, everything pushed is dropped. `matched` is the stop string found, else None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._failure = [_failure(stop) for stop in self._stops]
        self._at = [0] * len(self._stops)  # characters of each stop that the text so far ends with
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that is safe to pass on, and whether a stop string has been found."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return piece, False
        text = self._held + piece
        for index in range(len(self._held), len(text)):
            for n, stop in enumerate(self._stops):
                self._at[n] = at = self._advance(n, stop, text[index])
                if at == len(stop):
                    self.matched = stop
                    self._held = ""
                    return text[: index + 1 - at], True
        kept = len(text) - max(self._at)
        self._held = text[kept:]
        return text[:kept], False

    def finish(self) -> str:
        """What was held back: the text has ended, so it was no stop string."""
        text, self._held = self._held, ""
        self._at = [0] * len(self._stops)
        return text

    def _advance(self, n: int, stop: str, character: str) -> int:
        """One step of Knuth, Morris and Pratt."""
        at, failure = self._at[n], self._failure[n]
        while at and stop[at] != character:
            at = failure[at]
        return at + 1 if stop[at] == character else 0


def _failure(stop: str) -> list[int]:
    """failure[k]: the longest proper prefix of `stop` that the first k characters end with."""
    failure = [0, 0]
    for k in range(1, len(stop)):
        at = failure[k]
        while at and stop[k] != stop[at]:
            at = failure[at]
        failure.append(at + 1 if stop[k] == stop[at] else 0)
    return failure
