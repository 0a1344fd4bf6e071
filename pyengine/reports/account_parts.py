"""Stage 6, account_parts: a model as a list of parts, and the arithmetic over them: parameters, FLOPs, bytes.

A part is a run of equal tensors. What a token does in one, by its role:

    matrix  y = W x: 2 x rows x cols FLOPs (biases, norms and activations are not counted), all of it is read
    head    the same, in the format of lm_head
    router  the same, never quantized: bfloat16 as stored, else float32
    heads   the same, a small matrix of each head: float32 under f32, else bfloat16
    tied    an embedding that is the head too: parameters of the embedding, FLOPs and bytes of the head
    once    a matrix for one token of a whole text (a pooler): nothing per token
    table   a row is looked up: no FLOPs, and next to nothing is read
    vector  a norm or a bias: no FLOPs counted, kept in float32

Bytes are those of docs/packed_formats.md. A decode step reads the matrices of the decoder without their headers, as
bench counts them; what is kept in memory has the headers and the vectors too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyengine._core import Format
from pyengine.kv_cache import token_bytes
from pyengine.quantize import PackedFormat, Quantization, packed_bytes

GROUPS = ("ffn", "attention", "embedding", "lm_head", "norm", "router", "other")
HEADER = 64  # bytes in front of a packed tensor
KV_BLOCK = 32  # tokens that the cache grows by


@dataclass(frozen=True)
class Part:
    """`count` equal tensors [rows, cols] of one purpose; a vector has cols 0.

    active: how many of them one token goes through. experts: how many there are in a layer, 0 if it is no expert.
    stage: "decoder", "encoder", or "mtp" for what a step of decoding leaves out. joined: packed behind another one.
    stacked: so many of them are one packed tensor.
    """

    name: str  # Llama's, or one like it; * for the numbers of layers and experts
    group: str
    rows: int
    cols: int = 0
    role: str = "matrix"
    count: int = 1
    active: int = 1
    experts: int = 0
    stage: str = "decoder"
    joined: bool = False
    stacked: int = 1

    @property
    def size(self) -> int:
        """Parameters of one of them."""
        return self.rows * max(self.cols, 1)

    @property
    def parameters(self) -> int:
        return self.count * self.size

    @property
    def computes(self) -> bool:
        return self.role in ("matrix", "head", "tied", "router", "heads")

    @property
    def flops(self) -> int:
        """Of one token."""
        return 2 * self.active * self.size if self.computes else 0

    @property
    def computed_as(self) -> str:
        """The group that its FLOPs and reads count to."""
        return "lm_head" if self.role == "tied" else self.group

    def packed_as(self, q: Quantization, bf16: bool) -> PackedFormat:
        """The format of a matrix. bf16: whether the files hold bfloat16."""
        if self.role == "router":
            return PackedFormat(Format.BF16 if bf16 else Format.F32)
        if self.role == "heads":
            return PackedFormat(Format.F32 if q.layers.format == Format.F32 else Format.BF16)
        return q.head if self.role in ("head", "tied") else q.layers

    def matrix_bytes(self, q: Quantization, bf16: bool) -> int:
        """Of one of them, packed, without its header."""
        return packed_bytes(self.packed_as(q, bf16), self.rows, self.cols)

    def stored_bytes(self, q: Quantization, bf16: bool) -> int:
        """Of all of them, as they are kept in memory."""
        if self.computes or self.role == "once":
            one = self.matrix_bytes(q, bf16)
        else:
            one = -(-self.size * (2 if self.role == "table" and bf16 else 4) // 64) * 64
        return self.count * one + (0 if self.joined else self.count // self.stacked * HEADER)

    def step_bytes(self, q: Quantization, bf16: bool, batch: int) -> float:
        """What a decode step of `batch` sequences reads of it.

        An expert is read if any of the sequences picks it. With every pick equally likely, E experts of which a token
        takes k, that are E (1 - (1 - k/E)^batch) of a layer's.
        """
        if not self.computes or self.stage != "decoder":
            return 0.0
        reads: float = self.active
        if self.experts and batch > 1:
            reads = self.count * (1 - (1 - self.active / self.count) ** batch)
        return reads * self.matrix_bytes(q, bf16)


@dataclass(frozen=True)
class Attention:
    """The part of attention that grows with the context, in `layers` equal layers.

    heads x (k_dim + v_dim): what a token multiplies with each key and value. kv_heads x (k_cached + v_cached): what is
    kept of a token; 0 heads where nothing is (an encoder). window: keys seen at most. state: elements per layer of a
    recurrent state (float32), which takes the place of keys.
    """

    layers: int
    heads: int
    k_dim: int
    v_dim: int
    kv_heads: int = 0
    k_cached: int = 0
    v_cached: int = 0
    window: int | None = None
    state: int = 0
    stage: str = "decoder"
    kind: str = "self"  # or "cross"

    def keys(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def flops(self, context: int) -> int:
        """q.k and weights.v of the last of `context` tokens; of a state: k.S, its update and q.S."""
        return self.layers * (6 * self.state + 2 * self.heads * (self.k_dim + self.v_dim) * self.keys(context))

    def prompt_flops(self, context: int) -> float:
        """The mean over all tokens of a prompt."""
        if self.kind == "cross" or self.stage == "encoder":  # each sees all
            return self.flops(context)
        seen = self.keys(context)  # 1, 2 .. seen, seen ..
        mean = (seen * (seen + 1) / 2 + (context - seen) * seen) / context
        return self.layers * (6 * self.state + 2 * self.heads * (self.k_dim + self.v_dim) * mean)

    def token_bytes(self, kv_dtype: str) -> int:
        """What one more token takes in the caches of these layers."""
        return self.layers * token_bytes(self.kv_heads, self.k_cached, self.v_cached, kv_dtype)

    def read_bytes(self, context: int, kv_dtype: str) -> int:
        """What the last of `context` tokens reads of the cache; a state is read and written."""
        return self.keys(context) * self.token_bytes(kv_dtype) + 2 * 4 * self.layers * self.state

    def kept_bytes(self, context: int, kv_dtype: str, chunk: int) -> int:
        """Memory of a sequence of `context` tokens that came in prompts of up to `chunk` tokens at a time."""
        tokens = context if self.window is None else min(context, self.window + chunk)
        return -(-tokens // KV_BLOCK) * KV_BLOCK * self.token_bytes(kv_dtype) + 4 * self.layers * self.state


@dataclass(frozen=True)
class Ffn:
    """A kind of FFN: hidden d, intermediate, matrices (3 where gated), whether one of experts, and where it is."""

    hidden: int
    intermediate: int
    matrices: int
    experts: int = 0
    top_k: int = 0
    first: int = 0  # layers that have it
    last: int = 0


class Ffns:
    """The kinds that layers have, each once."""

    def __init__(self) -> None:
        self.seen: dict[Ffn, tuple[int, int]] = {}

    def add(self, ffn: Ffn, layer: int) -> None:
        first, last = self.seen.get(ffn, (layer, layer))
        self.seen[ffn] = min(first, layer), max(last, layer)

    def result(self) -> tuple[Ffn, ...]:
        return tuple(replace(ffn, first=first, last=last) for ffn, (first, last) in self.seen.items())


@dataclass(frozen=True)
class Anatomy:
    """A model as the arithmetic sees it. kind: "decoder", "encoder" or "encoder-decoder"."""

    family: str
    architecture: str
    kind: str
    parts: tuple[Part, ...]
    attention: tuple[Attention, ...]
    ffns: tuple[Ffn, ...]
    max_context: int | None  # None: no limit of its own
    stored: str | None  # dtype that config.json names
    notes: tuple[str, ...] = ()
    not_run: str | None = None  # why the engine does not run it; None: it does

    @property
    def main(self) -> list[Part]:
        """All but multi-token prediction."""
        return [part for part in self.parts if part.stage != "mtp"]

    @property
    def bf16(self) -> bool:
        """Whether the files hold bfloat16."""
        return self.stored == "bfloat16"

    @property
    def stack(self) -> str:
        """Whose FLOPs per token are meant."""
        return "encoder" if self.kind == "encoder" else "decoder"

    def parameters(self) -> dict[str, int]:
        """total = the sum of the groups; active: without the experts that a token is not sent to; mtp beside total."""
        groups = {group: sum(p.parameters for p in self.main if p.group == group) for group in GROUPS}
        idle = sum((part.count - part.active) * part.size for part in self.main)
        total = sum(groups.values())
        mtp = sum(part.parameters for part in self.parts if part.stage == "mtp")
        return {"total": total, "active": total - idle, **groups, "mtp": mtp}

    def flops(self, context: int, stack: str | None = None) -> dict[str, int]:
        """Of the last of `context` tokens, by group."""
        stage = stack or self.stack

        def of(group: str) -> int:
            return sum(p.flops for p in self.parts if p.stage == stage and p.computed_as == group)

        parts = {
            "ffn": of("ffn"),
            "attention_projections": of("attention"),
            "lm_head": of("lm_head"),
            "attention_scores": sum(a.flops(context) for a in self.attention if a.stage == stage),
            "router": of("router"),
            "other": of("other"),
        }
        return {**parts, "total": sum(parts.values())}

    def crossover(self, limit: int = 1 << 24) -> int | None:
        """The shortest context whose attention scores cost as much as the FFN; None if none up to 2^24 does."""
        ffn = self.flops(1)["ffn"]
        low, high = 0, limit
        if self.flops(high)["attention_scores"] < ffn:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.flops(middle)["attention_scores"] >= ffn else (middle, high)
        return high

    def weight_bytes(self, q: Quantization) -> int:
        """All weights in memory, packed."""
        return sum(part.stored_bytes(q, self.bf16) for part in self.main)

    def step_bytes(self, q: Quantization, batch: int = 1) -> dict[str, float]:
        """Weights that a decode step reads, by group."""
        return {
            group: sum(part.step_bytes(q, self.bf16, batch) for part in self.parts if part.computed_as == group)
            for group in GROUPS
        }


class Parts:
    """Collects parts; equal ones of different layers become one."""

    def __init__(self) -> None:
        self.found: dict[Part, tuple[int, int]] = {}  # with count and active 0 -> their sums

    def add(self, part: Part) -> None:
        key = replace(part, count=0, active=0)
        count, active = self.found.get(key, (0, 0))
        self.found[key] = (count + part.count, active + part.active)

    def result(self) -> tuple[Part, ...]:
        return tuple(replace(part, count=count, active=active) for part, (count, active) in self.found.items())


def merged(attentions: Iterable[Attention]) -> tuple[Attention, ...]:
    """Equal layers as one."""
    layers: dict[Attention, int] = {}
    for one in attentions:
        key = replace(one, layers=0)
        layers[key] = layers.get(key, 0) + one.layers
    return tuple(replace(one, layers=count) for one, count in layers.items())
