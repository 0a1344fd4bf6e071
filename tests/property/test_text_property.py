"""Text, over random inputs: streams equal full decodes, pieces of any cut stop alike, contents stay text."""

from __future__ import annotations

import codecs
import tempfile
from functools import cache
from pathlib import Path

import tiny_tokenizers as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.chat_template import ChatTemplate, encode_chat
from pyengine.detokenize import StopMatcher
from pyengine.tokenizer import Tokenizer

MERGES = (("h", "e"), ("he", "l"), ("<", "|"), ("|", ">"), ("i", "m"))
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
# words whose letters meet at every border of a special token
FRAGMENTS = [
    "<",
    "|",
    "<|",
    "im_",
    "start",
    "end",
    "|>",
    "<|im_end|>",
    "<|im_start|>",
    "</s>",
    "<s>",
    "s>",
    " ",
    "\n",
    "x",
    "\u2581",
]
PIECES = st.lists(st.one_of(st.sampled_from(FRAGMENTS), TEXTS), max_size=8).map("".join)
KINDS = st.sampled_from(["byte_level", "legacy", "metaspace"])

often = settings(deadline=None, max_examples=300, derandomize=True)


@cache
def loaded(kind: str) -> tuple[Tokenizer, object]:
    base = tiny.byte_level(merges=MERGES) if kind == "byte_level" else tiny.sentencepiece(legacy=kind == "legacy")
    names = tiny.SPECIAL if kind == "byte_level" else ("<s>", "</s>")
    with tempfile.TemporaryDirectory() as folder:
        tiny.write(Path(folder), base, bos_token=names[0], eos_token=names[1])
        return Tokenizer.load(Path(folder), vocab_size=400), base


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.stream()
    return [*map(decoder.push, ids), decoder.finish()]


@often
@given(KINDS, TEXTS)
def test_report_e09_texts_come_back_through_the_stream(kind: str, text: str) -> None:
    tokenizer, base = loaded(kind)
    ids = tokenizer.encode(text, parse_special=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == base.decode(ids)  # type: ignore[attr-defined]
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert pieces[-1] == ""
    if kind == "byte_level":
        assert "".join(pieces) == text


@often
@given(st.lists(st.integers(0, 265), max_size=40))
def test_any_byte_level_ids_stream_as_the_package_decodes(ids: list[int]) -> None:
    tokenizer, base = loaded("byte_level")
    assert "".join(stream(tokenizer, ids)) == base.decode(ids)  # type: ignore[attr-defined]


@often
@given(st.binary(max_size=40))
def test_byte_tokens_stream_as_utf8_with_replacements(data: bytes) -> None:
    """Nothing is held back but the beginning of a character, of at most three bytes."""
    tokenizer, _ = loaded("metaspace")
    ids = [3 + byte for byte in data]
    pieces = stream(tokenizer, ids)
    whole = data.decode("utf-8", "replace")
    assert "".join(pieces) == whole.removeprefix(" ")
    for end in range(len(data) + 1):
        held = codecs.getincrementaldecoder("utf-8")("replace")
        complete = held.decode(data[:end])
        assert "".join(pieces[:end]) == complete.removeprefix(" ")
        assert len(held.getstate()[0]) <= 3


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@often
@given(
    st.text("ab<", max_size=30),
    st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 100), max_size=8),
)
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stops: list[str], places: list[int]) -> None:
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    end, _, first = min(ends, default=(len(text), 0, ""))
    matcher, shown = StopMatcher(stops), ""
    for piece in cut(text, places):
        out, stopped = matcher.push(piece)
        shown += out
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        if stopped:
            break
    else:
        shown += matcher.finish()
    assert (shown, matcher.matched) == (text[: end - len(first)], first or None)


TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}",
    "trimmed": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "side by side": "{{ bos_token }}{% for m in messages %}{{ m.content.strip() }}{% endfor %}{{ eos_token }}",
    "looks inside": (
        "{{ bos_token }}{% for m in messages %}{{ m.content.split('x')[-1] if 'x' in m.content else m.content }}"
        "{{ eos_token }}{% endfor %}"
    ),
}


@often
@given(KINDS, st.sampled_from(sorted(TEMPLATES)), st.lists(PIECES, min_size=1, max_size=3))
def test_malformed_e35_report_e17_no_content_makes_a_special_token(kind: str, name: str, contents: list[str]) -> None:
    tokenizer, _ = loaded(kind)
    template = ChatTemplate(TEMPLATES[name], "t", tokenizer)
    messages = [{"role": "user", "content": content} for content in contents]
    ids = encode_chat(tokenizer, template, messages)
    special = [i for i in ids if i in tokenizer.special_tokens.values() and i != 0]  # 0 is <unk>
    ends = 1 if name == "side by side" else len(messages)
    assert special == [tokenizer.bos_token_id] + [tokenizer.eos_token_id] * ends
    text = template.render(messages)
    if tokenizer.special_pattern is not None and len(tokenizer.special_pattern.findall(text)) == 1 + ends:
        assert ids == tokenizer.encode(text, add_special_tokens=False)  # nothing to quote: as the whole text


@often
@given(KINDS, PIECES)
def test_unparsed_text_has_no_special_token(kind: str, text: str) -> None:
    tokenizer, base = loaded(kind)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not set(ids) & (set(tokenizer.special_tokens.values()) - {0})
    base.encode_special_tokens = True  # type: ignore[attr-defined]
    try:
        assert ids == base.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
    finally:
        base.encode_special_tokens = False  # type: ignore[attr-defined]
