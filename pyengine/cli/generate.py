"""Stage 7, cli generate: text from a prompt, streamed; ends with one line of statistics."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.cli import _options, _output
from pyengine.errors import ChatTemplateError, RequestError, TokenizerError

if TYPE_CHECKING:
    from pyengine.engine import Engine
    from pyengine.tokenizer import Tokenizer

EXIT_CANCELLED = 130

# Values of SamplingParams that chat has no use for: no answer would end, and it shows no log probabilities.
NOT_IN_CHAT = ("ignore_eos", "logprobs", "prompt_logprobs")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="text from a prompt",
        description="Text from a prompt, streamed; ends with one line of statistics.",
    )
    _options.add_model(parser)
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads stdin")
    prompt.add_argument("-f", "--prompt-file", metavar="FILE", help="the prompt from a file; one trailing newline goes")
    prompt.add_argument("-sys", "--system", metavar="TEXT", help="a system message before the prompt")
    prompt.add_argument("--raw", action="store_true", help="the text itself, without the model's chat template")
    add_template(prompt)
    prompt.add_argument("--no-special", action="store_true", help="special tokens in the text are ordinary text")
    add_sampling(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    parser.add_argument(
        "--logprobs", type=int, default=0, metavar="N", help="with --json: of each token, and the N most likely ones"
    )
    parser.add_argument("--prompt-logprobs", action="store_true", help="with --json: of the prompt's tokens")
    _options.add_engine(parser)
    add_context(parser)
    _options.add_common(parser)
    parser.set_defaults(run=run)


def add_template(group: Any) -> None:
    """The options of the chat template: `generate` and `chat` have them."""
    group.add_argument("--chat-template", metavar="FILE", help="a jinja file instead of the model's template")
    group.add_argument(
        "--template-arg", metavar="K=V", action="append", default=[], help="a template variable; V as JSON, else text"
    )


def add_sampling(
    parser: argparse.ArgumentParser,
    title: str = "sampling (greedy unless told)",
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> None:
    """The options of sampling, with these defaults: those that `generate` and `chat` share."""
    sampling = parser.add_argument_group(title)
    sampling.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"{max_tokens}{'; -1' * (max_tokens != -1)} = until the end or a full context",
    )
    sampling.add_argument(
        "--temp",
        "--temperature",
        dest="temperature",
        type=float,
        default=temperature,
        metavar="X",
        help=f"{temperature:g}; 0 = greedy",
    )
    sampling.add_argument("--top-k", type=int, default=0, metavar="N", help="0 = off")
    sampling.add_argument("--top-p", type=float, default=top_p, metavar="X", help=f"{top_p:g}; 1 = off")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="X", help="0 = off")
    sampling.add_argument("--repeat-penalty", type=float, default=1.0, metavar="X", help="1 = off")
    sampling.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="-2 to 2, for each time a token was generated"
    )
    sampling.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="-2 to 2, once for each token generated"
    )
    sampling.add_argument(
        "--logit-bias",
        metavar="ID=X",
        action="append",
        default=[],
        help="added to the logit of a token id; -inf: never chosen; repeatable",
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="default: drawn, and shown")
    sampling.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable"
    )
    sampling.add_argument(
        "--speculate",
        choices=_options.SPECULATIONS,
        help="draft tokens from repetitions in the text and check several in a step; the text stays the same",
    )


def add_context(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--ctx-size", type=int, metavar="N", help="limit of the context; 0 = the model's maximum")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt of -p or -f; without either, stdin if it is not a terminal."""
    if args.prompt is not None and args.prompt_file is not None:
        raise RequestError("both -p and -f; expected one prompt")
    if args.prompt_file is not None:
        return _options.read_text(args.prompt_file)
    if args.prompt is not None and args.prompt != "-":
        try:
            args.prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError("the prompt is not UTF-8; expected UTF-8 text") from None
        return str(args.prompt)
    if args.prompt is None and sys.stdin.isatty():
        raise RequestError("no prompt; expected -p TEXT, -f FILE or text on stdin")
    return _options.read_text("-")


def template_arguments(pairs: list[str]) -> dict[str, Any]:
    """['enable_thinking=false', 'date=1 May'] -> {'enable_thinking': False, 'date': '1 May'}."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise RequestError(f"--template-arg {pair!r}; expected name=value")
        if key in arguments:
            raise RequestError(f"--template-arg {key} given twice; expected it once")
        try:
            arguments[key] = json.loads(value, parse_constant=_no_constant)
        except ValueError:
            arguments[key] = value
        except RecursionError:
            raise RequestError(f"--template-arg {key}: nested too deep; expected flat values") from None
    return arguments


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_prompt_form(args: argparse.Namespace) -> None:
    """Refuse what --raw would ignore, before anything is loaded."""
    if args.raw:
        for given, option in (
            (args.system is not None, "--system"),
            (args.chat_template is not None, "--chat-template"),
            (bool(args.template_arg), "--template-arg"),
        ):
            if given:
                raise RequestError(f"{option} with --raw, which uses no chat template; expected one of the two")
    check_template(args)


def check_template(args: argparse.Namespace) -> None:
    """Refuse template arguments that are none, and a template file that cannot be read."""
    template_arguments(args.template_arg)
    if args.chat_template is not None:
        from pyengine.template_file import read_template

        read_template(Path(args.chat_template))


def logit_bias(pairs: list[str]) -> dict[int, float]:
    """['5=1.5', '7=-inf'] -> {5: 1.5, 7: -inf}."""
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            number, added = int(token), float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {pair!r}; expected ID=X, a token id and a number") from None
        if number in bias:
            raise RequestError(f"--logit-bias of {number} given twice; expected it once")
        bias[number] = added
    return bias


def check_logprobs(args: argparse.Namespace) -> None:
    """Refuse what only --json would show."""
    for given, option in ((args.logprobs != 0, "--logprobs"), (args.prompt_logprobs, "--prompt-logprobs")):
        if given and not args.json:
            raise RequestError(f"{option} without --json, which shows them; expected both")


def encode_raw(tokenizer: Tokenizer, args: argparse.Namespace, prompt: str) -> list[int]:
    return tokenizer.encode(prompt, add_special_tokens=True, parse_special=not args.no_special)


def encode_prompt(engine: Engine, args: argparse.Namespace, prompt: str) -> tuple[list[int], str]:
    """Token ids of the prompt, and its form: 'chat' through a template, or 'raw'."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise TokenizerError(f"{engine.folder}: no tokenizer.json; expected one, a prompt is text")
    if args.raw:
        return encode_raw(tokenizer, args, prompt), "raw"
    from pyengine.chat import check_system
    from pyengine.chat_template import ChatTemplate, encode_chat

    if args.chat_template is not None:
        template: ChatTemplate | None = ChatTemplate.from_file(Path(args.chat_template), tokenizer)
    else:
        template = ChatTemplate.load(engine.folder, tokenizer)
    if template is None:
        if args.system is not None or args.template_arg:
            option = "--system" if args.system is not None else "--template-arg"
            raise RequestError(f"{option}: {engine.folder} has no chat template; expected one, or --chat-template FILE")
        return encode_raw(tokenizer, args, prompt), "raw"
    messages = [{"role": "user", "content": prompt}]
    template_args = template_arguments(args.template_arg)
    if args.system is not None:
        check_system(template, args.system, template_args)
        messages.insert(0, {"role": "system", "content": args.system})
    ids = encode_chat(tokenizer, template, messages, template_args=template_args)
    if not ids:
        raise ChatTemplateError(f"{template.where}: makes no text of this prompt; expected some")
    return ids, "chat"


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repeat_penalty,
        "seed": args.seed,
        "stop": tuple(args.stop or ()),
        "ignore_eos": args.ignore_eos,
        "speculate": args.speculate,
        "frequency_penalty": args.frequency_penalty,
        "presence_penalty": args.presence_penalty,
        "logit_bias": logit_bias(args.logit_bias or []) or None,
        "logprobs": args.logprobs,
        "prompt_logprobs": args.prompt_logprobs,
    }


def write_pieces(pieces: Iterator[Any], *, show: bool) -> bool:
    """Stream the text to stdout, flushed piece by piece; True if Ctrl-C ended it."""
    last = "\n"
    cancelled = False
    try:
        for piece in pieces:
            if show and piece.text:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                last = piece.text[-1]
    except KeyboardInterrupt:
        cancelled = True
    if last != "\n" and sys.stdout.isatty():
        print(flush=True)
    return cancelled


def run(args: argparse.Namespace) -> int:
    check_prompt_form(args)
    check_logprobs(args)
    _options.engine_arguments(args)  # wrong options are refused before anything is read or downloaded
    prompt = read_prompt(args)
    if not prompt and not args.raw:
        raise RequestError("empty prompt; expected text, or --raw to start from nothing")
    sampling = sampling_arguments(args)
    from pyengine.sampling import SamplingParams

    SamplingParams(**sampling)  # so are wrong values
    with _options.open_engine(args, _options.model_folder(args)) as engine:
        ids, prompt_format = encode_prompt(engine, args, prompt)
        if args.verbose:
            values = ", ".join(f"{name} {value}" for name, value in sampling.items())
            _output.message(f"{values}; prompt {len(ids)} tokens, {prompt_format}")
        stream = engine.stream(ids, **sampling)
        try:
            cancelled = write_pieces(stream, show=not args.json)
        finally:
            stream.close()  # also after a closed pipe: the engine stops computing for nobody
        result = stream.result
        assert result is not None
        record = {**result.to_json(), "prompt_format": prompt_format}
    if args.json:
        _output.print_json(record)
    elif not args.quiet:
        from pyengine.reports.machine import known_read, reader

        limit = known_read(*reader(record["device"], record["threads"]))
        line = _output.statistics_line(record, sampled=args.temperature > 0, limit_gb_per_s=limit)
        print(line, file=sys.stderr, flush=True)
    return EXIT_CANCELLED if cancelled else 0
