"""Packed weights from disk: the same bits as fresh ones, and a key for all that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from cache_cases import CONFIG, IDS, calibrated_model, count_fresh, own_cache, run
from compare import assert_same_bits
from golden.golden_cases import CONFIGS
from kernel_cases import ISAS
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import _core, weights_cache
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


def packed(model: Path, **arguments: Any) -> list[np.ndarray]:
    """Every tensor of a load, without the header's checksum."""
    with pyengine.load(model, threads=1, log=lambda _: None, **arguments) as one:
        tensors = [one.backend.tensor_bytes(tensor) for tensor in one.weights.tensors]
    for tensor in tensors:
        tensor[48:56] = 0
    return tensors


# ---- the same bits ---------------------------------------------------------------------------------------------------

FORMATS: list[dict[str, Any]] = [
    {"quant": "f32"},
    {"quant": "bf16"},
    {"quant": "int8"},
    {"quant": "int4"},
    {"quant": "int4", "group_size": 128, "int4_scheme": "symmetric"},
]


@pytest.mark.parametrize("case", ["llama", "qwen2_window", "qwen3", "llama_head_dim"])
@pytest.mark.parametrize("options", FORMATS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_cached_start_has_the_same_bits(
    tmp_path: Path, fresh: list[int], home: Path, case: str, options: dict[str, Any]
) -> None:
    model = write_tiny_model(tmp_path / "model", {**CONFIGS[case], "vocab_size": 258}, seed=4)
    expected = packed(model, cache=False, **options)
    assert not home.exists()
    logits, lines = run(model, **options)
    assert len(lines) == 1
    assert "cached for the next start" in lines[0]
    assert str(home) in lines[0]
    again, lines = run(model, **options)
    assert lines == []
    assert len(fresh) == 2
    assert_same_bits(again, logits, "logits")
    for mine, theirs in zip(packed(model, **options), expected, strict=True):
        assert_same_bits(mine, theirs, "a tensor")
    assert len(fresh) == 2


@pytest.mark.parametrize("isa", ISAS)
def test_every_isa_reads_what_another_wrote(model: Path, fresh: list[int], isa: str) -> None:
    logits, _ = run(model, quant="int4", isa=ISAS[0], threads=3)
    again, _ = run(model, quant="int4", isa=isa)
    assert len(fresh) == 1
    assert_same_bits(again, logits, isa)


def test_what_a_fresh_load_says_a_cached_one_says(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG, seed=3)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][:] = 0
    model = write_tiny_model(tmp_path / "model", CONFIG, tensors=tensors)
    kept = []
    for _ in range(2):
        with pyengine.load(model, log=lambda _: None) as one:
            weights = one.weights
            kept.append((one.spec.warnings, one.notes, one.bits_per_weight, weights.packed_bytes, weights.head_bytes))
    assert kept[0] == kept[1]
    assert any(name in text for text in kept[0][0])
    with pytest.raises(ModelFormatError, match="is all zero"):
        pyengine.load(model, strict=True, log=lambda _: None)


def test_report_b21_mapped_tensors_are_read_only_and_outlive_their_file(model: Path, home: Path) -> None:
    logits, _ = run(model)
    with pyengine.load(model) as one:
        norm = one.weights.final_norm
        with pytest.raises(RequestError, match="mapped from a file"):
            one.backend.tensor_pack(norm, np.zeros(CONFIG["hidden_size"], np.float32))
        for path in home.iterdir():
            path.unlink()
        assert_same_bits(one.logits(IDS), logits, "logits")


def test_no_cache_neither_reads_nor_writes(model: Path, home: Path, fresh: list[int]) -> None:
    run(model, cache=False)
    assert not home.exists()
    run(model)
    before = {path: path.stat().st_mtime_ns for path in home.iterdir()}
    _, lines = run(model, cache=False)
    assert lines == []
    assert len(fresh) == 3
    assert {path: path.stat().st_mtime_ns for path in home.iterdir()} == before


def test_a_quick_load_is_not_written(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cache, "WORTH_SECONDS", 1e9)
    assert run(model)[1] == []
    assert not home.exists()


def test_the_default_log_is_one_line_on_stderr(model: Path, home: Path, capsys: Any) -> None:
    pyengine.load(model).close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"pyengine: packed weights cached for the next start: 0.00 GB in {home}\n"


# ---- the key ---------------------------------------------------------------------------------------------------------


def change_mtime(model: Path) -> None:
    path = model / "model.safetensors"
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def change_header(model: Path) -> None:
    """Another name in the metadata; the same size and time."""
    path = model / "model.safetensors"
    status, raw = path.stat(), path.read_bytes()
    assert raw.count(b'"pt"') == 1
    path.write_bytes(raw.replace(b'"pt"', b'"np"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-3}))


def change_tokenizer(model: Path) -> None:
    write_tokenizer(model, byte_level(merges=(("t", "h"),)))


CHANGES: dict[str, tuple[Callable[[Path], None] | None, dict[str, Any]]] = {
    "quant": (None, {"quant": "int8"}),
    "group": (None, {"group_size": 64}),
    "scheme": (None, {"int4_scheme": "symmetric"}),
    "calibration": (None, {"calibration": False}),
    "time": (change_mtime, {}),
    "header": (change_header, {}),
    "config": (change_config, {}),
    "tokenizer": (change_tokenizer, {}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_the_bytes_changes_the_key(model: Path, home: Path, fresh: list[int], what: str) -> None:
    run(model, quant="int4")
    change, options = CHANGES[what]
    if change is not None:
        change(model)
    _, lines = run(model, **{"quant": "int4", **options})
    assert len(fresh) == 2
    assert len(lines) == 1
    assert len(list(home.iterdir())) == 2


@pytest.mark.parametrize("version", ["QUANTIZER_VERSION", "FILE_VERSION"])
def test_another_version_is_another_key(
    model: Path, fresh: list[int], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    run(model)
    monkeypatch.setattr(weights_cache, version, getattr(weights_cache, version) + 1)
    run(model)
    assert len(fresh) == 2


def test_what_does_not_change_the_bytes_shares_them(model: Path, fresh: list[int]) -> None:
    run(model, quant="int4")
    for options in ({"threads": 2}, {"kv_dtype": "f32"}, {"ctx_size": 64}, {"group_size": 32}, {"isa": ISAS[0]}):
        run(model, quant="int4", **options)
    (model / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=3))
    run(model, quant="int4")
    assert len(fresh) == 1


def test_a_model_through_a_link_is_the_same_model(model: Path, tmp_path: Path, fresh: list[int]) -> None:
    run(model)
    (tmp_path / "link").symlink_to(model)
    run(tmp_path / "link")
    assert len(fresh) == 1


@pytest.mark.parametrize("isa", ISAS)
def test_results_of_the_quantizer_belong_to_a_version(isa: str) -> None:
    """If this fails because results changed on purpose, raise QUANTIZER_VERSION and store what is found."""
    rng = np.random.default_rng(11)
    weights = (rng.integers(-1000, 1000, (40, 600)) * rng.integers(1, 50, (40, 600))).astype(np.float32)
    importance = rng.integers(0, 100, 600).astype(np.float32)
    backend, sums = _core.Backend(1, isa), []
    for form, group in (("INT8", 64), ("INT4_SYM", 32), ("INT4_SYM", 128), ("INT4_MIN", 32), ("INT4_MIN", 64)):
        tensor = backend.tensor_create(int(getattr(_core.Format, form)), 40, 600, group)
        for weighted in (None, importance):  # integers: no library's rounding is part of it
            backend.tensor_pack(tensor, weights, 0, 1, weighted)
            sums.append(hashlib.sha256(backend.tensor_bytes(tensor).tobytes()).hexdigest()[:8])
    assert (weights_cache.QUANTIZER_VERSION, " ".join(sums)) == (2, STORED)


STORED = "a0eb436a 2e6fbf09 e7ce19e0 d447f8d0 70b7a7e7 79bb61b9 7f2c23e5 eb3c9e1f 06efaf61 d187e3cc"
