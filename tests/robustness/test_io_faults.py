"""File operations that fail, transfer less or are interrupted: in loading, in writing the cache and in reading it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
from builders import write_tiny_model
from cache_cases import CONFIG
from faults import shim
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine.errors import ModelFormatError

DRIVER = Path(shim.HERE) / "io_faults.py"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The shim, and a model of one layer with a tokenizer."""
    folder = tmp_path_factory.mktemp("faults")
    model = write_tiny_model(folder / "model", {**CONFIG, "num_hidden_layers": 1}, seed=3)
    write_tokenizer(model, byte_level())
    return shim.build(folder), model


def run(built: tuple[Path, Path], tmp_path: Path, *specs: str) -> list[str]:
    library, model = built
    cache = tmp_path / "cache" / "weights"
    cache.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(model), str(cache), *specs],
        env=shim.environment(library), cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_loading(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Every file that is opened and every place that is read."""
    lines = run(
        built, tmp_path,
        "load:open:EIO", "load:open:EMFILE", "load:open:EINTR", "load:read:EIO", "load:read:EINTR:4",
        "load:read:short", "load:pread:EIO:6", "load:pread:ENOMEM:3", "load:pread:EINTR:6", "load:pread:short",
    )  # fmt: skip
    for what in ("EIO at open 4", "EMFILE at open 4", "EIO at read 4", "EIO at pread 6", "short at pread"):
        assert any(line.startswith(f"load: {what}") for line in lines), lines
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert any("EMFILE" in line and f"{name}: Too many open files" in line for line in lines), lines


def test_a_file_cut_short_while_the_package_looks_at_it(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package maps what it opens: a mapped file cut short would be a SIGBUS."""
    model = tmp_path / "model"
    shutil.copytree(built[1], model)
    original = safetensors.safe_open

    def cut_first(path: str, **keywords: Any) -> Any:
        os.truncate(model / "model.safetensors", 100)
        return original(path, **keywords)

    monkeypatch.setattr(safetensors, "safe_open", cut_first)
    with pytest.raises(
        ModelFormatError, match=r"model\.safetensors: changed while loading, ends at byte 100; expected"
    ):
        pyengine.load(model, threads=1, calibration=False)


def test_writing_the_cache(built: tuple[Path, Path], tmp_path: Path) -> None:
    """A table that fills several huge pages of the file, each of which is a call of its own."""
    model = write_tiny_model(tmp_path / "model", {**CONFIG, "num_hidden_layers": 1, "vocab_size": 70_000}, seed=3)
    write_tokenizer(model, byte_level())
    lines = run(
        (built[0], model), tmp_path,
        "write:open:EMFILE", "write:pwritev:ENOSPC", "write:pwritev:EIO:2", "write:pwritev:EINTR:2",
        "write:pwritev:short", "write:pwrite:ENOSPC", "write:pwrite:EINTR", "write:pwrite:short", "write:fsync:EIO",
        "write:fsync:EINTR", "write:rename:EIO", "write:rename:ENOSPC",
    )  # fmt: skip
    for call in ("pwritev", "pwrite", "fsync", "rename"):
        refused = [line for line in lines if f"at {call} 1: packed weights not cached: " in line]
        assert len(refused) >= 1, lines
    assert any(line.startswith("write: ENOSPC at pwritev 3: ") for line in lines), lines
    assert any(line.startswith("write: EIO at fsync 2: packed weights cached") for line in lines), lines  # the folder


def test_reading_the_cache(built: tuple[Path, Path], tmp_path: Path) -> None:
    lines = run(
        built, tmp_path,
        "read:open:EMFILE:1", "read:open:EACCES:1", "read:pread:EIO", "read:pread:EINTR", "read:pread:short",
    )  # fmt: skip
    for what in ("EMFILE at open 1", "EACCES at open 1", "EIO at pread 1", "EIO at pread 2"):
        assert any(line.startswith(f"read: {what}: warning: ") for line in lines), lines
    for what in ("EINTR at pread 2", "short at pread 1"):
        assert f"read: {what}: the same bits" in lines
