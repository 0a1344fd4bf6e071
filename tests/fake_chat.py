"""A fake engine that converses: it says what it was asked, so that a test can see what a conversation has become."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeResult, FakeStream, install

from pyengine.chat import ChatSampling, chat_sampling
from pyengine.chat_template import ChatTemplate
from pyengine.errors import ContextFullError

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ style }}"
    "{% if messages[0].role == 'system' and messages[0].content == 'no' %}{{ raise_exception('no system') }}{% endif %}"
)


class EchoResult(FakeResult):
    """What a chat looks at besides."""

    usage: dict[str, int]
    cached: int

    def to_json(self) -> dict[str, Any]:
        record = super().to_json()
        record["timings"]["cache_n"] = self.cached
        return record


class EchoStream(FakeStream):
    """cut: whether the answer ends for want of room."""

    def __init__(self, pieces: Any, seed: int | None, delay: float, cut: bool, engine: EchoEngine) -> None:
        super().__init__(pieces, seed, delay)
        self.cut, self.engine = cut, engine

    def _finish(self, reason: str) -> None:
        if self.result is None:
            reason = "length" if reason == "stop" and self.cut else reason
            self.result = EchoResult("".join(self._shown), reason, self._seed, len(self._shown))
            used = sum(len(message["content"]) for message in self.engine.requests[-1]["messages"])
            self.result.usage = {"total_tokens": used + len(self._shown)}
            self.result.cached = self.engine.cached


@dataclass
class EchoEngine(FakeEngine):
    """Answers with the number of messages and the last one, a piece a character, after `slow` for ever.

    pieces: given, they are every answer. messages: of all requests.
    """

    pieces: Any = None
    template: str = TEMPLATE
    own: ChatSampling | None = None
    cached: int = 0  # tokens that each request takes from the cache

    def chat_template(self, file: Any = None) -> ChatTemplate:
        tokenizer: Any = SimpleNamespace(token_names={})
        return ChatTemplate(self.template, "the fake's template", tokenizer)

    def chat_sampling(self) -> ChatSampling:
        return self.own or chat_sampling(Path("/nonexistent"))

    def chat(self, messages: Any, *, stream: bool, template_args: Any, chat_template: Any, **sampling: Any) -> Any:
        tokens = sum(len(message["content"]) for message in messages)
        if tokens >= self.ctx_size:
            raise ContextFullError("prompt", tokens)
        last = messages[-1]["content"]
        chat_template.render(messages, **template_args)
        self.requests.append({"messages": messages, "template_args": template_args, **sampling})
        pieces = [*f"{len(messages)}:{last!r}"] if self.pieces is None else self.pieces
        if "slow" in last:
            pieces = [*pieces, *["."] * 100_000]
        room = self.ctx_size - tokens
        limit = room if sampling["max_tokens"] < 0 else min(sampling["max_tokens"], room)
        return EchoStream(pieces[:limit], sampling["seed"], 0.002 if "slow" in last else 0.0, len(pieces) > limit, self)


def install_chat(monkeypatch: pytest.MonkeyPatch, folder: Path) -> EchoEngine:
    return install(monkeypatch, folder, EchoEngine(folder=folder))


def script(argv: list[str], engine: str = "EchoEngine()") -> str:
    """A program that is `pyengine` with these arguments over the engine of the expression.

    At a pseudo-terminal it takes it as its controlling terminal first, so that Ctrl-C is a signal.
    """
    return (
        "import os, sys\n"
        "if os.isatty(0): os.close(os.open(os.ttyname(0), os.O_RDWR))\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from fake_chat import EchoEngine\n"
        "from pyengine.cli import _options\n"
        "from pyengine.cli.main import main\n"
        "_options.model_folder = lambda args: Path('/nonexistent')\n"
        f"_options.open_engine = lambda args, folder: {engine}\n"
        f"sys.exit(main({argv!r}))\n"
    )


def program(argv: list[str], engine: str = "EchoEngine()") -> list[str]:
    return [sys.executable, "-c", script(argv, engine)]
