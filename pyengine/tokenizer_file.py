"""Stage 5, tokenizer_file: tokenizer.json and tokenizer_config.json read and checked before the tokenizer is built.

The `tokenizers` package builds the tokenizer; what it would repair, reorder or pass over in silence is refused here. Of
a GGUF file both documents are made and checked in the same way.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyengine import gguf_tokenizer, system
from pyengine.errors import TokenizerError
from pyengine.gguf_file import is_gguf
from pyengine.strict_json import MAX_DEPTH, shown

MAX_TOKENIZER_BYTES = 512 << 20
MAX_CONFIG_BYTES = 16 << 20
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

NORMALIZERS = frozenset(
    {
        "BertNormalizer",
        "ByteLevel",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Replace",
        "Sequence",
        "Strip",
        "StripAccents",
    }
)
PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "FixedLength",
        "Metaspace",
        "Punctuation",
        "Sequence",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    }
)
POST_PROCESSORS = frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"})
DECODERS = frozenset({"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"})
PARTS = (  # key of tokenizer.json, its known types, the key under which a Sequence lists its parts
    ("normalizer", NORMALIZERS, "normalizers"),
    ("pre_tokenizer", PRE_TOKENIZERS, "pretokenizers"),
    ("post_processor", POST_PROCESSORS, "processors"),
    ("decoder", DECODERS, "decoders"),
)


@dataclass(frozen=True)
class TokenizerSettings:
    """What tokenizer_config.json adds. Every field is empty where the file, or the key, is absent.

    named: bos_token, eos_token, unk_token, pad_token -> the token's text. special: texts of further special tokens.
    """

    named: Mapping[str, str]
    special: tuple[str, ...]
    add_bos_token: bool


def read_json(path: Path, limit: int, *, missing: str = "expected a tokenizer") -> Any:
    """A JSON object from a file. Errors: TokenizerError naming the file: missing, too large, not JSON, no object;
    ResourceError without a file descriptor or memory."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise TokenizerError(f"{path}: not a regular file; {missing}")
        if status.st_size > limit:
            raise TokenizerError(f"{path}: {status.st_size} bytes; expected at most {limit}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise TokenizerError(f"{path}: no such file; {missing}") from None
    except OSError as error:
        wrong = TokenizerError(f"{path}: {error.strerror or error}; expected a readable file")
        raise system.lacking(path, error) or wrong from error
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: {error or 'empty'}; expected JSON") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: the root is a {type(value).__name__}; expected an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {shown(double)}")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"the literal {name} is not JSON")


def tokenizer_path(model: Path) -> Path:
    """The file that holds the tokenizer of a folder or a GGUF file."""
    return model if is_gguf(model) else model / "tokenizer.json"


def config_path(model: Path) -> Path:
    """The file that holds its settings and chat template."""
    return model if is_gguf(model) else model / "tokenizer_config.json"


def has_tokenizer(model: Path) -> bool:
    return gguf_tokenizer.has_tokenizer(model) if is_gguf(model) else tokenizer_path(model).exists()


def read_tokenizer(folder: Path, vocab_size: int) -> dict[str, Any]:
    """tokenizer.json, checked: model type, vocabulary, merges, added tokens, known parts, ids within vocab_size.

    folder: or a GGUF file. Errors: TokenizerError naming the file and the key, value or index.
    """
    path = tokenizer_path(folder)
    document: dict[str, Any]
    document = gguf_tokenizer.document(path) if path == folder else read_json(path, MAX_TOKENIZER_BYTES)
    for key, known, parts in PARTS:
        for part in _parts(path, key, document.get(key), parts):
            if part.get("type") not in tuple(known):  # anything may stand there, and a set wants what can be hashed
                expected = ", ".join(sorted(known))
                raise TokenizerError(
                    f"{path}: {key} of type {shown(part.get('type'))} is not supported; expected one of {expected}"
                )
            if key == "post_processor":
                _check_post_processor(path, part, vocab_size)
    model = document.get("model")
    if not isinstance(model, dict):
        raise TokenizerError(f"{path}: no model; expected one of type 'BPE'")
    kind = model.get("type", "BPE")  # files of before 2022 do not name it
    if kind != "BPE":
        raise TokenizerError(f"{path}: model of type {shown(kind)} is not supported; expected 'BPE'")
    vocab = _check_vocab(path, model.get("vocab"))
    _check_merges(path, model, vocab)
    added = _check_added(path, document.get("added_tokens") or [], vocab)
    highest = max([*vocab.values(), *added.values()], default=-1)
    if highest >= vocab_size:
        raise TokenizerError(
            f"{path}: token ids up to {highest} ({highest + 1} ids), but the model has {vocab_size} embedding rows; "
            f"expected ids below {vocab_size}"
        )
    return document


def _parts(path: Path, key: str, part: Any, parts: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """A part of tokenizer.json, and the parts in it where it is a Sequence."""
    if part is None:
        return
    if depth > MAX_DEPTH:
        raise TokenizerError(f"{path}: {key}: nested deeper than {MAX_DEPTH}; expected fewer Sequences in Sequences")
    if not isinstance(part, dict):
        raise TokenizerError(f"{path}: {key} is {shown(part)}; expected an object with a type, or null")
    yield part
    if part.get("type") == "Sequence":
        inner = part.get(parts)
        if not isinstance(inner, list):
            raise TokenizerError(f"{path}: {key} is a Sequence without a list {parts!r}; expected one")
        for item in inner:
            if item is not None:
                yield from _parts(path, key, item, parts, depth + 1)


def _check_post_processor(path: Path, part: Mapping[str, Any], vocab_size: int) -> None:
    """What it adds to a text. The package takes any id, and panics where a template names what it does not define."""
    defined, pieces = part.get("special_tokens"), part.get("single")  # of a template
    defined = defined if isinstance(defined, dict) else {}
    added: list[Any] = [value[1:] for value in (part.get("cls"), part.get("sep")) if isinstance(value, list)]
    for piece in pieces if isinstance(pieces, list) else []:
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        name = special.get("id") if isinstance(special, dict) else None
        if not isinstance(name, str):
            continue
        if name not in defined:
            raise TokenizerError(f"{path}: post_processor adds {shown(name)}; expected it under its special_tokens")
        added.append(defined[name].get("ids") if isinstance(defined[name], dict) else None)
    for i in (i for ids in added if isinstance(ids, list) for i in ids):
        if type(i) is int and i >= vocab_size:
            raise TokenizerError(f"{path}: post_processor adds token id {i}; expected ids below {vocab_size}")


def _check_vocab(path: Path, vocab: Any) -> dict[str, int]:
    if not isinstance(vocab, dict) or not vocab:
        raise TokenizerError(f"{path}: model.vocab is missing or empty; expected token: id")
    if set(map(type, vocab.values())) != {int} or min(vocab.values()) < 0:
        token = next(t for t, i in vocab.items() if type(i) is not int or i < 0)
        raise TokenizerError(f"{path}: token {shown(token)} has id {shown(vocab[token])}; expected an integer from 0")
    if len(set(vocab.values())) != len(vocab):
        seen: dict[int, str] = {}
        for token, i in vocab.items():
            if i in seen:
                raise TokenizerError(f"{path}: id {i} is both {shown(seen[i])} and {shown(token)}; expected one")
            seen[i] = token
    return vocab


def _check_merges(path: Path, model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{path}: model.merges is {shown(merges)}; expected a list")
    kinds = set(map(type, merges))
    if kinds - {str} and kinds - {list}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TokenizerError(f"{path}: merges of types {names}; expected all 'a b' strings or all ['a', 'b'] pairs")
    prefix = model.get("continuing_subword_prefix") or ""
    if not isinstance(prefix, str):
        raise TokenizerError(f"{path}: continuing_subword_prefix is {shown(prefix)}; expected text")
    for index, merge in enumerate(merges):
        parts = merge.split(" ") if type(merge) is str else merge
        if len(parts) != 2 or type(parts[0]) is not str or type(parts[1]) is not str:
            raise TokenizerError(f"{path}: merge {index} is {shown(merge)}; expected two tokens")
        a, b = parts
        if not b.startswith(prefix):  # the package cuts as many bytes off, and panics where there are not so many
            raise TokenizerError(
                f"{path}: merge {index} is {shown(merge)}; expected the second to begin with {shown(prefix)}, "
                "the continuing_subword_prefix"
            )
        if a in vocab and b in vocab and a + b[len(prefix) :] in vocab:
            continue
        wrong = next(token for token in (a, b, a + b[len(prefix) :]) if token not in vocab)
        raise TokenizerError(f"{path}: merge {index} is {shown(merge)}, {shown(wrong)} is not in the vocabulary")


def _check_added(path: Path, added: Any, vocab: Mapping[str, int]) -> dict[str, int]:
    """added_tokens as text -> id."""
    if not isinstance(added, list) or not all(isinstance(item, dict) for item in added):
        raise TokenizerError(f"{path}: added_tokens is {shown(added)}; expected a list of objects")
    by_id = {i: token for token, i in vocab.items()} if added else {}
    ids: dict[str, int] = {}
    for index, item in enumerate(added):
        token, i = item.get("content"), item.get("id")
        if type(token) is not str or not token or type(i) is not int or i < 0:
            raise TokenizerError(f"{path}: added_tokens[{index}] is {shown(item)}; expected a content and an id")
        other = by_id.get(i)
        if other is not None and other != token:
            raise TokenizerError(
                f"{path}: added token {shown(token)} has id {i}, which is {shown(other)}; expected one"
            )
        if vocab.get(token, i) != i or ids.get(token, i) != i:
            known = vocab.get(token, ids.get(token))
            raise TokenizerError(f"{path}: added token {shown(token)} has ids {i} and {known}; expected one")
        by_id[i] = token
        ids[token] = i
    return ids


def token_text(path: Path, key: str, value: Any) -> str | None:
    """A token of tokenizer_config.json, written as text or as an object with `content`; None for null."""
    text = value.get("content") if isinstance(value, dict) else value
    if value is None or text is None:
        return None
    if not isinstance(text, str):
        raise TokenizerError(f"{path}: {key} is {shown(value)}; expected text, an object with content, or null")
    return text


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json as it is; {} without one."""
    path = config_path(folder)
    if path == folder:
        return gguf_tokenizer.config(path)
    config: dict[str, Any] = read_json(path, MAX_CONFIG_BYTES) if path.exists() else {}
    return config


def read_settings(folder: Path) -> TokenizerSettings:
    """The token names of tokenizer_config.json. Errors: TokenizerError naming file and key."""
    path, config = config_path(folder), read_config(folder)
    named = {key: token_text(path, key, config.get(key)) for key in NAMED_TOKENS}
    special = []
    for key in ("additional_special_tokens", "extra_special_tokens"):  # the second since transformers 5, maybe by name
        further = config.get(key) or []
        if not isinstance(further, (list, dict)):
            raise TokenizerError(f"{path}: {key} is {shown(further)}; expected a list")
        special += [token_text(path, key, value) for value in (further.values() if type(further) is dict else further)]
    add_bos = config.get("add_bos_token")
    if add_bos is not None and not isinstance(add_bos, bool):
        raise TokenizerError(f"{path}: add_bos_token is {shown(add_bos)}; expected true or false")
    return TokenizerSettings(
        named={key: text for key, text in named.items() if text},
        special=tuple(text for text in special if text),
        add_bos_token=bool(add_bos),
    )
