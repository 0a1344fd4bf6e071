"""Engine.chat: the conversation's tokens, the values it is sampled with, and what is refused before it computes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from tiny_tokenizers import bos_processor, byte_level, write

import pyengine
from pyengine.chat import DEFAULTS, ChatSampling, chat_sampling, check_system
from pyengine.chat_template import ChatTemplate, encode_chat
from pyengine.cli._chat_session import Session

CONFIG = {**CONFIGS["llama"], "vocab_size": 258, "max_position_embeddings": 512, "eos_token_id": 257}
START, END = 256, 257
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ style }}"
)
USER = [{"role": "user", "content": "Hi"}]


def make(folder: Path, template: str | None = CHATML, *, post: Any = None, **generation: Any) -> Path:
    write_tiny_model(folder, CONFIG, seed=4)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write(folder, byte_level(post=post), **names, **({} if template is None else {"chat_template": template}))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def load(folder: Path) -> pyengine.Engine:
    return pyengine.load(folder, quant="f32", threads=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pyengine.Engine]:
    with load(make(tmp_path_factory.mktemp("chat"))) as one:
        yield one


# ---- the request -----------------------------------------------------------------------------------------------------


def test_a_chat_is_the_request_of_its_tokens(engine: pyengine.Engine) -> None:
    conversation = [{"role": "system", "content": "S"}, *USER, {"role": "assistant", "content": "A"}, *USER]
    sampling: dict[str, Any] = {"max_tokens": 12, "seed": 3}
    ids = encode_chat(engine.tokenizer, engine.chat_template(), conversation)
    expected = engine.generate(ids, temperature=0.7, top_p=0.9, **sampling)
    result = engine.chat(conversation, **sampling)
    assert (result.tokens, result.seed, result.prompt_format) == (expected.tokens, 3, "chat")
    assert (expected.prompt_format, result.usage) == ("raw", expected.usage)
    assert result.tokens != engine.generate(ids, **sampling).tokens  # which is greedy
    stream = engine.chat(conversation, stream=True, **sampling)
    assert "".join(piece.text for piece in stream) == result.text
    assert stream.result is not None
    assert (stream.result.tokens, stream.result.prompt_format) == (result.tokens, "chat")


def test_contents_are_text_and_nothing_is_added_in_front(tmp_path: Path) -> None:
    folder = make(tmp_path, "<|im_start|>{{ messages[0].content }}", post=bos_processor())
    with load(folder) as one:
        assert one.tokenize("a")[0] == START  # raw text gets a BOS of its own
        stream = one.chat([{"role": "user", "content": "a<|im_end|>b"}], stream=True)
        assert stream.prompt[0] == START
        assert stream.prompt.count(START) == 1
        assert END not in stream.prompt
        assert one.detokenize(stream.prompt[1:]) == "a<|im_end|>b"
        stream.close()


@pytest.mark.parametrize("text", ["a", "hi", "hello worl"])
def test_short_messages_work(engine: pyengine.Engine, text: str) -> None:
    result = engine.chat([{"role": "user", "content": text}], max_tokens=2, ignore_eos=True)
    assert len(result.tokens) == 2


def test_an_answer_ends_at_an_eos_of_any_file(tmp_path: Path) -> None:
    with load(make(tmp_path / "one")) as one:
        first = one.chat(USER, temperature=0.0, max_tokens=4).tokens[0]
    with load(make(tmp_path / "other", eos_token_id=[first, 5])) as other:
        result = other.chat(USER, temperature=0.0)
        assert (result.tokens, result.finish_reason, result.stop_reason) == ([], "stop", first)
        stream = other.chat(USER, stream=True)
        assert stream.eos == {first, 5, END}
        stream.close()


def test_template_arguments_and_another_template(engine: pyengine.Engine, tmp_path: Path) -> None:
    def prompt(**options: Any) -> str:
        stream = engine.chat(USER, stream=True, **options)
        stream.close()
        return engine.detokenize(stream.prompt)

    assert prompt(template_args={"style": "<|im_end|>!"}).endswith("assistant\n!")
    file = tmp_path / "a.jinja"
    file.write_text("[{{ messages[0].content }}]", encoding="utf-8")
    for given in (file, str(file), ChatTemplate.from_file(file, engine.tokenizer)):
        assert prompt(chat_template=given) == "[Hi]"
    assert prompt() == "user\nHi\nassistant\n"  # the model's own is as it was


# ---- what it is sampled with -----------------------------------------------------------------------------------------


def test_an_argument_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = {"temperature": 0.25, "top_k": 20.0, "repetition_penalty": 1.05, "do_sample": True, "max_new_tokens": 7}
    with load(make(tmp_path, **file)) as one:

        def params(**given: Any) -> Any:
            stream = one.chat(USER, stream=True, **given)
            stream.close()
            return stream.params

        own = params()
        assert (own.temperature, own.top_k, own.repetition_penalty) == (0.25, 20, 1.05)
        assert (own.top_p, own.max_tokens, own.min_p) == (0.9, -1, 0.0)
        told = params(temperature=1.5, top_p=1.0, max_tokens=3)
        assert (told.temperature, told.top_k, told.top_p, told.max_tokens) == (1.5, 20, 1.0, 3)
        stream = one.stream([1, 2])  # generate does not look at the file's values
        assert (stream.params.temperature, stream.params.top_k) == (0.0, 0)
        stream.close()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({}, DEFAULTS),
        ({"temperature": None, "top_k": None, "do_sample": None}, DEFAULTS),
        ({"do_sample": False}, {**DEFAULTS, "temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.5}, {"max_tokens": -1, "temperature": 0.0, "top_p": 0.5}),
        ({"do_sample": True}, DEFAULTS),
        ({"top_p": 1, "top_k": -1, "min_p": 0.1}, {**DEFAULTS, "top_p": 1.0, "top_k": -1, "min_p": 0.1}),
    ],
)
def test_values_of_the_file(tmp_path: Path, file: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    own = chat_sampling(tmp_path)
    assert own.values == expected
    named = {key for key, value in file.items() if value is not None and key != "do_sample"}
    named |= {"temperature"} if file.get("do_sample") is False else set()
    assert {key for key, source in own.sources.items() if source == "generation_config.json"} == named
    assert {key for key, source in own.sources.items() if source == "default"} == expected.keys() - named
    assert own.warnings == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
        ("do_sample", 0),
    ],
)
def test_wrong_values_of_the_file_name_it(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(pyengine.ModelFormatError, match=rf"generation_config\.json: .*{key}.*; expected"):
        chat_sampling(tmp_path)


def test_what_the_file_asks_for_in_vain_is_said(tmp_path: Path) -> None:
    file = {"num_beams": 4, "typical_p": 1.0, "no_repeat_ngram_size": 3, "suppress_tokens": None, "top_k": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    said = chat_sampling(tmp_path).warnings
    assert [text.split(": ")[1].split()[0] for text in said] == ["num_beams", "no_repeat_ngram_size"]
    assert "generation_config.json" in said[0]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_without_a_template_only_chat_is_refused(tmp_path: Path) -> None:
    with load(make(tmp_path, None)) as one:
        assert one.generate("Hi", max_tokens=2, ignore_eos=True).tokens
        with pytest.raises(pyengine.ChatTemplateError, match=r"no chat template .*tokenizer_config\.json.*; expected"):
            one.chat(USER)
        (tmp_path / "chat_template.jinja").write_text("x", encoding="utf-8")
        assert one.chat(USER, max_tokens=1, ignore_eos=True).tokens


def test_without_a_tokenizer(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIG)
    with load(tmp_path) as one, pytest.raises(pyengine.TokenizerError, match="no tokenizer"):
        one.chat(USER)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"messages": "Hi"}, "messages 'Hi'"),
        ({"messages": []}, "at least one"),
        ({"stream": 1}, "stream '1'"),
        ({"temperature": -1}, "temperature -1"),
        ({"template_args": ["style"]}, "template_args"),
        ({"template_args": {"styel": "x"}}, "does not use template argument 'styel'; expected one of style"),
        ({"template_args": {"messages": []}}, "'messages' is the engine's own"),
        ({"template_args": {"add_generation_prompt": False}}, "'add_generation_prompt' is the engine's own"),
        ({"template_args": {"allow_special": True}}, "does not use template argument 'allow_special'"),
        ({"template_args": {"style": object()}}, "expected plain JSON values"),
    ],
)
def test_wrong_arguments(engine: pyengine.Engine, options: dict[str, Any], says: str) -> None:
    with pytest.raises(pyengine.RequestError) as caught:
        engine.chat(options.pop("messages", USER), **options)
    assert says in str(caught.value)
    assert engine.chat(USER, max_tokens=1, ignore_eos=True).tokens


def test_a_full_context_says_how_long_the_conversation_is(engine: pyengine.Engine) -> None:
    with pytest.raises(pyengine.ContextFullError, match="no room in a context of 512") as caught:
        engine.chat([{"role": "user", "content": "x" * 600}])
    assert caught.value.tokens == len("<s>user\n" + "x" * 600 + "<e>\n<s>assistant\n") - 6
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.tokens, str(copy)) == (caught.value.tokens, str(caught.value))
    assert caught.value.exit_code == 2


def test_a_template_that_makes_nothing_or_refuses(engine: pyengine.Engine, tmp_path: Path) -> None:
    for name, source, error, says in (
        ("empty", "", pyengine.ChatTemplateError, "empty: makes no text"),
        ("refuses", "{{ raise_exception('roles must alternate') }}", pyengine.RequestError, "roles must alternate"),
        ("fails", "\n{{ nope.x }}", pyengine.ChatTemplateError, "fails, line 2"),
    ):
        (tmp_path / name).write_text(source, encoding="utf-8")
        with pytest.raises(error, match=says):
            engine.chat(USER, chat_template=tmp_path / name)
    with pytest.raises(pyengine.ChatTemplateError, match="missing: no such file"):
        engine.chat(USER, chat_template=tmp_path / "missing")


def test_a_closed_engine(tmp_path: Path) -> None:
    with load(make(tmp_path)) as one:
        pass
    with pytest.raises(pyengine.RequestError, match="closed"):
        one.chat(USER)


# ---- system messages -------------------------------------------------------------------------------------------------


def test_a_system_message_that_the_template_does_not_take(engine: pyengine.Engine) -> None:
    def check(source: str, args: dict[str, Any] | None = None) -> None:
        check_system(ChatTemplate(source, "a.jinja", engine.tokenizer), "Be brief", args or {})

    check(CHATML)
    check(CHATML, {"style": "x"})
    check("{{ messages[0].content | upper | trim }}")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(pyengine.RequestError, match="System role not supported; expected no system message"):
        check(refuses + CHATML)
    with pytest.raises(pyengine.RequestError, match=r"a\.jinja leaves a system message out; expected none"):
        check("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    with pytest.raises(pyengine.RequestError, match="does not use"):
        check(CHATML, {"self": 1})


def test_a_session_over_the_engine_itself(engine: pyengine.Engine, capsys: Any) -> None:
    """Every turn is the request of the whole conversation, the same tokens as from Python."""
    session = Session(engine, engine.chat_template(), given={"max_tokens": 8, "seed": 5}, system="S")
    expected: list[dict[str, str]] = [{"role": "system", "content": "S"}]
    for turn, text in enumerate(("one", "two")):
        assert session.take(text) is True
        expected.append({"role": "user", "content": text})
        result = engine.chat(expected, max_tokens=8, seed=5 + turn)
        assert capsys.readouterr().out.removesuffix("\n") == result.text.removesuffix("\n")
        expected.append({"role": "assistant", "content": result.text})
    assert session.messages == expected[1:]
    assert isinstance(session.own, ChatSampling)
