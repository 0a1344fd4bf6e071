"""Small tokenizers for tests: byte-level ones like Llama 3's and Qwen's, and SentencePiece-like ones as in Llama 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pyengine.detokenize import BYTE_OF

Document = dict[str, Any]

SPECIAL = ("<|im_start|>", "<|im_end|>")
SPACE = "\u2581"


def byte_level(
    *, special: tuple[str, ...] = SPECIAL, post: Any = None, merges: tuple[tuple[str, str], ...] = ()
) -> Any:
    """256 bytes, the products of `merges`, then the special tokens. Ids of special tokens: 256 + len(merges) ..."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    if post is not None:
        tokenizer.post_processor = post
    return tokenizer


def ids_of(text: str) -> list[int]:
    """Ids of the byte-level tokenizer without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    character = {byte: c for c, byte in BYTE_OF.items()}
    return [alphabet.index(character[byte]) for byte in text.encode()]


def bos_processor(token: str = SPECIAL[0], i: int = 256) -> Any:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, i)])


def sentencepiece(*, legacy: bool = True) -> Any:
    """<unk> <s> </s>, 256 byte tokens, some letters and words; a space prefix as Llama 2 (legacy) or Mistral has it."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("h", "i"), (SPACE, "a"), (SPACE + "a", "b")]
    vocab = {token: i for i, token in enumerate([*tokens, *(a + b for a, b in merges)])}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = bos_processor("<s>", 1)
    return tokenizer


def backtracking() -> Any:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    return tokenizer


def document(tokenizer: Any) -> Document:
    loaded: Document = json.loads(tokenizer.to_str())
    return loaded


def write(folder: Path, tokenizer: Any, **settings: Any) -> Path:
    """tokenizer.json (of a tokenizer, or a document as it is), and tokenizer_config.json if there are settings."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(tokenizer) if isinstance(tokenizer, dict) else tokenizer.to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
