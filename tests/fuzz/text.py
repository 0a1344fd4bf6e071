"""Tokenizers and streams: pieces joined are the whole text, and a changed tokenizer.json works or is refused.

python tests/fuzz/text.py --seconds 1800
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_tokenizers as tiny
from fuzz import fuzzing
from property.test_text_property import FRAGMENTS, MERGES, stream

from pyengine.detokenize import StopMatcher
from pyengine.errors import TokenizerError
from pyengine.tokenizer import Tokenizer

CORPUS: tuple[int, ...] = ()
KINDS = ("byte_level", "legacy", "metaspace")
VALUES: list[Any] = [None, True, 0, -1, 400, 2**40, 1.5, "", "x", "BPE", "\u2581", [], {}, [{}], {"type": "Sequence"}]


def base(kind: str) -> Any:
    return tiny.byte_level(merges=MERGES) if kind == "byte_level" else tiny.sentencepiece(legacy=kind == "legacy")


@cache
def loaded(kind: str) -> tuple[Tokenizer, Any, dict[str, Any]]:
    """The tokenizer, the package's own, and tokenizer.json."""
    own = base(kind)
    with tempfile.TemporaryDirectory() as folder:
        tiny.write(Path(folder), own)
        document = json.loads((Path(folder) / "tokenizer.json").read_bytes())
        return Tokenizer.load(Path(folder), vocab_size=400), own, document


def text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(12)):
        kind = rng.randrange(4)
        if kind == 0:
            parts.append(rng.choice(FRAGMENTS))
        elif kind == 1:
            parts.append("".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(6))))
        else:
            code = rng.randrange(0x110000 if kind == 2 else 0x3000)
            parts.append(chr(code) if not 0xD800 <= code < 0xE000 else "\ufffd")
    return "".join(parts)


def check_stream(rng: random.Random) -> None:
    kind = rng.choice(KINDS)
    tokenizer, package, _ = loaded(kind)
    encoded = rng.random() < 0.5
    if encoded:
        ids = tokenizer.encode(text(rng), parse_special=rng.random() < 0.5)
    else:
        ids = [rng.randrange(package.get_vocab_size()) for _ in range(rng.randrange(40))]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids), ids
    if encoded or kind == "byte_level":  # of byte tokens that are no text the package replaces the whole run
        assert "".join(pieces) == package.decode(ids), ids
    stops = [text(rng)[:8] or "x" for _ in range(rng.randrange(3))]
    matcher, shown, stopped = StopMatcher(stops), "", False
    for piece in pieces:
        more, stopped = matcher.push(piece)
        shown += more
        if stopped:
            break
    shown += "" if stopped else matcher.finish()
    whole = "".join(pieces)
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    end, _, first = min(ends, default=(len(whole), 0, ""))
    assert shown == whole[: end - len(first)], (ids, stops)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value but those of the vocabulary's words."""
    found = [path] if path else []
    if "vocab" not in path and isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            found += places(value[key], (*path, key))
    return found


def check_document(rng: random.Random) -> None:
    """A tokenizer.json with something changed."""
    document = copy.deepcopy(loaded(rng.choice(KINDS))[2])
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.choice(places(document))
        inside = document
        for key in at[:-1]:
            inside = inside[key]
        if rng.random() < 0.3:
            del inside[at[-1]]
        else:
            inside[at[-1]] = copy.deepcopy(rng.choice(VALUES))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokenizer.json"
        path.write_text(json.dumps(document))
        try:
            tokenizer = Tokenizer.load(path.parent, vocab_size=400)
            ids = tokenizer.encode(text(rng))
            assert max(ids, default=0) < 400, ids
            "".join(stream(tokenizer, ids))
        except TokenizerError as error:
            fuzzing.check_message(error, "tokenizer")


def case(rng: random.Random) -> None:
    (check_stream if rng.random() < 0.6 else check_document)(rng)


if __name__ == "__main__":
    fuzzing.main("text", case, CORPUS)
