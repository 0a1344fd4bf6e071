"""Stage 7, cli main: the parser, and the one place where an error becomes a line on stderr and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import sys
import traceback
from collections.abc import Sequence

from pyengine.cli import (
    _output,
    account,
    bench,
    cache,
    chat,
    compare,
    fetch_demo,
    generate,
    info,
    inspect,
    perplexity,
    profile,
)
from pyengine.cli._options import Parser
from pyengine.errors import PyEngineError, RequestError, ResourceError
from pyengine.system import LACKS

EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE, what a C program ends with
EXIT_INTERRUPTED = 130  # 128 + SIGINT
COMMANDS = (generate, chat, compare, perplexity, profile, account, bench, inspect, info, fetch_demo, cache)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="pyengine", description="Run Hugging Face checkpoints on the CPU, straight from their folder.")
    parser.add_argument("--version", action="store_true", help="the same as the command info")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def exit_code(error: BaseException) -> int:
    """The exit code of an error; anything not raised on purpose is 1, what memory or disk refused is 6."""
    if isinstance(error, PyEngineError):
        return error.exit_code
    if isinstance(error, MemoryError):
        return ResourceError.exit_code
    if isinstance(error, OSError) and error.errno in (*LACKS, errno.ENOSPC, errno.EDQUOT):
        return ResourceError.exit_code
    return 1


def describe_error(error: BaseException) -> str:
    if isinstance(error, PyEngineError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
        return f"{error.strerror}; expected room where the output goes"
    if isinstance(error, OSError) and error.strerror:
        return str(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    return f"internal error, {type(error).__name__}: {error} (--debug shows where)"


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = f" {args.command}" if args.command else ""
        quotes = args.command == "generate" and not unknown[0].startswith("-")
        hint = "a prompt goes in quotes behind -p; " if quotes else _meant(parser, args.command, unknown[0])
        raise RequestError(f"unrecognized arguments: {' '.join(unknown)} ({hint}see `{parser.prog}{command} --help`)")
    if args.version:
        if args.command is not None:
            raise RequestError(f"--version with the command {args.command}; expected one of the two")
        args = parser.parse_args(["info"])
    if args.command is None:
        parser.print_help(sys.stderr)
        return RequestError.exit_code
    code: int = args.run(args)
    sys.stdout.flush()  # a closed pipe must be noticed here, not by the interpreter's own exit
    return code


def _meant(parser: argparse.ArgumentParser, command: str | None, option: str) -> str:
    """A hint at the command's option that is spelled almost so."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    known = commands.choices[command]._option_string_actions if command else parser._option_string_actions
    near = difflib.get_close_matches(option.partition("=")[0], [name for name in known if len(name) > 2], 1, 0.75)
    return f"did you mean {near[0]}? " if near else ""


def _leave_closed_pipe() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot complain about the closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_missing_streams() -> None:
    """A program started with a standard stream closed (`>&-`, some services) has None there: nothing, in its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open to the end


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code.

    Exit codes: 0; 1 runtime; 2 usage; 3 model not found or files wrong; 4 not supported; 5 tokenizer or template;
    6 resources; 7 quality gate; 130 after Ctrl-C; 141 when stdout's reader has gone.
    """
    _open_missing_streams()
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # a terminal that cannot show a character gets '?', not a traceback
        reconfigure(errors="replace")
    try:
        return _run(argv)
    except KeyboardInterrupt:
        _output.message("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _leave_closed_pipe()
        return EXIT_CLOSED_PIPE
    except Exception as error:
        if debug:
            traceback.print_exc()
        _output.message(f"error: {describe_error(error)}")
        return exit_code(error)
