"""Checkpoints: what users of other engines ran into, on small inputs. Ids are those of case_ids.txt, section B."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import safetensors_bytes, tiny_tensors, write_tiny_model
from cache_cases import own_cache
from compare import assert_same_bits
from golden.golden_cases import CONFIGS, TL, TQ2
from refusal import assert_refused, listing
from report_models import IDS, Tensors, assert_equal_models, assert_nearer, logits, model, rounded
from safetensors.numpy import save_file
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine.errors import ModelFormatError, TokenizerError, UnsupportedModelError
from pyengine.reference import load_reference

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUANTS = ("f32", "bf16", "int8", "int4")
INDEX = "model.safetensors.index.json"


def refused(folder: Path, error: type[pyengine.PyEngineError], *texts: str) -> None:
    assert_refused(lambda: logits(folder), error, texts, folder, small=False)


# ---- tied embeddings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("head", ["report-B01-the-same", "report-B02-another"])
def test_an_output_matrix_beside_a_tied_embedding(head: str, quant: str, tmp_path: Path) -> None:
    """The same changes nothing, and is said; another is the head, as in transformers 5, and that is a warning."""
    plain = logits(model(tmp_path / "plain", TQ2), quant=quant)
    same = head == "report-B01-the-same"

    def add(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBED].copy() if same else np.roll(tensors[EMBED], 1, axis=0)

    with pyengine.load(model(tmp_path / "more", TQ2, add), quant=quant, threads=1, calibration=False) as engine:
        found = engine.logits(IDS)
        said = any(HEAD in text for text in (*engine.notes, *engine.spec.warnings))
    assert said
    if same:
        assert_same_bits(found, plain, "the embedding is the head")
        return
    untied = model(tmp_path / "untied", {**TQ2, "tie_word_embeddings": False}, add)
    assert_same_bits(found, logits(untied, quant=quant), "the other matrix is the head")
    assert np.abs(found - plain).max() > 0.1, "the other head would not show"


def test_report_b04_an_output_matrix_that_is_missing_is_named(tmp_path: Path) -> None:
    refused(model(tmp_path, TL, lambda tensors: tensors.pop(HEAD)), ModelFormatError, "1 tensors are missing: ", HEAD)


@pytest.mark.parametrize(("outside", "inside"), [(None, True), (True, None), (None, False), (False, None)])
def test_report_b05_tie_is_read_where_it_stands(outside: bool | None, inside: bool | None, tmp_path: Path) -> None:
    inner = {key: value for key, value in CONFIGS["ministral3"].items() if key != "architectures"}
    outer: dict[str, Any] = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    tied = bool(outside or inside)
    inner.pop("tie_word_embeddings")
    if inside is not None:
        inner["tie_word_embeddings"] = inside
    if outside is not None:
        outer["tie_word_embeddings"] = outside
    tensors = tiny_tensors(CONFIGS["ministral3"], seed=3)
    head = tensors.pop(HEAD)
    stored = {"model.language_model." + name.removeprefix("model."): value for name, value in tensors.items()}
    if not tied:
        stored[HEAD] = head
    folder = write_tiny_model(tmp_path / "whole", {**outer, "text_config": inner}, tensors=stored)
    text = {**CONFIGS["ministral3"], "tie_word_embeddings": tied}
    alone = write_tiny_model(tmp_path / "alone", text, tensors={**tensors, **({} if tied else {HEAD: head})})
    found = logits(folder)
    assert_same_bits(found, logits(alone), "the text part alone")
    other = write_tiny_model(
        tmp_path / "other", {**text, "tie_word_embeddings": False}, tensors={**tensors, HEAD: np.roll(head, 1, axis=0)}
    )
    assert np.abs(found - logits(other)).max() > 0.1


@pytest.mark.parametrize("quant", QUANTS)
def test_report_b06_malformed_p10_a_tied_embedding_is_the_head_in_every_format(quant: str, tmp_path: Path) -> None:
    folder = model(tmp_path, {**TL, "tie_word_embeddings": True})
    right, wrong = (rounded(folder, quant=quant) for _ in range(2))
    wrong.weights = {**wrong.weights, HEAD: np.random.default_rng(1).standard_normal((97, 64)) / 8}
    wrong.spec = type(wrong.spec)(**{**vars(wrong.spec), "tie_word_embeddings": False})
    assert_nearer(logits(folder, quant=quant), right.forward(IDS), wrong.forward(IDS))


def test_report_b31_an_untied_head_is_used(tmp_path: Path) -> None:
    folder = model(tmp_path, TL)
    right, wrong = (load_reference(folder) for _ in range(2))
    wrong.weights = {**wrong.weights, HEAD: wrong.weights[EMBED]}
    assert_equal_models(logits(folder), right.forward(IDS), wrong.forward(IDS))


# ---- tensors that are missing, misspelt, or under other names --------------------------------------------------------


def test_report_b07_a_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, {**TL, "num_hidden_layers": 3}, tensors=tiny_tensors(TL))
    refused(folder, ModelFormatError, "9 tensors are missing", "'model.layers.2.input_layernorm.weight'")


def test_report_b09_a_misspelt_tensor_is_missing_and_not_known(tmp_path: Path) -> None:
    def misspell(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_projj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")

    refused(
        model(tmp_path, TL, misspell), ModelFormatError, "1 tensors are missing: 'model.layers.1.mlp.up_proj.weight'",
        "1 not known: 'model.layers.1.mlp.up_projj.weight'",
    )  # fmt: skip


PREFIXES: dict[str, tuple[Callable[[str], str], str]] = {
    "report-B29-x": (lambda name: "x." + name, "'model.embed_tokens.weight'"),
    "report-B29-language-model": (lambda name: "language_model." + name, "'model.embed_tokens.weight'"),
    "report-B29-one-layer": (lambda name: name.replace("layers.1.", "blocks.1."), "'model.layers.1."),
}


@pytest.mark.parametrize("case", PREFIXES)
def test_tensors_under_names_that_are_not_the_familys(case: str, tmp_path: Path) -> None:
    rename, text = PREFIXES[case]
    folder = write_tiny_model(tmp_path, TL, tensors={rename(n): t for n, t in tiny_tensors(TL).items()})
    refused(folder, ModelFormatError, "tensors are missing", text, "not known")


def test_report_b29_an_extra_bias_is_not_passed_over(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)

    refused(model(tmp_path, TL, add), UnsupportedModelError, "'model.layers.0.self_attn.q_proj.bias'", "change the num")


def test_report_b30_a_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    folder = write_tokenizer(model(tmp_path, {**TL, "vocab_size": 257}), byte_level())
    assert_refused(lambda: logits(folder), TokenizerError, ("258 ids", "257 embedding rows"), folder, small=False)
    assert np.isfinite(logits(write_tokenizer(model(tmp_path / "fits", {**TL, "vocab_size": 258}), byte_level()))).all()


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("pad", [1, 2, 3, 5, 7, 33])
def test_report_b20_tensors_at_any_address_give_the_same_bits(pad: int, quant: str, tmp_path: Path) -> None:
    """The header is padded so that no tensor begins at a multiple of its element's size."""
    plain = model(tmp_path / "plain", TL)
    raw = (plain / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(TL))
    (odd / "model.safetensors").write_bytes(safetensors_bytes(raw[8 : 8 + size] + b" " * pad, raw[8 + size :]))
    assert_same_bits(logits(odd, quant=quant), logits(plain, quant=quant), f"{pad} more bytes of header")


def test_report_b21_a_cache_file_is_written_while_another_load_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = own_cache(tmp_path, monkeypatch)
    folder = model(tmp_path / "model", TL)
    pyengine.load(folder, threads=1, log=lambda _: None).close()
    with pyengine.load(folder, threads=1, log=lambda _: None) as mapped:
        before = mapped.logits(IDS)
        (path,) = home.glob("*.weights")
        damaged = bytearray(path.read_bytes())
        damaged[-100] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        (tmp_path / "damaged").replace(path)  # as if another process had written it
        with pyengine.load(folder, threads=1, log=lambda _: None) as other:
            assert_same_bits(other.logits(IDS), before, "made again")
        assert_same_bits(mapped.logits(IDS), before, "still the old file")


LIMITED = """
import resource, sys
import numpy as np
import pyengine
from pyengine.checkpoint import Checkpoint
from pathlib import Path
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), resource.RLIM_INFINITY))
try:
    np.zeros(600 << 20, np.uint8)
    sys.exit("the limit does not hold")
except MemoryError:
    pass
with Checkpoint.open(Path(sys.argv[1])) as checkpoint:
    print(checkpoint.read("small").tolist())
    try:
        checkpoint.read("large")
    except pyengine.ResourceError as error:
        print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the address space in use from /proc")
def test_report_b22_a_file_larger_than_the_address_space_is_read(tmp_path: Path) -> None:
    """Files are read and not mapped; a tensor that memory does not hold is an error that names it."""
    large = 1 << 40
    header = {
        "large": {"dtype": "F32", "shape": [large // 4], "data_offsets": [0, large]},
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [large, large + 8]},
    }
    head = safetensors_bytes(header)
    path = tmp_path / "model.safetensors"
    path.write_bytes(head)
    try:
        os.truncate(path, len(head) + large + 8)
    except OSError:
        pytest.skip("the file system has no files of this size")
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(np.array([1.5, -2], np.float32).tobytes())
    # not from the checkout: its pyengine folder may have no built core
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    values, error = done.stdout.splitlines()
    assert values == "[1.5, -2.0]"
    assert "model.safetensors: tensor 'large'" in error
    assert str(large) in error


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "report-B15-one-byte-short": lambda raw: raw[:-1],
    "report-B15-three-bytes-short": lambda raw: raw[:-3],
    "report-B15-a-byte-more": lambda raw: raw + b"x",
    "report-B26-header": lambda raw: raw[:20] + b"\xff" + raw[21:],
    "report-B26-empty": lambda raw: b"",
    "report-B14-a-page-short": lambda raw: raw[:-4096],
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_shard_is_named_and_nothing_is_deleted(case: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(TL, seed=3)
    names = list(tensors)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: files[at * 2 // len(names)] for at, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, str(tmp_path / file))
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(TL))
    before, whole = logits(tmp_path), (tmp_path / files[1]).read_bytes()
    (tmp_path / files[1]).write_bytes(DAMAGE[case](whole))
    here = listing(tmp_path)
    refused(tmp_path, ModelFormatError, files[1], *(["tensor"] if "B26" not in case else []))
    assert listing(tmp_path) == here
    (tmp_path / files[1]).write_bytes(whole)
    assert_same_bits(logits(tmp_path), before, "whole again")


def test_report_b24_data_of_zeros_is_said(tmp_path: Path) -> None:
    """A download that left a file of the right length and nothing in it."""
    folder = model(tmp_path, TL)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:size] + bytes(len(raw) - size))
    with pyengine.load(folder, threads=1, calibration=False) as engine:
        said = [text for text in engine.spec.warnings if "is all zero" in text]
    assert len(said) == len(tiny_tensors(TL))
    assert_refused(
        lambda: pyengine.load(folder, threads=1, strict=True), ModelFormatError, ("is all zero",), folder, small=False
    )
