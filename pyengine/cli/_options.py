"""Stage 7, cli options: what several subcommands share, and the one way from parsed options to an open engine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pyengine import cuda, system, text_file
from pyengine.cli import _output
from pyengine.errors import RequestError

if TYPE_CHECKING:
    from pyengine.engine import Engine

QUANTS = ("none", "f32", "bf16", "int8", "int4")
INT4_SCHEMES = ("minimum", "symmetric")
KV_DTYPES = ("bf16", "f32", "int8")
SPECULATIONS = ("ngram",)


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is a RequestError: one line and exit code 2 like every other wrong argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message} (see `{self.prog} --help`)")


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "model_positional",
        metavar="MODEL",
        nargs="?",
        help="a folder, a .gguf file or a hub id org/name[@revision]; default: the demo",
    )
    group.add_argument("-m", "--model", metavar="MODEL", help="the same as an option")
    group.add_argument("--offline", action="store_true", help="never download; also HF_HUB_OFFLINE=1")
    group.add_argument("--strict", action="store_true", help="refuse unknown config keys instead of warning")


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--quant", choices=QUANTS, help="weight format; none = as stored (default int8; int4: GGUF of up to 5 bits)"
    )
    group.add_argument("--group-size", type=int, metavar="N", help="weights per scale, for int8 and int4")
    group.add_argument("--int4-scheme", choices=INT4_SCHEMES, help="int4 with a minimum per group, or symmetric")
    group.add_argument(
        "--no-calibration", action="store_true", help="int8, int4: search scales without E[x^2] of a short text"
    )
    group.add_argument("--kv-dtype", choices=KV_DTYPES, help="KV cache (default bf16; f32 under --quant f32)")
    group.add_argument("-t", "--threads", type=int, metavar="N", help="worker threads; also PYENGINE_THREADS")
    group.add_argument("--no-cache", action="store_true", help="neither read nor write packed weights on disk")
    group.add_argument("--cache-limit", type=float, metavar="GB", help="packed weights on disk, in all (default 20)")
    group.add_argument(
        "--device",
        metavar="NAME",
        help="auto (default: CUDA where it can be used), cpu, cuda or cuda:N; also PYENGINE_DEVICE",
    )


def add_common(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    group = parser.add_argument_group("output")
    if json:
        group.add_argument("--json", action="store_true", help="exactly one JSON object on stdout")
    group.add_argument("-v", "--verbose", action="store_true", help="say on stderr what is in force")
    group.add_argument("-q", "--quiet", action="store_true", help="no statistics, progress or warnings")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")


def log(args: argparse.Namespace) -> Any:
    """Where a download or conversion says what it does: stderr, or nowhere under --quiet."""

    def write(text: str) -> None:
        if not args.quiet:
            _output.message(text)

    return write


def model_name(args: argparse.Namespace) -> str | None:
    """MODEL as it was given, once."""
    if args.model is not None and args.model_positional is not None:
        raise RequestError(f"two models: {args.model_positional!r} and -m {args.model!r}; expected one")
    name: str | None = args.model if args.model is not None else args.model_positional
    return name


def config_file(args: argparse.Namespace) -> Path:
    """The config.json of MODEL, or the file that MODEL is; of a hub id nothing else is downloaded."""
    model = model_name(args)
    if model is None:
        return model_folder(args) / "config.json"
    from pyengine import hub

    return hub.config_file(model, offline=args.offline, log=log(args))


def model_folder(args: argparse.Namespace, *, degrid_demo: bool = False) -> Path:
    """The local folder of MODEL: a path, a hub id found in the cache or downloaded, or without MODEL the demo."""
    model = model_name(args)
    if model is None:
        from pyengine import demo

        return demo.demo_folder(degrid=degrid_demo, offline=args.offline, log=log(args))
    from pyengine import hub

    return hub.resolve(model, offline=args.offline, log=log(args), bar=not args.quiet)


def threads(args: argparse.Namespace) -> int | None:
    """--threads, else PYENGINE_THREADS; None is the core's default."""
    count: int | None = args.threads if args.threads is not None else system.environment_threads()
    if count is not None and count < 1:
        raise RequestError(f"{count} threads; expected at least 1")
    return count


def device(args: argparse.Namespace) -> str:
    """--device, else PYENGINE_DEVICE, else auto: one that can be used."""
    value = cuda.wanted() if args.device is None else str(args.device)
    cuda.choose(value, "PYENGINE_DEVICE" if args.device is None else "--device")
    return value


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `pyengine.load` for these options. An option that would do nothing is refused."""
    for given, option, quants in (
        (args.group_size is not None, "--group-size", ("int8", "int4")),
        (args.int4_scheme is not None, "--int4-scheme", ("int4",)),
        (args.no_calibration, "--no-calibration", ("int8", "int4")),
    ):
        if given and (args.quant or "int8") not in quants:
            found = f"with --quant {args.quant}" if args.quant else "without --quant"
            raise RequestError(f"{option} {found}; expected --quant {' or '.join(quants)}")
    if args.cache_limit is not None and (args.no_cache or not 0 <= args.cache_limit <= 1e9):
        found = "with --no-cache" if args.no_cache else f"{args.cache_limit}"
        raise RequestError(f"--cache-limit {found}; expected GB, 0 or more, of a cache that is used")
    arguments: dict[str, Any] = {
        "quant": args.quant,
        "group_size": args.group_size,
        "kv_dtype": args.kv_dtype,
        "threads": threads(args),
        "device": device(args),
        "isa": getattr(args, "isa", None) or os.environ.get("PYENGINE_ISA") or None,
        "calibration": not args.no_calibration,
        "strict": args.strict,
        "cache": not args.no_cache,
    }
    if args.cache_limit is not None:
        arguments["cache_limit"] = round(args.cache_limit * 1e9)
    if args.int4_scheme is not None:  # the default scheme is the engine's to choose
        arguments["int4_scheme"] = args.int4_scheme
    if getattr(args, "ctx_size", None) is not None:
        arguments["ctx_size"] = args.ctx_size
    return arguments


def open_engine(args: argparse.Namespace, folder: Path, *, warn: bool = True) -> Engine:
    """Load `folder` as the options say, with a progress bar and the model's warnings. The caller closes it."""
    from pyengine import engine as engine_module

    progress = _output.Progress(quiet=args.quiet)
    try:
        opened = engine_module.load(folder, progress=progress, log=log(args), **engine_arguments(args))
    finally:
        progress.close()
    if warn and not args.quiet:
        for text in opened.spec.warnings:
            _output.warning(text)
    if args.verbose:
        quant = _output.format_quant(opened.quant, opened.group_size)
        _output.message(
            f"{opened.folder} ({opened.spec.family}): {quant}, {opened.bits_per_weight:.2f} bits per weight, "
            f"{', '.join(_output.processor(opened.device, opened.threads, opened.isa))}, context {opened.ctx_size}, "
            f"loaded in {opened.load_ms / 1e3:.2f} s"
        )
    return opened


def read_text(path: str) -> str:
    """The text of a file or, for '-', of stdin: UTF-8, one trailing newline dropped, everything else literal."""
    text = text_file.decode(text_file.read(path), text_file.name_of(path))
    if text.endswith("\r\n"):
        return text[:-2]
    return text.removesuffix("\n")
