#!/usr/bin/env python3
"""GGUF files of a model folder, for the peers that read those: BF16 written here, other types by llama.cpp from it.

    python tools/bench/gguf_from_safetensors.py FOLDER OUT --types BF16,Q4_0,Q8_0 [--llama PYTHON] [--check PROMPT]

Writes OUT/NAME-TYPE.gguf for the folder's NAME and every type (names of llama.cpp: F16, Q8_0, Q4_K_M, IQ4_NL, ...).
--llama: an interpreter whose environment has llama-cpp-python, which quantizes (without an importance matrix) and
checks. --check: llama.cpp's logits of the BF16 file, at every token of PROMPT and of its greedy continuation, must be
those that pyengine finds with quant="bf16"; exit 1 and no files where they are not. Families: Llama, Qwen2, Qwen3
without sliding windows and without RoPE scaling, and a byte-level BPE tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import pyengine
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.demo import to_bf16
from pyengine.errors import PyEngineError, ResourceError, UnsupportedModelError
from pyengine.gguf_config import CONTROL as CONTROL_TOKEN
from pyengine.gguf_config import NAMES as GGUF_NAMES
from pyengine.gguf_tokenizer import NORMAL as NORMAL_TOKEN
from pyengine.gguf_tokenizer import UNUSED as UNUSED_TOKEN
from pyengine.spec import ModelSpec
from pyengine.tensors import check_tensors, expected_tensors
from pyengine.tokenizer import Tokenizer
from pyengine.tokenizer_file import read_tokenizer

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # family -> general.architecture
PERMUTED = {"llama"}  # families whose RoPE turns neighbours in GGUF
CHECKED_TOKENS = 32
QUANTIZE = """
import ctypes, sys
import llama_cpp
kind, source, target, threads = sys.argv[1:]
number = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind, None)
if number is None:
    sys.exit(f"--types {kind}: not a type of llama.cpp")
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.nthread = number, int(threads)
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)))
"""
LOGITS = """
import json, sys
import llama_cpp, numpy
path, out, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = llama_cpp.Llama(path, n_ctx=len(ids), n_batch=512, verbose=False, logits_all=True)
model.eval(ids)
numpy.save(out, numpy.asarray(model.scores[: len(ids)], numpy.float32))
"""


def gguf_name(name: str) -> str:
    """'model.layers.3.self_attn.q_proj.weight' -> 'blk.3.attn_q.weight'."""
    stem, _, suffix = name.removeprefix("model.").rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{GGUF_NAMES.renames[part]}.{suffix}"
    return f"{GGUF_NAMES.head if stem == 'lm_head' else GGUF_NAMES.renames[stem]}.{suffix}"


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q_proj or k_proj [heads * head_dim, ...] in GGUF's order: row i + j * head_dim / 2 goes to 2i + j."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def check(folder: Path, spec: ModelSpec) -> None:
    """UnsupportedModelError for what this file does not write."""
    if spec.family not in ARCHITECTURES:
        raise UnsupportedModelError(f"{folder}: family {spec.family}; expected one of {', '.join(ARCHITECTURES)}")
    attention = spec.layers[0].attention
    if any(layer.attention.window is not None for layer in spec.layers):
        raise UnsupportedModelError(f"{folder}: sliding windows; expected none")
    if attention.rope.rope_type != "default" or attention.rope.rotary_dim != attention.head_dim:
        raise UnsupportedModelError(f"{folder}: RoPE {attention.rope}; expected the default kind over whole heads")


def add_sizes(writer: gguf.GGUFWriter, spec: ModelSpec, name: str) -> None:
    attention = spec.layers[0].attention
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.layers[0].ffn.intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm.eps)
    writer.add_rope_freq_base(attention.rope.theta)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_vocab_size(spec.vocab_size)


def pre_tokenizer(path: Path, document: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer of a tokenizer.json: by digits in groups of three, alone, or by a class."""
    text = json.dumps(document.get("pre_tokenizer"))
    if document["model"].get("type") != "BPE" or "ByteLevel" not in text:
        raise UnsupportedModelError(f"{path}: no byte-level BPE; expected one")
    if '"Split"' not in text:
        return "smollm" if '"individual_digits": true' in text else "gpt-2"
    return "llama-bpe" if "{1,3}" in text else "qwen2"


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, spec: ModelSpec) -> None:
    path = folder / "tokenizer.json"
    document = read_tokenizer(folder, spec.vocab_size)
    tokenizer = Tokenizer.load(folder, vocab_size=spec.vocab_size)
    names = {i: token for token, i in document["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in document.get("added_tokens") or []}
    control = set(tokenizer.special_tokens.values())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(path, document))
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(spec.vocab_size)])
    writer.add_token_types(
        [
            CONTROL_TOKEN if i in control else NORMAL_TOKEN if i in names else UNUSED_TOKEN
            for i in range(spec.vocab_size)
        ]
    )
    merges = document["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    if spec.bos_token_id is not None:
        writer.add_bos_token_id(spec.bos_token_id)
    if spec.eos_token_ids:
        writer.add_eos_token_id(spec.eos_token_ids[0])
    writer.add_add_bos_token(bool(tokenizer.encode("")))


def write_bf16(folder: Path, target: Path) -> None:
    """The folder as a GGUF: matrices bfloat16, vectors float32, one tensor in memory at a time."""
    spec = load_model_spec(folder)
    check(folder, spec)
    with Checkpoint.open(folder) as checkpoint:
        check_tensors(spec, checkpoint.tensors, folder)
        attention = spec.layers[0].attention
        heads = {"attn_q": attention.num_heads, "attn_k": attention.num_kv_heads} if spec.family in PERMUTED else {}
        names = list(expected_tensors(spec))
        writer = gguf.GGUFWriter(target, ARCHITECTURES[spec.family])
        add_sizes(writer, spec, folder.name)
        add_tokenizer(writer, folder, spec)
        for name in names:
            shape = checkpoint.tensors[name].shape
            kind = gguf.GGMLQuantizationType["BF16" if len(shape) == 2 else "F32"]
            size = int(np.prod(shape)) * (2 if len(shape) == 2 else 4)
            writer.add_tensor_info(gguf_name(name), shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in names:
            values = checkpoint.read_float32(name)
            part = gguf_name(name).split(".")[-2]
            if part in heads:
                values = permute(values, heads[part])
            writer.write_tensor_data(to_bf16(values) if values.ndim == 2 else values)
        writer.close()


def run(python: str, script: str, *arguments: str) -> str:
    """Output of a script in llama.cpp's environment. Errors: ResourceError with the end of what it said."""
    try:
        done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True)
    except OSError as error:
        raise ResourceError(f"--llama {python}: {error.strerror}; expected a Python interpreter") from None
    if done.returncode:
        says = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ResourceError(f"--llama {python}: {says}")
    return done.stdout


def compare(folder: Path, path: Path, python: str, prompt: str, scratch: Path) -> bool:
    """Whether llama.cpp gives pyengine's logits behind the prompt and behind its greedy continuation; says how close.

    Both round the inputs of the matrices to bfloat16 but not at the same places: a relative step of 2^-9 in each of 7
    matrices a layer, independent of each other. Twice that is allowed; a wrong tensor is near 1. Tokens that differ
    beyond that are ties.
    """
    with pyengine.load(folder, quant="bf16", cache=False) as engine:
        ids = engine.tokenize(prompt)
        ids += engine.generate(ids, max_tokens=CHECKED_TOKENS, ignore_eos=True).tokens
        ours = engine.logits(ids)
        allowed = 2.0 * 2.0**-9 * (7 * engine.spec.num_layers) ** 0.5
    run(python, LOGITS, str(path), str(scratch / "logits.npy"), json.dumps(ids))
    theirs = np.load(scratch / "logits.npy")
    error = (np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(ours, axis=1)).max()
    same = int((ours.argmax(1) == theirs.argmax(1)).sum())
    print(
        f"{folder}: llama.cpp's logits differ by {error:.4f} of their size at most (allowed {allowed:.4f}), "
        f"{same} of {len(ids)} greedy tokens are the same"
    )
    return bool(error <= allowed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--types", default="BF16", help="comma separated; BF16 needs no llama.cpp")
    parser.add_argument("--llama", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--check", metavar="PROMPT")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: expected at least 1")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.out) as scratch:
            base = Path(scratch) / "BF16.gguf"
            write_bf16(args.folder, base)
            if args.check is not None and not compare(args.folder, base, args.llama, args.check, Path(scratch)):
                return 1
            for kind in sorted(set(args.types.split(",")), key="BF16".__eq__):  # the base is moved away last
                made = Path(scratch) / f"{kind}.gguf"
                if kind != "BF16":
                    run(args.llama, QUANTIZE, kind, str(base), str(made), str(args.threads))
                target = args.out / f"{args.folder.resolve().name}-{kind}.gguf"
                made.rename(target)
                print(f"{target}: {target.stat().st_size / 1e6:.0f} MB")
    except PyEngineError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
