"""Stage 6 and 7, perplexity: compare's number for one model, strides, the command."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from fake_engine import ByteTokenizer, FakeEngine, install
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.cli.main import main
from pyengine.errors import ComputeError, RequestError
from pyengine.reports import compare
from pyengine.reports.compare_baseline import Options, Side
from pyengine.reports.compare_models import compare_sides
from pyengine.reports.perplexity import perplexity

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
KEYS = ["quant", "bits_per_weight", "text", "tokens", "window", "stride", "scored", "nll", "nll_stderr", "ppl"]


def source(content: str = TEXT) -> compare.TextSource:
    data = content.encode()
    return compare.TextSource("a text", hashlib.sha256(data).hexdigest(), len(data), content)


def nll_of(ids: list[int], first: int) -> list[float]:
    """Of ids[first:], each after all before it, the long way in float64."""
    logits = FakeEngine().logits(ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [-log_p[i - 1, ids[i]] for i in range(first, len(ids))]


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize(("stride", "scored"), [(None, 8), (15, 8), (8, 8), (5, 5), (1, 1)])
def test_windows_strides_and_scores(stride: int | None, scored: int, bos: int | None) -> None:
    result = perplexity(FakeEngine(), ByteTokenizer(bos), source(), tokens=64, window=16, stride=stride)
    ids, front = list(TEXT.encode()), [] if bos is None else [bos]
    size = 16 - len(front)
    step = size if stride is None else stride
    wanted = [x for i in range(4) for x in nll_of(front + ids[i * step : i * step + size], 16 - scored)]
    assert (result.stride, result.scored, result.tokens, result.window) == (step, 4 * scored, 64, 16)
    assert result.nll == pytest.approx(np.mean(wanted), rel=1e-5)
    assert result.ppl == pytest.approx(np.exp(np.mean(wanted)), rel=1e-5)
    assert result.nll_stderr == pytest.approx(np.std(wanted, ddof=1) / np.sqrt(len(wanted)), rel=1e-4)


def test_a_stride_of_half_a_window_scores_each_token_once() -> None:
    engine = FakeEngine()
    perplexity(engine, ByteTokenizer(), source(), tokens=64, window=16, stride=8)
    places = [8 * i + row + 1 for i, request in enumerate(engine.requests) for row in request["rows"]]
    assert places == list(range(8, 40))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stride": 0}, "stride 0"), ({"stride": 16}, "expected 1 to 15"), ({"window": 7}, "even"),
        ({"tokens": 20}, "multiple"), ({"tokens": 1600, "stride": 2}, "expected at least 213"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(options: dict[str, int], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        perplexity(FakeEngine(), ByteTokenizer(bos=3), source(), **{"tokens": 64, "window": 16, **options})


def test_the_engines_number_is_compares_to_the_bit(tmp_path: Path) -> None:
    """On real kernels: both of compare's perplexities, and the same at another stride from a shifted text."""
    folder = write_tiny_model(tmp_path, {**CONFIGS["qwen2"], "vocab_size": 256})
    sizes = {"tokens": 64, "window": 16}
    with (
        pyengine.load(folder, quant="f32", threads=1, cache=False) as stored,
        pyengine.load(folder, quant="int4", threads=1, cache=False) as packed,
    ):
        stored.tokenizer = packed.tokenizer = ByteTokenizer()
        sides = [Side(folder, e.quant, None, lambda e=e: contextlib.nullcontext(e)) for e in (stored, packed)]
        both = compare_sides(*sides, source(), Options(**sizes, layers=False, together=True))
        assert perplexity(stored, ByteTokenizer(), source(), **sizes).ppl == both.ppl_baseline
        assert perplexity(packed, ByteTokenizer(), source(), **sizes).ppl == both.ppl_quant
        assert both.ppl_baseline != both.ppl_quant
        one = perplexity(packed, ByteTokenizer(), source(), tokens=16, window=16)
        assert perplexity(packed, ByteTokenizer(), source(), tokens=16, window=16, stride=8) == one.__class__(
            **{**one.to_json(), "stride": 8}
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused(value: float) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[1, 2] = value
    with np.errstate(invalid="ignore"), pytest.raises(ComputeError, match="NaN or Inf"):
        compare.position_nll(logits, [2, 2, 2])
    with pytest.raises(ValueError, match="a target for each row"):
        compare.position_nll(np.zeros((3, 5), np.float32), [1])


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    engine = install(monkeypatch, tmp_path)
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    command = ["perplexity", "--text", str(file), "--tokens", "64", "--window", "16", "--stride", "4"]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record) == KEYS
    assert (record["stride"], record["scored"], record["quant"]) == (4, 16, "int8")
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "64 in windows of 16, stride 4; the last 4 of each scored, 16 in all" in out
    assert f"perplexity  {record['ppl']:.4f}" in out
    assert err == ""
    assert main([*command, "--stride", "17"]) == 2
    assert "stride 17" in capsys.readouterr().err
    (tmp_path / "pyengine_source.json").write_text("{}", encoding="utf-8")
    assert main(command) == 0
    assert "without MODEL, perplexity measures" in capsys.readouterr().err
    engine.tokenizer = None
    assert main(command) == 5
