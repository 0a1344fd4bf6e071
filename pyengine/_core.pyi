"""Stage 0, core stub: the types of the compiled extension, a thin layer over the C ABI in pyengine.h.

Every error is one of pyengine.errors: RequestError for wrong arguments, ModelFormatError for NaN or Inf in a tensor,
UnsupportedModelError, ResourceError, ComputeError, CancelledError.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, TypedDict

import numpy as np
import numpy.typing as npt

KV_BLOCK: int  # tokens in a KV block
LAYOUT_VERSION: int  # of packed tensors (docs/packed_formats.md)

class IsaInfo(TypedDict):
    name: str
    available: bool
    chosen: bool

class ProgramInfo(TypedDict):
    arena_bytes: int
    barriers: int
    allocations: int

def isas() -> list[IsaInfo]: ...
def cpu_features() -> list[str]: ...
def default_threads() -> int: ...
def compiler() -> str: ...
def commit() -> str: ...
def abi_version() -> int: ...
def checksum(data: bytes) -> int: ...  # of a multiple of 64 bytes

class _Enum:
    __members__: ClassVar[dict[str, Any]]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __ne__(self, other: object) -> bool: ...
    def __lt__(self, other: _Enum | int) -> bool: ...
    def __le__(self, other: _Enum | int) -> bool: ...
    def __gt__(self, other: _Enum | int) -> bool: ...
    def __ge__(self, other: _Enum | int) -> bool: ...
    def __hash__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Limit(_Enum):
    READ: ClassVar[Limit]
    INT8: ClassVar[Limit]
    F32: ClassVar[Limit]
    HOP: ClassVar[Limit]

class Format(_Enum):
    F32: ClassVar[Format]
    BF16: ClassVar[Format]
    INT8: ClassVar[Format]
    INT4_SYM: ClassVar[Format]
    INT4_MIN: ClassVar[Format]
    ROWS_F32: ClassVar[Format]
    ROWS_BF16: ClassVar[Format]
    VECTOR_F32: ClassVar[Format]

class KvDtype(_Enum):
    F32: ClassVar[KvDtype]
    BF16: ClassVar[KvDtype]
    INT8: ClassVar[KvDtype]

class OpKind(_Enum):
    EMBED: ClassVar[OpKind]
    LOAD_HIDDEN: ClassVar[OpKind]
    NORM: ClassVar[OpKind]
    QUANTIZE: ClassVar[OpKind]
    LINEAR: ClassVar[OpKind]
    QK_NORM: ClassVar[OpKind]
    ROPE: ClassVar[OpKind]
    KV_APPEND: ClassVar[OpKind]
    ATTENTION: ClassVar[OpKind]
    ADD: ClassVar[OpKind]
    ACT_MUL: ClassVar[OpKind]
    ACT: ClassVar[OpKind]
    MASK_COLUMNS: ClassVar[OpKind]
    HEAD_LINEAR: ClassVar[OpKind]
    LATENT_APPEND: ClassVar[OpKind]
    TAP: ClassVar[OpKind]
    DEQUANTIZE: ClassVar[OpKind]
    ROUTER: ClassVar[OpKind]
    MOE_GATE_UP: ClassVar[OpKind]
    MOE_DOWN: ClassVar[OpKind]
    GATE: ClassVar[OpKind]
    NORM_QUANTIZE: ClassVar[OpKind]
    QKV_ROPE_APPEND: ClassVar[OpKind]
    ATTENTION_QUANTIZE: ClassVar[OpKind]
    LINEAR_RESIDUAL: ClassVar[OpKind]
    NORM_RESIDUAL: ClassVar[OpKind]
    GATED_FFN: ClassVar[OpKind]
    GATED_FFN_RESIDUAL: ClassVar[OpKind]
    FFN: ClassVar[OpKind]
    FFN_RESIDUAL: ClassVar[OpKind]
    MOE_FFN_RESIDUAL: ClassVar[OpKind]
    LM_HEAD: ClassVar[OpKind]
    SAMPLE: ClassVar[OpKind]

class Stage(_Enum):
    EMBED: ClassVar[Stage]
    NORM: ClassVar[Stage]
    ATTENTION: ClassVar[Stage]
    ROUTER: ClassVar[Stage]
    FFN: ClassVar[Stage]
    LM_HEAD: ClassVar[Stage]
    SAMPLE: ClassVar[Stage]

class Norm(_Enum):
    RMS_NORM: ClassVar[Norm]
    LAYER_NORM: ClassVar[Norm]

class Activation(_Enum):
    SILU: ClassVar[Activation]
    GELU_TANH: ClassVar[Activation]
    GELU: ClassVar[Activation]
    RELU: ClassVar[Activation]

class Scoring(_Enum):
    SOFTMAX: ClassVar[Scoring]
    SIGMOID: ClassVar[Scoring]

class GroupScore(_Enum):
    MAX: ClassVar[GroupScore]
    TOP2_SUM: ClassVar[GroupScore]

class Library:
    """Another library with the functions of pyengine.h; ResourceError if it cannot be opened or is another version."""

    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def compiler(self) -> str: ...
    @property
    def commit(self) -> str: ...

class Backend:
    def __init__(self, threads: int = 0, isa: str = "", library: Library | None = None, device: str = "") -> None: ...
    @property
    def device(self) -> str: ...  # "cpu", "cuda:0"
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def measure(self, limit: int, work: int, passes: int) -> npt.NDArray[np.float64]: ...
    def flush_caches(self) -> None: ...
    def tensor_create(self, format: int, rows: int, cols: int, group: int = 0) -> int: ...
    def tensor_pack(
        self,
        id: int,
        source: npt.NDArray[Any],
        offset: int = 0,
        stride: int = 1,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> None: ...
    def tensor_bytes(self, id: int) -> npt.NDArray[np.uint8]: ...
    def tensor_write(self, id: int, source: npt.NDArray[np.uint8]) -> None: ...
    def tensor_size(self, id: int) -> int: ...
    def tensor_dequantize(self, id: int) -> npt.NDArray[np.float32]: ...
    def tensor_free(self, id: int) -> None: ...
    def tensors_gather(self, ids: Sequence[int]) -> None: ...
    def tensors_write(self, fd: int, offset: int, ids: Sequence[int]) -> int: ...
    def tensors_map(self, fd: int, offset: int, descs: Sequence[tuple[int, int, int, int]]) -> list[int]: ...
    def rope_set(
        self, id: int, table: npt.NDArray[np.float32], q_scale: npt.NDArray[np.float32] | None = None
    ) -> int: ...
    def kv_create(self, layers: int, kv_heads: int, k_dim: int, v_dim: int, dtype: int) -> int: ...
    def kv_reserve(self, group: int, blocks: int) -> None: ...
    def kv_block_bytes(self, group: int) -> int: ...

class Program:
    def __init__(
        self,
        backend: Backend,
        ops: list[dict[str, Any]],
        buffers: Sequence[tuple[bool, int] | tuple[bool, int, int]],
        max_batch_tokens: int,
        max_sequences: int,
        timed: bool,
    ) -> None: ...
    def run(
        self,
        token_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        query_start: npt.NDArray[np.int32],
        block_tables: Sequence[npt.NDArray[np.int32]],
        logits_rows: npt.NDArray[np.int32],
        logits: npt.NDArray[np.float32] | None,
        sampling: list[dict[str, Any] | None] | None,
        hidden: npt.NDArray[np.float32] | None,
        taps: Sequence[npt.NDArray[np.float32]],
        cancel: npt.NDArray[np.int32] | None,
        interruptible: bool,
        targets: npt.NDArray[np.int32] | None = None,
        top: int = 0,
    ) -> (
        tuple[
            npt.NDArray[np.int32],  # [rows] sampled ids
            npt.NDArray[np.float32],  # [rows] log probabilities of the untouched logits at them
            npt.NDArray[np.float32] | None,  # [rows] at the targets
            npt.NDArray[np.int32] | None,  # [rows, top] the most likely ids
            npt.NDArray[np.float32] | None,  # [rows, top] at them
        ]
        | None
    ): ...
    def times(self, reset: bool = False) -> tuple[npt.NDArray[np.uint64], int, int]: ...
    def routing(self, reset: bool = False) -> npt.NDArray[np.uint64]: ...
    def info(self) -> ProgramInfo: ...
