"""pyengine's logits against stored ones of transformers: tiny float32 models of every family and RoPE type, no torch.

The engine and the numpy reference are held to the same goldens: whole prompt at once, token by token, in chunks, and
at every length around a window. Regenerate the goldens with tools/goldens/make.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from compare import assert_close, assert_same_bits
from golden.golden_cases import CONFIGS, POSITIONS, VOCAB_SIZE, WITH_STATES, Golden, build, load_golden

import pyengine
from pyengine.reference import ReferenceCache, ReferenceModel, load_reference

BOUND = 1e-4  # largest absolute logit difference from transformers, float32 against float32
STATE_BOUND = 1e-5  # relative, for hidden states
CHUNKS = (None, 1, 7, 64)
WINDOWED = ("mistral_window", "qwen2_window", "qwen3_window")
SPELLINGS = ("rope_default", "rope_linear", "rope_dynamic", "rope_llama3", "rope_yarn")
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def goldens() -> dict[str, Golden]:
    return {path.stem.removeprefix("tiny_"): load_golden(path) for path in sorted(HERE.glob("tiny_*.npz"))}


@pytest.fixture(scope="session")
def folder_of(goldens: dict[str, Golden], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a case -> its model folder, made again from the seed and checked against the stored sha256."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            golden = goldens[name]
            path = build(tmp_path_factory.mktemp(name), golden.config, golden.seed)
            digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
            assert digest == golden.weights_sha256, (
                f"{name}: other weights than the golden's; run tools/goldens/make.py"
            )
            made[name] = path
        return made[name]

    return folder


@pytest.fixture
def engine_of(folder_of: Callable[[str], Path]) -> Iterator[Callable[[str], pyengine.Engine]]:
    opened: list[pyengine.Engine] = []

    def engine(name: str) -> pyengine.Engine:
        opened.append(pyengine.load(folder_of(name), quant="f32", threads=1))
        return opened[-1]

    yield engine
    for one in opened:
        one.close()


def reference_logits(model: ReferenceModel, ids: list[int], chunk: int | None) -> np.ndarray:
    """Logits [T, V] of the reference, `chunk` tokens at a time through its cache (None = at once)."""
    step, cache = chunk or len(ids), ReferenceCache()
    parts = [model.forward(ids[at : at + step], at, cache) for at in range(0, len(ids), step)]
    return np.concatenate(parts)


def test_the_goldens_are_those_of_the_cases(goldens: dict[str, Golden]) -> None:
    assert sorted(goldens) == sorted(CONFIGS)
    for name, golden in goldens.items():
        assert golden.config == CONFIGS[name], f"{name}: config changed since the golden was made"
        assert golden.logits.shape == (POSITIONS, VOCAB_SIZE)
        assert golden.logits.dtype == np.float32
        assert np.isfinite(golden.logits).all()
        assert golden.logits.std() > 0.1, f"{name}: logits too flat to tell a wrong model from a right one"
        assert (len(golden.states) > 0) == (name in WITH_STATES)
    assert sum(path.stat().st_size for path in HERE.glob("tiny_*.npz")) < 2_000_000


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_reference(name: str, chunk: int | None, goldens: dict[str, Golden], folder_of: Callable[[str], Path]) -> None:
    golden = goldens[name]
    logits = reference_logits(load_reference(folder_of(name)), golden.ids, chunk)
    assert_close(logits, golden.logits, BOUND, f"{name}, chunk {chunk}")


@pytest.mark.parametrize("name", WITH_STATES)
def test_reference_states(name: str, goldens: dict[str, Golden], folder_of: Callable[[str], Path]) -> None:
    golden, taps = goldens[name], {}
    load_reference(folder_of(name)).forward(golden.ids, taps=taps)
    assert len(taps["hidden"]) == len(golden.states)
    for layer, (ours, theirs) in enumerate(zip(taps["hidden"], golden.states, strict=True)):
        assert_close(ours, theirs, STATE_BOUND * np.abs(theirs).max(), f"{name}, after layer {layer}")


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_engine(
    name: str, chunk: int | None, goldens: dict[str, Golden], engine_of: Callable[[str], pyengine.Engine]
) -> None:
    logits = engine_of(name).logits(goldens[name].ids, chunk=chunk)
    assert_close(logits, goldens[name].logits, BOUND, f"{name}, chunk {chunk}")


@pytest.mark.parametrize("name", WINDOWED)
def test_report_c23_c26_c27_c29_engine_at_every_length_around_the_window(
    name: str, goldens: dict[str, Golden], engine_of: Callable[[str], pyengine.Engine]
) -> None:
    golden, engine = goldens[name], engine_of(name)
    for length in range(1, POSITIONS + 1):
        prefill = engine.logits(golden.ids[:length])
        decode = engine.logits(golden.ids[:length], chunk=1)
        assert_close(prefill, golden.logits[:length], BOUND, f"{name}, {length} tokens at once")
        assert_close(decode, golden.logits[:length], BOUND, f"{name}, {length} tokens one by one")


@pytest.mark.parametrize("name", WINDOWED)
def test_reference_at_every_length_around_the_window(
    name: str, goldens: dict[str, Golden], folder_of: Callable[[str], Path]
) -> None:
    golden, model = goldens[name], load_reference(folder_of(name))
    for length in range(1, POSITIONS + 1):
        logits = reference_logits(model, golden.ids[:length], None)
        assert_close(logits, golden.logits[:length], BOUND, f"{name}, {length} tokens")


@pytest.mark.parametrize("kind", SPELLINGS)
def test_both_config_spellings_are_one_model(
    kind: str, goldens: dict[str, Golden], folder_of: Callable[[str], Path]
) -> None:
    old, new = load_reference(folder_of(f"{kind}_v4")), load_reference(folder_of(f"{kind}_v5"))
    assert old.spec == new.spec
    ids = goldens[f"{kind}_v4"].ids
    assert_same_bits(old.forward(ids), new.forward(ids))


@pytest.mark.parametrize("kind", SPELLINGS)
def test_report_c07_c09_engine_gives_the_same_bits_for_both_spellings(
    kind: str, goldens: dict[str, Golden], engine_of: Callable[[str], pyengine.Engine]
) -> None:
    ids = goldens[f"{kind}_v4"].ids
    assert_same_bits(engine_of(f"{kind}_v4").logits(ids), engine_of(f"{kind}_v5").logits(ids))
