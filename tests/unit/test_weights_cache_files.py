"""The files of packed weights: every kind of damage is found, the folder keeps its limits, processes share it."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_cases import calibrated_model, count_fresh, own_cache, run
from compare import assert_same_bits

import pyengine
from pyengine import _core, engine, weights_cache
from pyengine.errors import ModelFormatError, RequestError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_cache(tmp_path, monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return calibrated_model(tmp_path / "model")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_fresh(monkeypatch)


# ---- damage ----------------------------------------------------------------------------------------------------------


def only_file(home: Path) -> Path:
    (path,) = home.glob("*.weights")
    path.chmod(0o644)
    return path


def with_index(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """The index changed, and its checksum with it."""
    raw = path.read_bytes()
    head = weights_cache.HEADER
    magic, version, _, index_bytes, _, _ = head.unpack(raw[: head.size])
    index = edit(json.loads(raw[head.size : head.size + index_bytes]))
    text = json.dumps(index).encode()
    text += b" " * (-len(text) % 64)
    data = raw[head.size + index_bytes :]
    first = head.pack(magic, version, 0, len(text), _core.checksum(text), head.size + len(text) + len(data))
    path.write_bytes(first + text + data)


def flip(place: Callable[[bytes], int]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[place(bytes(raw))] ^= 0x10
        path.write_bytes(bytes(raw))

    return change


def first_tensor(raw: bytes) -> int:
    return raw.index(b"PYENGP16")


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "short header": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "last bytes": lambda path: os.truncate(path, path.stat().st_size - 64),
    "too long": lambda path: os.truncate(path, path.stat().st_size + 64),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("{}" * 5000),
    "magic": flip(lambda raw: 3),
    "version": flip(lambda raw: 8),
    "index length": flip(lambda raw: 16),
    "index checksum": flip(lambda raw: 24),
    "index": flip(lambda raw: 200),
    "tensor header": flip(lambda raw: first_tensor(raw) + 24),
    "tensor checksum": flip(lambda raw: first_tensor(raw) + 50),
    "first byte of data": flip(lambda raw: first_tensor(raw) + 64),
    "last byte": flip(lambda raw: len(raw) - 1),
    "middle": flip(lambda raw: len(raw) // 2),
    "other key": lambda path: with_index(path, lambda i: {**i, "key": {**i["key"], "quant": "int8"}}),
    "no tensors": lambda path: with_index(path, lambda i: {**i, "tensors": []}),
    "tensor gone": lambda path: with_index(path, lambda i: {**i, "tensors": i["tensors"][:-1]}),
    "huge tensor": lambda path: with_index(path, lambda i: {**i, "tensors": [[0, 2**31 - 1, 2**31 - 1, 0]] * 9}),
    "odd tensor": lambda path: with_index(path, lambda i: {**i, "tensors": [["a"], *i["tensors"][1:]]}),
    "place past the end": lambda path: with_index(path, lambda i: {**i, "lm_head": 10**6}),
    "layer without o": lambda path: with_index(path, lambda i: {**i, "layers": [{"qkv": 1}]}),
    "list": lambda path: with_index(path, lambda i: [i]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_said_and_made_again(
    model: Path, home: Path, fresh: list[int], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    logits, _ = run(model, quant="int4")
    good = only_file(home).read_bytes()
    DAMAGE[what](only_file(home))
    assert only_file(home).read_bytes() != good
    monkeypatch.setattr(weights_cache, "WORTH_SECONDS", 1e9)  # it is made again however quick that is
    again, lines = run(model, quant="int4")
    assert_same_bits(again, logits, "logits")
    assert len(lines) == 2
    assert lines[0].startswith("warning: ")
    assert str(home) in lines[0]
    assert lines[0].endswith("quantizing again")
    assert "\n" not in lines[0]
    assert only_file(home).read_bytes() == good
    assert len(fresh) == 2
    assert run(model, quant="int4")[1] == []
    assert len(fresh) == 2


def test_a_file_under_anothers_name_is_found(model: Path, home: Path) -> None:
    run(model, quant="int4", group_size=64)
    other = only_file(home).read_bytes()
    logits, _ = run(model, quant="int4")
    for path in home.iterdir():
        path.chmod(0o644)
        path.write_bytes(other)
    again, lines = run(model, quant="int4")
    assert "made of something else" in lines[0]
    assert_same_bits(again, logits, "logits")


def test_a_folder_in_its_place_is_no_crash(model: Path, home: Path) -> None:
    logits, _ = run(model)
    path = only_file(home)
    path.unlink()
    path.mkdir()
    again, lines = run(model)
    assert len(lines) == 2
    assert_same_bits(again, logits, "logits")


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes(model: Path, home: Path) -> None:
    sizes: dict[Path, int] = {}
    for age, group in enumerate((32, 64, 128)):
        run(model, quant="int4", group_size=group)
        new = next(path for path in home.iterdir() if path not in sizes)
        sizes[new] = new.stat().st_size
        os.utime(new, (1000 + age, 1000 + age))
    first, second, third = sizes
    run(model, quant="int4", group_size=32)  # used again: now the second is the oldest
    limit = sum(sizes.values()) + sizes[second]
    _, lines = run(model, quant="int4", int4_scheme="symmetric", cache_limit=limit)
    assert len(lines) == 1
    assert first.exists()
    assert third.exists()
    _, lines = run(model, quant="int8", cache_limit=limit)
    assert not second.exists()
    assert first.exists()
    assert sum(path.stat().st_size for path in home.iterdir()) <= limit + 4096  # headers and indexes


@pytest.mark.parametrize("limit", [0, 1000])
def test_a_limit_too_small_for_the_model_is_said(model: Path, home: Path, limit: int) -> None:
    run(model, quant="bf16")
    _, lines = run(model, cache_limit=limit)
    assert len(lines) == 1
    assert "not cached" in lines[0]
    assert len(list(home.iterdir())) == 1  # and nothing was removed for it


@pytest.mark.parametrize("limit", [-1, 1.5, "3", True])
def test_a_wrong_limit_is_refused(model: Path, limit: Any) -> None:
    with pytest.raises(RequestError, match="cache limit"):
        pyengine.load(model, cache_limit=limit)


def test_a_disk_without_three_times_the_space_is_left_alone(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pyengine.load(model, cache=False) as one:
        size = one.weights.packed_bytes
    for free, written in ((3 * size - 1, False), (3 * size, True)):
        status = SimpleNamespace(f_bavail=free, f_frsize=1)
        monkeypatch.setattr(weights_cache.os, "statvfs", lambda _, status=status: status)
        _, lines = run(model)
        assert len(lines) == 1
        assert ("not cached" not in lines[0]) == written
        assert len(list(home.iterdir())) == written


def test_report_b25_a_full_disk_leaves_nothing_behind(model: Path, home: Path) -> None:
    """A limit on file sizes fails the write in the core as a full disk does."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    try:
        _, lines = run(model, quant="bf16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert len(lines) == 1
    assert "not cached" in lines[0]
    assert "File too large" in lines[0]
    assert list(home.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "file"))
    logits, lines = run(model)
    assert [line for line in lines if "not cached" in line] == lines[-1:]
    assert_same_bits(logits, run(model, cache=False)[0], "logits")


def refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_read_only_folder_is_used(model: Path, home: Path, fresh: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    run(model)

    for name in ("utime", "rename", "unlink"):
        monkeypatch.setattr(weights_cache.os, name, refuse)
    monkeypatch.setattr(weights_cache.tempfile, "mkstemp", refuse)
    assert run(model)[1] == []
    assert len(fresh) == 1
    _, lines = run(model, quant="int4")
    assert len(lines) == 1
    assert lines[0].endswith("Permission denied")


@pytest.mark.parametrize("how", ["inside", "the folder", "a link to it", "a link inside", "a model by link"])
def test_nothing_is_written_into_the_models_folder(
    how: str, tmp_path: Path, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = calibrated_model(tmp_path / "own")
    before, given = sorted(own.rglob("*")), own
    cache = {"inside": own / "a" / "b", "the folder": own}.get(how, tmp_path / "link")
    if how == "a model by link":
        cache, given = own / "cache", tmp_path / "link"
        given.symlink_to(own)
    elif how.startswith("a link"):
        target = own if how == "a link to it" else own / "sub"
        cache.symlink_to(target)
    monkeypatch.setenv("PYENGINE_CACHE", str(cache))
    _, lines = run(given)
    assert len(lines) == 1
    assert "inside the model's folder" in lines[0]
    assert sorted(own.rglob("*")) == before
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "own-cache"))  # a name that begins alike is another folder
    assert "cached for the next start" in run(given)[1][0]


def test_every_bit_of_the_header_counts(model: Path, home: Path) -> None:
    run(model)
    (path,) = home.iterdir()
    good = path.read_bytes()
    path.chmod(0o644)
    with path.open("r+b") as file:
        weights_cache.read_index(file.fileno(), path)
        for bit in range(8 * weights_cache.HEADER.size):
            os.pwrite(file.fileno(), bytes([good[bit // 8] ^ 1 << bit % 8]), bit // 8)
            with pytest.raises(ModelFormatError, match=r"expected|not what was written"):
                weights_cache.read_index(file.fileno(), path)
            os.pwrite(file.fileno(), good[bit // 8 : bit // 8 + 1], bit // 8)


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_report_b25_temporary_files_of_dead_processes_go(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    run(model)
    dead, alive = home / ".dead.weights.tmp", home / ".alive.weights.tmp"
    for path in (dead, alive):
        path.write_bytes(bytes(100))
    if locks:
        writer = os.open(alive, os.O_RDWR)
        fcntl.flock(writer, fcntl.LOCK_EX)
    else:
        monkeypatch.setattr(weights_cache.fcntl, "flock", refuse)
        os.utime(dead, (1000, 1000))
    run(model)  # from the cache: every start looks
    assert not dead.exists()
    assert alive.exists()
    if locks:
        os.close(writer)  # as the kernel does when a process ends
        run(model)
        assert not alive.exists()


def test_a_new_file_that_was_taken_for_a_dead_one_is_made_again(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, made = weights_cache.tempfile.mkstemp, []

    def removed_at_once(**keywords: Any) -> tuple[int, str]:
        made.append(original(**keywords))
        if len(made) < 3:
            os.unlink(made[-1][1])
        return made[-1]

    monkeypatch.setattr(weights_cache.tempfile, "mkstemp", removed_at_once)
    _, lines = run(model)
    assert len(made) == 3
    assert "cached for the next start" in lines[0]
    assert len(list(home.iterdir())) == 1


SCRIPT = """
import sys
import numpy as np
import pyengine
from pyengine import weights_cache
weights_cache.WORTH_SECONDS = -1.0
sums = []
for turn in range(6):
    options = {"threads": 1, "group_size": (32, 64)[turn % 2], "cache_limit": int(sys.argv[2])}
    with pyengine.load(sys.argv[1], quant="int4", log=lambda line: print(line, file=sys.stderr), **options) as one:
        sums.append(one.logits(list(range(40))).tobytes().hex()[:64])
print(sums)
"""


@pytest.mark.parametrize("room", [True, False], ids=["room", "evicting"])
def test_processes_at_once(model: Path, home: Path, room: bool) -> None:
    with pyengine.load(model, quant="int4", cache=False) as one:
        limit = one.weights.packed_bytes * (10 if room else 1) + 1000
    # not from the checkout: its pyengine folder may have no built core
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(model), str(limit)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=home.parent.parent,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert "warning" not in outputs[0][1] + outputs[1][1]
    assert all(path.suffix == ".weights" for path in home.iterdir())


def test_an_engine_is_pickled_with_its_cache_arguments(model: Path, home: Path) -> None:
    with pyengine.load(model, cache=False) as one:
        reload, arguments = one.__reduce__()
        with reload(*arguments):
            assert not home.exists()
    assert engine.DEFAULT_LIMIT_BYTES == 20_000_000_000
