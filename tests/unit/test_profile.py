"""Stage 6 and 7, profile: bytes and operations against account and brute force, times by stage and layer, the page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.cli.main import main
from pyengine.reports import profile as report
from pyengine.reports import profile_text
from pyengine.reports.account_read import of_spec
from pyengine.reports.profile_meter import Sample
from pyengine.reports.profile_result import Cost, Phase, Profile
from pyengine.reports.profile_work import STAGES, Model, Rates
from pyengine.steps import MAX_BATCH_TOKENS

CONFIG = {**CONFIGS["llama"], "max_position_embeddings": 2048}
KEYS = {
    *("model", "quant", "group_size", "bits_per_weight", "kv_dtype", "decode", "prefill", "bytes_per_stage"),
    *("gb_per_s_per_stage", "contexts", "timer_cost", "machine"),
}
PHASE_KEYS = {
    *("context", "tokens", "steps", "steps_used", "wall_ms", "stage_sum_ms", "tokens_per_second", "ffn_share"),
    *("stages", "layers", "roofline"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("profile"), CONFIG, seed=4)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[pyengine.Engine]:
    with pyengine.load(folder, quant="int8", threads=2, calibration=False) as one:
        yield one


@pytest.fixture(scope="module")
def profiled(engine: pyengine.Engine) -> Profile:
    result = engine.profile(context=96, steps=8, contexts=[32, 700])
    assert isinstance(result, Profile)
    return result


def model_of(engine: pyengine.Engine, kv_dtype: str = "bf16") -> Model:
    return Model(of_spec(engine.spec, None), engine.quantization, kv_dtype, engine.spec.vocab_size)


# ---- bytes and operations


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama_biases", "llama_tied"])
@pytest.mark.parametrize("quant", ["f32", "int8", "int4"])
def test_a_decode_step_reads_what_the_engine_reads(name: str, quant: str, tmp_path: Path) -> None:
    with pyengine.load(write_tiny_model(tmp_path, CONFIGS[name]), quant=quant, calibration=False) as one:
        model = model_of(one, one.kv_dtype)
        work = model.step(1, 20, 1)
        kv = 20 * one.pool.bytes_per_token
        vectors = sum(model.vector_bytes(stage) for stage in ("attention", "ffn", "lm_head"))
        matrices = sum(work[stage].bytes for stage in ("attention", "ffn", "lm_head")) - vectors - kv
        assert matrices == one.weight_bytes_per_token
        flops = model.anatomy.flops(20)
        assert sum(w.ops for w in work.values()) == flops["total"]
        assert work["attention"].score_ops == flops["attention_scores"]
        assert work["router"].ops == work["router"].bytes == 0


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_a_prompt_in_chunks_is_the_sum_over_its_tokens(name: str, tmp_path: Path) -> None:
    with pyengine.load(write_tiny_model(tmp_path, CONFIGS[name]), quant="f32") as one:
        model = model_of(one, "f32")
        work = model.whole([(16, 16, 0), (16, 32, 0), (5, 37, 1)])
        assert work["attention"].score_ops == pytest.approx(
            sum(model.anatomy.flops(p)["attention_scores"] for p in range(1, 38))
        )
        assert work["ffn"].matrix_ops == 37 * model.anatomy.flops(1)["ffn"]
        assert work["lm_head"].matrix_ops == model.anatomy.flops(1)["lm_head"]  # one row is wanted
        weights = model.anatomy.step_bytes(one.quantization)
        assert work["ffn"].bytes == 3 * weights["ffn"]  # once a chunk
        window = one.spec.layers[0].attention.window
        keys = sum(end if window is None else min(end, window + n - 1) for n, end in ((16, 16), (16, 32), (5, 37)))
        assert work["attention"].bytes == 3 * weights["attention"] + keys * model.anatomy.attention[0].token_bytes(
            "f32"
        )
        assert work["embed"].bytes == 37 * 4 * one.spec.hidden_size


def test_rates_are_those_of_the_formats(engine: pyengine.Engine) -> None:
    limits = report.median([report.Gauge.of(engine.backend).sample()])
    assert Rates.of(limits, engine.quantization, "bf16").matrix == limits.int8_gops
    assert Rates.of(limits, engine.quantization, "bf16").score == limits.f32_gflops
    assert Rates.of(limits, engine.quantization, "int8").score == limits.int8_gops / 2


# ---- times


def synthetic(engine: pyengine.Engine, samples: list[Sample], *, mean: bool = True) -> Phase:
    work = model_of(engine).step(1, 20, 1)
    known = {"context": 20, "tokens": 1, "work": work, "rates": Rates(10.0, 100.0, 50.0)}
    return report.phase(engine.program, engine.spec.num_layers, samples, mean=mean, **known)


def test_every_op_counts_to_its_own_stage_and_layer(engine: pyengine.Engine) -> None:
    ops = engine.program.ops
    for index, op in enumerate(ops):
        ns = np.zeros(len(ops), np.uint64)
        ns[index] = 2_000_000
        phase = synthetic(engine, [Sample(0.0, 0.003, ns)])
        stage = STAGES[op["stage"]]
        assert {name: ms for name, ms in phase.stages.items() if ms} == {stage: 2.0, "other": pytest.approx(1.0)}
        layers = [{} for _ in range(engine.spec.num_layers)]
        if op["layer"] >= 0:
            layers[op["layer"]] = {stage: 2.0}
        assert phase.layers == layers


def test_a_step_is_the_mean_of_the_quicker_half(engine: pyengine.Engine) -> None:
    ns = np.full(len(engine.program.ops), 1000, np.uint64)
    samples = [Sample(i, wall, ns) for i, wall in enumerate([0.001, 0.001, 0.0012, 60.0, 0.0011])]
    phase = synthetic(engine, samples)
    assert (phase.steps, phase.steps_used) == (5, 3)
    assert phase.wall_ms == pytest.approx(3.1 / 3)
    assert phase.all_steps_ms == {"p10": 1.0, "median": 1.1, "p90": pytest.approx(1.2 + 0.6 * 59998.8)}  # 60 s counts
    assert synthetic(engine, samples[3:4]).wall_ms == pytest.approx(60000)
    chunks = synthetic(engine, samples, mean=False)
    assert (chunks.steps_used, chunks.wall_ms, chunks.all_steps_ms) == (5, pytest.approx(60004.3), {})


def test_the_cost_of_the_timers_is_of_pairs(engine: pyengine.Engine) -> None:
    none = np.zeros(0, np.uint64)
    base = [1.0, 2.0, 4.0, 8.0]  # a machine that changes its speed changes both of a pair
    timed = [Sample(0, 1.01 * s, none) for s in base]
    cost = report.timer_cost(timed, [Sample(0, s, none) for s in base])
    assert cost == Cost(pytest.approx(0.01), pytest.approx(0, abs=1e-12), 4)
    noisy = report.timer_cost([Sample(0, 1.0 + i % 3 * 0.1, none) for i in range(30)], [Sample(0, 1.0, none)] * 30)
    assert noisy.error > 0.01


def test_stages_and_layers_sum_to_the_whole(profiled: Profile) -> None:
    for phase in (*profiled.sweep, profiled.prefill):
        assert sum(phase.stages.values()) == pytest.approx(phase.wall_ms)
        assert phase.stages["other"] >= 0
        assert set(phase.stages) == {*STAGES, "other"}
        layers = sum(sum(layer.values()) for layer in phase.layers)
        outside = sum(phase.stages[stage] for stage in ("embed", "lm_head", "sample"))
        assert layers + outside == pytest.approx(phase.stage_sum_ms)
        assert phase.stages["ffn"] > 0
    assert [phase.context for phase in profiled.sweep] == [32, 96, 700]
    assert profiled.decode is profiled.sweep[1]
    assert profiled.prefill.steps == 1
    assert profiled.cost.pairs == 24


def test_the_differences_explain_all_of_the_difference(profiled: Profile) -> None:
    for phase in profiled.sweep:
        points = sum(row["points"] for row in phase.differences())
        assert points == pytest.approx(100 * (phase.byte_share - phase.ffn_share))


def test_equal_bandwidth_leaves_nothing_to_explain(engine: pyengine.Engine) -> None:
    base = synthetic(engine, [Sample(0, 1.0, np.ones(len(engine.program.ops), np.uint64))])
    counted = ("attention", "ffn", "lm_head")
    stages = {name: base.work[name].bytes / 1e3 if name in counted else 0.0 for name in base.stages}
    even = replace(base, stages=stages, wall_ms=sum(stages.values()))
    assert even.ffn_share == pytest.approx(even.byte_share)
    assert all(row["points"] == pytest.approx(0) for row in even.differences())
    slow = replace(even, stages={**stages, "attention": 2 * stages["attention"]}, wall_ms=1.0)
    assert max(slow.differences(), key=lambda row: row["points"])["stage"] == "attention"
    row = {r["stage"]: r for r in even.roofline()}["ffn"]
    assert row["gb_per_s"] == pytest.approx(1e-3)
    assert row["read_fraction"] == pytest.approx(1e-4)
    assert row["fraction"] == max(row["read_fraction"], row["compute_fraction"])


def explained(engine: pyengine.Engine, profiled: Profile, **times: float) -> list[str]:
    """The words for a step whose stages read their bytes at 2 GB/s, but for `times`, of which a byte takes so long."""
    base = profiled.decode
    stages = dict.fromkeys(base.stages, 0.0)
    for name in ("attention", "ffn", "lm_head"):
        stages[name] = times.get(name, 1.0) * base.work[name].bytes / 2e6
    stages["other"] = times.get("other", 0.0)
    decode = replace(base, stages=stages, wall_ms=sum(stages.values()))
    return profile_text.explanation(replace(profiled, decode=decode))


def test_the_difference_is_said_in_words(engine: pyengine.Engine, profiled: Profile) -> None:
    assert explained(engine, profiled) == [
        "0.0 points less than predicted: every stage reads about as fast as the FFN, 2.0 GB/s"
    ]
    slow = explained(engine, profiled, attention=4.0)
    assert re.fullmatch(r"[\d.]+ points less than predicted: the FFN reads at 2\.0 GB/s, and of the others", slow[0])
    assert re.fullmatch(
        r"  attention reads at 0\.5 GB/s and takes [\d.]+ ms, [\d.]+ ms at the FFN's rate: -[\d.]+ points", slow[1]
    )
    quick = explained(engine, profiled, lm_head=0.25)
    idle = explained(engine, profiled, other=0.01)
    assert " more than predicted" in quick[0]
    assert any(re.match(r"  lm_head reads at 8\.0 GB/s .*: \+", line) for line in quick)
    assert re.match(r"  other takes 0\.010 ms and counts no bytes: -", idle[1])
    for lines in (slow, quick, idle, profile_text.explanation(profiled)):  # what is named adds up to the difference
        total = sum(float(line.rsplit(" ", 2)[1]) for line in lines[1:])
        sign = -1 if " less " in lines[0] else 1
        assert total == pytest.approx(sign * float(lines[0].split()[0]), abs=0.05 * (len(lines) + 1))


def test_the_engine_is_as_it_was(engine: pyengine.Engine) -> None:
    before = engine.generate([5, 17, 3], max_tokens=8)
    stream = engine.stream([5, 17, 3], max_tokens=8)
    next(stream)
    engine.profile(context=20, steps=2)  # between two steps of a request, whose timers it must leave alone
    result = stream.finish()
    assert result.tokens == before.tokens
    assert result.decode_breakdown is not None
    assert result.decode_breakdown["ffn"] > 0
    assert all(len(free) == size for free, size in zip(engine.pool.free, engine.pool.size, strict=True))


def test_contexts_up_to_the_models_maximum_and_windows(tmp_path: Path) -> None:
    with pyengine.load(write_tiny_model(tmp_path, CONFIGS["mistral_window"]), quant="f32") as one:
        result = one.profile(context=one.ctx_size, steps=4, contexts=[20, 40])
        assert [phase.context for phase in result.sweep] == [20, 40, one.ctx_size]
        assert [phase.steps for phase in result.sweep] == [4, 4, 4]


def test_a_prompt_longer_than_a_batch_has_chunks(engine: pyengine.Engine) -> None:
    result = engine.profile(context=MAX_BATCH_TOKENS + 88, steps=1)
    assert (result.prefill.steps, result.prefill.tokens) == (2, 600)


# ---- what comes out


def test_trace_is_nested_and_has_every_op(profiled: Profile, engine: pyengine.Engine) -> None:
    trace = json.loads(json.dumps(profiled.to_trace()))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [e for e in events if e["cat"] in ("prompt", "decode")]
    layers, ops = ([e for e in events if e["cat"] == kind] for kind in ("layer", "op"))
    ops = [e for e in events if e["cat"] in STAGES]
    assert [e["name"] for e in steps] == ["prompt 0", *(f"decode {i}" for i in range(8))]
    assert len(ops) == 9 * len(engine.program.ops)
    assert len(layers) == 9 * engine.spec.num_layers
    assert min(e["ts"] for e in events) == 0
    for inner, outer in ((ops, steps), (layers, steps)):
        for e in inner:
            around = [o for o in outer if o["ts"] <= e["ts"] + 1e-3 and e["ts"] + e["dur"] <= o["ts"] + o["dur"] + 1e-3]
            assert len(around) == 1
    quicker = sorted((e["dur"], e["ts"]) for e in steps[1:])[: profiled.decode.steps_used]
    assert sum(duration for duration, _ in quicker) / len(quicker) / 1e3 == pytest.approx(profiled.decode.wall_ms)


def test_json_keys(profiled: Profile) -> None:
    record = json.loads(json.dumps(profiled.to_json(), allow_nan=False))
    assert set(record) == KEYS
    assert set(record["prefill"]) == PHASE_KEYS
    assert set(record["decode"]) == {*PHASE_KEYS, "all_steps_ms", "byte_share", "differences"}
    assert set(record["bytes_per_stage"]) == set(record["gb_per_s_per_stage"]) == set(STAGES)
    assert record["machine"]["read_gb_per_s"] > 0
    row = {r["stage"]: r for r in record["decode"]["roofline"]}["ffn"]
    assert record["gb_per_s_per_stage"]["ffn"] == row["gb_per_s"]
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)


def test_the_page_says_what_the_json_says(profiled: Profile) -> None:
    page = profiled.to_html()
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    text = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)
    record = profiled.to_json()
    for name in ("decode", "prefill"):
        for row in record[name]["roofline"]:
            cells = rf"{row['stage']}\s+{row['ms']:.3f}\s+{100 * row['ms'] / record[name]['wall_ms']:.1f} %"
            assert re.search(cells, text), row
    for layer in record["decode"]["layers"]:
        assert f"{layer['ms']:.4f}" in text
    for row in record["contexts"]:
        ms = r"\s+".join(f"{value:.3f}" for value in (row["wall_ms"], *row["all_steps_ms"].values()))
        assert re.search(rf"{row['context']:,}\s+{ms}\s+[\d.]+\s+{100 * row['ffn_share']:.1f} %", text)
    svgs = [ET.fromstring(svg) for svg in re.findall(r'<svg class="wide".*?</svg>', page, re.DOTALL)]
    labels = [svg.attrib["aria-label"] for svg in svgs]
    assert labels == [
        *("Decode time by stage", "Decode: roofline", "Prefill time by stage", "Prefill: roofline"),
        *("A decode step by layer", "FFN share of decode against context"),
    ]
    ns = "{http://www.w3.org/2000/svg}"
    stages = {k: ms for k, ms in record["decode"]["stages"].items() if ms}
    widths = [float(rect.attrib["width"]) for rect in svgs[0].iter(f"{ns}rect")]
    assert len(widths) == len(stages)
    assert max(widths) / sum(widths) == pytest.approx(max(stages.values()) / sum(stages.values()), abs=1e-3)
    points = [c.find(f"{ns}title").text for c in svgs[1].iter(f"{ns}circle")]  # type: ignore[union-attr]
    row = next(r for r in record["decode"]["roofline"] if r["stage"] == "ffn")
    assert f"ffn: {row['operations'] / row['bytes']:.4g}, {row['gops']:.4g}" in points
    for svg in svgs:
        for at in svg.iter(f"{ns}circle"):
            assert 0 <= float(at.attrib["cx"]) <= 1000
            assert 0 <= float(at.attrib["cy"]) <= 380
    assert profiled._repr_html_() in page


def test_the_ffn_share_is_in_the_first_line(profiled: Profile) -> None:
    first = str(profiled).splitlines()[0]
    shares = re.findall(r"([\d.]+) %", first)
    assert shares == [f"{100 * profiled.decode.ffn_share:.1f}", f"{100 * profiled.decode.byte_share:.1f}"]
    assert "measuring" in str(profiled)
    assert profile_text.sweep_table(profiled)[1][0][0] == "32"


def test_the_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    page, trace = tmp_path / "p.html", tmp_path / "t.json"
    command = ["profile", str(folder), "--quant", "f32", "-t", "1", "--steps", "2", "--context", "40"]
    assert main([*command, "--contexts", "8,16", "--json", "--html", str(page), "--trace", str(trace)]) == 0
    out, _ = capsys.readouterr()
    record = json.loads(out)
    assert [row["context"] for row in record["contexts"]] == [8, 16, 40]
    assert record["machine"]["threads"] == 1
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("FFN ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "0"], "steps 0; expected 1"),
        (["--context", "4", "--steps", "4"], "context 4 with 4 steps; expected 5"),
        (["--context", "5000"], "to 2048, the model's"),
        (["--contexts", "128,9000"], "context 9000"),
        (["--contexts", "128,x"], "expected contexts"),
        (["--html", "/dev/null/a.html"], "/dev/null/a.html: its folder"),
        (["--trace", "/"], "/: not a regular file"),
    ],
)
def test_bad_arguments_are_one_line(folder: Path, capsys: Any, options: list[str], says: str) -> None:
    assert main(["profile", str(folder), "--quant", "f32", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
