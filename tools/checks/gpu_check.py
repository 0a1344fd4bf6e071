#!/usr/bin/env python3
"""Greedy tokens of a model on a CUDA device against the CPU, and the times that the CUDA core is to reach.

    python tools/checks/gpu_check.py [--tiny] [--json FILE]

tools/gpu_check.sh builds the library first, and runs the tests.

Times are differences of wall time: of a program with many copies of an op (different weights, more than the caches
hold) less one with few, so that what a run costs once is not in them. Rates of bytes are beside R, what a reduction
that only reads reaches in the same process, before and after. --tiny: small shapes, for the emulated device.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pyengine import cuda, demo, load
from pyengine._core import Activation, Backend, Format, Limit, OpKind, Program
from pyengine.config import load_model_spec
from pyengine.decoder import BuiltProgram, KvLayout, build
from pyengine.errors import PyEngineError
from pyengine.fuse import fuse
from pyengine.kernel_program import Bench, run
from pyengine.kv_cache import KvPool, Sequence, step_arrays
from pyengine.pack_layer import NONE, LayerWeights
from pyengine.packer import padded
from pyengine.quantize import PackedFormat, choose
from pyengine.rope_tables import RopeTables
from pyengine.spec import ModelSpec
from pyengine.weights import ModelWeights

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import synthetic

INT4 = choose("int4").layers
BLOCK_ROWS = 1024  # random rows that a matrix repeats


@dataclass(frozen=True)
class Sizes:
    """What is timed."""

    hidden: int = 4096
    ffn: int = 14336
    linear: tuple[int, int] = (8192, 28672)
    few: int = 4  # copies of an op
    many: int = 20
    runs: int = 20
    read_bytes: int = 4 << 30
    context: int = 512
    steps: int = 64
    prompt: int = 2048
    tokens: int = 32  # of the greedy text
    config: dict[str, Any] = field(default_factory=lambda: synthetic.CONFIGS["llama-3.1-8b"])


SMALL = synthetic.CONFIGS["llama-3.1-8b"] | {
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY = Sizes(128, 256, (64, 256), 1, 2, 2, 1 << 20, 40, 2, 40, 6, SMALL)


def copies(backend: Backend, fmt: PackedFormat, rows: int, cols: int, count: int) -> list[int]:
    """Equal packed matrices of random values, each in its own memory."""
    values = np.random.default_rng(1).standard_normal((min(rows, BLOCK_ROWS), cols), np.float32) / math.sqrt(cols)
    source, step = (bfloat16(values), 1) if fmt.format == Format.ROWS_BF16 else (values.astype(np.float16), 16)
    made = [backend.tensor_create(int(fmt.format), rows, cols, fmt.group)]
    for begin in range(0, rows, BLOCK_ROWS):
        backend.tensor_pack(made[0], source[: rows - begin], begin // step)
    raw = backend.tensor_bytes(made[0]) if count > 1 else None
    for _ in range(count - 1):
        made.append(backend.tensor_create(int(fmt.format), rows, cols, fmt.group))
        assert raw is not None
        backend.tensor_write(made[-1], raw)
    return made


def bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def wall(once: Callable[[], object], runs: int) -> float:
    """Seconds of a run: the median, after two that do not count."""
    times = []
    for at in range(runs + 2):
        start = time.perf_counter()
        once()
        if at > 1:
            times.append(time.perf_counter() - start)
    return float(np.median(times))


class Ops:
    """Copies of int4 matrices, and programs of some ops over them."""

    def __init__(self, backend: Backend, sizes: Sizes) -> None:
        self.backend, self.sizes = backend, sizes

    def seconds(self, bench: Bench, before: int, each: list[list[dict[str, Any]]], width: int, m: int) -> float:
        """Of one entry of `each`: a list of ops. before: ops that prepare."""
        hidden = np.random.default_rng(2).standard_normal((m, width), np.float32)

        def seconds_of(count: int) -> float:
            ops = bench.ops[:before] + [op for some in each[:count] for op in some]
            program = Program(self.backend, ops, bench.descs, m, m, False)
            return wall(lambda: run(program, hidden), self.sizes.runs)

        return (seconds_of(self.sizes.many) - seconds_of(self.sizes.few)) / (self.sizes.many - self.sizes.few)

    def start(self, width: int) -> tuple[Bench, int, int]:
        bench = Bench(None, None, self.backend)
        x = bench.buffer(width)
        bench.op(OpKind.LOAD_HIDDEN, output=x)
        return bench, x, bench.quantized(x, INT4)

    def linear(self) -> tuple[float, int]:
        """Seconds and bytes at one token."""
        rows, cols = self.sizes.linear
        bench, _, x = self.start(cols)
        out = bench.buffer(rows)
        weights = copies(self.backend, INT4, rows, cols, self.sizes.many)
        each = [[op(OpKind.LINEAR, input=x, output=out, weight=weight)] for weight in weights]
        seconds = self.seconds(bench, len(bench.ops), each, cols, 1)
        size = self.backend.tensor_size(weights[0])
        for weight in weights:
            self.backend.tensor_free(weight)
        return seconds, size

    def ffn(self) -> tuple[dict[tuple[int, str], float], int]:
        """Seconds by (tokens, fused or unfused), and bytes, of the FFN with its residual."""
        s = self.sizes
        bench, _, x = self.start(s.hidden)
        sums, act, branch = bench.buffer(2 * padded(s.ffn)), bench.buffer(s.ffn), bench.buffer(s.hidden)
        rounded, out = bench.buffer(s.ffn, quantized=True), bench.buffer(s.hidden)
        up = copies(self.backend, INT4, 2 * padded(s.ffn), s.hidden, s.many)
        down = copies(self.backend, INT4, s.hidden, s.ffn, s.many)
        unfused = [
            [
                op(OpKind.LINEAR, input=x, output=sums, weight=first),
                op(OpKind.ACT_MUL, input=sums, output=act, activation=int(Activation.SILU)),
                op(OpKind.QUANTIZE, input=act, output=rounded),
                op(OpKind.LINEAR, input=rounded, output=branch, weight=second),
                op(OpKind.ADD, input=branch, output=out),
            ]
            for first, second in zip(up, down, strict=True)
        ]
        forms = {"fused": [fuse(ops) for ops in unfused], "unfused": unfused}
        times = {
            (m, name): self.seconds(bench, len(bench.ops), each, s.hidden, m)
            for m in (1, 8)
            for name, each in forms.items()
        }
        size = self.backend.tensor_size(up[0]) + self.backend.tensor_size(down[0])
        for weight in (*up, *down):
            self.backend.tensor_free(weight)
        return times, size


def op(kind: OpKind, **fields: Any) -> dict[str, Any]:
    return {"kind": int(kind), "stage": 4, **fields}


class RandomModel:
    """A Llama of random int4 weights without a checkpoint: every layer a copy of the first one's."""

    def __init__(self, backend: Backend, spec: ModelSpec) -> None:
        self.backend, self.spec = backend, spec
        a, f = spec.layers[0].attention, spec.layers[0].ffn
        heads, kv, hidden, ffn = (
            a.num_heads * a.head_dim,
            a.num_kv_heads * a.head_dim,
            spec.hidden_size,
            f.intermediate_size,
        )
        layers = spec.num_layers
        parts = {
            "qkv": copies(backend, INT4, padded(heads) + padded(kv) + kv, hidden, layers),
            "o": copies(backend, INT4, hidden, heads, layers),
            "gate_up": copies(backend, INT4, 2 * padded(ffn), hidden, layers),
            "down": copies(backend, INT4, hidden, ffn, layers),
        }
        vector = PackedFormat(Format.VECTOR_F32)
        norm = backend.tensor_create(int(vector.format), 1, hidden, 0)
        backend.tensor_pack(norm, np.ones(hidden, np.float32))
        (head,) = copies(backend, choose("int4").head, spec.vocab_size, hidden, 1)
        (embed,) = copies(backend, PackedFormat(Format.ROWS_BF16), spec.vocab_size, hidden, 1)
        made = [
            LayerWeights(attn_norm=norm, ffn_norm=norm, **{name: ids[layer] for name, ids in parts.items()})
            for layer in range(layers)
        ]
        weights = ModelWeights(embed, head, norm, NONE, NONE, made, choose("int4"))
        self.matrix_bytes = sum(backend.tensor_size(i) for ids in parts.values() for i in ids) + backend.tensor_size(
            head
        )
        self.matrix_weights = layers * hidden * (heads + 2 * kv + heads + 3 * ffn)
        self.pool, self.ropes = KvPool(backend, spec, "bf16"), RopeTables(backend, spec)
        self.program: BuiltProgram = build(
            backend, spec, weights, KvLayout(self.pool.groups, self.ropes.ids), timed=False, max_batch_tokens=512
        )

    def step(self, sequence: Sequence, ids: list[int]) -> None:
        """Greedy, one row of logits."""
        self.ropes.grow(sequence.length + len(ids))
        sequence.reserve(len(ids))
        arrays = step_arrays([(sequence, ids)])
        rows = np.array([len(ids) - 1], np.int32)
        token_ids, positions, ends, tables = arrays
        self.program.program.run(token_ids, positions, ends, tables, rows, None, [None], None, [], None, False)
        sequence.advance(len(ids))

    def decode(self, context: int, steps: int) -> float:
        """Seconds of a step whose last token sees about `context`."""
        sequence = Sequence(self.pool)
        self.prefill_into(sequence, context - steps // 2)
        seconds = wall(lambda: self.step(sequence, [7]), steps)
        sequence.close()
        return seconds

    def prefill_into(self, sequence: Sequence, tokens: int) -> None:
        ids = [int(i) for i in np.random.default_rng(3).integers(0, self.spec.vocab_size, tokens)]
        for begin in range(0, tokens, 512):
            self.step(sequence, ids[begin : begin + 512])

    def prefill(self, tokens: int) -> float:
        def once() -> None:
            sequence = Sequence(self.pool)
            self.prefill_into(sequence, tokens)
            sequence.close()

        return wall(once, 3)


def greedy(folder: Path, device: str, sizes: Sizes) -> tuple[list[int], str]:
    """Greedy tokens of the device and the CPU: those they have in common, and what is wrong ("" where nothing is).

    Where they part, both tokens must be as good as equal on the CPU: their logits within 1e-2 of the logits' spread.
    """
    texts = []
    for where in ("cpu", device):
        with load(folder, quant="int4", device=where, cache=False) as engine:
            prompt = list(range(1, 17))
            texts.append(engine.generate(prompt, max_tokens=sizes.tokens, ignore_eos=True).tokens)
            if where == "cpu":
                rows = engine.logits([*prompt, *texts[0]])[len(prompt) - 1 :]
    same = 0
    while same < sizes.tokens and texts[0][same] == texts[1][same]:
        same += 1
    if same == sizes.tokens:
        return texts[0], ""
    gap = abs(float(rows[same][texts[0][same]] - rows[same][texts[1][same]])) / float(np.std(rows[same]))
    return texts[0][:same], "" if gap < 1e-2 else f"token {same} differs by {gap:.3g} of the logits' spread"


def parity(device: str, sizes: Sizes, tiny: bool) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory() as temporary:
        try:
            if tiny:
                raise PyEngineError
            folder, name = demo.demo_folder(offline=True, log=lambda _: None), "the demo model"
        except PyEngineError:
            config = Path(temporary) / "config.json"
            config.write_text(json.dumps(SMALL), encoding="utf-8")
            folder, name = Path(temporary) / "model", "a random model"
            synthetic.write(folder, synthetic.read_config(str(config)), 0)
        same, wrong = greedy(folder, device, sizes)
    return (
        f"greedy tokens of {name}: {len(same)} of {sizes.tokens} as on the CPU{'; ' if wrong else ''}{wrong}",
        not wrong,
    )


def read_rate(backend: Backend, sizes: Sizes) -> float:
    return float(np.median(backend.measure(int(Limit.READ), sizes.read_bytes, 8)))


def times(backend: Backend, sizes: Sizes, spec: ModelSpec) -> dict[str, float]:
    """What is timed, by name: shares of R where bytes are the limit."""
    rate = read_rate(backend, sizes)
    ops = Ops(backend, sizes)
    ffn, ffn_bytes = ops.ffn()
    linear, linear_bytes = ops.linear()
    model = RandomModel(backend, spec)
    step, prompt = model.decode(sizes.context, sizes.steps), model.prefill(sizes.prompt)
    again = read_rate(backend, sizes)
    rate = max(rate, again)
    return {
        "R_gb_per_s": rate / 1e9,
        "ffn_1_token_of_R": ffn_bytes / ffn[1, "fused"] / rate,
        "ffn_8_tokens_of_R": ffn_bytes / ffn[8, "fused"] / rate,
        "ffn_unfused_to_fused_1_token": ffn[1, "unfused"] / ffn[1, "fused"],
        "ffn_unfused_to_fused_8_tokens": ffn[8, "unfused"] / ffn[8, "fused"],
        "linear_of_R": linear_bytes / linear / rate,
        "decode_of_R": model.matrix_bytes / step / rate,
        "decode_tokens_per_s": 1 / step,
        "prefill_tokens_per_s": sizes.prompt / prompt,
        "prefill_tflop_per_s": 2 * model.matrix_weights * sizes.prompt / prompt / 1e12,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    sizes = TINY if args.tiny else Sizes()
    try:
        device = cuda.choose("cuda")
        line, good = parity(device, sizes, args.tiny)
        backend = cuda.open_backend(device, None, None)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(sizes.config), encoding="utf-8")
            spec = load_model_spec(Path(folder))
        measured = times(backend, replace(sizes), spec)
    except PyEngineError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    print(f"{device}: {cuda.devices()[0].model}\n{line}")
    for name, value in measured.items():
        print(f"{name:32} {value:.4g}")
    if args.json:
        record = {"device": asdict(cuda.devices()[0]), "parity": line, **measured}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
