"""Stage 5, tokenizer: text -> token ids and back, as the model's tokenizer.json says."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pyengine import system
from pyengine.detokenize import StopMatcher, StreamDecoder, TokenDecoder, read_decoder
from pyengine.errors import TokenizerError
from pyengine.strict_json import shown
from pyengine.tokenizer_file import TokenizerSettings, config_path, read_settings, read_tokenizer, tokenizer_path

__all__ = ["StopMatcher", "StreamDecoder", "Tokenizer"]


class Tokenizer:
    """The tokenizer of a model folder or GGUF file. Immutable, and safe to use from several threads.

    vocab_size: of the model; the tokenizer may have fewer ids. special_tokens: text -> id of the tokens that are
    control tokens and not text. token_names: bos_token, eos_token, unk_token, pad_token -> text, for chat templates.

    The BOS rule for raw text: the post-processor of tokenizer.json decides, as in transformers' AutoTokenizer. A file
    without one adds BOS only if tokenizer_config.json has "add_bos_token": true (transformers 5 does not look at that
    key beside a tokenizer.json: there such a folder has no BOS). Decoding never "cleans up" spaces around punctuation,
    as in transformers for BPE.
    """

    def __init__(
        self, backend: Any, decoder: TokenDecoder, settings: TokenizerSettings, where: Path, size: int
    ) -> None:
        self._backend = backend
        self._decoder = decoder
        self._where = where
        self.vocab_size = size
        self.token_names = dict(settings.named)
        added = backend.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {t.content: i for i, t in added.items() if t.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._adds_bos = backend.post_processor is None and settings.add_bos_token
        if self._adds_bos and self.bos_token_id is None:
            raise TokenizerError(f"{where}: add_bos_token without a bos_token; expected one in tokenizer_config.json")
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        # a token matched in the normalized text may be there without being in the text as it was written
        self.normalizes_special = backend.normalizer is not None and any(
            t.special and t.normalized for t in added.values()
        )
        self._quoting: tuple[Any, dict[str, str]] | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path, *, vocab_size: int) -> Tokenizer:
        """The tokenizer of a model with `vocab_size` embedding rows.

        Errors: TokenizerError naming the file: missing, damaged, of a kind that is not supported, or with ids that the
        model has no rows for. ResourceError without a file descriptor or memory.
        """
        path = tokenizer_path(folder)
        document = read_tokenizer(folder, vocab_size)
        settings = read_settings(folder)
        try:
            decoder = read_decoder(document.get("decoder"))
        except ValueError as error:
            raise TokenizerError(f"{path}: {error}") from None
        try:
            if path == folder:  # a GGUF file
                backend = tokenizers.Tokenizer.from_str(json.dumps(document))
            else:
                backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            wrong = TokenizerError(f"{path}: {error.strerror or error}; expected a readable file")
            raise system.lacking(path, error) or wrong from None
        except BaseException as error:
            # The package raises Exception itself, and where its own checks fail a PanicException, which is none.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(f"{path}: {error}; expected a tokenizer that the tokenizers package reads") from None
        backend.no_truncation()
        backend.no_padding()
        _check_ids(path, backend, document.get("added_tokens") or [])
        _add_named(config_path(folder), backend, settings)
        return cls(backend, decoder, settings, path, vocab_size)

    def _named_id(self, name: str) -> int | None:
        token = self.token_names.get(name)
        return None if token is None else self.token_to_id(token)

    @property
    def bos_token(self) -> str | None:
        return self.token_names.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.token_names.get("eos_token")

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary; None if there is no such token."""
        found: int | None = self._backend.token_to_id(token)
        return found

    # ---- text -> ids --------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special_tokens: BOS and the like by the tokenizer's own rule. parse_special: special tokens written in the
        text become those tokens; else they are ordinary text (added tokens that are not special always match).
        Errors: TokenizerError for an unpaired surrogate, or where a pattern of tokenizer.json takes too long.
        """
        if parse_special or not self._may_hold_special(text):
            return self._with_bos(self._run(self._backend, text, add_special_tokens), add_special_tokens)
        return self.encode_parts([(text, False)], add_special_tokens=add_special_tokens)

    def encode_parts(self, parts: Sequence[tuple[str, bool]], *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of the parts' texts joined, special tokens parsed only inside parts marked True.

        A special token across a border of parts is text. Errors: as for `encode`.
        """
        backend, names = self._quoting_backend()
        pieces = []
        for text, parsed in parts:
            if parsed and self.special_pattern is not None:
                text = self.special_pattern.sub(lambda match: names[match.group()], text)
            pieces.append(text)
        return self._with_bos(self._run(backend, "".join(pieces), add_special_tokens), add_special_tokens)

    def _may_hold_special(self, text: str) -> bool:
        return self.normalizes_special or (
            self.special_pattern is not None and self.special_pattern.search(text) is not None
        )

    def _with_bos(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        if not (add_special_tokens and self._adds_bos):
            return ids
        assert self.bos_token_id is not None
        return [self.bos_token_id, *ids]

    def _run(self, backend: Any, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text has an unpaired surrogate at character {error.start}; expected Unicode text"
            ) from None
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            # The package's matcher of regular expressions gives up after 10 million steps (some 0.3 s) by a panic,
            # which is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            pattern = "Regex" in str(error)
            expected = "a pattern without such backtracking" if pattern else "a tokenizer that encodes every text"
            raise TokenizerError(f"{self._where}: {error}; expected {expected}") from None
        return ids

    def _quoting_backend(self) -> tuple[Any, dict[str, str]]:
        """The same tokenizer with every special token renamed to a text nobody can guess: text -> new name.

        In it, what users write is never a special token: neither as an added token nor as a word of the vocabulary.
        Everything else (normalization, word borders beside special tokens, space prefixes) works as in the original.
        """
        with self._lock:
            if self._quoting is None:
                self._quoting = self._rename_special()
            return self._quoting

    def _rename_special(self) -> tuple[Any, dict[str, str]]:
        document = json.loads(self._backend.to_str())
        nonce = secrets.token_hex(16)
        # private-use characters around hexadecimal digits: no normalizer changes them, no name starts another
        names = {token: f"\U0010fffd{nonce}{i:x}\U0010fffd" for token, i in self.special_tokens.items()}
        for item in document["added_tokens"]:
            item["content"] = names.get(item["content"], item["content"])
        model = document["model"]
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [(a, b) for a, b in model["merges"] if not names.keys() & {a, b, a + b[prefix:]}]
        model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
        post_processor = json.dumps(document["post_processor"])
        document["post_processor"] = None
        backend = tokenizers.Tokenizer.from_str(json.dumps(document))
        if post_processor != "null":  # it goes by ids; only its names are unknown to the renamed vocabulary
            backend.post_processor = self._backend.post_processor
        for token, name in names.items():
            if backend.token_to_id(name) != self.special_tokens[token]:
                raise TokenizerError(f"{self._where}: special token {shown(token)} cannot be told from text")
        return backend, names

    # ---- ids -> text --------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: special tokens, and ids the tokenizer does not have, are left out. Equals the stream's."""
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream(self) -> StreamDecoder:
        """A decoder for one sequence of tokens as they come."""
        return StreamDecoder(self._decoder, self._text_of)

    def _text_of(self, token_id: int) -> str | None:
        if token_id in self._special_ids or not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token


def _check_ids(path: Path, backend: Any, added: Sequence[dict[str, Any]]) -> None:
    """The package numbers added tokens itself: refuse a file whose own numbers come out differently."""
    for item in added:
        found = backend.token_to_id(item["content"])
        if found != item["id"]:
            raise TokenizerError(
                f"{path}: added token {shown(item['content'])} has id {item['id']}, but its place in the file makes it "
                f"{found}; expected ids without gaps, in order"
            )


def _add_named(path: Path, backend: Any, settings: TokenizerSettings) -> None:
    """Tokens that tokenizer_config.json names are special, also where tokenizer.json lists them as plain vocabulary."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    names = [*settings.named.items(), *(("additional_special_tokens", text) for text in settings.special)]
    for key, text in names:
        if text in known:
            continue
        if backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
        elif key in ("bos_token", "eos_token"):
            raise TokenizerError(f"{path}: {key} {shown(text)} is not in the vocabulary; expected a token of it")
