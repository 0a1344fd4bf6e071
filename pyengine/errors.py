"""Stage 0, errors: the one error tree, and the exit code each branch has on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PyEngineError(Exception):
    """Base of every error pyengine raises on purpose. The message says what was expected, found, where, what to do."""

    exit_code = 1


class ModelNotFoundError(PyEngineError, FileNotFoundError):
    """No such model: not a folder, not in the hub cache, not downloadable."""

    exit_code = 3


class ModelFormatError(PyEngineError):
    """The bytes on disk are wrong: damaged, inconsistent, or outside the documented limits."""

    exit_code = 3


class UnsupportedModelError(PyEngineError):
    """A valid model, format or option that this version does not implement (also: an op a backend lacks)."""

    exit_code = 4


class TokenizerError(PyEngineError):
    """The tokenizer is missing or damaged, or cannot encode this text."""

    exit_code = 5


class ChatTemplateError(PyEngineError):
    """The chat template is missing, damaged, refused by the sandbox, or over its limits."""

    exit_code = 5


class RequestError(PyEngineError, ValueError):
    """The caller's arguments are wrong (also: use after close)."""

    exit_code = 2


class ContextFullError(RequestError):
    """A prompt, or a conversation, leaves no room in the context; `tokens` is how long it is."""

    def __init__(self, message: str, tokens: int) -> None:
        super().__init__(message)
        self.tokens = tokens

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.tokens)


class ResourceError(PyEngineError):
    """Memory, disk, threads, or a missing ISA, device or extra."""

    exit_code = 6


class ComputeError(PyEngineError, ArithmeticError):
    """NaN or Inf at run time, naming layer and step."""

    exit_code = 1


class BatchError(ComputeError):
    """NaN or Inf in some requests of a batch, after the others went on to their ends. results: of all, in order; one
    that failed has what it had until then, as "cancelled"."""

    def __init__(self, message: str, results: Sequence[Any]) -> None:
        super().__init__(message)
        self.results = results

    def __reduce__(self) -> tuple[type, tuple[str, Sequence[Any]]]:
        return type(self), (str(self), self.results)


class CancelledError(PyEngineError):
    """A run was cancelled through its flag. The engine turns it into KeyboardInterrupt or finish_reason 'cancelled'."""

    exit_code = 130
