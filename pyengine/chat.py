"""Stage 5, chat: a conversation as one request: through the model's template, sampled as its own files suggest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

from pyengine.config_values import ConfigValues
from pyengine.errors import ChatTemplateError, ModelFormatError, RequestError
from pyengine.gguf_file import is_gguf
from pyengine.sampling import MAX_TOP_K, SamplingParams
from pyengine.strict_json import shown

if TYPE_CHECKING:
    from pyengine.chat_template import ChatTemplate, Message
    from pyengine.engine import Engine
    from pyengine.generate import GenerationStream
    from pyengine.results import GenerationResult

DEFAULTS: dict[str, Any] = {"max_tokens": -1, "temperature": 0.7, "top_p": 0.9}
FILE = "generation_config.json"
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
# What transformers would sample with besides, and the values that mean "off" there.
NOT_SAMPLED_WITH: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "guidance_scale": (None, 1),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
}


class ChatSampling(NamedTuple):
    """What a chat samples with unless told. values: of SamplingParams. sources: where each of them is from.
    warnings: values of generation_config.json that change nothing here."""

    values: dict[str, Any]
    sources: dict[str, str]
    warnings: tuple[str, ...]


def chat_sampling(folder: Path) -> ChatSampling:
    """The values of generation_config.json (`do_sample: false` is temperature 0), else DEFAULTS, one by one.

    Errors: ModelFormatError naming file, key and value.
    """
    values: dict[str, Any] = dict(DEFAULTS)
    sources = dict.fromkeys(values, "default")
    path = folder / FILE
    if not path.exists():
        return ChatSampling(values, sources, ())
    config = ConfigValues.read(path)
    given: dict[str, Any] = {key: config.number(key, config.get(key)) for key in NUMBERS if config.get(key) is not None}
    if config.get("top_k") is not None:
        given["top_k"] = config.integer("top_k", -1, MAX_TOP_K)
    if not config.flag("do_sample", True):
        given["temperature"] = 0.0
    for key, value in given.items():
        try:
            SamplingParams(**{key: value})
        except RequestError as error:
            raise ModelFormatError(f"{path}: {error}") from None
    odd = {key: config.get(key) for key, off in NOT_SAMPLED_WITH.items() if config.get(key) not in off}
    warnings = tuple(f"{path}: {key} {shown(value)} changes nothing here" for key, value in odd.items())
    return ChatSampling(values | given, sources | dict.fromkeys(given, FILE), warnings)


def check_system(template: ChatTemplate, text: str, template_args: Mapping[str, Any]) -> None:
    """RequestError where the template refuses a system message, or leaves it out without a word."""
    template.check_arguments(template_args)

    def rendered(content: str) -> str:
        messages = [{"role": "system", "content": content}, {"role": "user", "content": "?"}]
        return template.render(messages, **template_args)

    try:
        left_out = rendered(text) == rendered(f"{text}?")
    except RequestError as error:
        raise RequestError(f"{error}; expected no system message with this template") from None
    if left_out:
        raise RequestError(f"{template.where} leaves a system message out; expected none with this template")


class ChatRequests:
    """Methods of Engine."""

    _chat_template: ChatTemplate | None = None
    _chat_sampling: ChatSampling | None = None

    @overload
    def chat(
        self, messages: Sequence[Message], *, stream: Literal[False] = False, **options: Any
    ) -> GenerationResult: ...

    @overload
    def chat(self, messages: Sequence[Message], *, stream: Literal[True], **options: Any) -> GenerationStream: ...

    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: bool = False,
        template_args: Mapping[str, Any] | None = None,
        chat_template: ChatTemplate | str | os.PathLike[str] | None = None,
        **sampling: Any,
    ) -> GenerationResult | GenerationStream:
        """The answer to a conversation: [{"role": "user", "content": "Hi"}, ...], through the model's chat template.

        What a message says is never read as a special token. stream: an iterator of pieces, as `stream` gives.
        template_args: further variables of the template, JSON values; one that it does not use is an error.
        chat_template: a jinja file in place of the model's template. Other keyword arguments are those of
        SamplingParams; what is not given is generation_config.json's, else DEFAULTS: until the end of the answer,
        temperature 0.7, top_p 0.9. Errors: RequestError for wrong messages and values, and in the template's own words
        where it refuses them; ContextFullError; ChatTemplateError without a template, and for one that does not run.
        """
        from pyengine.chat_template import encode_chat  # jinja2, which a load does without

        engine = cast("Engine", self)
        engine._check_open()
        if not isinstance(stream, bool):
            raise RequestError(f"stream {shown(stream)}; expected True or False")
        if template_args is not None and not isinstance(template_args, Mapping):
            raise RequestError(f"template_args {shown(template_args)}; expected names and values")
        template = self.chat_template(chat_template)
        ids = encode_chat(engine._need_tokenizer(), template, messages, template_args=template_args)
        if not ids:
            raise ChatTemplateError(f"{template.where}: makes no text of these messages; expected some")
        request = engine.stream(ids, **{**self.chat_sampling().values, **sampling})
        request.prompt_format = "chat"
        return request if stream else request.finish()

    def chat_template(self, file: ChatTemplate | str | os.PathLike[str] | None = None) -> ChatTemplate:
        """The model's template, compiled once, or that of a jinja file. Errors: ChatTemplateError, TokenizerError."""
        from pyengine.chat_template import ChatTemplate

        engine = cast("Engine", self)
        tokenizer = engine._need_tokenizer()
        if isinstance(file, ChatTemplate):
            return file
        if file is not None:
            return ChatTemplate.from_file(Path(file), tokenizer)
        if self._chat_template is None:
            self._chat_template = ChatTemplate.load(engine.folder, tokenizer)
        if self._chat_template is None:
            raise ChatTemplateError(no_template(engine.folder))
        return self._chat_template

    def chat_sampling(self) -> ChatSampling:
        """What `chat` samples with unless told."""
        if self._chat_sampling is None:
            self._chat_sampling = chat_sampling(cast("Engine", self).folder)
        return self._chat_sampling


def no_template(folder: Path) -> str:
    """What a model without a template is told with."""
    places = "key 'tokenizer.chat_template'" if is_gguf(folder) else "chat_template.jinja or tokenizer_config.json"
    return f"{folder}: no chat template ({places}); expected one, or a jinja file"
