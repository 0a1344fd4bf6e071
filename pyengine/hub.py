"""Stage 1, hub: what a user calls MODEL -> a local folder or GGUF file: a path, of the hub cache, or a download."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from pyengine import strict_json
from pyengine.checkpoint import INDEX, MAX_INDEX_BYTES
from pyengine.errors import (
    ModelFormatError,
    ModelNotFoundError,
    PyEngineError,
    RequestError,
    ResourceError,
    UnsupportedModelError,
)
from pyengine.gguf_file import is_gguf

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?")
PATTERNS = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
MAX_BESIDE = 10000  # entries of a folder that are looked at for a name like the one given

Log = Callable[[str], None]


def _stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def hub_cache() -> Path:
    """The hub's own cache folder: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub (or XDG_CACHE_HOME)."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface" / "hub"


def missing_files(folder: Path) -> list[str]:
    """What a snapshot lacks: its config, or a weight file that its index names. Links into the cache are followed."""
    missing = [] if (folder / "config.json").exists() else ["config.json"]
    if (folder / "model.safetensors").exists():
        return missing
    index = folder / INDEX
    if not index.exists():
        whole = any(path.exists() for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
        return missing if whole else [*missing, "model.safetensors"]
    try:
        data = strict_json.read_bytes(index, MAX_INDEX_BYTES)
        shards = set(strict_json.loads(data, where=str(index), max_bytes=MAX_INDEX_BYTES)["weight_map"].values())
    except (ModelFormatError, KeyError, TypeError, AttributeError):
        return missing  # damaged rather than incomplete: loading it says how
    return missing + sorted(str(shard) for shard in shards if not (folder / str(shard)).exists())


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of a snapshot of org/name in the hub cache, complete or not; None if there is none.

    revision: a branch, a tag or a commit; None = main.
    """
    repository = hub_cache() / ("models--" + name.replace("/", "--"))
    wanted = revision or "main"
    ref = repository / "refs" / wanted
    if ref.is_file():
        wanted = ref.read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", wanted):  # a commit or what stands for one, never a path
        return None
    folder = repository / "snapshots" / wanted
    return folder.resolve() if folder.is_dir() else None


def is_offline(offline: bool) -> bool:
    return offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _hub_id(model: str) -> re.Match[str] | None:
    """A hub id's parts; the hub has none with `..`, and none of over 96 characters."""
    match = HUB_ID.fullmatch(model)
    return match if match and ".." not in model and len(match["name"]) <= 96 and len(model) <= 200 else None


def resolve(model: str, *, offline: bool = False, log: Log = _stderr, bar: bool = True) -> Path:
    """The folder or GGUF file of MODEL: an existing path wins, then the hub cache, then (unless offline) a download.

    log: gets the line that says what is downloaded and how large it is. bar: show progress where stderr is a terminal.
    Errors: ModelNotFoundError (with the command that would fetch it), RequestError for another file and for text that
    is neither a path nor org/name, ResourceError for a full disk.
    """
    if not model.strip():
        raise RequestError("an empty model name; expected a model folder or org/name")
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a name too long, or one with a NUL
        exists = False
    if exists:
        if path.is_dir() or is_gguf(path):
            return path
        raise RequestError(f"{model}: a file; expected the folder of a model, a .gguf file, or org/name")
    match = _hub_id(model)
    if match is None:
        if os.sep in model or model.startswith((".", "~")):
            raise ModelNotFoundError(f"{model}: no such folder; expected a model folder or org/name{_meant(model)}")
        if not _is_text(model):
            raise RequestError(f"{model!r} is neither a folder nor org/name; expected one of them{_meant(model)}")
        near = _near(model)
        raise RequestError(
            f"{model!r} is neither a folder nor org/name; expected one of them, or `generate` with a prompt: "
            f"did you mean {f'{near}, or ' if near else ''}-p {model!r}?"
        )
    name, revision = match["name"], match["revision"]
    found = cached_snapshot(name, revision)
    missing = [] if found is None else missing_files(found)
    if found is not None and not missing:
        return found
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    if is_offline(offline):
        state = f"incomplete in the hub cache (without {', '.join(missing[:10])})" if found else "not in the hub cache"
        meant = "" if found else _meant(model)
        raise ModelNotFoundError(f"{model}: not a folder, {state}, and offline; run `{command}` with a network{meant}")
    return _download(name, revision, command, log, bar)


def config_file(model: str, *, offline: bool = False, log: Log = _stderr) -> Path:
    """The config.json of MODEL, without its weights: a file, that of a folder, of the hub cache, or downloaded alone.
    A GGUF file is its own.

    Errors: as `resolve`, but a file is taken for a config.
    """
    path = Path(model).expanduser()
    try:
        exists = bool(model.strip()) and path.exists()
    except (OSError, ValueError):  # a name too long, or one with a NUL
        exists = False
    if exists and not path.is_dir():
        return path
    match = _hub_id(model)
    if match is None or exists:
        return resolve(model, offline=True, log=log) / "config.json"
    name, revision = match["name"], match["revision"]
    found = cached_snapshot(name, revision)
    if found is not None and (found / "config.json").exists():
        return found / "config.json"
    command = f"hf download {name} config.json" + (f" --revision {revision}" if revision else "")
    if is_offline(offline):
        raise ModelNotFoundError(
            f"{model}: not a folder, not in the hub cache, and offline; run `{command}`{_meant(model)}"
        )
    from huggingface_hub import HfApi, hf_hub_download

    def fetch() -> Path:
        HfApi().model_info(name, revision=revision)  # says at once what is wrong; a download would try six times first
        return Path(hf_hub_download(name, "config.json", revision=revision, cache_dir=hub_cache()))

    return _from_hub(name, revision, command, fetch)


def _meant(model: str) -> str:
    near = _near(model)
    return f"; did you mean {near}?" if near else ""


def _is_text(model: str) -> bool:
    """Whether it may be a prompt in the wrong place."""
    return _no_name(model) or any(map(str.isspace, model))


def _no_name(model: str) -> bool:
    """Whether it is too long for a name, or of other than printable characters."""
    return len(model) > 200 or not model.isprintable()


def _near(model: str) -> str | None:
    """A path or an id of the hub cache of almost this name: with a path's first part that is not there replaced."""
    if _no_name(model):
        return None
    path = Path(model).expanduser()
    try:
        parent = next((folder for folder in path.parents if folder.is_dir()), path)
        missing, *rest = path.relative_to(parent).parts
        beside = [e for e in islice(parent.iterdir(), MAX_BESIDE) if rest or e.suffix == ".gguf" or e.is_dir()]
        found = {str(entry).lower(): str(entry.joinpath(*rest)) for entry in beside if entry.joinpath(*rest).exists()}
        near = difflib.get_close_matches(str(parent / missing).lower(), found, n=1, cutoff=0.8)
        if near:
            return found[near[0]]
        cached = [e.name.removeprefix("models--").replace("--", "/") for e in hub_cache().glob("models--*--*")]
    except (OSError, ValueError):  # of a folder that cannot be read, of a path without a name
        return None
    name = model.partition("@")[0]
    ids = {(one if "/" in name else one.partition("/")[2]).lower(): one for one in cached}
    near = difflib.get_close_matches(name.lower(), ids, n=1, cutoff=0.8)
    return ids[near[0]] if near else None


def _is_wanted(name: str) -> bool:
    """Whether the engine reads this file of a repository: the rule that the hub client applies to the patterns."""
    return any(fnmatch(name, p) for p in PATTERNS) and not any(fnmatch(name, p) for p in IGNORED)


def _check_weights(name: str, files: set[str], command: str) -> None:
    """That a repository has weights that are read here, before any of it is fetched."""
    if any(file.endswith(".safetensors") and _is_wanted(file) for file in files):
        return
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if ggufs:
        found = f"{len(ggufs)} GGUF files and no safetensors"
        raise ModelNotFoundError(
            f"{name}: {found}; run `{command} {ggufs[0]}`, or with another of them, and give the file as MODEL"
        )
    pickles = sorted(file for file in files if Path(file).suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise UnsupportedModelError(f"{name}: only {pickles[0]}, and pickle is never read; expected safetensors")
    raise ModelNotFoundError(f"{name}: {len(files)} files on the hub and no weights; expected safetensors")


def _download(name: str, revision: str | None, command: str, log: Log, bar: bool) -> Path:
    """Fetch what an engine reads into the hub cache. HF_TOKEN and HF_ENDPOINT are the hub client's own."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    def fetch() -> Path:
        files = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
        _check_weights(name, {f.rfilename for f in files}, command)
        wanted = {f.rfilename for f in files if _is_wanted(f.rfilename)}
        size = sum(f.size or 0 for f in files if f.rfilename in wanted)
        log(f"downloading {name}: {len(wanted)} files, {size / 1e6:.1f} MB, to {hub_cache()}")
        if not (bar and sys.stderr.isatty()):
            disable_progress_bars()
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=hub_cache(),
                allow_patterns=PATTERNS,
                ignore_patterns=IGNORED,
            )
        )

    folder = _from_hub(name, revision, command, fetch)
    missing = missing_files(folder)
    if missing:
        raise ModelNotFoundError(f"{name}: without {', '.join(missing[:10])} on the hub; expected a complete model")
    return folder


def _from_hub(name: str, revision: str | None, command: str, fetch: Callable[[], Path]) -> Path:
    """What `fetch` downloads; the hub client's errors as our own."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return fetch()
    except PyEngineError:
        raise
    except GatedRepoError:
        raise ModelNotFoundError(f"{name}: gated; accept its licence, set HF_TOKEN and run `{command}`") from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"{name}: no revision {revision!r} on the hub; run `{command}` with one") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{name}: not a folder and not on the hub; expected a model that `{command}` finds{_meant(name)}"
        ) from None
    except Exception as error:  # the client's transport has its own errors, other ones in each version
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"{hub_cache()}: {error.strerror}; expected room for {name}") from None
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelNotFoundError(f"{name}: cannot be downloaded ({reason}); run `{command}`") from None
