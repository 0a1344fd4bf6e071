"""Stage 6 and 7, compare on real kernels: modules against their own definition, swaps, planted faults, both orders."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_tensors, write_tiny_model
from compare import assert_same_bits
from golden.golden_cases import CONFIGS
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import kernels
from pyengine.cli.main import main
from pyengine.errors import RequestError, ResourceError, TokenizerError
from pyengine.hooks import Hooks
from pyengine.reports import compare_baseline, compare_layers, compare_models, compare_ops
from pyengine.reports.compare import TextSource
from pyengine.reports.compare_baseline import Options, Side
from pyengine.reports.compare_models import compare_sides
from pyengine.reports.compare_result import CompareResult, first_difference

CONFIG = {**CONFIGS["qwen2"], "vocab_size": 258}  # biases of q, k and v
TEXT = TextSource("a text", "0" * 64, 600, "The quick brown fox jumps over the lazy dog. " * 12)
SIZES: dict[str, Any] = {"tokens": 128, "window": 32}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LOAD: dict[str, Any] = {"cache": False, "calibration": False, "threads": 2}
TAPS = {"attn_norm": MODULES[:3], "attention": ["o_proj"], "ffn_norm": MODULES[4:6], "act": ["down_proj"]}
PREFIX = {name: "mlp." if name in MODULES[4:] else "self_attn." for name in MODULES}


def folder_of(path: Path, config: dict[str, Any] = CONFIG, tensors: Any = None) -> Path:
    return write_tokenizer(write_tiny_model(path, config, seed=3, tensors=tensors), byte_level())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="module")
def compared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> CompareResult:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT.content, encoding="utf-8")
    return pyengine.compare(
        folder, quant="int4", text=text, swap=True, prompt="The quick", max_tokens=6, **SIZES, **LOAD
    )


def side(folder: Path, quant: str, **arguments: Any) -> Side:
    return Side(folder, quant, None, lambda: pyengine.load(folder, quant=quant, **{**LOAD, **arguments}))


def changed_side(folder: Path, quant: str, change: Any) -> Side:
    """An engine whose packed tensors `change` has been at."""

    def opened() -> pyengine.Engine:
        engine = pyengine.load(folder, quant=quant, **LOAD)
        change(engine)
        return engine

    return Side(folder, quant, None, opened)


# ---- the figures


def test_kl_is_that_of_two_engines(folder: Path, compared: CompareResult) -> None:
    ids = list(pyengine.load(folder, quant="f32", **LOAD).tokenize(TEXT.content))
    kld = []
    with pyengine.load(folder, quant="f32", **LOAD) as p, pyengine.load(folder, quant="int4", **LOAD) as q:
        for begin in range(0, 128, 32):
            window = ids[begin : begin + 32]
            log_p, log_q = (x.astype(np.float64) for x in (p.logits(window), q.logits(window)))
            log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (log_p, log_q))
            kld += (np.exp(log_p) * (log_p - log_q)).sum(axis=1)[15:31].tolist()
    assert compared.mean_kld == pytest.approx(np.mean(kld), rel=1e-4)
    assert compared.max_kld == pytest.approx(np.max(kld), rel=1e-3)


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8"])
def test_a_model_against_itself_is_exactly_zero(folder: Path, quant: str) -> None:
    """With another number of threads, too, and with every module swapped for its like."""
    result = compare_sides(side(folder, quant), side(folder, quant, threads=1), TEXT, Options(**SIZES, swap=True))
    assert result.mean_kld == result.max_kld == 0
    assert result.top1_agreement == 1
    assert result.ppl_baseline == result.ppl_quant
    assert all(d == 0 for d in result.delta_p.values())
    assert {(r.weight_rel_error, r.output_rel_error, r.cosine) for r in result.layers} == {(0, 0, 1)}
    assert {(r.rel_error, r.cosine) for r in result.hidden} == {(0, 1)}
    assert result.swap is not None
    assert {row.mean_kld for row in result.swap} == {0}


def test_module_errors_are_their_definition(folder: Path, compared: CompareResult) -> None:
    """Inputs from the engine's own taps, each matrix packed alone."""
    tensors = tiny_tensors(CONFIG, seed=3)
    rows = {(row.layer, row.module): row for row in compared.layers}
    assert list(rows) == [*((layer, name) for layer in range(2) for name in MODULES), (None, "lm_head")]
    with pyengine.load(folder, quant="f32", **LOAD) as base, pyengine.load(folder, quant="int4", **LOAD) as packed:
        ids = base.tokenize(TEXT.content)[:32]
        keys = tuple((layer, tap) for layer in range(2) for tap in (*TAPS, "hidden"))
        states: list[dict[Any, Any]] = [{}, {}]
        for engine, taps in zip((base, packed), states, strict=True):
            engine.logits(ids, program=engine.build(hooks=Hooks(taps=keys)), taps=taps)
    for layer in range(2):
        for tap, names in TAPS.items():
            x = states[0][layer, tap][16:]
            for name in names:
                w = tensors[f"model.layers.{layer}.{PREFIX[name]}{name}.weight"]
                y, y_q = kernels.linear(x, w, quant="f32"), kernels.linear(x, w, quant="int4")
                w_q = kernels.quantize_dequantize(w, quant="int4")
                row = rows[layer, name]
                assert row.weight_rel_error == pytest.approx(np.linalg.norm(w_q - w) / np.linalg.norm(w), rel=1e-5)
                assert row.output_rel_error == pytest.approx(np.linalg.norm(y_q - y) / np.linalg.norm(y), rel=1e-5)
                cosine = (y * y_q).sum(axis=1) / np.linalg.norm(y, axis=1) / np.linalg.norm(y_q, axis=1)
                assert row.cosine == pytest.approx(cosine.mean(), abs=1e-6)
        h, h_q = (s[layer, "hidden"][16:] for s in states)
        last = h
        assert compared.hidden[layer].rel_error == pytest.approx(np.linalg.norm(h_q - h) / np.linalg.norm(h), rel=1e-5)
    assert compared.hidden[1].rel_error > 0
    w = tensors["model.embed_tokens.weight"]  # tied; int4 keeps the head in int8
    x = kernels.rms_norm(last, tensors["model.norm.weight"], eps=CONFIG["rms_norm_eps"])
    y, y_q = kernels.linear(x, w, quant="f32"), kernels.linear(x, w, quant="int8")
    w_q, row = kernels.quantize_dequantize(w, quant="int8"), rows[None, "lm_head"]
    assert row.weight_rel_error == pytest.approx(np.linalg.norm(w_q - w) / np.linalg.norm(w), rel=1e-5)
    assert row.output_rel_error == pytest.approx(np.linalg.norm(y_q - y) / np.linalg.norm(y), rel=1e-5)


@pytest.mark.parametrize("name", ["llama_ratio_7", "qwen3_biases", "llama_head_dim", "qwen2_window"])
def test_other_shapes(name: str, tmp_path: Path) -> None:
    """Heads that are no whole panels, norms of q and k, windows: the small errors of int8 tell that parts are right."""
    folder = folder_of(tmp_path, {**CONFIGS[name], "vocab_size": 258})
    result = compare_sides(side(folder, "f32"), side(folder, "int8"), TEXT, Options(**SIZES))
    assert {row.module for row in result.layers} == {*MODULES, "lm_head"}
    assert all(0 < row.weight_rel_error < 0.02 for row in result.layers)
    assert all(0 < row.output_rel_error < 0.05 for row in result.layers)
    assert all(row.cosine > 0.998 for row in result.layers)


def test_one_module_swapped_is_that_module_alone(folder: Path, tmp_path: Path) -> None:
    """bf16 rounds weights and nothing else: the same bits as a checkpoint with just those weights rounded."""
    tensors = tiny_tensors(CONFIG, seed=3)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 258, 24)]
    parts = {"qkv": MODULES[:3], "o": MODULES[3:4], "gate_up": MODULES[4:6], "down": MODULES[6:]}
    with pyengine.load(folder, quant="f32", **LOAD) as base, pyengine.load(folder, quant="bf16", **LOAD) as other:
        swap = compare_ops.Swap(base, other)
        assert [(m.layer, m.name) for m in swap.targets] == [
            *((i, n) for i in range(2) for n in parts),
            (-1, "lm_head"),
        ]
        for module in swap.targets[:-1]:
            rounded = dict(tensors)
            for name in parts[module.name]:
                full = f"model.layers.{module.layer}.{PREFIX[name]}{name}.weight"
                rounded[full] = kernels.quantize_dequantize(tensors[full], quant="bf16")
            alone = folder_of(tmp_path / f"{module.layer}{module.name}", tensors=rounded)
            with pyengine.load(alone, quant="f32", **LOAD) as expected:
                rows = list(range(24))
                assert_same_bits(swap.logits(module, ids, rows), expected.logits(ids), module.name)
        head = swap.logits(swap.targets[-1], ids, list(range(24)))
        assert not np.array_equal(head, base.logits(ids))


@pytest.mark.parametrize("pair", [("f32", "int8"), ("int8", "int4"), ("int8", "f32"), ("bf16", "int8")])
def test_swaps_between_any_formats(folder: Path, pair: tuple[str, str]) -> None:
    result = compare_sides(*(side(folder, quant) for quant in pair), TEXT, Options(**SIZES, swap=True))
    assert result.swap is not None
    assert len(result.swap) == 9
    same = {"lm_head"} if pair == ("int8", "int4") else set()  # int4 keeps an int8 head
    assert {row.module for row in result.swap if row.mean_kld == 0} == same
    assert all(row.mean_kld < 1 for row in result.swap)
    assert [row.mean_kld for row in result.swap] == sorted((row.mean_kld for row in result.swap), reverse=True)


@pytest.mark.parametrize("planted", ["o", "down"])
def test_a_module_whose_scales_are_doubled_ranks_first(folder: Path, planted: str) -> None:
    name = f"{planted}_proj"
    weight = tiny_tensors(CONFIG, seed=3)[f"model.layers.1.{PREFIX[name]}{name}.weight"]

    def double(engine: pyengine.Engine) -> None:
        tensor = getattr(engine.weights.layers[1], planted)
        engine.backend.tensor_pack(tensor, 2 * weight, 0, 1, None)

    faulty = changed_side(folder, "int8", double)
    result = compare_sides(side(folder, "f32"), faulty, TEXT, Options(**SIZES, swap=True))
    assert result.swap is not None
    assert (result.swap[0].layer, result.swap[0].module) == (1, planted)
    assert result.swap[0].mean_kld > 10 * result.swap[1].mean_kld
    for figure in ("weight_rel_error", "output_rel_error"):
        first, second = sorted(result.layers, key=lambda row: -getattr(row, figure))[:2]
        assert (first.layer, first.module) == (1, name)
        assert getattr(first, figure) == pytest.approx(1, abs=0.02)
        assert getattr(second, figure) < 0.05


def test_an_int8_cache_balances_keys_and_is_no_error_of_the_weights(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG, seed=3)
    for name in tensors:
        if name.endswith("k_proj.bias"):
            tensors[name] *= 100
    folder = folder_of(tmp_path, tensors=tensors)
    options = Options(**SIZES, swap=True)
    result = compare_sides(side(folder, "f32"), side(folder, "int8", kv_dtype="int8"), TEXT, options)
    plain = compare_sides(side(folder, "f32"), side(folder, "int8"), TEXT, options)
    assert result.layers == plain.layers  # powers of two change no bit
    assert result.swap == plain.swap
    assert all(row.weight_rel_error < 0.02 for row in result.layers)
    with pyengine.load(folder, quant="int8", kv_dtype="int8", **LOAD) as engine:
        module = compare_ops.modules_of(engine, engine.build(fused=False, timed=False))[0]
        factors = compare_layers.balance_factors(engine, module, 128)
        assert factors is not None
        assert factors.max() >= 4


# ---- one after the other


@pytest.mark.parametrize("pair", [("none", "int4"), ("bf16", "int8")])
def test_one_after_the_other_gives_the_same(folder: Path, pair: tuple[str, str]) -> None:
    options = Options(**SIZES, prompt="The", max_tokens=5, together=True)
    sides = [side(folder, quant) for quant in pair]
    both = compare_sides(*sides, TEXT, options)
    apart = compare_sides(*sides, TEXT, replace(options, together=False))
    assert (both.loaded, apart.loaded) == ("together", "one after the other")
    assert replace(apart, loaded=both.loaded) == both


def test_never_both_at_once_where_both_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that decides is the machine's; the baseline is closed before the other one is opened."""
    engines: list[pyengine.Engine] = []

    def opened(quant: str) -> pyengine.Engine:
        assert all(engine._closed for engine in engines)
        engines.append(pyengine.load(folder, quant=quant, **LOAD))
        return engines[-1]

    sides = [Side(folder, quant, None, lambda quant=quant: opened(quant)) for quant in ("f32", "int8")]
    needs = [compare_baseline.needed_bytes(one) for one in sides]
    assert needs[0] > needs[1] > 0
    for available, expected in ((sum(needs) - 1, "one after the other"), (sum(needs), "together")):
        room = compare_baseline.memory_room().__class__(available, None)
        monkeypatch.setattr(compare_baseline, "memory_room", lambda room=room: room)
        assert compare_baseline.fit_together(*sides) == (expected == "together")
        if expected != "together":
            assert compare_sides(*sides, TEXT, Options(**SIZES, layers=False)).loaded == expected
    assert len(engines) == 2


def test_what_needs_both_at_once_says_so(folder: Path) -> None:
    apart = Options(**SIZES, together=False)
    with pytest.raises(ResourceError, match=r"--swap runs modules .* memory does not hold both"):
        compare_sides(side(folder, "f32"), side(folder, "int8"), TEXT, replace(apart, swap=True))
    with pytest.raises(ResourceError, match=r"layers against a baseline in int8 .* or --no-layers"):
        compare_sides(side(folder, "int8"), side(folder, "int4"), TEXT, apart)
    result = compare_sides(side(folder, "int8"), side(folder, "int4"), TEXT, replace(apart, layers=False))
    assert result.mean_kld > 0


def test_a_full_disk_is_said_before_it_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = compare_baseline.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(compare_baseline.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match="1000 bytes free"):
        compare_sides(side(folder, "f32"), side(folder, "int8"), TEXT, Options(**SIZES, together=False))


# ---- two models


def test_another_model_as_baseline(folder: Path, tmp_path: Path) -> None:
    near = {name: 1.001 * values for name, values in tiny_tensors(CONFIG, seed=3).items()}
    other = folder_of(tmp_path / "near", tensors=near)
    result = pyengine.compare(folder, quant="f32", against=other, **SIZES, cache=False)
    assert (result.model, result.against, result.baseline) == (str(folder), str(other), "f32")
    errors = [row.weight_rel_error for row in result.layers]
    assert errors == pytest.approx([0.001 / 1.001] * len(errors), rel=1e-2)
    deeper = folder_of(tmp_path / "deeper", {**CONFIG, "num_hidden_layers": 3})
    result = pyengine.compare(folder, quant="f32", against=deeper, **SIZES, cache=False)
    assert result.layers == ()
    assert result.notes == ("the two models have layers of different shapes: no errors by layer",)
    assert "note " in str(result)
    with pytest.raises(RequestError, match="have different shapes"):
        pyengine.compare(folder, quant="f32", against=deeper, swap=True, **SIZES, cache=False)


def test_what_cannot_be_compared_is_refused(folder: Path, tmp_path: Path) -> None:
    larger = folder_of(tmp_path / "larger", {**CONFIG, "vocab_size": 300})
    with pytest.raises(RequestError, match="different vocabularies"):
        compare_sides(side(larger, "f32"), side(folder, "int8"), TEXT, Options(**SIZES))
    bare = write_tiny_model(tmp_path / "bare", CONFIG, seed=3)
    with pytest.raises(TokenizerError, match="no tokenizer"):
        compare_sides(side(bare, "f32"), side(folder, "int8"), TEXT, Options(**SIZES))
    with pytest.raises(RequestError, match="at most 64, the model's context"):
        compare_sides(side(folder, "f32"), side(folder, "int8"), TEXT, Options(tokens=256, window=128))
    with pytest.raises(RequestError, match="the text has"):
        compare_sides(side(folder, "f32"), side(folder, "int8"), TEXT, Options(tokens=6400, window=32))


def test_progress_only_goes_forward(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = Options(**SIZES, swap=True)
    compare_sides(side(folder, "f32"), side(folder, "int8"), TEXT, options, lambda *step: seen.append(step[:2]))
    fractions = [done / total for done, total in seen]
    assert all(0 <= done <= total for done, total in seen)
    assert len(seen) > 12
    assert fractions[-1] > 0.9


# ---- what comes out


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3], "abc", "abc") is None
    assert first_difference([1, 2, 3], [1, 5, 3], "abc", "axc") == {"token": 1, "character": 1}
    assert first_difference([1, 2], [1, 2, 3], "ab", "abc") == {"token": 2, "character": 2}


def test_json_and_text(compared: CompareResult) -> None:
    record = json.loads(json.dumps(compared.to_json(), allow_nan=False))
    assert record["layers"][0].keys() == {"layer", "module", "weight_rel_error", "output_rel_error", "cosine"}
    assert len(record["positions"]["kld"]) == record["scored"] == 64
    assert record["worst"][0]["kld"] == record["max_kld"] == max(record["positions"]["kld"])
    assert np.mean(record["positions"]["kld"]) == pytest.approx(record["mean_kld"])
    assert "".join(record["positions"]["text"][:16]) == TEXT.content[16:32]
    assert record["swap"][-1]["mean_kld"] <= record["swap"][0]["mean_kld"]
    assert set(record["greedy"]) == {"prompt", "baseline", "quant", "first_difference"}
    text = str(compared)
    for part in ("KL          mean", "perplexity", "layer, output error", "Where they part most", "Greedy text"):
        assert part in text


def test_the_page_says_what_the_json_says(compared: CompareResult) -> None:
    page, record = compared.to_html(), compared.to_json()
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    text = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert f"{record['mean_kld']:.5f}" in text
    assert f"{record['ppl_quant']:.4f}" in text
    for row in record["layers"]:
        cells = f"{row['weight_rel_error']:.5f} +{row['output_rel_error']:.5f} +{row['cosine']:.6f}"
        name = row["module"] if row["layer"] is None else f"{row['layer']} {row['module']}"
        assert re.search(rf"{name} +{cells}", text)
    for row in record["swap"]:
        assert f"{row['mean_kld']:.6f}" in text
    svgs = [ET.fromstring(svg) for svg in re.findall(r'<svg class="wide".*?</svg>', page, re.DOTALL)]
    labels = [svg.attrib["aria-label"] for svg in svgs]
    assert labels[:2] == ["Output error by layer and module", "Weight error by layer and module"]
    ns = "{http://www.w3.org/2000/svg}"
    in_layers = [row for row in record["layers"] if row["layer"] is not None]
    for svg, name in zip(svgs, ("output_rel_error", "weight_rel_error"), strict=False):
        titles = [rect.find(f"{ns}title").text for rect in svg.iter(f"{ns}rect")]  # type: ignore[union-attr]
        assert titles == [f"{row['layer']}, {row['module']}: {row[name]:.4f}" for row in in_layers]
        depth = [float(r.attrib.get("style", "fill-opacity:1").split(":")[1]) for r in svg.iter(f"{ns}rect")]
        assert depth.index(max(depth)) == int(np.argmax([row[name] for row in in_layers]))
    strip = re.findall(r'<p class="strip">(.*?)</p>', page, re.DOTALL)
    assert len(strip) == 4
    spans = re.findall(r'<span(?: style="background:rgba\(214,110,40,([\d.]+)\)")? title="([^"]*)">', "".join(strip))
    assert len(spans) == 64
    for (_, title), kld in zip(spans, record["positions"]["kld"], strict=True):
        assert f"KL {kld:.4f}" in title
        assert title.count("%") >= 11  # delta p and both top 5
    colours = [float(colour or 0) for colour, _ in spans]
    assert colours.index(max(colours)) == int(np.argmax(record["positions"]["kld"]))
    assert compared._repr_html_() in page


def test_what_a_model_writes_is_text_in_the_page(compared: CompareResult) -> None:
    assert compared.greedy is not None
    greedy = replace(compared.greedy, baseline="<b>&", quant="<b>x", first_difference={"token": 1, "character": 3})
    position = replace(compared.positions[0], text="<script>")
    page = replace(compared, greedy=greedy, positions=(position,), model="<i>").to_html()
    assert "<script" not in page
    assert "<i>" not in page
    assert "&lt;b&gt;<mark>&amp;</mark>" in page


@pytest.fixture
def command(folder: Path, tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text(TEXT.content, encoding="utf-8")
    return ["compare", str(folder), "--text", str(text), "--tokens", "64", "--window", "32", "--no-cache"]


def test_the_command(command: list[str], tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "c.html"
    options = ["--quant", "int4", "--swap", "-p", "The", "-n", "3", "--html", str(page), "--json"]
    assert main([*command, *options, "--max-kld", "0"]) == 7
    record = json.loads(capsys.readouterr().out)
    assert (len(record["layers"]), len(record["swap"]), record["baseline"]) == (15, 9, "f32")
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    assert main([*command, "--quant", "int4", "--against", "int4", "--max-kld", "0"]) == 0
    assert "against int4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["-n", "3"], 2, "--max-tokens without --prompt"),
        (["-p", "x", "-n", "0"], 2, "expected at least 1"),
        (["--html", "/dev/null/c.html"], 2, "its folder is not there"),
        (["--against", "no/such/folder"], 3, "no/such/folder"),
        (["--text", "/dev/null/text"], 2, "/dev/null/text"),
        (["--tokens", "4096"], 2, "expected at least"),
    ],
)
def test_bad_arguments_are_one_line(command: list[str], capsys: Any, options: list[str], code: int, says: str) -> None:
    assert main([*command, *options]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_the_door_is_typed() -> None:
    assert pyengine.compare is compare_models.compare
    assert pyengine.CompareResult is CompareResult
