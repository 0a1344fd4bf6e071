"""Stage 0, cuda: the devices a model can run on, and where CUDA cannot be used the one reason why.

The CUDA library is no part of this process until a device is asked for: it is looked for beside the package (or where
PYENGINE_CUDA_LIBRARY says), opened with cffi, and asked for its version and its devices.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine import system
from pyengine.errors import RequestError, ResourceError

if TYPE_CHECKING:
    from pyengine._core import Backend

LIBRARY = "libpyengine_cuda.so"
HOW_TO_BUILD = "pip install . -C cmake.define.PYENGINE_CUDA=ON"
DECLARATIONS = """
    int32_t pe_abi_version(void);
    const char* pe_last_error(void);
    int32_t pe_device_count(void);
    const char* pe_device_name(int32_t i);
    int32_t pe_device_bytes(int32_t i, uint64_t* free, uint64_t* total);
"""


@dataclass(frozen=True)
class Device:
    """A device that the CUDA library can use."""

    name: str  # cuda:0
    model: str  # as its maker calls it
    free_bytes: int
    total_bytes: int


def choose(device: object, what: str = "device") -> str:
    """'cpu' or 'cuda:N' for auto, cpu, cuda or cuda:N; auto is the first CUDA device, or without one the CPU.

    RequestError for another word; ResourceError where a CUDA device is asked for and cannot be used. what: the name
    of the option in errors.
    """
    found = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", device) if isinstance(device, str) else None
    if found is None:
        raise RequestError(f"{what} {device!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device == "cpu":
        return "cpu"
    try:
        known = devices()
    except ResourceError as error:
        if device == "auto":
            return "cpu"
        raise ResourceError(f"{what} {device!r}: {error}") from None
    index = int(found.group(1) or 0)
    if index >= len(known):
        names = ", ".join(f"{one.name} ({one.model})" for one in known)
        raise ResourceError(f"{what} {device!r}: no such device; expected one of {names}")
    return f"cuda:{index}"


def wanted() -> str:
    """PYENGINE_DEVICE, else auto."""
    return os.environ.get("PYENGINE_DEVICE") or "auto"


def library_path() -> Path:
    """Where the CUDA library is, or would be: beside the compiled core."""
    named = os.environ.get("PYENGINE_CUDA_LIBRARY")
    if named:
        return Path(named)
    from pyengine import _core

    return Path(_core.__file__).parent / LIBRARY


def devices() -> list[Device]:
    """At least one device; ResourceError with what is missing, and what to do."""
    path = library_path()
    if not path.is_file():
        if os.environ.get("PYENGINE_CUDA_LIBRARY"):
            raise ResourceError(f"PYENGINE_CUDA_LIBRARY={path}: no such file; expected a CUDA library of pyengine")
        raise ResourceError(f"this installation has no {LIBRARY}; where nvcc is, build it: {HOW_TO_BUILD}")
    ffi, library = _opened(str(path.resolve()))
    count = library.pe_device_count()
    if count < 1:
        raise ResourceError(_text(ffi, library.pe_last_error()) or f"{path}: no CUDA device")
    return [_device(ffi, library, index) for index in range(count)]


def available_memory(device: str) -> int | None:
    """Bytes that a model's caches can still take where it runs; None where the system does not say."""
    if device == "cpu":
        return system.available_memory()
    return devices()[int(device.partition(":")[2])].free_bytes


def open_backend(device: str, threads: int | None, isa: str | None) -> Backend:
    """A backend for a device that `choose` gave. threads, isa: of the CPU, which packs the weights for every device."""
    from pyengine import _core

    if device == "cpu":
        return _core.Backend(threads or 0, isa or "")
    library = _core.Library(str(library_path().resolve()))
    return _core.Backend(threads or 0, isa or "", library=library, device=device)


@functools.lru_cache(maxsize=4)
def _opened(path: str) -> tuple[Any, Any]:
    """cffi and the library, of the version that this package speaks."""
    import cffi

    from pyengine import _core

    ffi = cffi.FFI()
    ffi.cdef(DECLARATIONS)
    try:
        library = ffi.dlopen(path, ffi.RTLD_NOW | ffi.RTLD_LOCAL)
    except OSError as error:
        raise ResourceError(f"cannot open the CUDA library: {error}") from None
    again = f"build it again with this version: {HOW_TO_BUILD}"
    try:
        version = library.pe_abi_version()
        if version != _core.abi_version():
            raise ResourceError(f"{path}: ABI version {version}; expected {_core.abi_version()}; {again}")
        for name in re.findall(r"pe_\w+(?=\()", DECLARATIONS):
            getattr(library, name)
    except AttributeError as error:
        raise ResourceError(f"{path} is no CUDA library of pyengine ({error}); {again}") from None
    return ffi, library


def _device(ffi: Any, library: Any, index: int) -> Device:
    free, total = ffi.new("uint64_t*"), ffi.new("uint64_t*")
    if library.pe_device_bytes(index, free, total) != 0:
        raise ResourceError(f"cuda:{index}: {_text(ffi, library.pe_last_error())}")
    return Device(f"cuda:{index}", _text(ffi, library.pe_device_name(index)), int(free[0]), int(total[0]))


def _text(ffi: Any, chars: Any) -> str:
    return ffi.string(chars).decode("utf-8", "replace") if chars else ""
