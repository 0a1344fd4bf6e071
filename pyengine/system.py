"""Stage 0, system: what the machine has left."""

from __future__ import annotations

import errno
import os
import resource

from pyengine.errors import RequestError, ResourceError

LIBRARIES_BYTES = 64 << 20  # beside the weights; tokenizers, in Rust, aborts where it gets no memory
LACKS = {errno.EMFILE: "a free file descriptor", errno.ENFILE: "a free file descriptor", errno.ENOMEM: "free memory"}


def lacking(path: str | os.PathLike[str], error: OSError) -> ResourceError | None:
    """The error where a file could not be read for lack of descriptors or memory; None where it is the file's fault."""
    if error.errno not in LACKS:
        return None
    return ResourceError(f"{os.fspath(path)}: {error.strerror}; expected {LACKS[error.errno]}")


def available_memory() -> int | None:
    """Bytes that can still be taken without swapping, and within a limit on address space (ulimit -v); None where the
    system does not say."""
    known = [room for room in (_physical_room(), _address_room()) if room is not None]
    return min(known, default=None)


def check_room(what: str | os.PathLike[str]) -> None:
    """ResourceError where a limit on address space leaves less than libraries take that end the process without it."""
    room = _address_room()
    if room is not None and room < LIBRARIES_BYTES:
        raise ResourceError(
            f"{os.fspath(what)}: {room} bytes of address space left (ulimit -v); "
            f"expected {LIBRARIES_BYTES} beside the weights"
        )


def _physical_room() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _address_room() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return max(0, limit - int(file.read().split()[0]) * resource.getpagesize())
    except OSError:
        return None


def environment_threads() -> int | None:
    """PYENGINE_THREADS; None where it is not set. RequestError if it is no number."""
    value = os.environ.get("PYENGINE_THREADS", "")
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise RequestError(f"PYENGINE_THREADS={value!r}; expected a whole number") from None
