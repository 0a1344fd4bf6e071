"""Stage 6, account: parameters, FLOPs, bytes, memory and speed to expect of a model, from its config.json alone.

Everything but the machine's limits is exact arithmetic over the parts of account_parts.py. Speeds are bounds: a decode
step takes at least the time to read its bytes and at least the time of its operations, whichever is longer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from pyengine import _core, hub, quantize
from pyengine._core import Limit
from pyengine.errors import RequestError
from pyengine.kv_cache import KV_DTYPES
from pyengine.reports import machine
from pyengine.reports.account_memory import activation_bytes
from pyengine.reports.account_parts import Anatomy
from pyengine.reports.account_read import read_anatomy, stored_parameters
from pyengine.reports.machine import Limits
from pyengine.reports.memory import MemoryRoom, memory_room
from pyengine.sampling import is_integer
from pyengine.steps import MAX_BATCH_TOKENS

FORMATS = ("f32", "bf16", "int8", "int4")
DEFAULT_CONTEXT = 4096
MAX_TOKENS = 1 << 31
CONTEXTS = (1, 512, 4096, 32768, 131072)  # of the table of FLOPs


@dataclass(frozen=True)
class Machine:
    """What speeds are computed from. read: "kept" (by bench), "measured" or "given"."""

    cpu: str
    threads: int
    isa: str
    limits: Limits
    read: str

    def to_json(self) -> dict[str, Any]:
        rates = self.limits.rates
        return {"cpu": self.cpu, "threads": self.threads, "isa": self.isa, **rates, "read_source": self.read}


@dataclass(frozen=True)
class Account:
    """What `account` found. Sizes in bytes, shares as fractions 0..1; None where a model has no such thing.

    context: tokens that the last one sees, itself included. batch: sequences that a decode step advances. A step's
    bytes are those of all of them.
    """

    model: str
    anatomy: Anatomy
    context: int
    batch: int
    quant: str
    kv_dtype: str
    stored_parameters: int | None
    notes: tuple[str, ...]
    machine: Machine
    room: MemoryRoom

    # ---- parameters and FLOPs ----

    @property
    def decodes(self) -> bool:
        return self.anatomy.kind != "encoder"

    @property
    def parameters(self) -> dict[str, int]:
        return self.anatomy.parameters()

    @property
    def ffn_parameter_share(self) -> float:
        return self.parameters["ffn"] / self.parameters["total"]

    @property
    def flops_per_token(self) -> dict[str, int]:
        return self.anatomy.flops(self.context)

    @property
    def encoder_flops_per_token(self) -> dict[str, int] | None:
        """Of a source token, with a decoder beside the encoder: k and v of cross-attention are computed here."""
        return self.anatomy.flops(self.context, "encoder") if self.anatomy.kind == "encoder-decoder" else None

    def flops_by_context(self) -> dict[int, dict[str, int]]:
        """The same at a few contexts up to the model's maximum, the one asked for among them."""
        limit = self.anatomy.max_context or CONTEXTS[-1]
        wanted = sorted({*(c for c in CONTEXTS if c <= limit), self.context, min(limit, CONTEXTS[-1])})
        return {context: self.anatomy.flops(context) for context in wanted}

    # ---- bytes ----

    @property
    def weight_bytes(self) -> dict[str, int]:
        return {name: self.anatomy.weight_bytes(quantize.choose(name)) for name in FORMATS}

    @property
    def decode_bytes_per_token(self) -> dict[str, int] | None:
        """Weights that a step of one sequence reads; `bench` calls it weight_bytes_per_token."""
        if not self.decodes:
            return None
        return {name: round(sum(self.anatomy.step_bytes(quantize.choose(name)).values())) for name in FORMATS}

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(a.token_bytes(self.kv_dtype) for a in self.anatomy.attention)

    @property
    def step_weight_bytes(self) -> dict[str, float]:
        """Weights that a step reads, by group, in the format and for the batch asked for."""
        return self.anatomy.step_bytes(quantize.choose(self.quant), self.batch)

    @property
    def step_kv_bytes(self) -> int:
        return self.batch * sum(a.read_bytes(self.context, self.kv_dtype) for a in self.anatomy.attention)

    @property
    def step_bytes(self) -> float:
        return sum(self.step_weight_bytes.values()) + self.step_kv_bytes

    @property
    def kv_cache_bytes(self) -> int:
        """Of all sequences at this context."""
        chunk = min(self.context, MAX_BATCH_TOKENS)
        return self.batch * sum(a.kept_bytes(self.context, self.kv_dtype, chunk) for a in self.anatomy.attention)

    @property
    def activation_bytes(self) -> int:
        integer = quantize.choose(self.quant).layers.is_integer
        return activation_bytes(self.anatomy, integer, self.machine.threads)

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes[self.quant] + self.kv_cache_bytes + self.activation_bytes

    @property
    def fits(self) -> bool | None:
        return None if self.room.available is None else self.needed_bytes <= self.room.available

    # ---- speed ----

    def seconds(self, matrix_flops: float, score_flops: float) -> float:
        """The least time of so many operations: int8 ones for int8 and int4 weights, and for scores of an int8 cache.

        There q and the weights of the values have two int8 digits, so each operation is done twice.
        """
        limits = self.machine.limits
        integer = quantize.choose(self.quant).layers.is_integer
        matrix_rate = limits.int8_gops if integer else limits.f32_gflops
        score_rate = limits.int8_gops / 2 if self.kv_dtype == "int8" else limits.f32_gflops
        return matrix_flops / (1e9 * matrix_rate) + score_flops / (1e9 * score_rate)

    @property
    def decode_seconds(self) -> tuple[float, float] | None:
        """Of a step: to read its bytes, to compute."""
        if not self.decodes:
            return None
        flops, scores = self.flops_per_token["total"], self.flops_per_token["attention_scores"]
        read = self.step_bytes / (1e9 * self.machine.limits.read_gb_per_s)
        return read, self.seconds(self.batch * (flops - scores), self.batch * scores)

    @property
    def decode_tokens_per_second(self) -> float | None:
        return None if self.decode_seconds is None else self.batch / max(self.decode_seconds)

    @property
    def decode_bound(self) -> str | None:
        if self.decode_seconds is None:
            return None
        read, compute = self.decode_seconds
        return "bandwidth" if read >= compute else "compute"

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of a prompt as long as the context; the head is computed once, for its last token (an encoder has none)."""
        stack = "decoder" if self.anatomy.kind == "decoder" else "encoder"  # a prompt goes into the encoder
        flops = self.anatomy.flops(1, stack)
        matrices = flops["total"] - flops["attention_scores"] - flops["lm_head"] * (1 - 1 / self.context)
        scores = sum(a.prompt_flops(self.context) for a in self.anatomy.attention if a.stage == stack)
        return 1 / self.seconds(matrices, scores)

    # ---- what comes out ----

    def to_json(self) -> dict[str, Any]:
        """The object of `account --json`."""
        anatomy, flops = self.anatomy, self.flops_per_token
        return {
            "model": self.model,
            "family": anatomy.family,
            "architecture": anatomy.architecture or None,
            "kind": anatomy.kind,
            "runs": anatomy.not_run is None,
            "why_not": anatomy.not_run,
            "notes": list(self.notes),
            "parameters": self.parameters,
            "stored_parameters": self.stored_parameters,
            "ffn_parameter_share": self.ffn_parameter_share,
            "context": self.context,
            "max_context": anatomy.max_context,
            "flops_per_token": flops,
            "ffn_flop_share": flops["ffn"] / flops["total"],
            "flops_by_context": [{"context": c, **f} for c, f in self.flops_by_context().items()],
            "scores_equal_ffn_at": anatomy.crossover(),
            "encoder_flops_per_token": self.encoder_flops_per_token,
            "weight_bytes": self.weight_bytes,
            "decode_bytes_per_token": self.decode_bytes_per_token,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "decode": self.decode_to_json() if self.decodes else None,
            "memory": {
                "weight_bytes": self.weight_bytes[self.quant],
                "kv_cache_bytes": self.kv_cache_bytes,
                "activation_bytes": self.activation_bytes,
                "total_bytes": self.needed_bytes,
                "available_bytes": self.room.available,
                "cgroup_limit_bytes": self.room.cgroup_limit,
                "fits": self.fits,
            },
            "expected": {
                "decode_tokens_per_second": self.decode_tokens_per_second,
                "decode_bound": self.decode_bound,
                "prefill_tokens_per_second": self.prefill_tokens_per_second,
            },
            "machine": self.machine.to_json(),
            "parts": [
                {**vars(part), "parameters": part.parameters, "flops_per_token": part.flops} for part in anatomy.parts
            ],
        }

    def decode_to_json(self) -> dict[str, Any]:
        """Of a step of the whole batch at this context."""
        weights = self.step_weight_bytes
        return {
            "quant": self.quant,
            "kv_dtype": self.kv_dtype,
            "batch": self.batch,
            "weight_bytes_per_step": round(sum(weights.values())),
            "ffn_bytes_per_step": round(weights["ffn"]),
            "ffn_byte_share": weights["ffn"] / self.step_bytes,
            "kv_bytes_per_step": self.step_kv_bytes,
            "bytes_per_step": round(self.step_bytes),
            "flops_per_step": self.batch * self.flops_per_token["total"],
        }

    def explain(self) -> list[str]:
        """The arithmetic, line by line."""
        from pyengine.reports.account_text import explain

        return explain(self)

    def to_html(self) -> str:
        """One self-contained page."""
        from pyengine.reports.account_html import page

        return page(self)

    def to_png(self, path: str | os.PathLike[str]) -> None:
        """The page's pictures as one PNG file.

        Errors: ResourceError without the extra [viz], RequestError for a path that cannot be written.
        """
        from pyengine.reports import account_pictures, account_text, png

        png.write(
            path, [self.model, f"parameters: {account_text.parameters_line(self)}"], account_pictures.pictures(self)
        )

    def _repr_html_(self) -> str:
        from pyengine.reports.account_html import fragment

        return fragment(self)

    def __str__(self) -> str:
        from pyengine.reports.account_text import report

        return report(self)


def measure_machine(threads: int | None, limits: Limits | None) -> Machine:
    """The machine's limits: those given, else the read bandwidth that bench kept and the rates measured now (0.1 s)."""
    backend = _core.Backend(threads or 0, os.environ.get("PYENGINE_ISA", ""))
    count, isa = backend.threads, backend.isa
    if limits is not None:
        return Machine(machine.cpu_name(), count, isa, limits, "given")
    kept = machine.known_read(count)
    if kept is None:
        return Machine(machine.cpu_name(), count, isa, machine.measure(backend), "measured")
    work: dict[Limit, int] = {}
    rates = [machine.compute_rate(backend, limit, work) / 1e9 for limit in (Limit.INT8, Limit.F32)]
    return Machine(machine.cpu_name(), count, isa, Limits(kept, *rates), "kept")


def check_number(name: str, value: Any, limit: int, what: str = "") -> int:
    if not is_integer(value) or not 1 <= value <= limit:
        raise RequestError(f"{name} {value!r}; expected 1 to {limit}{what}")
    return int(value)


def account(
    model: str | os.PathLike[str],
    *,
    context: int | None = None,
    batch: int = 1,
    quant: str = "int8",
    kv_dtype: str | None = None,
    threads: int | None = None,
    limits: Limits | None = None,
    strict: bool = False,
    offline: bool = False,
) -> Account:
    """What a model costs, from its config.json alone.

    model: a folder, a config.json, or a hub id, of which only config.json is fetched. context: tokens that the last
    token sees (default 4096, or the model's maximum). batch: sequences decoded at once. quant: "f32", "bf16", "int8",
    "int4" or "none" (as config.json says that it is stored). kv_dtype: "bf16" (default; "f32" with f32), "f32", "int8".
    threads: whose limits count, as in `load`. limits: in place of the machine's own.
    Errors: RequestError for a bad argument, ModelNotFoundError, ModelFormatError for a bad config,
    UnsupportedModelError for a family whose shapes are not known.
    """
    batch = check_number("batch", batch, MAX_TOKENS)
    if quant not in quantize.QUANTS:
        raise RequestError(f"quant {quant!r}; expected one of {', '.join(quantize.QUANTS)}")
    if kv_dtype not in (None, *KV_DTYPES):
        raise RequestError(f"KV dtype {kv_dtype!r}; expected one of {', '.join(KV_DTYPES)}")
    if threads is not None:
        threads = check_number("threads", threads, 1024)
    if limits is not None and not all(0 < value < float("inf") for value in limits.rates.values()):
        raise RequestError(f"limits {limits}; expected finite numbers above 0")
    path = hub.config_file(os.fsdecode(model), offline=offline)
    anatomy = read_anatomy(path, strict=strict)
    limit = anatomy.max_context
    if context is None:
        context = min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    context = check_number("context", context, limit or MAX_TOKENS, ", the model's maximum" if limit else "")
    if quant == "none":
        quant = "bf16" if anatomy.stored == "bfloat16" else "f32"
    found, note = stored_parameters(path, anatomy)
    notes = (*anatomy.notes, *([] if note is None else [note]))
    return Account(
        model=str(path.parent if path.name == "config.json" else path),
        anatomy=replace(anatomy, notes=()),
        context=context,
        batch=batch,
        quant=quant,
        kv_dtype=kv_dtype or ("f32" if quant == "f32" else "bf16"),
        stored_parameters=found,
        notes=notes,
        machine=measure_machine(threads, limits),
        room=memory_room(),
    )
