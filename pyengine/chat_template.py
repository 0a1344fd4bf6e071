"""Stage 5, chat_template: messages -> one text -> token ids, by the jinja template that came with the model.

What a message says is never parsed for special tokens. Only special tokens that the template itself writes are tokens;
the same text inside a message is encoded as ordinary text. To tell the two apart, the messages are rendered a second
time with the characters of their contents replaced, one for one, by private-use characters ("marked"); in that text
every special token still to be found is the template's. This does not depend on what the template does to a content
(trim it, cut it, join it to others), as long as it does the same to the marked one. Where it does not, because it looks
for a word inside a content, only the special tokens inside contents are marked, and what at a content's border could
become one. A template that looks for those gets an error: no ids would be those of its text with its own tokens alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from pyengine.errors import ChatTemplateError, RequestError
from pyengine.strict_json import shown
from pyengine.template_file import MAX_TEMPLATE_BYTES, find_template, read_template
from pyengine.template_limits import BUDGET, MAX_RENDERED_BYTES, Budget, LimitError
from pyengine.template_sandbox import RefusedError, Sandbox
from pyengine.tokenizer import Tokenizer
from pyengine.tokenizer_file import NAMED_TOKENS

MAX_DEPTH = 64
ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
OWN_VARIABLES = ("messages", "add_generation_prompt")
# Planes 15 and 16 are private use: nothing is encoded there, no normalizer touches them.
FIRST_MARK, LAST_MARK = 0xF0000, 0x10FFFD

Message = Mapping[str, Any]
Mark = Callable[[str], str]


class ChatTemplate:
    """A compiled template. `where` names it in messages. Safe to use from several threads."""

    def __init__(self, source: str, where: str, tokenizer: Tokenizer) -> None:
        self.where = where
        self.token_names = tokenizer.token_names
        if len(source.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
            raise ChatTemplateError(f"{where}: over {MAX_TEMPLATE_BYTES} bytes; expected a shorter template")
        self._source, self._environment = source, Sandbox()
        token = BUDGET.set(Budget())  # the compiler runs what is constant
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"{where}, line {error.lineno}: {error.message}; expected a jinja template"
            ) from None
        except Exception as error:  # too deep for the compiler, say: RecursionError, SyntaxError, MemoryError
            raise ChatTemplateError(f"{where}: {error or type(error).__name__}; expected a jinja template") from None
        finally:
            BUDGET.reset(token)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a model folder, as `find_template` finds it; None if it has none.

        Errors: ChatTemplateError naming file, line and what is wrong.
        """
        found = find_template(folder)
        return None if found is None else cls(*found, tokenizer)

    @classmethod
    def from_file(cls, path: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """The template in a jinja file. Errors: ChatTemplateError naming the file."""
        return cls(*read_template(path), tokenizer)

    def check_arguments(self, template_args: Mapping[str, Any]) -> None:
        """RequestError for a template argument that the template never looks at, or that is the engine's own."""
        for name in template_args:
            if name in OWN_VARIABLES:
                raise RequestError(f"template argument {name!r} is the engine's own; expected another name")
        unused = sorted(set(template_args) - self.variables) if template_args else []
        if unused:
            known = self.variables - {*OWN_VARIABLES, *NAMED_TOKENS, *self._environment.globals}
            expected = f"one of {', '.join(sorted(known))}" if known else "no template arguments"
            raise RequestError(f"{self.where} does not use template argument {shown(unused[0])}; expected {expected}")

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template looks up and does not set itself."""
        token = BUDGET.set(Budget())
        try:
            return frozenset(meta.find_undeclared_variables(self._environment.parse(self._source)))
        finally:
            BUDGET.reset(token)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_args: Any) -> str:
        """The text of a conversation.

        messages: each {"role": ..., "content": ...} and whatever else the template reads, plain JSON values. A content
        that is a list of {"type": "text", "text": ...} is those texts joined. template_args: further variables.
        Errors: RequestError for wrong messages, or with the template's own words where it refuses them;
        ChatTemplateError for everything else, with the line.
        """
        return self._render(check_messages(messages), add_generation_prompt, template_args, Budget())

    def _render(self, messages: list[Any], prompt: bool, args: Mapping[str, Any], budget: Budget) -> str:
        self.check_arguments(args)
        variables = {"tools": None, "documents": None, **self.token_names, **_plain(dict(args), "template arguments")}
        variables |= {"messages": messages, "add_generation_prompt": prompt}
        budget.begin(variables)
        token = BUDGET.set(budget)
        try:
            pieces, size = [], 0
            for piece in self._template.generate(variables):
                size += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
                if size > MAX_RENDERED_BYTES:
                    raise LimitError(f"rendered more than {MAX_RENDERED_BYTES} bytes")
                budget.tick()
                pieces.append(piece)
            return "".join(pieces)
        except RefusedError as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from None
        except Exception as error:  # jinja2 passes on what Python raises: TypeError, OverflowError, RecursionError ...
            line = _line(error)
            at = f", line {line}" if line else ""
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ChatTemplateError(f"{self.where}{at}: {message}; expected a template that runs") from None
        finally:
            BUDGET.reset(token)


def _line(error: BaseException) -> int | None:
    """The template's line an error came from: jinja2 rewrites tracebacks to it."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


# ---- messages --------------------------------------------------------------------------------------------------------


def check_messages(messages: Sequence[Message]) -> list[Any]:
    """A copy of the messages as plain JSON values, so that no template can reach the caller's objects.

    Errors: RequestError naming the message and the key.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages {shown(messages)}; expected a list of at least one role and content")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {shown(message)}; expected a role and a content")
    plain: dict[str, Any] = _plain(dict(message), where)
    role = plain.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise RequestError(f"{where}.role is {shown(role)}; expected letters, digits, '_', '.' or '-'")
    content = plain.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) != len(content):
            raise RequestError(f"{where}.content has a part that is no text; expected parts of type 'text'")
        plain["content"] = "".join(texts)
    elif not isinstance(content, str) and not (content is None and plain.get("tool_calls")):
        raise RequestError(f"{where}.content is {shown(content)}; expected text")
    return plain


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError(f"{where}: nesting deeper than {MAX_DEPTH}; expected flat values")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{where}: key {shown(key)}; expected text keys")
        return {str.__str__(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise RequestError(f"{where}: {shown(value)} of type {type(value).__name__}; expected plain JSON values")


# ---- encoding, with contents never parsed ----------------------------------------------------------------------------


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    /,
    *,
    add_generation_prompt: bool = True,
    allow_special: bool = False,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation; nothing is added to what the template writes (it writes BOS itself, if any).

    allow_special: special tokens inside messages are parsed too. Errors: those of `ChatTemplate.render` and
    `Tokenizer.encode`; RequestError where the template writes another text when special tokens in messages are marked.
    """
    plain, budget, args = check_messages(messages), Budget(), dict(template_args or {})
    text = template._render(plain, add_generation_prompt, args, budget)
    if allow_special or tokenizer.special_pattern is None:
        return tokenizer.encode(text, add_special_tokens=False)
    marks = _Marks(tokenizer, plain)

    def render_marked(mark: Mark) -> str:
        return template._render(_map_contents(plain, mark), add_generation_prompt, args, budget)

    try:
        marked = render_marked(marks.everything)
    except (RequestError, ChatTemplateError):  # it looks for something inside a content
        marked = ""
    if marks.undo(marked) != text:
        marked = render_marked(marks.special_tokens)
        if marks.undo(marked) != text:
            raise RequestError(
                "the messages hold special tokens that the template looks for; expected messages without them"
            )
    same = _spans(tokenizer, marked) == _spans(tokenizer, text)
    if same and not tokenizer.normalizes_special:  # no content has a special token in it
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_parts(list(marks.parts(marked)))


def _spans(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    assert tokenizer.special_pattern is not None
    return [match.span() for match in tokenizer.special_pattern.finditer(text)]


def _map_contents(messages: list[Any], mark: Mark) -> list[Any]:
    """The messages with every text in them marked but the roles (checked to be plain words) and the keys."""

    def mapped(value: Any) -> Any:
        if isinstance(value, str):
            return mark(value)
        if isinstance(value, dict):
            return {key: mapped(item) for key, item in value.items()}
        return [mapped(item) for item in value] if isinstance(value, list) else value

    return [{**mapped(message), "role": message["role"]} for message in messages]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


class _Marks:
    """One private-use character for each character of a special token, none of them in the messages.

    White space is not marked, since templates trim it, nor is what JSON would escape: a special token has other
    characters too.
    """

    def __init__(self, tokenizer: Tokenizer, messages: list[Any]) -> None:
        self._specials = [token for token in tokenizer.special_tokens if not token.isspace()]
        letters = sorted({c for token in self._specials for c in token if not c.isspace() and c not in '"\\'})
        used = {c for text in _texts(messages) for c in text if ord(c) >= FIRST_MARK}
        free = (chr(code) for code in range(FIRST_MARK, LAST_MARK + 1) if chr(code) not in used)
        pairs = list(zip(letters, free, strict=False))
        if len(pairs) < len(letters):
            raise RequestError("the messages use all private-use characters; expected some of them free")
        self._mark = {ord(letter): mark for letter, mark in pairs}
        self._undo = {ord(mark): letter for letter, mark in pairs}
        marks = "".join(mark for _, mark in pairs)
        self._runs = re.compile(f"[{re.escape(marks)}]+|[^{re.escape(marks)}]+")
        self._pattern = tokenizer.special_pattern

    def everything(self, text: str) -> str:
        return text.translate(self._mark)

    def special_tokens(self, text: str) -> str:
        """Mark whole special tokens, and at the borders what could become one together with its neighbours."""
        assert self._pattern is not None
        text = self._pattern.sub(lambda match: self.everything(match.group()), text)
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        first, last = start, end
        for token in self._specials:
            for k in range(1, len(token)):
                if text.startswith(token[k:], start):
                    first = max(first, start + len(token) - k)
                if text.endswith(token[:k], start, end):
                    last = min(last, end - k)
        if first >= last:
            return self.everything(text)
        return self.everything(text[:first]) + text[first:last] + self.everything(text[last:])

    def undo(self, text: str) -> str:
        return text.translate(self._undo)

    def parts(self, marked: str) -> Iterator[tuple[str, bool]]:
        """The text in parts, True where special tokens are the template's own."""
        for match in self._runs.finditer(marked):
            run = match.group()
            yield self.undo(run), ord(run[0]) not in self._undo
