"""Stage 0, system: what the machine has left."""

from __future__ import annotations

import errno
import os

from pyengine.errors import ResourceError

LACKS = {errno.EMFILE: "a free file descriptor", errno.ENFILE: "a free file descriptor", errno.ENOMEM: "free memory"}


def lacking(path: str | os.PathLike[str], error: OSError) -> ResourceError | None:
    """The error where a file could not be read for lack of descriptors or memory; None where it is the file's fault."""
    if error.errno not in LACKS:
        return None
    return ResourceError(f"{os.fspath(path)}: {error.strerror}; expected {LACKS[error.errno]}")


def available_memory() -> int | None:
    """Bytes that can still be taken without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
