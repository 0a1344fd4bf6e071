"""Malformed indexes, shards and folders, and unusual ones that must load. Ids are those of the case list."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import safetensors_bytes, tiny_tensors, write_tiny_model
from refusal import assert_refused
from safetensors.numpy import save_file

from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.errors import ModelFormatError, ModelNotFoundError, ResourceError, UnsupportedModelError
from pyengine.tensors import check_tensors

INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
TL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def shard(folder: Path, *, shards: int = 3, spread: int | None = None, **changes: Any) -> dict[str, str]:
    """A TL model in `shards` files with an index; returns weight_map. spread: files actually written."""
    folder.mkdir(exist_ok=True)
    config = {**TL, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tiny_tensors(config)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: names[at % shards] for at, name in enumerate(tensors)}
    for at, file in enumerate(names):
        if spread is None or at < spread:
            save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, str(folder / file))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any, **more: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}))


def load(folder: Path) -> list[str]:
    """Config, files and tensors of a folder, checked against each other; notes."""
    spec = load_model_spec(folder)
    with Checkpoint.open(folder) as checkpoint:
        return check_tensors(spec, checkpoint.tensors, folder)


def refused(folder: Path, error: type[Any], *texts: str, small: bool = True) -> str:
    return assert_refused(lambda: load(folder), error, texts, folder, small=small)


def test_sharded_model_loads(tmp_path: Path) -> None:
    shard(tmp_path)
    assert load(tmp_path) == []
    with Checkpoint.open(tmp_path) as checkpoint:
        for name, values in tiny_tensors(TL).items():
            np.testing.assert_array_equal(checkpoint.read(name), values)
            assert checkpoint.tensors[name].file.name in SHARDS


def test_malformed_c01_report_b10_missing_shard(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    refused(tmp_path, ModelFormatError, "1 of 3 shards", SHARDS[1])


def test_malformed_c01_link_into_a_cache_that_lost_its_file(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).symlink_to(tmp_path / "blobs" / "0123")
    refused(tmp_path, ModelFormatError, "1 of 3 shards", SHARDS[1])


@pytest.mark.parametrize(("shards", "present"), [(4, 2), (30, 15)])
def test_malformed_c19_report_b11_half_of_the_shards(shards: int, present: int, tmp_path: Path) -> None:
    shard(tmp_path, shards=shards, spread=present, num_hidden_layers=4)
    message = refused(tmp_path, ModelFormatError, f"{shards - present} of {shards} shards")
    for at in range(shards):
        assert (f"model-{at + 1:05d}-of-" in message) == (at >= present)


def test_malformed_c02_tensor_not_in_its_shard(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    write_index(tmp_path, {**weight_map, "ghost.weight": SHARDS[2]})
    refused(tmp_path, ModelFormatError, INDEX, "'ghost.weight'", SHARDS[2])


def test_malformed_c02_tensor_in_another_shard(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    name = next(n for n, f in weight_map.items() if f == SHARDS[0])
    write_index(tmp_path, {**weight_map, name: SHARDS[1]})
    refused(tmp_path, ModelFormatError, INDEX, f"'{name}' in '{SHARDS[1]}'")


def test_malformed_c02_tensor_of_the_model_in_no_shard(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    tensors = tiny_tensors(TL)
    for file in SHARDS:
        kept = {n: t for n, t in tensors.items() if weight_map[n] == file and n != "model.norm.weight"}
        save_file(kept, str(tmp_path / file))
    write_index(tmp_path, {n: f for n, f in weight_map.items() if n != "model.norm.weight"})
    refused(tmp_path, ModelFormatError, "1 tensors are missing", "'model.norm.weight'")


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    name = next(n for n, f in weight_map.items() if f == SHARDS[0])
    tensors = tiny_tensors(TL)
    save_file({n: t for n, t in tensors.items() if weight_map[n] == SHARDS[1] or n == name}, str(tmp_path / SHARDS[1]))
    refused(tmp_path, ModelFormatError, SHARDS[1], f"tensor '{name}'", f"also in {SHARDS[0]}")


def test_malformed_c22_tensor_that_only_a_shard_knows_is_not_ignored(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    tensors = {n: t for n, t in tiny_tensors(TL).items() if weight_map[n] == SHARDS[0]}
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    save_file(tensors, str(tmp_path / SHARDS[0]))
    refused(tmp_path, UnsupportedModelError, "'model.layers.0.self_attn.q_proj.bias'")


@pytest.mark.parametrize(
    "target",
    [
        "../../etc/passwd",
        "../secret.safetensors",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "x\0.safetensors",
        "a\\b.safetensors",
    ],
)
def test_malformed_c03_c04_names_outside_the_folder(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    weight_map = shard(folder)
    save_file({"a": np.ones(1, np.float32)}, str(tmp_path / "s.safetensors"))
    write_index(folder, {**weight_map, "model.norm.weight": target})
    refused(folder, ModelFormatError, INDEX, "'model.norm.weight'", "expected a safetensors file beside the index")


def test_malformed_c04_absolute_path(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    outside = tmp_path / "x.safetensors"
    save_file({"model.norm.weight": np.ones(64, np.float32)}, str(outside))
    write_index(tmp_path, {**weight_map, "model.norm.weight": str(outside)})
    refused(tmp_path, ModelFormatError, INDEX, "'model.norm.weight'", "beside the index")


def test_malformed_c06_links_into_a_cache_load(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shard(blobs)
    folder.mkdir(parents=True)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    assert load(folder) == []


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


NOT_FILES: dict[str, Callable[[Path], None]] = {
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "fifo": fifo,
    "folder": Path.mkdir,
    "socket": listening_socket,
}


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_malformed_c07_not_a_regular_file(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path, TL)
    (tmp_path / name).unlink()
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    NOT_FILES[kind](Path(name))
    refused(tmp_path, ModelFormatError, name, "not a regular file")


@pytest.mark.parametrize("kind", NOT_FILES)
def test_malformed_c07_index_is_not_a_regular_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path)
    (tmp_path / INDEX).unlink()
    monkeypatch.chdir(tmp_path)
    NOT_FILES[kind](Path(INDEX))
    refused(tmp_path, ModelFormatError, INDEX, "not a regular file")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_malformed_c08_link_loop(name: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TL)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)
    refused(tmp_path, ModelFormatError, name, "symbolic links")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_malformed_c09_no_permission(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening is replaced, because mode 000 does not stop the superuser."""
    write_tiny_model(tmp_path, TL)
    really_open = os.open

    def denied(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ModelFormatError, match=f"{re.escape(name)}: Permission denied"):
        load(tmp_path)


def test_no_descriptors_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path)
    really_open = os.open

    def full(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(SHARDS[2]):
            raise OSError(24, "Too many open files", str(path))
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ResourceError, match="Too many open files"):
        Checkpoint.open(tmp_path)


def cuts(size: int, header_bytes: int) -> list[int]:
    fixed = [0, 7, 8, 8 + header_bytes - 1, 8 + header_bytes, size - 1, size - 3, size - 4096]
    return fixed + random.Random(0).sample(range(8 + header_bytes, size), 64)


def test_malformed_c10_report_b14_b15_truncated_shard(tmp_path: Path) -> None:
    shard(tmp_path)
    path = tmp_path / SHARDS[1]
    whole = path.read_bytes()
    header_bytes = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + header_bytes])
    ends = sorted((e["data_offsets"][1], name) for name, e in entries.items() if name != "__metadata__")
    for cut in cuts(len(whole), header_bytes):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelFormatError) as caught:
            load(tmp_path)
        assert SHARDS[1] in str(caught.value)
        if cut >= 8 + header_bytes:
            first = next(name for end, name in ends if end > cut - 8 - header_bytes)
            assert f"tensor '{first}'" in str(caught.value)
            assert f"{cut} bytes" in str(caught.value)
    path.write_bytes(whole)
    assert load(tmp_path) == []


def test_malformed_c13_truncated_while_loading(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TL)
    path = tmp_path / "model.safetensors"
    with Checkpoint.open(tmp_path) as checkpoint:
        last = max(checkpoint.tensors.values(), key=lambda info: info.end)
        os.truncate(path, last.begin + 4)
        with pytest.raises(ModelFormatError, match=r"model\.safetensors: changed while loading"):
            checkpoint.read(last.name)
        with pytest.raises(ModelFormatError, match="changed while loading"):
            checkpoint.verify_unchanged()


@pytest.mark.parametrize("how", ["replaced", "rewritten", "deleted"])
def test_malformed_c13_replaced_while_loading(how: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TL)
    path = tmp_path / "model.safetensors"
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.verify_unchanged()
        data = path.read_bytes()
        if how == "replaced":
            (tmp_path / "new").write_bytes(data)
            (tmp_path / "new").replace(path)
        elif how == "deleted":
            path.unlink()
        else:
            path.write_bytes(data)
            os.utime(path, ns=(1, 1))
        with pytest.raises(ModelFormatError, match="changed while loading"):
            checkpoint.verify_unchanged()


@pytest.mark.parametrize("metadata", [{"total_size": 10**30}, {"total_size": -1}, {"total_size": "x"}, {}, None, 5])
def test_malformed_c14_total_size_is_not_used(metadata: Any, tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    assert load(tmp_path) == []


C15 = {
    "duplicate": ('{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', "duplicate key 'a'"),
    "integer": ('{"weight_map":{"a":1}}', "key 'a' of weight_map"),
    "null": ('{"weight_map":{"a":null}}', "key 'a' of weight_map"),
    "root": ("[]", "root is list"),
    "empty-map": ('{"weight_map":{}}', "key 'weight_map'"),
    "no-map": ("{}", "key 'weight_map'"),
    "map-is-a-list": ('{"weight_map":["a"]}', "key 'weight_map'"),
    "empty": ("", "not JSON"),
}


@pytest.mark.parametrize("case", C15)
def test_malformed_c15_index(case: str, tmp_path: Path) -> None:
    text, expected = C15[case]
    shard(tmp_path)
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, ModelFormatError, INDEX, expected)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth"])
def test_malformed_c16_pickle_is_never_read(name: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TL)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"\x80\x04.")
    refused(tmp_path, UnsupportedModelError, name, "pickle is never read")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TL))
    refused(tmp_path, ModelFormatError, "no model.safetensors")


def test_shards_without_an_index(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / INDEX).unlink()
    refused(tmp_path, ModelFormatError, "3 safetensors files", INDEX)


def test_no_folder(tmp_path: Path) -> None:
    for action in (load_model_spec, Checkpoint.open):
        with pytest.raises(ModelNotFoundError, match="nowhere: no such folder"):
            action(tmp_path / "nowhere")


def test_malformed_c18_report_b12_stale_shards_are_not_opened(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"stale, and not even a safetensors file")
    assert load(tmp_path) == []


def test_whole_file_wins_over_an_index(tmp_path: Path) -> None:
    shard(tmp_path)
    write_tiny_model(tmp_path, TL, seed=1)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert {info.file.name for info in checkpoint.tensors.values()} == {"model.safetensors"}


def test_malformed_c20_dtypes_mixed_over_shards(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    for file, dtype in zip(SHARDS, (np.float32, np.float16, np.float32), strict=True):
        part = {n: t.astype(dtype) for n, t in tiny_tensors(TL).items() if weight_map[n] == file}
        save_file(part, str(tmp_path / file))
    assert load(tmp_path) == []
    with Checkpoint.open(tmp_path) as checkpoint:
        name = next(n for n, f in weight_map.items() if f == SHARDS[1])
        assert checkpoint.read(name).dtype == np.float16


def test_malformed_p17_index_of_one_shard(tmp_path: Path) -> None:
    shard(tmp_path, shards=1)
    assert load(tmp_path) == []


def test_malformed_p18_read_only_folder_with_spaces_and_non_ascii(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mein Modell é 模型", TL)
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert load(folder) == []
    finally:
        folder.chmod(0o755)


def test_report_b24_file_of_zeros_is_no_hole(tmp_path: Path) -> None:
    """A sparse file of 1 TiB with a consistent header opens without reading or allocating it."""
    size = 1 << 40
    head = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    data = safetensors_bytes(head)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    os.truncate(path, len(data) + size)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.tensors["a"].end - checkpoint.tensors["a"].begin == size
        assert checkpoint.tensors["a"].end == len(data) + size
