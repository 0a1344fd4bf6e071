#!/usr/bin/env python3
"""A checkpoint of random bfloat16 weights in the shapes of a config.json, to measure models that are not at hand.

    python tools/bench/synthetic.py FOLDER --config llama-3.1-8b|qwen3-moe-14b|CONFIG.json [--seed 0]

FOLDER, which must be empty or not there, gets config.json, shards of at most 2 GB (a larger tensor has its own), their
index and a byte-level tokenizer (not for vocabularies below 256: such a model takes token ids). Shapes are those that
pyengine expects of the config's family, under the names of its files; experts stand apart.
Matrices are normal with the config's initializer_range (0.02) as standard deviation, norms 1 (0 where 1 + weight
multiplies), biases 0, as an untrained model has them: its text means nothing, its speed and memory are real.
Memory stays the same whatever the size. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pyengine.config import load_model_spec
from pyengine.errors import PyEngineError
from pyengine.families import FAMILIES
from pyengine.spec import ModelSpec
from pyengine.tensors import NamesOnDisk, expected_tensors

SHARD_BYTES = 2_000_000_000
CHUNK_VALUES = 1 << 22  # drawn at a time
ONE = 0x3F80  # in bfloat16
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
    "qwen3-moe-14b": {  # Qwen3-30B-A3B with 22 of its 48 layers: 14.3e9 weights
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
}

Bits = npt.NDArray[np.uint16]  # bfloat16
Shapes = dict[str, tuple[int, ...]]


def read_config(name: str) -> dict[str, Any]:
    """A named config or a file's; SystemExit says what is wrong with the file."""
    if name in CONFIGS:
        return CONFIGS[name]
    try:
        config = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"--config {name}: {error}; expected {', '.join(CONFIGS)} or a config.json") from error
    if not isinstance(config, dict):
        raise SystemExit(f"--config {name}: no JSON object; expected a config.json")
    return config


def normal_table(rng: np.random.Generator, deviation: float) -> Bits:
    """65,536 draws as bfloat16, rounded to the nearest even: a random 16-bit number picks one."""
    values = (rng.standard_normal(1 << 16) * deviation).astype(np.float32).view(np.uint32)
    return ((values + 0x7FFF + ((values >> 16) & 1)) >> 16).astype(np.uint16)


def on_disk(spec: ModelSpec) -> tuple[Shapes, set[str]]:
    """Shapes by the names that the family's files have, experts apart, and the vectors that are 1."""
    expected = expected_tensors(spec)
    sources = NamesOnDisk(FAMILIES[spec.architecture].names, {}).sources(expected)
    shapes = {source.name: source.shape for source in sources.values()}  # parts of a fused tensor give it once
    ones = {source.name for name, source in sources.items() if name.endswith("norm.weight")}
    return shapes, set() if spec.norm.plus_one else ones


def source(
    rng: np.random.Generator, deviation: float, ones: set[str]
) -> Callable[[str, tuple[int, ...]], Iterator[Bits]]:
    """Draws a tensor's values by its name and shape, CHUNK_VALUES at a time."""
    table = normal_table(rng, deviation)

    def draw(name: str, shape: tuple[int, ...]) -> Iterator[Bits]:
        for left in range(prod(shape), 0, -CHUNK_VALUES):
            count = min(left, CHUNK_VALUES)
            if len(shape) > 1:
                yield table[rng.bit_generator.random_raw(-(-count // 4)).view(np.uint16)[:count]]
            else:
                yield np.full(count, ONE if name in ones else 0, np.uint16)

    return draw


def shards(shapes: Shapes) -> list[Shapes]:
    """The tensors in their order, in files of at most SHARD_BYTES."""
    made: list[Shapes] = []
    room = 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        if not made or size > room:
            made.append({})
            room = SHARD_BYTES
        made[-1][name] = shape
        room -= size
    return made


def write_shard(file: BinaryIO, shapes: Shapes, draw: Callable[[str, tuple[int, ...]], Iterator[Bits]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, shape in shapes.items():
        for part in draw(name, shape):
            file.write(part.data)


def write_tokenizer(folder: Path) -> None:
    """A token for every byte."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}\n", encoding="utf-8")


def write(folder: Path, config: dict[str, Any], seed: int) -> int:
    """Write the checkpoint; its bytes of weights. PyEngineError for a config that pyengine does not take."""
    with tempfile.TemporaryDirectory() as scratch:  # nothing is left of a config that is refused
        (Path(scratch) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = load_model_spec(Path(scratch))
    shapes, ones = on_disk(spec)
    total = sum(2 * prod(shape) for shape in shapes.values())
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; expected a new folder")
    free = shutil.disk_usage(folder).free
    if total > free:
        raise SystemExit(f"{folder}: the weights take {total} bytes, {free} are free")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if spec.vocab_size >= 256:
        write_tokenizer(folder)
    draw = source(np.random.Generator(np.random.SFC64(seed)), float(config.get("initializer_range", 0.02)), ones)
    files = shards(shapes)
    where: dict[str, str] = {}
    for i, part in enumerate(files, 1):
        name = f"model-{i:05}-of-{len(files):05}.safetensors"
        with (folder / name).open("wb") as file:
            write_shard(file, part, draw)
        where |= dict.fromkeys(part, name)
        print(f"\r{i} of {len(files)} shards", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", required=True, help=f"{', '.join(CONFIGS)} or a config.json")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        total = write(args.folder, read_config(args.config), args.seed)
    except (OSError, PyEngineError) as error:
        raise SystemExit(str(error)) from error
    seconds = time.perf_counter() - started
    print(f"{args.folder}: {total / 1e9:.2f} GB in {seconds:.1f} s, {total / 1e6 / seconds:.0f} MB/s")


if __name__ == "__main__":
    main()
