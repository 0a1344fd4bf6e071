"""The tokenizer: what is refused, BOS and special tokens, decoding token by token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from refusal import assert_refused
from tiny_tokenizers import ids_of
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pyengine.detokenize import BYTE_OF, read_decoder
from pyengine.errors import TokenizerError
from pyengine.tokenizer import Tokenizer
from pyengine.tokenizer_file import MAX_TOKENIZER_BYTES

VOCAB = 300


def load(folder: Path, tokenizer: Any, vocab_size: int = VOCAB, **settings: Any) -> Tokenizer:
    return Tokenizer.load(tiny.write(folder, tokenizer, **settings), vocab_size=vocab_size)


def refused(folder: Path, says: str) -> None:
    load = partial(Tokenizer.load, folder, vocab_size=VOCAB)
    assert_refused(load, TokenizerError, ("tokenizer.json", says), folder, small=False)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.finish()]


# --- files that are refused


def changed(change: Callable[[tiny.Document], object], base: Callable[[], Any] = tiny.byte_level) -> tiny.Document:
    document = tiny.document(base())
    change(document)
    return document


def set_merges(merges: list[Any]) -> Callable[[tiny.Document], object]:
    return lambda d: d["model"].update(merges=merges)


def sequence(key: str, *types: str) -> dict[str, Any]:
    return {"type": "Sequence", key: [{"type": kind} for kind in types]}


REFUSED = {
    "malformed-E02-Unigram": (changed(lambda d: d["model"].update(type="Unigram")), "'Unigram'"),
    "malformed-E02-WordPiece": (changed(lambda d: d["model"].update(type="WordPiece")), "'WordPiece'"),
    "no model": (changed(lambda d: d.pop("model")), "model"),
    "no vocab": (changed(lambda d: d["model"].pop("vocab")), "vocab"),
    "malformed-E03-mixed merges": (changed(set_merges(["a b", ["a", "b"]])), "merges"),
    "malformed-E04-merge of one": (changed(set_merges([["a"]])), "merge 0"),
    "malformed-E04-merge of three": (
        changed(lambda d: d["model"].update(merges=["a b", "a b c"], vocab={"a": 0, "b": 1, "ab": 2})),
        "merge 1",
    ),
    "malformed-E04-merge of unknown": (changed(set_merges([["a", "zz"]])), "'zz'"),
    "malformed-E04-merge into unknown": (changed(set_merges([["a", "b"]])), "'ab'"),
    "malformed-E04-merge of numbers": (changed(set_merges([[1, 2]])), "merge 0"),
    "malformed-E06-float id": (changed(lambda d: d["model"]["vocab"].update(a=64.0)), "'64.0'"),
    "malformed-E06-text id": (changed(lambda d: d["model"]["vocab"].update(a="64")), "'64'"),
    "malformed-E06-true id": (changed(lambda d: d["model"]["vocab"].update(a=True)), "'True'"),
    "malformed-E06-negative id": (changed(lambda d: d["model"]["vocab"].update(a=-1)), "-1"),
    "malformed-E07-id twice": (changed(lambda d: d["model"]["vocab"].update(a=5)), "id 5"),
    "malformed-E07-added id of another": (changed(lambda d: d["added_tokens"][0].update(id=64)), "id 64"),
    "malformed-E07-added token of two ids": (changed(lambda d: d["added_tokens"][0].update(content="a")), "'a'"),
    "added with a gap": (changed(lambda d: d["added_tokens"][1].update(id=270)), "270"),
    "added without content": (changed(lambda d: d["added_tokens"][1].pop("content")), "added_tokens[1]"),
    "malformed-E08-pre_tokenizer": (changed(lambda d: d.update(pre_tokenizer={"type": "Guess"})), "'Guess'"),
    "malformed-E08-normalizer": (changed(lambda d: d.update(normalizer={"type": "Guess"})), "'Guess'"),
    "malformed-E08-in a sequence": (
        changed(lambda d: d.update(normalizer=sequence("normalizers", "NFC", "Guess"))),
        "'Guess'",
    ),
    "malformed-E08-decoder": (changed(lambda d: d.update(decoder={"type": "CTC"})), "'CTC'"),
    "malformed-E08-decoder null": (changed(lambda d: d.update(decoder=None)), "decoder"),
    "decoder steps": (
        changed(lambda d: d.update(decoder=sequence("decoders", "Fuse", "ByteLevel"))),
        "ByteLevel",
    ),
    "decoder of a type that is an object": (changed(lambda d: d.update(decoder={"type": {}})), "decoder of type"),
    "decoder steps of null": (
        changed(lambda d: d.update(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, None]})),
        "Fuse, None",
    ),
    "a prefix that merges lack": (
        changed(lambda d: d["model"].update(merges=["a b"], vocab={"a": 0, "b": 1}, continuing_subword_prefix="##")),
        "begin with '##'",
    ),
    "what only the package sees": (
        changed(lambda d: d.update(normalizer={"type": "Replace"})),
        "the tokenizers package",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_tokenizers_are_refused(tmp_path: Path, case: str) -> None:
    document, says = REFUSED[case]
    tiny.write(tmp_path, document)
    refused(tmp_path, says)


def test_a_panic_of_the_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    class Package:
        @staticmethod
        def from_buffer(data: bytes) -> None:
            raise PanicException("range end index out of range")

    tiny.write(tmp_path, tiny.byte_level())
    monkeypatch.setattr("pyengine.tokenizer.tokenizers.Tokenizer", Package)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: range end index out of range; expected"):
        Tokenizer.load(tmp_path, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "no such file"),
        (b"", "expected JSON"),
        (b"hello", "expected JSON"),
        (b"[]", "the root is a list"),
        (b"\xff", "expected JSON"),
        (b'\xef\xbb\xbf{"model": {}}', "expected JSON"),
        (b'{"model": 1, "model": 2}', "duplicate key 'model'"),
        (b'{"model": NaN}', "NaN"),
        (b"[" * 100_000, "expected JSON"),
    ],
)
def test_malformed_e01_wrong_files_are_refused(tmp_path: Path, data: bytes | None, says: str) -> None:
    if data is not None:
        (tmp_path / "tokenizer.json").write_bytes(data)
    refused(tmp_path, says)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokenizer.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a regular file"):
        Tokenizer.load(tmp_path, vocab_size=VOCAB)


def test_malformed_e01_a_file_of_600_mebibytes_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(600 << 20)
    started = time.monotonic()
    with pytest.raises(TokenizerError, match=f"{600 << 20} bytes; expected at most {MAX_TOKENIZER_BYTES}"):
        Tokenizer.load(tmp_path, vocab_size=VOCAB)
    assert time.monotonic() - started < 1


def test_malformed_e10_e12_report_b30_e26_more_ids_than_embedding_rows(tmp_path: Path) -> None:
    assert load(tmp_path, tiny.byte_level(), 258).vocab_size == 258
    with pytest.raises(TokenizerError, match=r"up to 257 \(258 ids\), but the model has 257 embedding rows"):
        load(tmp_path, tiny.byte_level(), 257)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"eos_token": "</s>"}, "eos_token '</s>' is not in the vocabulary"),
        ({"bos_token": 5}, "bos_token is '5'"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ({"add_bos_token": True}, "add_bos_token without a bos_token"),
        ({"additional_special_tokens": "x"}, "additional_special_tokens"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        load(tmp_path, tiny.byte_level(), **settings)
    assert says in str(caught.value)


# --- files that must load


@pytest.mark.parametrize("pairs", [True, False])
def test_malformed_e03_p13_report_e07_merges_as_strings_and_as_pairs(tmp_path: Path, pairs: bool) -> None:
    document = tiny.document(tiny.byte_level(merges=(("h", "i"), ("hi", "t"))))
    merges = document["model"]["merges"]
    document["model"]["merges"] = merges if pairs else [" ".join(merge) for merge in merges]
    tokenizer = load(tmp_path, document)
    assert tokenizer.encode("hit") == [257]
    assert tokenizer.encode("hi t") == [256, *ids_of(" t")]


def test_report_e07_a_merge_with_a_space_inside_loads_as_a_pair(tmp_path: Path) -> None:
    document = changed(lambda d: d["model"]["vocab"].update({" ": 256, " a": 257}))
    document["added_tokens"] = []
    document["pre_tokenizer"] = None
    document["model"]["merges"] = [[" ", "a"]]
    assert load(tmp_path, document).encode(" a") == [257]
    document["model"]["merges"] = ["  a"]  # as a string it has three parts
    with pytest.raises(TokenizerError, match="merge 0"):
        load(tmp_path, document)


def test_malformed_e19_report_e05_e06_tokenizer_json_wins_over_the_class_named_beside_it(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.byte_level(), tokenizer_class="LlamaTokenizer", clean_up_tokenization_spaces=True)
    text = "theorem t (a b : \u2115) , 's ."
    assert tokenizer.encode(text) == ids_of(text)
    assert tokenizer.decode(ids_of(text)) == text


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = tiny.byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    assert load(tmp_path, tokenizer).encode("abcd") == ids_of("abcd")


# --- BOS and special tokens


def test_special_tokens_by_name(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|im_end|>", "pad_token": None}
    tokenizer = load(tmp_path, tiny.byte_level(), **settings)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 256)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 257)
    assert tokenizer.token_names == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    plain = load(tmp_path / "plain", tiny.byte_level())
    assert (plain.bos_token_id, plain.eos_token_id) == (None, None)


def test_a_named_token_that_the_file_has_as_plain_vocabulary_is_special(tmp_path: Path) -> None:
    document = changed(lambda d: d["model"]["vocab"].update({"</s>": 256}))
    document["added_tokens"] = []
    assert load(tmp_path / "plain", document).encode("</s>") == ids_of("</s>")
    tokenizer = load(tmp_path, document, eos_token="</s>")
    assert tokenizer.encode("a</s>") == [*ids_of("a"), 256]
    assert tokenizer.decode([*ids_of("a"), 256]) == "a"
    assert tokenizer.encode("a</s>", parse_special=False) == ids_of("a</s>")
    for name in ({"additional_special_tokens": ["</s>"]}, {"extra_special_tokens": {"end": {"content": "</s>"}}}):
        assert load(tmp_path, document, **name).encode("</s>") == [256]


def test_special_tokens_in_text_are_parsed_or_not(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.byte_level(merges=(("<", "|"), ("i", "m"))))
    text = "a <|im_end|> b<|im_start|>"
    assert tokenizer.encode(text) == [*ids_of("a "), 259, *ids_of(" b"), 258]
    plain = tokenizer.encode(text, parse_special=False)
    assert not {258, 259} & set(plain)
    assert tokenizer.decode(plain) == text
    reference = tiny.byte_level(merges=(("<", "|"), ("i", "m")))
    reference.encode_special_tokens = True
    assert plain == reference.encode(text).ids


def test_a_special_token_in_the_vocabulary_is_no_way_around(tmp_path: Path) -> None:
    """ignore_merges takes a whole word from the vocabulary: the package's own switch still finds the special token."""
    document = changed(lambda d: d["model"]["vocab"].update({"<e>": 256}))
    document["added_tokens"] = [{**document["added_tokens"][0], "id": 256, "content": "<e>"}]
    document["model"]["ignore_merges"] = True
    document["pre_tokenizer"]["use_regex"] = False
    tokenizer = load(tmp_path, document)
    package = Backend.from_str(json.dumps(document))
    package.encode_special_tokens = True
    assert package.encode("<e>").ids == [256]
    assert tokenizer.encode("<e>", parse_special=False) == ids_of("<e>")
    assert tokenizer.encode("<e>") == [256]


@pytest.mark.parametrize("legacy", [True, False])
def test_parts_are_encoded_as_one_text(tmp_path: Path, legacy: bool) -> None:
    """Space prefixes and merges do not see the borders of parts; a token across one is text."""
    tokenizer = load(tmp_path, tiny.sentencepiece(legacy=legacy))
    whole = "<s>ab </s>hi ab"
    assert tokenizer.encode_parts(
        [("<s>a", True), ("b ", False), ("</s>h", True), ("i ab", False)]
    ) == tokenizer.encode(whole, add_special_tokens=False)
    assert tokenizer.encode_parts([("</s>", True)]) == [2]
    for second in (True, False):
        quoted = tokenizer.encode_parts([("</", True), ("s>", second)])
        assert quoted == tokenizer.encode("</s>", add_special_tokens=False, parse_special=False)
        assert 2 not in quoted


def test_a_special_token_matched_in_normalized_text_is_quoted_too(tmp_path: Path) -> None:
    base = tiny.byte_level(special=())
    base.normalizer = normalizers.Lowercase()
    base.add_special_tokens([AddedToken("<end>", special=True, normalized=True)])
    tokenizer = load(tmp_path, base)
    assert tokenizer.encode("<END>") == [256]
    assert tokenizer.encode("<END>", parse_special=False) == ids_of("<end>")


def test_malformed_e16_unpaired_surrogates_are_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.byte_level())
    for parse in (True, False):
        with pytest.raises(TokenizerError, match="unpaired surrogate at character 2"):
            tokenizer.encode("ab\ud800", parse_special=parse)
    assert tokenizer.encode("ab") == ids_of("ab")


def test_malformed_e09_catastrophic_backtracking_ends(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.backtracking())
    started = time.monotonic()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*backtracking"):
        tokenizer.encode("a" * 40 + "b")
    assert time.monotonic() - started < 5
    assert tokenizer.encode("b") == ids_of("b")


def test_malformed_e18_half_a_mebibyte_of_one_letter(tmp_path: Path) -> None:
    merges = (("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"))
    tokenizer = load(tmp_path, tiny.byte_level(merges=merges))
    started = time.monotonic()
    assert tokenizer.encode("a" * (512 << 10)) == [258] * (64 << 10)
    assert time.monotonic() - started < 10


# --- decoding


def test_report_e04_e06_all_bytes_round_trip(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.byte_level())
    assert len(BYTE_OF) == 256
    assert set(BYTE_OF.values()) == set(range(256))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for i, character in enumerate(alphabet):
        data = bytes([BYTE_OF[character]])
        assert tokenizer.decode([i]) == data.decode("utf-8", "replace")
    text = "\nfoo \U0001f917 bar   \u010d\r\n\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_malformed_e13_e15_an_unfinished_character_is_held_back(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.byte_level())
    face = ids_of("\U0001f917")
    assert streamed(tokenizer, face) == ["", "", "", "\U0001f917", ""]
    assert streamed(tokenizer, face[:3]) == ["", "", "", "\ufffd"]
    assert streamed(tokenizer, [*face[:3], *ids_of("ab")]) == ["", "", "", "\ufffda", "b", ""]
    assert streamed(tokenizer, [*face[:2], 257, *face[2:]])[-2] == "\U0001f917"  # a special token has no bytes


@pytest.mark.parametrize("data", [b"\xc0\x80", b"\xf5", b"\x80", b"\xed\xa0\x80", b"\xe0\x80", b"\xf0\x80\x80\x80"])
def test_malformed_e14_bytes_that_never_become_a_character_come_at_once(tmp_path: Path, data: bytes) -> None:
    tokenizer = load(tmp_path, tiny.byte_level())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    id_of = {BYTE_OF[c]: i for i, c in enumerate(alphabet)}
    ids = [id_of[byte] for byte in data] + ids_of("x")
    pieces = streamed(tokenizer, ids)
    assert pieces[-2:] == ["x", ""]
    assert "".join(pieces) == tiny.byte_level().decode(ids)
    assert "".join(pieces[: len(data)]) == "\ufffd" * len(data)


def test_malformed_p13_report_e24_padding_rows_and_special_tokens_have_no_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.byte_level())
    assert tokenizer.decode([*ids_of("a"), 258, 299, 256, *ids_of("b"), 10**12]) == "ab"


def test_report_e10_an_added_token_outside_the_byte_table_stands_for_itself(tmp_path: Path) -> None:
    base = tiny.byte_level()
    base.add_tokens([AddedToken("two words \u4e2d", normalized=False)])
    tokenizer = load(tmp_path, base)
    assert tokenizer.decode([258, *ids_of("!")]) == base.decode([258, *ids_of("!")]) == "two words \u4e2d!"


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("text", ["hi ab", " hi", "  ab", "", "\U0001f917 z\u00e9", "hi\nab", "\u2581"])
def test_sentencepiece_decodes_as_the_package_does(tmp_path: Path, legacy: bool, text: str) -> None:
    base = tiny.sentencepiece(legacy=legacy)
    tokenizer = load(tmp_path, base)
    ids = tokenizer.encode(text)
    assert ids == base.encode(text).ids
    assert ids[0] == 1
    assert tokenizer.decode(ids) == base.decode(ids)
    if text != "\u2581" and (legacy or text[:1] != " "):  # else the prefix is not added to what has one
        assert tokenizer.decode(ids) == text


def test_a_wrong_byte_does_not_take_the_right_characters_with_it(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.sentencepiece())
    ids = [3 + byte for byte in "\u00e9".encode()] + [3 + 0x80]
    assert streamed(tokenizer, ids) == ["", "\u00e9", "\ufffd", ""]


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decodes_as_the_package_does(tmp_path: Path, scheme: str) -> None:
    base = tiny.sentencepiece(legacy=False)
    base.decoder = decoders.Metaspace(replacement=tiny.SPACE, prepend_scheme=scheme)
    tokenizer = load(tmp_path, base)
    for text in ("hi ab", "  hi", "a  b "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == base.decode(ids)


def test_decoders_that_would_be_read_wrongly_are_refused() -> None:
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    for steps in (
        [{"type": "Fuse"}, strip],
        [{**strip, "stop": 0}],
        [{"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}],
    ):
        with pytest.raises(ValueError, match="decoder"):
            read_decoder({"type": "Sequence", "decoders": steps})


# --- threads and processes


def test_report_e30_many_threads_use_one_tokenizer(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tiny.byte_level())
    expected = (ids_of("a<|im_end|>b"), [*ids_of("a"), 257, *ids_of("b")])
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(200):
            got = (tokenizer.encode("a<|im_end|>b", parse_special=False), tokenizer.encode("a<|im_end|>b"))
            if got != expected:
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_report_e29_a_forked_child_can_encode(tmp_path: Path) -> None:
    tiny.write(tmp_path, tiny.byte_level())
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom pyengine.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(Path(sys.argv[1]), vocab_size=300)\nhere = t.encode('abc')\nchild = os.fork()\n"
        "if child == 0:\n    os._exit(0 if t.encode('abc') == here else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 0
