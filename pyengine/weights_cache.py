"""Stage 3, weights_cache: packed weights of a model in one file, so that the next start maps what this one made.

A file is a header of 64 bytes, an index (JSON) and the tensors in program order (docs/packed_formats.md). Its name is
the hash of its key: everything that the bytes depend on. Files are made under another name and renamed, never changed,
so that readers and writers need no lock; one that is damaged is said, removed, and made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyengine import _core
from pyengine._core import Backend
from pyengine.checkpoint import Checkpoint
from pyengine.errors import ModelFormatError, PyEngineError, ResourceError
from pyengine.pack_layer import NONE, LayerWeights
from pyengine.paths import weights_cache_dir
from pyengine.quantize import QUANTIZER_VERSION, Quantization
from pyengine.spec import ModelSpec
from pyengine.weights import ModelWeights, Observer, Prepare, Progress, load_weights

FILE_VERSION = 2
WORTH_SECONDS = 2.0  # a load that took less is not worth a file
FREE_TIMES = 3  # times the file's size that must be free before it is written
DEFAULT_LIMIT_BYTES = 20_000_000_000
STALE_SECONDS = 3600  # where files cannot be locked: a temporary file not written to for so long is a dead process's
MAX_INDEX_BYTES = 64 << 20
SUFFIX = ".weights"
HEADER = struct.Struct("<8sIIQQQ24x")  # magic, file version, 0, bytes of the index, its checksum, bytes of the file
MAGIC = b"PYENGWTS"

Key = dict[str, Any]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One file of the cache. model and quant are "?" where its index cannot be read."""

    path: Path
    model: str
    quant: str
    group_size: int | None
    bytes: int
    last_used: float  # seconds since the epoch


@dataclass
class WeightsCache:
    """The cache as one load uses it: where, how much in all, and who is told what happened (one line each)."""

    limit_bytes: int
    log: Log

    def load(self, backend: Backend, key: Key, quantization: Quantization, *, strict: bool) -> ModelWeights | None:
        """The weights of `key`, mapped; None where they are not there, or not to be used, which is said.

        strict: weights that had a warning are not used, because making them is an error.
        """
        path = weights_cache_dir() / file_name(key)
        remove_dead()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.log(f"warning: {path}: {error.strerror}; quantizing again")
            return None
        try:
            index, offset = read_index(descriptor, path)
            if index["key"] != key:
                raise ModelFormatError(f"{path}: made of something else; expected the file that its name says")
            if strict and index["warnings"]:
                return None
            weights = _map(backend, descriptor, index, offset, quantization)
        except ResourceError as error:
            self.log(f"warning: {path}: {error}; quantizing")
            return None
        except (PyEngineError, OSError, KeyError, TypeError, ValueError, IndexError) as error:
            text = str(error) if isinstance(error, PyEngineError) else f"damaged ({error!r})"
            self.log(f"warning: {text if str(path) in text else f'{path}: {text}'}; quantizing again")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # a folder that cannot be written to is used all the same
            os.utime(path)
        return weights

    def save(self, backend: Backend, key: Key, weights: ModelWeights, model: Path) -> None:
        """Write the weights for `key`; says so, or why not. Never an error: the weights are there."""
        folder, size = weights_cache_dir(), weights.packed_bytes
        try:
            if _is_inside(folder, model):
                self.log(f"packed weights not cached: {folder} is inside the model's folder {model}; expected another")
                return
            if size > self.limit_bytes:
                self.log(f"packed weights not cached: {size / 1e9:.1f} GB; the limit is {self.limit_bytes / 1e9:g} GB")
                return
            folder.mkdir(parents=True, exist_ok=True)
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
            if free < FREE_TIMES * size:
                wanted = f"{FREE_TIMES} times {size / 1e9:.1f} GB to be free"
                self.log(f"packed weights not cached: {folder} has {free / 1e9:.1f} GB; expected {wanted}")
                return
            path = folder / file_name(key)
            evict(self.limit_bytes - size, keep=path)
            _write(backend, path, index_of(key, weights, model), list(weights.tensors))
        except (OSError, ResourceError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else error
            self.log(f"packed weights not cached: {folder}: {text}")
            return
        self.log(f"packed weights cached for the next start: {size / 1e9:.2f} GB in {folder}")


# ---- what a file depends on -----------------------------------------------------------------------------------------


def make_key(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    quantization: Quantization,
    calibration_ids: list[int] | None,
    prepare: Prepare | None = None,
) -> Key:
    """Everything that the packed bytes depend on, as JSON values.

    calibration_ids: tokens of the calibration text, which stand for the text and the tokenizer; None without
    calibration. prepare: as in `load_weights`; its name stands for it. The spec stands for config.json: all that is
    used of it, as it was understood.
    """
    described = repr(replace(spec, warnings=()))
    ids = None if calibration_ids is None else _sha256(np.asarray(calibration_ids, "<i4").tobytes())
    return {
        "file_version": FILE_VERSION,
        "layout_version": _core.LAYOUT_VERSION,
        "quantizer_version": QUANTIZER_VERSION,
        "files": [list(file) for file in checkpoint.identity()],
        "spec": _sha256(described.encode()),
        "quant": quantization.quant,
        "group_size": quantization.group_size,
        "scheme": quantization.scheme,
        "calibration": ids,
        "prepare": None if prepare is None else prepare.__name__,
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_name(key: Key) -> str:
    """The name of the file of `key`, inside the cache's folder."""
    return _sha256(json.dumps(key, sort_keys=True).encode())[:32] + SUFFIX


# ---- files ----------------------------------------------------------------------------------------------------------


def index_of(key: Key, weights: ModelWeights, model: Path) -> dict[str, Any]:
    """The index of a file: ids of tensors become their places in it."""
    place = {tensor: at for at, tensor in enumerate(weights.tensors)} | {NONE: NONE}
    return {
        "key": key,
        "model": str(model),
        "tensors": list(weights.tensors.values()),
        "embed": place[weights.embed],
        "lm_head": place[weights.lm_head],
        "final_norm": place[weights.final_norm],
        "final_norm_bias": place[weights.final_norm_bias],
        "positions": place[weights.positions],
        "layers": [{name: place[tensor] for name, tensor in asdict(layer).items()} for layer in weights.layers],
        "layer_matrix_weights": weights.layer_matrix_weights,
        "chosen_experts": weights.chosen_experts,
        "warnings": weights.warnings,
    }


def _map(
    backend: Backend, descriptor: int, index: dict[str, Any], offset: int, quantization: Quantization
) -> ModelWeights:
    """The weights that `index` describes, their tensors mapped from `offset` on and verified."""
    descs = [(int(form), int(rows), int(cols), int(group)) for form, rows, cols, group in index["tensors"]]
    ids = backend.tensors_map(descriptor, offset, descs)
    try:
        weights = _named(index, ids, quantization)
        weights.tensors = dict(zip(ids, descs, strict=True))
        weights.count_bytes(backend)
    except BaseException:
        for tensor in ids:
            backend.tensor_free(tensor)
        raise
    return weights


def _named(index: dict[str, Any], ids: list[int], quantization: Quantization) -> ModelWeights:
    """The weights of an index whose tensors have these ids in the core."""

    def tensor(place: int) -> int:
        return ids[place] if place >= 0 else NONE

    return ModelWeights(
        tensor(index["embed"]),
        tensor(index["lm_head"]),
        tensor(index["final_norm"]),
        tensor(index["final_norm_bias"]),
        tensor(index["positions"]),
        [LayerWeights(**{name: tensor(at) for name, at in layer.items()}) for layer in index["layers"]],
        quantization,
        layer_matrix_weights=int(index["layer_matrix_weights"]),
        chosen_experts=[(int(chosen), int(of)) for chosen, of in index["chosen_experts"]],
        warnings=[str(text) for text in index["warnings"]],
        cached=True,
    )


def _write(backend: Backend, path: Path, index: dict[str, Any], tensors: list[int]) -> None:
    """Write a file under another name, sync it, rename it. On any error nothing is left behind."""
    raw = json.dumps(index).encode()
    raw += b" " * (-len(raw) % 64)
    descriptor, name = _temporary(path.parent)
    try:
        try:
            data_bytes = backend.tensors_write(descriptor, HEADER.size + len(raw), tensors)
            end = HEADER.size + len(raw) + data_bytes
            head = HEADER.pack(MAGIC, FILE_VERSION, 0, len(raw), _core.checksum(raw), end)
            at, head = 0, head + raw
            while at < len(head):
                at += os.pwrite(descriptor, head[at:], at)
            os.fchmod(descriptor, 0o444)  # it is mapped while it is used: nobody writes into it
            os.fsync(descriptor)
            os.rename(name, path)  # still locked: nobody takes it for a dead process's
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    with contextlib.suppress(OSError):  # the file is whole and in its place; only a crash could still undo that
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _temporary(folder: Path) -> tuple[int, str]:
    """A new file to write, and its name. It is locked as long as it is open, so that the file of a process that died
    is known by its having no lock (`remove_dead`)."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=SUFFIX + ".tmp", dir=folder)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: then age tells
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.exists(name):
                return descriptor, name
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # taken for a dead one before it was locked


def remove_dead() -> None:
    """Remove what processes that died left half written."""
    for path in weights_cache_dir().glob(f".*{SUFFIX}.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _is_dead(descriptor):
                    path.unlink()  # under its lock: a writer that comes for it now finds that it has gone
            finally:
                os.close(descriptor)


def _is_dead(descriptor: int) -> bool:
    """Whether nobody writes this open temporary file any more; then it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > STALE_SECONDS
    return True


def _read(descriptor: int, count: int, offset: int) -> bytes:
    """`count` bytes from `offset`; fewer only where the file ends."""
    parts = []
    while count > 0 and (part := os.pread(descriptor, count, offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def read_index(descriptor: int, path: Path) -> tuple[dict[str, Any], int]:
    """The index of an open file, and where its tensors begin. ModelFormatError for anything but an intact index."""
    head = _read(descriptor, HEADER.size, 0)
    if len(head) < HEADER.size:
        raise ModelFormatError(f"{path}: {len(head)} bytes; expected at least a header")
    magic, version, _, index_bytes, checksum, end = HEADER.unpack(head)
    size = os.fstat(descriptor).st_size
    if (magic, version) != (MAGIC, FILE_VERSION):
        raise ModelFormatError(f"{path}: begins with {magic!r}, version {version}; expected {MAGIC!r}, {FILE_VERSION}")
    if size != end or index_bytes % 64 or not 0 < index_bytes <= min(MAX_INDEX_BYTES, size - HEADER.size):
        raise ModelFormatError(f"{path}: {size} bytes, index of {index_bytes}; expected {end} bytes in all")
    if head != HEADER.pack(MAGIC, FILE_VERSION, 0, index_bytes, checksum, end):
        raise ModelFormatError(f"{path}: the header is not what was written; expected zeros between its fields")
    raw = _read(descriptor, index_bytes, HEADER.size)
    if len(raw) < index_bytes or _core.checksum(raw) != checksum:
        raise ModelFormatError(f"{path}: the index is not what was written")
    index = json.loads(raw)
    if not isinstance(index, dict):
        raise ModelFormatError(f"{path}: the index is not an object")
    return index, HEADER.size + index_bytes


def _is_inside(folder: Path, model: Path) -> bool:
    """Whether `folder`, links followed, is in a model's folder: nothing is ever written there."""
    return model.is_dir() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(model))


# ---- the folder -----------------------------------------------------------------------------------------------------


def _files() -> Iterator[tuple[Path, os.stat_result]]:
    """Files of the cache, least recently used first. What another process removes meanwhile is left out."""
    found = []
    for path in weights_cache_dir().glob("*" + SUFFIX):
        with contextlib.suppress(OSError):
            found.append((path, path.stat()))
    yield from sorted(found, key=lambda item: (item[1].st_mtime_ns, item[0].name))


def entries() -> list[Entry]:
    """The cache's files, least recently used first."""
    listed = []
    for path, status in _files():
        model, quant, group = "?", "?", None
        with contextlib.suppress(PyEngineError, OSError, KeyError, TypeError, ValueError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                index, _ = read_index(descriptor, path)
            finally:
                os.close(descriptor)
            model, quant, group = index["model"], index["key"]["quant"], index["key"]["group_size"]
        listed.append(Entry(path, model, quant, group, status.st_size, status.st_mtime))
    return listed


def evict(limit_bytes: int, *, keep: Path | None = None) -> int:
    """Remove the least recently used files until the others take at most `limit_bytes`; returns the bytes removed.

    `keep` is neither counted nor removed. Temporary files of dead processes go too. Who has a removed file mapped keeps
    its pages. Errors: OSError for a file that cannot be removed.
    """
    remove_dead()
    files = [(path, status.st_size) for path, status in _files() if path != keep]
    total, removed = sum(size for _, size in files), 0
    for path, size in files:
        if total - removed <= limit_bytes:
            break
        path.unlink(missing_ok=True)
        removed += size
    return removed


# ---- the way in -----------------------------------------------------------------------------------------------------


def load_through(
    cache: WeightsCache | None,
    backend: Backend,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    quantization: Quantization,
    calibration_ids: list[int] | None,
    observe: Callable[[list[int]], Observer],
    progress: Progress | None = None,
    *,
    prepare: Prepare | None = None,
    strict: bool = False,
) -> ModelWeights:
    """The model's packed weights, from the cache where it has them, else as `load_weights` makes them.

    observe: makes the observer of a load with `calibration_ids`; not called where the cache has the weights.
    Errors: as `load_weights`; the cache itself raises none.
    """
    key, there = make_key(checkpoint, spec, quantization, calibration_ids, prepare), False
    if cache is not None:
        there = (weights_cache_dir() / file_name(key)).exists()  # what is damaged is made again at any speed
        found = cache.load(backend, key, quantization, strict=strict)
        if found is not None:
            return found
    started = time.perf_counter()
    observer = None if calibration_ids is None else observe(calibration_ids)
    weights = load_weights(backend, checkpoint, spec, quantization, observer, progress, prepare=prepare, strict=strict)
    if cache is not None and (there or time.perf_counter() - started > WORTH_SECONDS):
        cache.save(backend, key, weights, checkpoint.folder)
    return weights
