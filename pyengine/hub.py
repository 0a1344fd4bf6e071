"""Stage 1, hub: what a user calls MODEL -> a local folder: a path, a model of the hub cache, or a download."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from pyengine.errors import ModelNotFoundError, RequestError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.json"]


def hub_cache() -> Path:
    """The hub's own cache folder: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home) / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def is_complete(folder: Path) -> bool:
    """Whether a snapshot has its config and every weight file that its index names."""
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            return True  # damaged rather than incomplete: loading it says how
        return all((folder / str(shard)).exists() for shard in shards)
    return any(folder.glob("*.safetensors"))


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of a complete snapshot of org/name in the hub cache, or None. `revision`: branch, tag or commit."""
    repository = hub_cache() / ("models--" + name.replace("/", "--"))
    wanted = revision or "main"
    ref = repository / "refs" / wanted
    if ref.is_file():
        wanted = ref.read_text(encoding="utf-8").strip()
    folder = repository / "snapshots" / wanted
    return folder if folder.is_dir() and is_complete(folder) else None


def is_offline(offline: bool) -> bool:
    return offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def resolve(model: str, *, offline: bool = False) -> Path:
    """The folder of MODEL. An existing path wins, then the hub cache, then (unless offline) a download.

    Errors: ModelNotFoundError (with the command that would fetch it), RequestError for text that is neither a path nor
    org/name.
    """
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if exists:
        if path.is_dir():
            return path
        raise RequestError(f"{model}: a file; expected a model folder or org/name")
    if not HUB_ID.fullmatch(model):
        if os.sep in model or model.startswith((".", "~")):
            raise ModelNotFoundError(f"{model}: no such folder; expected a model folder or org/name")
        raise RequestError(f"{model!r} is neither a folder nor org/name; did you mean -p {model!r}?")
    name, _, revision = model.partition("@")
    found = cached_snapshot(name, revision or None)
    if found is not None:
        return found
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    if is_offline(offline):
        raise ModelNotFoundError(
            f"{model}: not a folder, not in the hub cache, and offline; run `{command}` with a network"
        )
    return _download(name, revision or None, command)


def _download(name: str, revision: str | None, command: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS))
    except GatedRepoError:
        raise ModelNotFoundError(f"{name}: gated; accept its licence, set HF_TOKEN and run `{command}`") from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(
            f"{name}: no revision {revision!r} on the hub; expected one that `{command}` finds"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{name}: not a folder and not on the hub; expected a model that `{command}` finds"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(f"{name}: cannot be downloaded ({line}); run `{command}`") from None
