"""Rare tokenizers, templates, messages and requests: what no other file of the tests has a reason to hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from builders import write_tiny_model
from golden.golden_cases import TL

import pyengine
from pyengine import tokenizer
from pyengine.chat_template import ChatTemplate, encode_chat
from pyengine.detokenize import read_decoder
from pyengine.errors import ChatTemplateError, RequestError, TokenizerError
from pyengine.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]

# ---- tokenizer ------------------------------------------------------------------------------------------------------


def document(**parts: Any) -> tiny.Document:
    return {**tiny.document(tiny.byte_level()), **parts}


def of_model(**parts: Any) -> tiny.Document:
    whole = tiny.document(tiny.byte_level())
    return {**whole, "model": {**whole["model"], **parts}}


def nested(levels: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "NFC"}
    for _ in range(levels):
        part = {"type": "Sequence", "normalizers": [part]}
    return part


TOKENIZERS: dict[str, tuple[tiny.Document, str]] = {
    "normalizer-list": (document(normalizer=[]), "normalizer is '[]'; expected an object with a type, or null"),
    "sequence-of-nothing": (document(normalizer={"type": "Sequence"}), "a Sequence without a list 'normalizers'"),
    "sequences-in-sequences": (document(normalizer=nested(100)), "normalizer: nested deeper than 64"),
    "merges-missing": (of_model(merges=None), "model.merges is 'None'; expected a list"),
    "prefix-number": (of_model(continuing_subword_prefix=3), "continuing_subword_prefix is '3'; expected text"),
    "added-text": (document(added_tokens="x"), "added_tokens is 'x'; expected a list of objects"),
    "added-numbers": (document(added_tokens=[1]), "added_tokens is '[1]'; expected a list of objects"),
    "metaspace": (document(decoder={"type": "Metaspace", "replacement": "ab"}), "decoder replacement 'ab'"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_rare_tokenizer_is_refused(case: str, tmp_path: Path) -> None:
    whole, text = TOKENIZERS[case]
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tiny.write(tmp_path, whole), vocab_size=300)
    assert "tokenizer.json" in str(caught.value)
    assert text in str(caught.value)


def test_nothing_in_a_sequence_is_passed_over(tmp_path: Path) -> None:
    plain = Tokenizer.load(tiny.write(tmp_path / "plain", tiny.byte_level()), vocab_size=300)
    one = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    tokenizer = Tokenizer.load(tiny.write(tmp_path / "one", document(normalizer=one)), vocab_size=300)
    assert tokenizer.encode("e\u0301") == plain.encode("\u00e9")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write(tmp_path, tiny.byte_level())

    def denied(*_: Any) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: Permission denied; expected a readable file"):
        Tokenizer.load(tmp_path, vocab_size=300)


def test_a_decoder_without_a_prefix_to_take_off_takes_none() -> None:
    steps = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "Fuse"}]
    decoder = read_decoder({"type": "Sequence", "decoders": steps})
    assert decoder.token_bytes("\u2581a") == b" a"
    assert (decoder.strip, decoder.first_drops) == (0, "")


def test_named_tokens_that_are_nowhere_are_an_error_only_where_they_are_used(tmp_path: Path) -> None:
    load = Tokenizer.load
    known = load(tiny.write(tmp_path / "pad", tiny.byte_level(), pad_token="<pad>"), vocab_size=300)
    assert known.encode("<pad>") == load(tiny.write(tmp_path / "no", tiny.byte_level()), vocab_size=300).encode("<pad>")
    with pytest.raises(TokenizerError, match=r"bos_token '<s>' is not in the vocabulary"):
        load(tiny.write(tmp_path / "bos", tiny.byte_level(), bos_token="<s>"), vocab_size=300)


def test_errors_of_the_package_that_are_no_panic_go_on(tmp_path: Path) -> None:
    one = Tokenizer.load(tiny.write(tmp_path, tiny.byte_level()), vocab_size=300)

    class Backend:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def encode(self, *_: Any, **__: Any) -> Any:
            raise self.error

    one._backend = Backend(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        one.encode("a")
    one._backend = Backend(ValueError("no"))
    with pytest.raises(TokenizerError, match="no; expected a tokenizer that encodes every text"):
        one.encode("a")


def test_a_special_token_that_cannot_be_told_from_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Tokenizer.load(tiny.write(tmp_path, tiny.byte_level()), vocab_size=300)
    right = tokenizer.tokenizers.Tokenizer

    class Blind:
        """Renamed tokens are not found again."""

        def __init__(self, backend: Any) -> None:
            self.backend = backend

        @staticmethod
        def from_str(text: str) -> Any:
            return Blind(right.from_str(text))

        def token_to_id(self, token: str) -> None:
            return None

    monkeypatch.setattr(tokenizer.tokenizers, "Tokenizer", Blind)
    with pytest.raises(TokenizerError, match=r"special token '<\|im_start\|>' cannot be told from text"):
        one.encode("a<|im_end|>", parse_special=False)


# ---- templates ------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(tmp_path: Path) -> Callable[[str], tuple[Tokenizer, ChatTemplate]]:
    folder = tiny.write(tmp_path / "tokenizer", tiny.byte_level(), bos_token="<|im_start|>", eos_token="<|im_end|>")
    one = Tokenizer.load(folder, vocab_size=300)
    return lambda source: (one, ChatTemplate(source, "a.jinja", one))


Chat = Callable[[str], tuple[Tokenizer, ChatTemplate]]


def test_settings_that_are_no_json_have_no_template(tmp_path: Path, chat: Chat) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json: .*expected JSON"):
        ChatTemplate.load(tmp_path, chat("")[0])


def test_a_file_too_long_by_a_part_of_a_character_is_too_long(tmp_path: Path, chat: Chat) -> None:
    path = tmp_path / "a.jinja"
    path.write_text("x" * ((1 << 20) - 1) + "\U0001f917", encoding="utf-8")
    with pytest.raises(ChatTemplateError, match=r"a\.jinja: 1048579 bytes; expected at most 1048576"):
        ChatTemplate.from_file(path, chat("")[0])


def test_messages_without_end_are_refused(chat: Chat) -> None:
    deep: Any = "x"
    for _ in range(70):
        deep = [deep]
    with pytest.raises(RequestError, match="nesting deeper than 64"):
        chat("x")[1].render([{**USER[0], "more": deep}])
    with pytest.raises(RequestError, match="nesting deeper than 64"):
        chat("{{ tools }}")[1].render(USER, tools=deep)


def test_numbers_beside_texts_are_rendered_and_marked_as_they_are(chat: Chat) -> None:
    one, template = chat("{{ messages[0].n }}{{ messages[0].content }}{{ messages[0].list[1].x }}<|im_end|>")
    messages = [{"role": "user", "content": "<|im_end|>", "n": 5, "list": [None, {"x": True}]}]
    ids = encode_chat(one, template, messages)
    assert ids.count(257) == 1
    assert ids[-1] == 257
    assert one.decode(ids) == "5<|im_end|>True"


def test_messages_of_every_private_use_character_leave_no_marks(chat: Chat) -> None:
    one, template = chat("{{ messages[0].content }}<|im_end|>")
    everything = "".join(map(chr, (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))))
    with pytest.raises(RequestError, match="the messages use all private-use characters"):
        encode_chat(one, template, [{"role": "user", "content": everything + "\U000ffffe\U000fffff"}])


def test_a_content_that_is_all_border_is_marked_whole(chat: Chat) -> None:
    """A template that looks inside: the content is the end of one token and the start of another at once."""
    source = "{% if 'm_e' in messages[0].content %}x{% endif %}<|{{ messages[1].content }}_end|>"
    one, template = chat(source)
    messages = [{"role": "user", "content": "am_em"}, {"role": "user", "content": "im_end|><|im"}]
    ids = encode_chat(one, template, messages)
    assert 257 not in ids
    assert one.decode(ids) == "x<|im_end|><|im_end|>"


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|>b", "im_end|>"])
def test_a_template_that_looks_for_special_tokens_in_messages_gets_none(text: str, chat: Chat) -> None:
    """Hidden from it they give another text than the one that it writes: no ids are right then."""
    one, template = chat("{% if '_end|>' in messages[0].content %}found {% endif %}<|{{ messages[0].content }}")
    with pytest.raises(RequestError, match="special tokens that the template looks for"):
        encode_chat(one, template, [{"role": "user", "content": text}])
    ids = encode_chat(one, template, [{"role": "user", "content": text}], allow_special=True)
    assert ids == one.encode("found <|" + text, add_special_tokens=False)
    plain = encode_chat(one, template, [{"role": "user", "content": "a word"}])
    assert one.decode(plain) == "<|a word"


LIMITED = {
    "indent": "{{ messages | tojson(indent=17) }}",
    "sum": "{{ [[1], [2]] | sum(start=[]) }}",
    "round": "{{ 1.5 | round(301) }}",
    "product": "{{ (2 ** 60000) * (2 ** 60000) }}",
    "power": "{{ 2 ** 70000 }}",
    "private": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "characters-in-all": "{% for i in range(200) %}{% set x = 'a' * 16000000 %}{% endfor %}",
    "a-table-of-long-texts": "{{ ('a' * 1000000).translate({97: 'b' * 1000}) }}",
    "fields": "{{ '{0}{0}{0}{0}{0}{0}{0}{0}'.format('a' * 4000000) }}",
    "list-of-texts": "{{ ['a' * 4000000] * 8 }}",
}


@pytest.mark.parametrize("case", LIMITED)
def test_a_template_over_a_limit_is_stopped(case: str, chat: Chat) -> None:
    with pytest.raises(ChatTemplateError, match=r"a\.jinja"):
        chat(LIMITED[case])[1].render(USER)


ALLOWED = {
    "{{ [1, 2.5] | sum }}{{ [{'n': 1}, {'n': 2}] | sum('n') }}": "3.53",
    "{{ 'ab' | center(6) }}|{{ 'a\nb' | indent('--') }}|{{ 7.25 | round(1, 'floor') }}": "  ab  |a\n--b|7.2",
    "{{ 'a-b-c'.replace('-', '+', 1) }}{{ 'a\tb'.expandtabs(2) }}{{ 'a\tb'.expandtabs() }}": "a+b-ca ba       b",
    "{{ 'abc'.translate({97: 'x'}) }}{{ 'a b c'.rsplit(' ', 1) }}": "xbc['a b', 'c']",
    "{{ 'a\nb'.splitlines() }}": "['a', 'b']",
    "{{ 3 * [1] }}{{ 2 * 'ab' }}{{ [1] + [2] }}{{ (1, 2) + (3,) }}": "[1, 1, 1]abab[1, 2](1, 2, 3)",
    "{{ '%s-%05d' % ('x', 7) }}{{ '%(a)s' % {'a': 1} }}{{ 7 % 4 }}": "x-0000713",
    "{{ {'b': [1, {'c': 2}]} | tojson(separators=(',', ':')) }}": '{"b":[1,{"c":2}]}',
    "{{ 'x'.join(['a', 1 | string, 'b']) }}{{ ''.join([]) }}{{ 'ab'.zfill(4) }}{{ 'a'.ljust(3, '.') }}": "ax1xb00aba..",
    "{{ strftime_now('%%') }}": "%",
}  # fmt: skip


@pytest.mark.parametrize("source", ALLOWED)
def test_what_stays_under_the_limits_is_made(source: str, chat: Chat) -> None:
    assert chat(source)[1].render(USER) == ALLOWED[source]


# ---- requests -------------------------------------------------------------------------------------------------------


def test_the_eos_of_the_tokenizer_ends_an_answer_too(tmp_path: Path) -> None:
    config = {**TL, "vocab_size": 258, "eos_token_id": None}
    folder = tiny.write(write_tiny_model(tmp_path / "model", config, seed=4), tiny.byte_level())
    with pyengine.load(folder, quant="f32", threads=1) as engine:
        assert engine.tokenizer is not None
        free = engine.generate("Hi", max_tokens=20).tokens
        assert len(free) == 20
        engine.tokenizer.eos_token_id = free[7]
        result = engine.generate("Hi", max_tokens=20)
    assert (result.tokens, result.stop_reason) == (free[: free.index(free[7])], free[7])


def test_a_stop_string_that_ends_with_the_text_is_found_at_the_end(tmp_path: Path) -> None:
    """The last character is complete only when nothing more comes: a replacement for bytes that were cut."""
    config = {**TL, "vocab_size": 258, "eos_token_id": None}
    folder = tiny.write(write_tiny_model(tmp_path / "model", config, seed=4), tiny.byte_level())
    with pyengine.load(folder, quant="f32", threads=1) as engine:
        for seed in range(200):
            options: dict[str, Any] = {"max_tokens": 6, "temperature": 5.0, "seed": seed}
            plain = engine.generate("Hi", **options)
            pieces = [piece.text for piece in engine.stream("Hi", **options)]
            held = plain.text.endswith("\ufffd") and "\ufffd" not in "".join(pieces[:-1])
            if held:
                break
        assert held, "no answer ends inside a character"
        stopped = engine.generate("Hi", stop="\ufffd", **options)
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "\ufffd")
        assert stopped.text == plain.text.split("\ufffd")[0]


def test_closing_a_stream_twice_keeps_its_result(tmp_path: Path) -> None:
    with pyengine.load(write_tiny_model(tmp_path, TL), quant="f32", threads=1) as engine:
        stream = engine.stream([1], max_tokens=9, ignore_eos=True)
        next(stream)
        stream.close()
        first = stream.result
        stream.close()
        stream.end()
        assert stream.result is first
        assert first is not None
        assert first.finish_reason == "cancelled"
