"""Stage 3, quantize: which packed format each kind of matrix gets, and what that costs in bits.

The arithmetic is in csrc/cpu/kernels/pack-inl.h; docs/packed_formats.md describes the layout and how the default int4
was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyengine._core import Format
from pyengine.errors import RequestError

QUANTS = ("none", "f32", "bf16", "int8", "int4")
INT4_SCHEMES = ("minimum", "symmetric")
INT4_GROUPS = (32, 64, 128)
INT8_GROUPS = (64,)
QUANTIZER_VERSION = (
    2  # of the integers that a matrix becomes, calibration included: cached weights of another are not used
)
DEFAULT_GROUP = {"int8": 64, "int4": 32}


@dataclass(frozen=True)
class PackedFormat:
    """A format of the core and its group size (0 for float formats)."""

    format: Format
    group: int = 0

    @property
    def is_integer(self) -> bool:
        """Integer formats take activations quantized to int8; float formats take float32."""
        return self.group > 0


@dataclass(frozen=True)
class Quantization:
    """How a model's matrices are stored. All linears inside the layers share one format."""

    quant: str  # "f32", "bf16", "int8" or "int4"
    group_size: int | None  # of the layers' matrices; None for float formats
    scheme: str | None  # int4: "minimum" or "symmetric"
    layers: PackedFormat
    head: PackedFormat  # lm_head and a tied embedding: int8 under int4

    @property
    def searches(self) -> bool:
        """Whether scales are searched, so that calibration matters."""
        return self.quant in ("int8", "int4")


def packed_bytes(packed: PackedFormat, rows: int, cols: int) -> int:
    """Bytes of a packed matrix [rows, cols], its header of 64 bytes not counted (docs/packed_formats.md)."""

    def up(n: int, step: int) -> int:
        return -(-n // step) * step

    step = {Format.F32: 1, Format.BF16: 2, Format.INT8: 4, Format.INT4_SYM: 8, Format.INT4_MIN: 8}[packed.format]
    groups = -(-cols // packed.group) if packed.group else 0
    before = 64 + up(32 * groups, 64) if groups else 0
    if packed.format == Format.INT4_MIN:
        before = 128 + 2 * up(16 * groups, 64)
    return -(-rows // 16) * up(before + 64 * up(cols, step) // step, 64)


def choose(quant: str, group_size: int | None = None, scheme: str | None = None) -> Quantization:
    """The formats of `quant` ("f32", "bf16", "int8", "int4"), its group size and int4 scheme.

    Errors: RequestError for an unknown value, or one that the format does not use.
    """
    if scheme is not None and (quant != "int4" or scheme not in INT4_SCHEMES):
        raise RequestError(f"int4 scheme {scheme!r} with {quant}; expected int4 and one of {', '.join(INT4_SCHEMES)}")
    if quant in ("f32", "bf16"):
        if group_size is not None:
            raise RequestError(f"group size {group_size} with {quant}, which has no groups; expected int8 or int4")
        packed = PackedFormat(Format.F32 if quant == "f32" else Format.BF16)
        return Quantization(quant, None, None, packed, packed)
    if quant not in ("int8", "int4"):
        raise RequestError(f"quant {quant!r}; expected one of {', '.join(QUANTS)}")
    groups = INT8_GROUPS if quant == "int8" else INT4_GROUPS
    group = DEFAULT_GROUP[quant] if group_size is None else group_size
    if not isinstance(group, int) or isinstance(group, bool) or group not in groups:
        raise RequestError(f"group size {group!r} with {quant}; expected one of {', '.join(map(str, groups))}")
    int8 = PackedFormat(Format.INT8, DEFAULT_GROUP["int8"])
    if quant == "int8":
        return Quantization(quant, group, None, int8, int8)
    scheme = "minimum" if scheme is None else scheme
    int4 = Format.INT4_MIN if scheme == "minimum" else Format.INT4_SYM
    return Quantization(quant, group, scheme, PackedFormat(int4, group), int8)
