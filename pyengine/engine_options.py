"""Stage 5, engine_options: the arguments of `load`, checked before anything is read, and what their defaults mean."""

from __future__ import annotations

import os
from typing import Any

from pyengine import cuda, system
from pyengine.checkpoint import Checkpoint
from pyengine.errors import RequestError, UnsupportedModelError
from pyengine.kv_cache import KV_DTYPES
from pyengine.sampling import is_integer
from pyengine.spec import MLASpec, ModelSpec


def load_arguments(**given: Any) -> dict[str, Any]:
    """The keyword arguments of `load`, environment twins filled in. RequestError for what no model could take."""
    threads, isa = given["threads"], given["isa"]
    if threads is None:
        threads = system.environment_threads()
    if threads is not None and (not is_integer(threads) or not 1 <= threads <= 1024):
        raise RequestError(f"threads {threads!r}; expected 1 to 1024")
    if isa is not None and not isinstance(isa, str):
        raise RequestError(f"isa {isa!r}; expected a name")
    for name, what in (("cache_limit", "cache limit"), ("prefix_cache_bytes", "prefix_cache_bytes")):
        if not is_integer(given[name]) or given[name] < 0:
            raise RequestError(f"{what} {given[name]!r}; expected bytes, 0 or more")
    for name in ("calibration", "strict", "cache"):
        if not isinstance(given[name], bool):
            raise RequestError(f"{name} {given[name]!r}; expected True or False")
    what = "device" if given["device"] is not None else "PYENGINE_DEVICE"
    device = cuda.wanted() if given["device"] is None else given["device"]
    cuda.choose(device, what)
    return {**given, "threads": threads, "device": device, "isa": isa or os.environ.get("PYENGINE_ISA") or None}


def stored_quant(checkpoint: Checkpoint) -> str:
    """What `none` means: bf16 where every matrix is stored as BF16, else f32 (which holds F16 and BF16 exactly)."""
    kinds = {info.dtype for info in checkpoint.tensors.values() if len(info.shape) == 2}
    return "bf16" if kinds == {"BF16"} else "f32"


def choose_kv_dtype(kv_dtype: str | None, quant: str, spec: ModelSpec) -> str:
    """The default is bf16, f32 under f32. int8 has one scale a row, which [latent | rotary key] would have to share."""
    if kv_dtype not in (None, *KV_DTYPES):
        raise RequestError(f"KV dtype {kv_dtype!r}; expected one of {', '.join(KV_DTYPES)}")
    if kv_dtype == "int8" and any(isinstance(layer.attention, MLASpec) for layer in spec.layers):
        raise UnsupportedModelError(f"KV dtype 'int8' for latent attention ({spec.family}); expected 'bf16' or 'f32'")
    return kv_dtype or ("f32" if quant == "f32" else "bf16")


def choose_ctx_size(ctx_size: int, spec: ModelSpec) -> int:
    if not is_integer(ctx_size) or not 0 <= ctx_size <= spec.max_context:
        raise RequestError(f"context {ctx_size!r}; expected 0 to the model's maximum {spec.max_context}")
    return int(ctx_size) or spec.max_context
