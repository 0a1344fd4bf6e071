"""Stage 6, compare: KL, agreement and perplexity against a float64 computation written the long way."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import ByteTokenizer, FakeEngine

from pyengine.cli import _options
from pyengine.cli.main import main
from pyengine.errors import ComputeError, RequestError, ResourceError
from pyengine.reports import compare as report
from pyengine.reports import compare_models
from pyengine.reports.compare_baseline import Options, Side
from pyengine.reports.compare_models import compare_sides


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def source(content: str) -> report.TextSource:
    data = content.encode()
    return report.TextSource("a text", hashlib.sha256(data).hexdigest(), len(data), content)


@pytest.mark.parametrize("vocab", [2, 257, 50_000])
def test_rows_against_float64(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "BLOCK_ELEMENTS", 3 * vocab)  # several blocks and a shorter last one
    rng = np.random.default_rng(vocab)
    p = (4 * rng.standard_normal((8, vocab)) + 30).astype(np.float32)
    q = (p + 0.3 * rng.standard_normal(p.shape)).astype(np.float32)
    targets = rng.integers(0, vocab, 8).tolist()
    result = report.compare_rows(p, q, targets)
    log_p, log_q = log_softmax(p), log_softmax(q)
    rows = np.arange(8)
    # float32 rounding of p - q and exp(p): each a few eps of a term whose weights sum to 1
    bound = 8 * np.finfo(np.float32).eps * np.abs(log_p - log_q).max(axis=1) + 8 * np.finfo(np.float32).eps
    assert (np.abs(result.kld - (np.exp(log_p) * (log_p - log_q)).sum(axis=1)) <= bound).all()
    assert np.allclose(result.nll_baseline, -log_p[rows, targets], rtol=0, atol=1e-5)
    assert np.allclose(result.nll_quant, -log_q[rows, targets], rtol=0, atol=1e-5)
    assert (result.agreement == (p.argmax(axis=1) == q.argmax(axis=1))).all()
    reverse = report.compare_rows(q, p, targets)
    assert (np.abs(reverse.kld - result.kld) > bound).any()  # KL is not symmetric: swapped arguments must show


def test_equal_logits_give_exactly_zero() -> None:
    p = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    result = report.compare_rows(p, p.copy(), [0] * 5)
    assert (result.kld == 0).all()
    assert result.agreement.all()
    assert (result.nll_baseline == result.nll_quant).all()
    assert (result.delta_p == 0).all()


def test_the_likeliest_tokens_in_order() -> None:
    logits = np.array([[1, 3, 3, 0, 2, 5, -4], [0, 0, 0, 0, 0, 0, 0]], np.float32)
    result = report.compare_rows(logits, logits[:, ::-1].copy(), [0, 0])
    ids, probability = result.top_baseline
    assert ids[0].tolist() == [5, 1, 2, 4, 0]
    assert probability[0] == pytest.approx(np.exp(log_softmax(logits))[0, ids[0]])
    assert result.top_quant[0][0].tolist() == [1, 4, 5, 2, 6]
    assert report.compare_rows(np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32), [0]).top_quant[0].shape == (
        1,
        2,
    )


def test_inputs_are_not_changed() -> None:
    p = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)
    q = p + 1
    before = p.copy(), q.copy()
    report.compare_rows(p, q, [1, 2, 3])
    assert np.array_equal(p, before[0])
    assert np.array_equal(q, before[1])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_nan_and_inf_are_refused(value: float, which: int) -> None:
    pair = [np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)]
    pair[which][1, 2] = value
    with pytest.raises(ComputeError):
        report.compare_rows(pair[0], pair[1], [0, 0])


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match="equal shapes"):
        report.compare_rows(np.zeros((2, 4), np.float32), np.zeros((2, 5), np.float32), [0, 0])
    with pytest.raises(ValueError, match="equal shapes"):
        report.compare_rows(np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32), [0])


def test_windows_are_consecutive_and_start_with_the_models_own_bos() -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(40))
    plain, stride = report.make_windows(ByteTokenizer(), text, tokens=24, window=8)
    assert stride == 8
    assert plain == [list(text[i : i + 8].encode()) for i in (0, 8, 16)]
    with_bos, stride = report.make_windows(ByteTokenizer(bos=3), text, tokens=24, window=8)
    assert stride == 7
    assert with_bos == [[3, *text[i : i + 7].encode()] for i in (0, 7, 14)]
    named_only = ByteTokenizer(bos=3)  # a BOS that the tokenizer has but does not add is not the model's habit
    named_only.adds_bos = False
    assert report.make_windows(named_only, text, tokens=24, window=8) == (plain, 8)


def test_special_tokens_in_the_text_are_ordinary_text() -> None:
    tokenizer = ByteTokenizer()
    report.make_windows(tokenizer, "abcd", tokens=2, window=2)
    assert tokenizer.calls[-1] == {"text": "abcd", "add_special_tokens": False, "parse_special": False}


@pytest.mark.parametrize(
    ("tokens", "window", "says"),
    [(24, 7, "even"), (24, 0, "even"), (20, 8, "multiple"), (4, 8, "multiple"), (48, 8, "at least 48")],
)
def test_sizes_that_do_not_fit_are_refused(tokens: int, window: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        report.make_windows(ByteTokenizer(), "x" * 40, tokens=tokens, window=window)


def test_whole_report_scores_the_second_half_of_each_window() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 3
    baseline, quantized = FakeEngine(quant="bf16"), FakeEngine(quant="int8", noise=0.2)
    tokenizer = ByteTokenizer()
    for engine in (baseline, quantized):
        engine.tokenizer = tokenizer
    sides = [Side(Path("fake"), engine.quant, None, lambda engine=engine: engine) for engine in (baseline, quantized)]
    options = Options(tokens=64, window=16, layers=False, together=True)
    result = compare_sides(*sides, source(text), options)
    assert [request["rows"] for request in baseline.requests] == [list(range(7, 15))] * 4
    kld, nll_p, nll_q, same, delta, best = [], [], [], [], [], []
    oracle_p, oracle_q = FakeEngine(), FakeEngine(noise=0.2)
    for begin in range(0, 64, 16):
        ids = list(text.encode())[begin : begin + 16]
        p, q = oracle_p.logits(ids), oracle_q.logits(ids)
        log_p, log_q = log_softmax(p), log_softmax(q)
        for i in range(8, 16):
            kld.append((np.exp(log_p[i - 1]) * (log_p[i - 1] - log_q[i - 1])).sum())
            nll_p.append(-log_p[i - 1, ids[i]])
            nll_q.append(-log_q[i - 1, ids[i]])
            same.append(log_p[i - 1].argmax() == log_q[i - 1].argmax())
            delta.append(np.exp(log_q[i - 1, ids[i]]) - np.exp(log_p[i - 1, ids[i]]))
            best.append([np.argsort(-x[i - 1], kind="stable")[:5].tolist() for x in (log_p, log_q)])
    assert result.mean_kld == pytest.approx(np.mean(kld), rel=1e-4)
    assert result.median_kld == pytest.approx(np.median(kld), rel=1e-4)
    assert result.p99_kld == pytest.approx(np.percentile(kld, 99), rel=1e-4)
    assert result.max_kld == pytest.approx(np.max(kld), rel=1e-4)
    assert result.top1_agreement == np.mean(same)
    assert result.ppl_baseline == pytest.approx(np.exp(np.mean(nll_p)), rel=1e-5)
    assert result.ppl_quant == pytest.approx(np.exp(np.mean(nll_q)), rel=1e-5)
    assert 0 < result.median_kld < result.p99_kld <= result.max_kld
    assert result.mean_kld_stderr == pytest.approx(np.std(kld, ddof=1) / np.sqrt(32), rel=1e-4)
    spread = np.std(nll_q, ddof=1) / np.sqrt(32)
    assert result.ppl_quant_stderr == pytest.approx(np.exp(np.mean(nll_q)) * spread, rel=1e-4)
    assert result.delta_p["mean"] == pytest.approx(np.mean(delta), abs=1e-7)
    assert result.delta_p["rms"] == pytest.approx(np.sqrt(np.mean(np.square(delta))), rel=1e-4)
    assert result.delta_p["p95"] == pytest.approx(np.percentile(delta, 95), abs=1e-6)
    assert [p.token for p in result.positions] == [t for b in range(0, 64, 16) for t in text.encode()[b + 8 : b + 16]]
    assert [p.kld for p in result.positions] == pytest.approx(kld, rel=1e-3, abs=1e-6)
    assert [[[c.token for c in top] for top in (p.baseline, p.quant)] for p in result.positions] == best
    assert [p.kld for p in result.worst] == sorted((p.kld for p in result.positions), reverse=True)[:20]


def test_text_with_offset(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("äbc".encode())
    whole = report.read_text(file)
    assert whole.to_json() == {"name": "text.txt", "sha256": hashlib.sha256("äbc".encode()).hexdigest(), "bytes": 4}
    part = report.read_text(file, offset=2)
    assert part.content == "bc"
    assert part.to_json() == {
        "name": "text.txt from byte 2",
        "sha256": hashlib.sha256(b"bc").hexdigest(),
        "bytes": 2,
    }
    for offset in (1, 4, -1):
        with pytest.raises(RequestError):
            report.read_text(file, offset=offset)
    with pytest.raises(RequestError, match="readable"):
        report.read_text(tmp_path)


def test_the_shipped_text_is_long_enough() -> None:
    text = report.read_text(None)
    assert text.name == "compare.txt"
    assert 30_000 <= text.bytes <= 36_000
    assert text.content.isascii()


# --- the command


KEYS = [
    "baseline",
    "quant",
    "bits_per_weight",
    "text",
    "tokens",
    "window",
    "mean_kld",
    "median_kld",
    "p99_kld",
    "max_kld",
]
KEYS += ["top1_agreement", "ppl_baseline", "ppl_quant", "layers"]
MORE_KEYS = {
    *("model", "against", "group_size", "scored", "mean_kld_stderr", "ppl_baseline_stderr", "ppl_quant_stderr"),
    *("delta_p", "layers_tokens", "hidden", "swap", "swap_tokens", "greedy", "loaded", "notes", "worst", "positions"),
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The options with which the command opened its engines: the baseline first."""
    calls: list[Any] = []

    def open_engine(args: Any, folder: Path, **_: Any) -> FakeEngine:
        calls.append(args)
        quant = "bf16" if args.quant == "none" else args.quant
        return FakeEngine(quant=quant, group_size=None, noise=0.0 if args.quant == "none" else 0.2)

    monkeypatch.setattr(_options, "model_folder", lambda args, **_: tmp_path)
    monkeypatch.setattr(_options, "open_engine", open_engine)
    monkeypatch.setattr(compare_models, "fit_together", lambda *_: True)
    return calls


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 4, encoding="utf-8")
    return ["compare", "--text", str(file), "--tokens", "64", "--window", "16", "--no-layers"]


def test_json_keys(opened: list[Any], command: list[str], capsys: Any) -> None:
    assert main([*command, "--json", "--quant", "int4", "--int4-scheme", "symmetric", "--kv-dtype", "f32"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {*KEYS, *MORE_KEYS}
    assert (record["layers"], record["swap"], record["greedy"]) == ([], None, None)
    assert set(record["text"]) == {"name", "sha256", "bytes"}
    assert (record["baseline"], record["quant"], record["tokens"], record["window"]) == ("bf16", "int4", 64, 16)
    assert [args.quant for args in opened] == ["none", "int4"]
    assert [args.int4_scheme for args in opened] == [None, "symmetric"]
    assert [args.kv_dtype for args in opened] == [None, "f32"]


def test_quality_gate(opened: list[Any], command: list[str], capsys: Any) -> None:
    assert main([*command, "--max-kld", "10"]) == 0
    assert main([*command, "--max-kld", "0.0001"]) == 7
    out, err = capsys.readouterr()
    assert out.count("perplexity") == 2  # the report comes all the same
    assert err.startswith("pyengine: quality gate: mean KL")
    assert main([*command, "--quant", "none", "--max-kld", "0"]) == 0


def test_a_folder_made_from_a_4_bit_file_warns(
    opened: list[Any], command: list[str], capsys: Any, tmp_path: Path
) -> None:
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "pyengine_source.json").write_text("{}", encoding="utf-8")
    assert main(command) == 0
    assert "flatters int4" in capsys.readouterr().err


def test_a_text_without_a_free_descriptor_is_a_matter_of_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(ResourceError, match=r"text\.txt: Too many open files"):
        report.read_text(tmp_path / "text.txt")
