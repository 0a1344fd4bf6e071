"""Stage 7, cli chat: a conversation in the terminal, or over a pipe with one message a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.cli import _options, _output, generate
from pyengine.cli._chat_input import PipeInput, TerminalInput, open_input
from pyengine.errors import ChatTemplateError, PyEngineError

if TYPE_CHECKING:
    from pyengine.cli._chat_session import Session


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="a conversation in the terminal",
        description="A conversation in the terminal; /help lists its commands. Where stdin is a pipe, one message a "
        "line.",
    )
    _options.add_model(parser)
    conversation = parser.add_argument_group("conversation")
    conversation.add_argument("-sys", "--system", metavar="TEXT", help="a system message at the beginning")
    generate.add_template(conversation)
    title = "sampling (an option, else generation_config.json, else the default)"
    generate.add_sampling(parser, title, max_tokens=-1, temperature=0.7, top_p=0.9)  # pyengine.chat.DEFAULTS
    _options.add_engine(parser)
    generate.add_context(parser)
    _options.add_common(parser, json=False)
    parser.set_defaults(run=run, **dict.fromkeys([*sampling_options(), *generate.NOT_IN_CHAT]))


def sampling_options() -> Iterable[str]:
    """The names of the sampling options: here none has a value of its own, the model's file comes before defaults."""
    alone = _options.Parser(add_help=False)
    generate.add_sampling(alone)
    return vars(alone.parse_args([]))


def check_has_template(folder: Path, args: argparse.Namespace) -> None:
    """Refuse a model without a template before its weights are loaded; what is no model is refused by the load."""
    from pyengine.chat import no_template
    from pyengine.gguf_file import is_gguf
    from pyengine.template_file import find_template

    model = is_gguf(folder) or (folder / "config.json").exists()
    if model and args.chat_template is None and find_template(folder) is None:
        raise ChatTemplateError(f"{no_template(folder)} with --chat-template; `generate --raw` needs none")


def report(record: dict[str, Any], values: Mapping[str, Any]) -> None:
    """The line of statistics after an answer."""
    from pyengine.reports.machine import known_read, reader

    limit = known_read(*reader(record["device"], record["threads"]))
    line = _output.statistics_line(record, sampled=values["temperature"] > 0, limit_gb_per_s=limit)
    print(line, file=sys.stderr, flush=True)


def say_what_is_in_force(session: Session, args: argparse.Namespace, notes: list[str]) -> None:
    """At the start: what generation_config.json asks for in vain, the values with -v, and where help is."""
    if args.verbose:
        _output.message(", ".join(session.describe()))
    if args.quiet:
        return
    for text in session.own.warnings:
        _output.warning(text)
    if sys.stdin.isatty():
        for text in notes:
            _output.message(text)
        engine = session.engine
        quant = _output.format_quant(engine.quant, engine.group_size)
        _output.message(f"{engine.folder}, {quant}, context {engine.ctx_size}; /help lists commands, Ctrl-D leaves")


def converse(session: Session, source: TerminalInput | PipeInput, *, quiet: bool) -> int:
    """Take messages until there are no more; the exit code.

    At a terminal Ctrl-C stops an answer, and an error is a message of one line: the person at it can go on. Over a
    pipe nobody can, so both end the program.
    """
    at_terminal = isinstance(source, TerminalInput)
    while True:
        try:
            text = source.read()
            finished = None if text is None else session.take(text)
            if finished is None:
                return 0
            if not finished and not at_terminal:
                return generate.EXIT_CANCELLED
            if session.hint is not None and not quiet:
                _output.message(session.hint)
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            print(file=sys.stderr)
            _output.message("Ctrl-D or /quit leaves")
        except PyEngineError as error:
            if not at_terminal:
                raise
            _output.message(f"error: {error}")


def run(args: argparse.Namespace) -> int:
    from pyengine.chat import DEFAULTS
    from pyengine.cli._chat_session import Session, checked

    generate.check_template(args)
    _options.engine_arguments(args)  # wrong options are refused before anything is read or downloaded
    given = {name: value for name, value in generate.sampling_arguments(args).items() if value not in (None, ())}
    checked({**DEFAULTS, **given})
    folder = _options.model_folder(args)
    check_has_template(folder, args)
    with _options.open_engine(args, folder) as engine:
        session = Session(
            engine,
            engine.chat_template(args.chat_template),
            given=given,
            system=args.system,
            template_args=generate.template_arguments(args.template_arg),
            terminal=sys.stdout.isatty(),
            report=report if args.verbose else None,
        )
        source = open_input()
        say_what_is_in_force(session, args, source.notes)
        return converse(session, source, quiet=args.quiet)
