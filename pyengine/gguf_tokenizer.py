"""Stage 5, gguf_tokenizer: the tokenizer in a GGUF file as the documents tokenizer.json and tokenizer_config.json.

The documents then go through the same checks as files. Two kinds are known: "gpt2", byte-level BPE, whose file names
the pre-tokenizer, and "llama", SentencePiece's BPE, whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyengine.errors import TokenizerError
from pyengine.gguf_config import CONTROL, TOKENIZER
from pyengine.gguf_file import GgufHeader, open_header
from pyengine.strict_json import shown

Document = dict[str, Any]

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 5, 6
MODEL = TOKENIZER + "model"
MAX_PIECE_CHARACTERS = 4096  # of a token of a SentencePiece vocabulary: all of its splits are looked up
SPACE = "\u2581"
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> list[Document]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


_QWEN = _split(rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}")
_LLAMA3 = _split(rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}")
# tokenizer.ggml.pre -> the parts of the pre-tokenizer, further keys of the document's model, normalizer
PRE_TOKENIZERS: dict[str, tuple[list[Document], Document, Document | None]] = {
    "gpt-2": ([_BYTES], {}, None),
    "smollm": ([_DIGITS, _BYTES], {}, None),
    "starcoder": ([_DIGITS, _BYTES], {}, None),
    "refact": ([_DIGITS, _BYTES], {}, None),
    "llama-bpe": (_LLAMA3, {"ignore_merges": True}, None),
    "qwen2": (_QWEN, {}, {"type": "NFC"}),
    "deepseek-r1-qwen": (_QWEN, {}, None),
    "tekken": (_split(_TEKKEN), {"ignore_merges": True}, None),
}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
ADDS_BOS = {"llama-bpe", "tekken"}  # unless the file says otherwise


def has_tokenizer(path: Path) -> bool:
    """Whether a GGUF file has a tokenizer."""
    return open_header(path).value(MODEL, str, "none") not in ("none", "no_vocab")


def document(path: Path) -> Document:
    """What a tokenizer.json of the file's tokenizer would hold.

    Errors: TokenizerError for a kind or pre-tokenizer that is not known and for lists that do not fit together;
    ModelFormatError for a key of another type.
    """
    header = open_header(path)
    kind = header.value(MODEL, str)
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in makers:
        raise TokenizerError(f"{path}: key '{MODEL}': {shown(kind)}; expected one of {', '.join(makers)}")
    tokens = _list(header, "tokens", str)
    types = _list(header, "token_type", int, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise TokenizerError(f"{path}: key '{TOKENIZER}token_type': {len(types)} values; expected {len(tokens)}")
    parts = makers[kind](header, tokens, types)
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind != USER_DEFINED}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _post_processor(header, tokens, kind),
        **parts,
    }


def _list(header: GgufHeader, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    """A list of the tokenizer, of elements of one type."""
    key = TOKENIZER + name
    values = header.value(key, list, default)
    if values is None:
        raise TokenizerError(f"{header.path}: key '{key}' is missing; expected it")
    if values and not isinstance(values[0], kind):
        raise TokenizerError(
            f"{header.path}: key '{key}': {shown(values[0])}; expected elements of type {kind.__name__}"
        )
    return list(values)


def _vocabulary(header: GgufHeader, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """token -> id. Places that only fill up the embedding are not tokens."""
    vocab: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != UNUSED and vocab.setdefault(token, i) != i:
            raise TokenizerError(
                f"{header.path}: key '{TOKENIZER}tokens': {shown(token)} has ids {vocab[token]} and {i}; expected one"
            )
    return vocab


def _byte_level(header: GgufHeader, tokens: list[str], types: list[int]) -> Document:
    pre = _pre(header)
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{header.path}: key '{TOKENIZER}pre': {shown(header.keys.get(TOKENIZER + 'pre'))}; expected one of "
            f"{', '.join([*PRE_TOKENIZERS, *_SAME])}"
        )
    pieces, further, normalizer = PRE_TOKENIZERS[pre]
    merges = []
    for index, merge in enumerate(_list(header, "merges", str)):
        pair = merge.split(" ")
        if len(pair) != 2 or not all(pair):
            raise TokenizerError(
                f"{header.path}: key '{TOKENIZER}merges'[{index}]: {shown(merge)}; expected two tokens"
            )
        merges.append(pair)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pieces},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(_vocabulary(header, tokens, types), merges, **further),
    }


def _pre(header: GgufHeader) -> str:
    pre: str = header.value(TOKENIZER + "pre", str, "")
    return _SAME.get(pre, pre)


def _bpe(vocab: dict[str, int], merges: list[list[str]], **further: Any) -> Document:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **flags, **further, "vocab": vocab, "merges": merges}


def _sentencepiece(header: GgufHeader, tokens: list[str], types: list[int]) -> Document:
    scores = _list(header, "scores", float)
    if len(scores) != len(tokens):
        raise TokenizerError(f"{header.path}: key '{TOKENIZER}scores': {len(scores)} values; expected {len(tokens)}")
    vocab = _vocabulary(header, tokens, types)
    absent = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if absent:
        raise TokenizerError(f"{header.path}: key '{TOKENIZER}tokens': no {absent[0]}; expected a token for each byte")
    longest = max(tokens, key=len, default="")
    if len(longest) > MAX_PIECE_CHARACTERS:
        raise TokenizerError(
            f"{header.path}: key '{TOKENIZER}tokens': {shown(longest)} of {len(longest)} characters; "
            f"expected at most {MAX_PIECE_CHARACTERS}"
        )
    prefix = header.value(TOKENIZER + "add_space_prefix", bool, True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    decoders: list[Document] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    pieces = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind in (NORMAL, USER_DEFINED)
    }
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace] if prefix else [replace],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges_of(pieces), byte_fallback=True, fuse_unk=True, unk_token=unknown),
    }


def merges_of(scores: dict[str, float]) -> list[list[str]]:
    """The merges of a SentencePiece BPE, best first: every split of a piece into two has the piece's score.

    Of splits of one piece, those of earlier pieces come first, as they were merged first in training.
    """
    place = {piece: at for at, piece in enumerate(scores)}
    found = []
    for piece, score in scores.items():
        splits = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        for left, right in splits:
            if left in place and right in place:
                found.append((-score, place[piece], place[left], place[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def _post_processor(header: GgufHeader, tokens: list[str], kind: str) -> Document | None:
    """What adds BOS and EOS to a raw text."""
    default = (kind == "llama" or _pre(header) in ADDS_BOS) and f"{TOKENIZER}bos_token_id" in header.keys
    names = []
    for token, adds, otherwise in (("bos", "add_bos_token", default), ("eos", "add_eos_token", False)):
        if not header.value(TOKENIZER + adds, bool, otherwise):
            continue
        names.append((token, str(_token(header, tokens, f"{token}_token_id", needed=True))))
    if not names:
        return None
    pieces: list[Document] = [{"Sequence": {"id": "A", "type_id": 0}}]
    second: list[Document] = [{"Sequence": {"id": "B", "type_id": 1}}]
    for name, token in names:
        special = {"SpecialToken": {"id": token, "type_id": 0}}
        pieces.insert(0 if name == "bos" else len(pieces), special)
    ids = {token: header.keys[f"{TOKENIZER}{name}_token_id"] for name, token in names}
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, *second],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()},
    }


def _token(header: GgufHeader, tokens: Sequence[str], name: str, *, needed: bool = False) -> str | None:
    """The text of the token whose id is under a key; None without the key."""
    key = TOKENIZER + name
    i = header.value(key, int)
    if i is None and not needed:
        return None
    if i is None or not 0 <= i < len(tokens):
        raise TokenizerError(f"{header.path}: key '{key}': {shown(i)}; expected an id from 0 to {len(tokens) - 1}")
    return tokens[int(i)]


def config(path: Path) -> Document:
    """What a tokenizer_config.json would hold: the named tokens and the chat template. Errors: as `document`."""
    header = open_header(path)
    tokens = _list(header, "tokens", str, [])
    named = {usual: text for usual, key in NAMED.items() if (text := _token(header, tokens, key)) is not None}
    template = header.value("tokenizer.chat_template", str)
    return {**named, "add_bos_token": False, **({} if template is None else {"chat_template": template})}
