"""Stage 7, cli chat_session: one conversation over one engine, and the commands that steer it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pyengine.chat import check_system
from pyengine.cli import _output
from pyengine.cli.generate import NOT_IN_CHAT
from pyengine.errors import ContextFullError, RequestError
from pyengine.sampling import SamplingParams

if TYPE_CHECKING:
    from pyengine.chat_template import ChatTemplate
    from pyengine.engine import Engine

COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
NAMES = {"temp": "temperature", "repeat_penalty": "repetition_penalty", "n": "max_tokens"}
HELP = """\
/help              this list
/set               the sampling values in force, and where each is from
/set NAME VALUE    change one of them, such as /set temperature 0.2; VALUE default takes it back
/system            the system message
/system TEXT       set it; a single - removes it. The conversation stays
/clear             start over: the conversation is forgotten, the system message stays
/regen             the last answer once more
/quit              leave, as Ctrl-D does
A \\ at the end of a line continues the message on the next one, and so does a pasted line break. Ctrl-C stops an
answer; what is there of it stays in the conversation. A line that starts with a space is never a command."""


def shown_value(value: Any) -> str:
    return "none" if value in (None, ()) else ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """All values of SamplingParams, given some. Errors: RequestError for a wrong one, and where no answer can be."""
    params = SamplingParams(**values)
    if params.max_tokens == 0:
        raise RequestError("max_tokens 0; expected at least 1, or -1 for all")
    return dataclasses.asdict(params)


def with_token_ids(entries: dict[str, Any]) -> dict[Any, Any]:
    """A JSON object with its keys as the numbers they spell, for logit_bias."""
    return {int(key) if key.isdecimal() else key: value for key, value in entries.items()}


class Session:
    """The messages so far, and what the next answer is sampled with.

    given: values of SamplingParams that options gave: they win over the model's own and the defaults.
    terminal: whether the answers are read on one. report: called with the record and the values of every answer.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        *,
        given: Mapping[str, Any],
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        terminal: bool = False,
        report: Callable[[dict[str, Any], Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.engine = engine
        self.template = template
        self.template_args = dict(template_args or {})
        template.check_arguments(self.template_args)
        self.own = engine.chat_sampling()
        self.given = dict(given)
        self.sources = dict.fromkeys(given, "option")
        self.values()
        self.system: str | None = None
        if system is not None:
            self.set_system(system)
        self.messages: list[dict[str, str]] = []
        self.requests = 0
        self.terminal = terminal
        self.report = report
        self.hint: str | None = None  # what the last answer's end means, where that is not its own end

    # ---- answers ------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> bool:
        """Answer a message, streamed to stdout; False if Ctrl-C stopped it."""
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> bool:
        """Answer the last message once more."""
        if not self.messages:
            raise RequestError("/regen: there is no answer yet; expected a message first")
        values = self.values()
        if values["temperature"] == 0:
            raise RequestError("/regen: at temperature 0 the answer would be the same; expected /set temperature X")
        return self._answer(self.messages[:-1])

    def _answer(self, messages: list[dict[str, str]]) -> bool:
        """The conversation is `messages` and the answer afterwards; what it was where there is no answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        values = self.values()
        if values["seed"] is not None:  # or a second answer at the same place would be the first again
            values["seed"] = (values["seed"] + self.requests) % 2**64
        try:
            stream = self.engine.chat(
                [*system, *messages],
                stream=True,
                template_args=self.template_args,
                chat_template=self.template,
                **values,
            )
        except ContextFullError as error:
            raise ContextFullError(self._full(error.tokens, alone=len(messages) == 1), error.tokens) from None
        self.requests += 1
        try:
            finished = self._write(stream)
        finally:
            stream.close()
        result = stream.result
        if result is None or (not finished and not result.text):
            return False
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        if result.finish_reason == "length":
            used = result.usage["total_tokens"]
            full = used >= self.engine.ctx_size
            self.hint = self._full(used) if full else f"stopped after {values['max_tokens']} tokens (max_tokens)"
        if self.report is not None:
            self.report(result.to_json(), values)
        return finished

    def _write(self, pieces: Iterable[Any]) -> bool:
        """The text as it comes, each piece flushed, then a line break; False if Ctrl-C ended it."""
        finished, last = True, ""
        try:
            for piece in pieces:
                if piece.text:
                    sys.stdout.write(visible(piece.text) if self.terminal else piece.text)
                    sys.stdout.flush()
                    last = piece.text[-1]
        except KeyboardInterrupt:
            finished = False
        if last != "\n":
            print(flush=True)
        return finished

    def _full(self, tokens: int, *, alone: bool = False) -> str:
        size, longest = self.engine.ctx_size, self.engine.spec.max_context
        if alone:
            return f"this message takes {tokens} tokens, the context has {size}; expected a shorter one"
        more = f", or a start with -c above {size}" if size < longest else ""
        return f"the context is full: {tokens} tokens of {size}; /clear starts over{more}"

    # ---- values -------------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Every value of SamplingParams that is in force. Errors: RequestError for a wrong one."""
        return checked({**self.own.values, **self.given})

    def describe(self) -> list[str]:
        """One line for each value: its name, what it is, where from."""
        sources = {**self.own.sources, **self.sources}
        values = {name: value for name, value in self.values().items() if name not in NOT_IN_CHAT}
        return [f"{name} {shown_value(value)} ({sources.get(name, 'default')})" for name, value in values.items()]

    def set(self, text: str) -> None:
        """`NAME VALUE`; VALUE is JSON, else text, and "default" goes back to what it was without options."""
        name, _, value = text.partition(" ")
        name = name.lstrip("-").replace("-", "_")
        name, value = NAMES.get(name, name), value.strip()
        if name not in self.values() or name in NOT_IN_CHAT:
            names = ", ".join(known for known in self.values() if known not in NOT_IN_CHAT)
            raise RequestError(f"/set {name}: no such value; expected one of {names}")
        if not value:
            raise RequestError(f"/set {name}: nothing to set it to; expected /set {name} VALUE")
        given, sources = {**self.given}, {**self.sources}
        if value == "default":
            given.pop(name, None)
            sources.pop(name, None)
        else:
            try:
                given[name] = json.loads(value, object_hook=with_token_ids)
            except (ValueError, RecursionError):
                given[name] = value
            sources[name] = "/set"
        checked({**self.own.values, **given})
        self.given, self.sources = given, sources
        if name == "seed":
            self.requests = 0

    def set_system(self, text: str) -> None:
        """Set the system message. RequestError, and nothing changes, where the template has none."""
        if not text:
            raise RequestError("the system message is empty; expected text")
        check_system(self.template, text, self.template_args)
        self.system = text

    # ---- commands -----------------------------------------------------------------------------------------------

    def take(self, text: str) -> bool | None:
        """Do what a line says: None to leave, else False if Ctrl-C stopped an answer. Errors: RequestError."""
        self.hint = None
        match = COMMAND.fullmatch(text.rstrip()) if text.startswith("/") else None
        if match is None:
            return self.ask(text) if text.strip() else True
        name, rest = match[1], (match[2] or "").strip()
        if rest and name not in ("set", "system"):
            raise RequestError(f"/{name} {rest}: /{name} takes nothing; expected it alone")
        if name == "quit":
            return None
        if name == "regen":
            return self.regenerate()
        self._command(name, rest)
        return True

    def _command(self, name: str, rest: str) -> None:
        lines: list[str] = []
        if name == "help":
            lines = HELP.splitlines()
        elif name == "clear":
            self.messages = []
        elif name == "set" and rest:
            self.set(rest)
        elif name == "set":
            lines = self.describe()
        elif name == "system" and rest == "-":
            self.system = None
        elif name == "system" and rest:
            self.set_system(rest)
        elif name == "system":
            lines = ["no system message" if self.system is None else _output.one_line(self.system)]
        else:
            raise RequestError(f"/{name}: no such command; expected one of /help's, or a space before the /")
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Control characters of a model's text as escapes, so that none of them reaches the terminal."""
    return CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)
