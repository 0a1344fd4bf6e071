"""Stage 6, profile_work: what each stage of a run must read and compute, by account's arithmetic (docs/profiling.md).

Bytes: the packed matrices of the stage once a step (an expert if a token of the step picks it), its vectors in float32,
the keys and values seen (attention), the rows looked up (embed), the logits (sample). Operations: two for each weight
of a matrix and token, two for each product with a key or a value; nothing for norms, activations and softmax.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyengine.quantize import Quantization
from pyengine.reports.account_parts import Anatomy, Part
from pyengine.reports.machine import Limits

STAGES = ("embed", "norm", "attention", "router", "ffn", "lm_head", "sample")
MATRIX_STAGES = ("attention", "router", "ffn", "lm_head")  # of the same names as account's groups


@dataclass(frozen=True)
class Work:
    """Of a stage: bytes it must read; operations with matrices, and with keys and values."""

    bytes: float = 0.0
    matrix_ops: float = 0.0
    score_ops: float = 0.0

    @property
    def ops(self) -> float:
        return self.matrix_ops + self.score_ops

    def plus(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.matrix_ops + other.matrix_ops, self.score_ops + other.score_ops)

    def times(self, factor: float) -> Work:
        return Work(self.bytes * factor, self.matrix_ops * factor, self.score_ops * factor)


@dataclass(frozen=True)
class Rates:
    """The limits as a model meets them: 1e9 bytes and operations per second."""

    read: float
    matrix: float  # int8 where matrices are int8 or int4, else float32
    score: float  # float32; half of int8 for an int8 cache, whose other factor has two digits

    @classmethod
    def of(cls, limits: Limits, quantization: Quantization, kv_dtype: str) -> Rates:
        matrix = limits.int8_gops if quantization.layers.is_integer else limits.f32_gflops
        return cls(limits.read_gb_per_s, matrix, limits.int8_gops / 2 if kv_dtype == "int8" else limits.f32_gflops)

    def read_seconds(self, work: Work) -> float:
        return work.bytes / (1e9 * self.read)

    def compute_seconds(self, work: Work) -> float:
        return work.matrix_ops / (1e9 * self.matrix) + work.score_ops / (1e9 * self.score)


@dataclass(frozen=True)
class Model:
    """The parts of a model in the formats it runs in."""

    anatomy: Anatomy
    quantization: Quantization
    kv_dtype: str
    vocab: int

    @property
    def parts(self) -> list[Part]:
        return [part for part in self.anatomy.parts if part.stage == "decoder"]

    def vector_bytes(self, stage: str) -> float:
        """Norm weights and biases, float32. The final norm counts to lm_head, those of q and k to attention."""
        return sum(4.0 * part.parameters for part in self.parts if part.role == "vector" and stage_of(part) == stage)

    def row_bytes(self) -> float:
        """Of one token's row of the embedding."""
        for part in self.parts:
            if part.role == "tied":
                return part.matrix_bytes(self.quantization, self.anatomy.bf16) / part.rows
            if part.group == "embedding" and part.role == "table":
                return part.cols * (2.0 if self.anatomy.stored == "bfloat16" else 4.0)
        return 0.0

    def step(self, tokens: int, end: int, rows: int) -> dict[str, Work]:
        """Of a step of `tokens` tokens, the last of which sees `end`, with `rows` rows of logits."""
        matrices = self.anatomy.step_bytes(self.quantization, tokens)
        flops = self.anatomy.flops(end)
        seen, scores = 0.0, 0.0
        for a in self.anatomy.attention:
            keys = end if a.window is None else min(end, a.window + tokens - 1)
            seen += keys * a.token_bytes(self.kv_dtype) + 2 * 4 * a.layers * a.state
            scores += end * a.prompt_flops(end) - (end - tokens) * (a.prompt_flops(end - tokens) if end > tokens else 0)
        work = {
            "embed": Work(tokens * self.row_bytes()),
            "norm": Work(self.vector_bytes("norm")),
            "sample": Work(4.0 * rows * self.vocab),
        }
        for stage in MATRIX_STAGES:
            name = "attention_projections" if stage == "attention" else stage
            count = rows if stage == "lm_head" else tokens
            read = matrices[stage] + self.vector_bytes(stage) if count else 0.0
            work[stage] = Work(read, float(count * flops[name]))
        work["attention"] = work["attention"].plus(Work(seen, 0.0, scores))
        return {stage: work[stage] for stage in STAGES}

    def mean(self, steps: Iterable[tuple[int, int, int]]) -> dict[str, Work]:
        """The mean over steps (tokens, end, rows)."""
        each = [self.step(*step) for step in steps]
        return {name: total(work[name] for work in each).times(1 / len(each)) for name in STAGES}

    def whole(self, steps: Iterable[tuple[int, int, int]]) -> dict[str, Work]:
        """The sum over steps."""
        each = [self.step(*step) for step in steps]
        return {name: total(work[name] for work in each) for name in STAGES}


def total(works: Iterable[Work]) -> Work:
    out = Work()
    for work in works:
        out = out.plus(work)
    return out


def stage_of(part: Part) -> str:
    """The stage whose op reads a vector."""
    if part.group == "norm":
        inner = part.name.endswith(("q_norm.weight", "k_norm.weight", "kv_a_layernorm.weight"))
        return "lm_head" if part.name.startswith("model.norm.") else "attention" if inner else "norm"
    return part.group


def byte_share(work: dict[str, Work]) -> float:
    """The share of the FFN by bytes, as account counts them: matrices, and keys and values."""
    return work["ffn"].bytes / sum(work[stage].bytes for stage in MATRIX_STAGES)
