"""Stage 6, machine and bench: arithmetic with known numbers and a clock of its own, what is read, what is kept."""

from __future__ import annotations

import json
import statistics
import subprocess
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_tiny_model
from fake_engine import FakeResult
from golden.golden_cases import CONFIGS

import pyengine
from pyengine import _core
from pyengine.cli import _output
from pyengine.cli.main import main
from pyengine.errors import RequestError, ResourceError
from pyengine.reports import bench, machine
from pyengine.reports.bench import Test as Case
from pyengine.reports.machine import Fraction, Limits, Timed, fraction, take_turns

MACHINE_KEYS = {"cpu", "isa", "threads", "commit", "compiler", "read_gb_per_s", "int8_gops", "f32_gflops"}
ROW_KEYS = {
    *("test", "tokens_per_second", "stdev", "p10", "p90", "samples"),
    *("weight_bytes_per_token", "gb_per_s", "bandwidth_fraction"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a cache"
    monkeypatch.setenv("PYENGINE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    long = {"max_position_embeddings": 256}
    return {name: write_tiny_model(root / name, {**CONFIGS[name], **long}) for name in ("llama", "mistral_window")}


class FakeProber:
    """A machine of 40 GB/s, 900 Gop/s, 200 GFLOP/s and 50 ns whose first pass is always disturbed."""

    def __init__(self, threads: int = 2, device: str = "cpu") -> None:
        self.threads, self.device = threads, device
        self.calls: list[tuple[int, int, int]] = []

    def measure(self, limit: int, work: int, passes: int) -> np.ndarray:
        self.calls.append((limit, work, passes))
        rate = {0: 40e9, 1: 900e9, 2: 200e9, 3: 20e6}[limit]
        return np.array([rate / 3] + [rate] * (passes - 2) + [2 * rate if limit in (0, 3) else rate])


def test_a_rate_is_that_of_the_best_pass_the_bandwidth_the_median_and_passes_are_long_enough() -> None:
    prober = FakeProber()
    assert machine.measure(prober) == Limits(40.0, 900.0, 200.0, 50.0)
    reads = [call for call in prober.calls if call[0] == 0]
    assert reads == [(0, machine.READ_BYTES, machine.READ_PASSES)]
    assert [work for limit, work, _ in prober.calls if limit == 1][-1] == 900e9 * machine.COMPUTE_SECONDS


def test_a_gauge_finds_the_length_of_passes_once() -> None:
    prober = FakeProber()
    gauge = machine.Gauge.of(prober)
    assert gauge.sample() == Limits(40.0, 900.0, 200.0, 50.0)
    first = len(prober.calls)
    assert gauge.sample() == gauge.limits == Limits(40.0, 900.0, 200.0, 50.0)
    passes = machine.COMPUTE_PASSES
    assert prober.calls[first:] == [
        (0, machine.READ_BYTES, machine.READ_PASSES),
        (3, machine.HOPS, machine.HOP_PASSES),
        (1, 900e9 * machine.COMPUTE_SECONDS, passes),
        (2, 200e9 * machine.COMPUTE_SECONDS, passes),
    ]


@pytest.mark.parametrize(("threads", "device"), [(1, "cpu"), (2, "cuda:0")])
def test_only_threads_of_a_cpu_are_some_way_from_each_other(threads: int, device: str) -> None:
    prober = FakeProber(threads, device)
    assert machine.measure(prober).hop_ns is None
    assert 3 not in [limit for limit, _, _ in prober.calls]
    gauge = machine.Gauge.of(prober)
    gauge.sample()
    record = gauge.to_json(isa="avx2", threads=threads)
    assert (record["hop_ns"], record["hop_samples"], machine.hop_text(record)) == (None, [None], "")


def test_a_gauge_takes_the_median_of_its_samples() -> None:
    values = iter([Limits(30, 900, 200, 90), Limits(10, 100, 50, 40), Limits(32, 800, 220, 200)])
    gauge = machine.Gauge(lambda: next(values))
    for _ in range(3):
        gauge.sample()
    assert gauge.limits == Limits(30, 800, 200, 90)
    record = gauge.to_json(isa="avx2", threads=2)
    assert record.keys() >= MACHINE_KEYS
    assert (record["isa"], record["threads"], record["read_gb_per_s"]) == ("avx2", 2, 30)
    assert record["version"] == pyengine.__version__
    assert date.fromisoformat(record["date"]) <= date.today() + timedelta(days=1)
    assert record["read_samples"] == [30, 10, 32]
    assert (record["hop_ns"], record["hop_samples"]) == (90, [90, 40, 200])
    assert machine.hop_text(record) == ", thread to thread 90 ns"
    assert "from 12.0 to 31.8 GB/s" in str(record["disturbed"]) or "other threads" in str(record["disturbed"])


def test_other_threads_beside_ours_disturb_where_there_are_too_few_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    others = iter([0, 5, 3, 0, 7])
    monkeypatch.setattr(machine, "others_running", lambda: next(others))
    gauge = machine.Gauge(lambda: Limits(30, 900, 200))
    for _ in range(5):
        gauge.sample()
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    assert gauge.disturbed(1) is None
    assert gauge.disturbed(2) == "3 other threads were running beside 2 on 4 CPUs"


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_core, "commit", lambda: "built")
    package = tmp_path / "pyengine" / "reports"
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    assert machine.commit() == "built"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert machine.commit() == "built"  # no commit yet
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert machine.commit() == head[:12]
    monkeypatch.setattr(_core, "commit", lambda: "")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "a" / "b" / "c" / "machine.py"))
    assert machine.commit() is None


# ---- what is kept


def test_a_bandwidth_is_kept_by_cpu_and_threads(cache: Path) -> None:
    assert machine.known_read(2) is None
    machine.remember_read(2, 30.0)
    machine.remember_read(2, 33.5)
    machine.remember_read(1, 20.0)
    machine.remember_read(2, 99.0, cpu="another")
    assert (machine.known_read(2), machine.known_read(1), machine.known_read(3)) == (33.5, 20.0, None)
    assert machine.known_read(2, cpu="another") == 99.0
    assert [path.name for path in cache.iterdir()] == [machine.FILE]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"read": 3}', '{"read": [1, {"cpu": "x"}]}', "\udcff"])
def test_a_damaged_file_is_as_if_there_were_none(cache: Path, text: str) -> None:
    cache.mkdir()
    (cache / machine.FILE).write_bytes(text.encode(errors="surrogateescape"))
    assert machine.known_read(2) is None
    machine.remember_read(2, 30.0)
    assert machine.known_read(2) == 30.0


def test_a_cache_folder_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ResourceError, match=r"a cache: .*PYENGINE_CACHE"):
        machine.remember_read(2, 30.0)


def test_the_statistics_line_shows_the_fraction_where_it_is_known() -> None:
    record = FakeResult("x", "stop", 1, 9).to_json()  # 20 tok/s of 1.5 GB
    assert "| 30.0 GB/s |" in _output.statistics_line(record, sampled=False)
    line = _output.statistics_line(record, sampled=False, limit_gb_per_s=33.0)
    assert "| 30.0 GB/s (91 % of this machine) |" in line


# ---- the arithmetic


def runs(seconds: list[float]) -> list[Timed]:
    limits = Limits(40.0, 900.0, 200.0)
    return [Timed(s, limits, limits) for s in seconds]


def of_reads(*rounds: tuple[float, float, float]) -> list[Timed]:
    """(GB/s of a run of 12 GB, read limit before, read limit after)"""
    return [Timed(12 / rate, Limits(before, 9, 1), Limits(after, 9, 2)) for rate, before, after in rounds]


def test_a_fraction_follows_a_machine_that_changes() -> None:
    of = fraction("read_gb_per_s", 12, of_reads((20, 40, 40), (35, 70, 70), (36, 74, 70), (20, 38, 42)))
    assert of == Fraction(pytest.approx(0.5), 3, True)  # 42 is more than 1.1 * 38


def test_rounds_in_which_the_limit_changed_are_left_out() -> None:
    good, bad = [(20, 40, 43), (30, 40, 40)], [(40, 40, 70), (40, 70, 40)]
    of = fraction("read_gb_per_s", 12, of_reads(*good, *bad))
    assert of == Fraction(pytest.approx((20 / 41.5 + 30 / 40) / 2), 2, True)
    of = fraction("read_gb_per_s", 12, of_reads(*bad))
    assert of == Fraction(pytest.approx(40 / 55), 2, False)
    assert fraction("int8_gops", 9, of_reads(*bad)).rounds_used == 2  # each limit by its own samples
    assert fraction("int8_gops", 9, of_reads(*bad)).steady
    assert not fraction("f32_gflops", 9, of_reads(*good)).steady


def test_runs_take_turns_between_samples() -> None:
    events: list[str] = []

    def limits() -> Limits:
        events.append("limits")
        return Limits(float(events.count("limits")), 1.0, 1.0)

    def run(name: str, seconds: float) -> float:
        events.append(name)
        return seconds

    gauge = machine.Gauge(limits)
    timed = take_turns(gauge, [lambda: run("a", 2.0), lambda: run("b", 3.0)], 2)
    assert events == ["limits", *("a", "limits", "b", "limits") * 2]
    assert [[(t.seconds, t.before.read_gb_per_s, t.after.read_gb_per_s) for t in some] for some in timed] == [
        [(2.0, 1, 2), (2.0, 3, 4)],
        [(3.0, 2, 3), (3.0, 4, 5)],
    ]


def test_tests_are_planned_in_order_and_once() -> None:
    assert [t.name for t in bench.plan([512, 16], [128], [0, 4096])] == ["pp512", "pp16", "tg128", "tg128@4096"]
    assert [t.name for t in bench.plan([0], [8, 8], [3])] == ["tg8@3"]
    with pytest.raises(RequestError, match="at least one above 0"):
        bench.plan([0], [0], [0])


def test_a_decode_row_is_bytes_over_bandwidth() -> None:
    work = bench.Work(weight_bytes=90_000_000, kv_bytes=10_000_000.0)
    row = bench.summarize(Case("tg", 100, 64), runs([1.0, 0.4, 0.5]), work)
    assert (row.test, row.samples, row.tokens_per_second) == ("tg100@64", [100.0, 250.0, 200.0], 200.0)
    assert row.stdev == pytest.approx(statistics.stdev([100, 250, 200]))
    assert (row.p10, row.p90) == (pytest.approx(120), pytest.approx(240))
    assert row.gb_per_s == pytest.approx(20.0)  # 200 tok/s of 0.1 GB
    assert row.bandwidth_fraction == pytest.approx(0.5)
    assert (row.gops, row.int8_fraction, row.f32_fraction) == (None, None, None)
    assert (row.rounds_used, row.steady) == (3, True)
    assert row.to_json().keys() >= ROW_KEYS


@pytest.mark.parametrize(("integer", "fractions"), [(True, (0.5, None)), (False, (None, 2.25))])
def test_a_prompt_row_is_operations_over_the_rate(integer: bool, fractions: tuple[float | None, ...]) -> None:
    work = bench.Work(matrix_ops=300_000_000, integer=integer)
    row = bench.summarize(Case("pp", 300), runs([0.2]), work)
    assert row.gops == pytest.approx(450.0)
    assert (row.int8_fraction, row.f32_fraction) == tuple(x and pytest.approx(x) for x in fractions)
    assert (row.stdev, row.weight_bytes_per_token, row.gb_per_s, row.bandwidth_fraction) == (None, None, None, None)
    assert (row.p10, row.p90) == (row.tokens_per_second, row.tokens_per_second)


def test_rounds_interleave_and_limits_are_measured_around_them() -> None:
    events: list[str] = []

    class Runner:
        def prepare(self, test: Case) -> None:
            events.append(f"prepare {test.name}")

        def seconds(self, test: Case) -> float:
            events.append(test.name)
            return 2.0

        def work(self, test: Case) -> bench.Work:
            return bench.Work(weight_bytes=10**9, kv_bytes=0.0) if test.kind == "tg" else bench.Work(matrix_ops=10**9)

    def limits() -> Limits:
        events.append("limits")
        return Limits(8.0 * events.count("limits"), 100.0, 10.0)

    told: list[tuple[int, int]] = []
    rows = bench.run(
        Runner(),
        machine.Gauge(limits),
        bench.plan([8], [4], [0]),
        repetitions=2,
        progress=lambda done, total, _: told.append((done, total)),
    )
    assert events == ["prepare pp8", "prepare tg4", "limits", *("pp8", "limits", "tg4", "limits") * 2]
    assert rows[1].bandwidth_fraction == pytest.approx((2.0 / 20 + 2.0 / 36) / 2)  # between 16 and 24, 32 and 40
    assert (rows[1].rounds_used, rows[1].steady) == (2, False)
    assert rows[0].int8_fraction == pytest.approx(4.0 / 100)
    assert (rows[0].rounds_used, rows[0].steady) == (2, True)
    assert told == [(done, 6) for done in range(7)]


# ---- a model


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize(("name", "quant"), [("llama", "int8"), ("mistral_window", "bf16")])
def test_what_a_model_reads_and_computes(folders: dict[str, Path], name: str, quant: str) -> None:
    config = CONFIGS[name]
    with pyengine.load(folders[name], quant=quant, threads=2) as engine:
        runner = bench.ModelRunner(engine, clock=Clock())
        decode, prompt = Case("tg", 5, 40), Case("pp", 70)
        work = runner.work(decode)
        assert work.weight_bytes == engine.weight_bytes_per_token
        window = engine.pool.windows[0]
        layers, a = config["num_hidden_layers"], engine.spec.layers[0].attention
        assert len(engine.pool.ids) == 1
        row = 2 * a.num_kv_heads * (a.head_dim + -(-a.head_dim // 16) * 16)  # bfloat16 K and V
        keys = [min(position + 1, window or position + 1) for position in range(40, 45)]
        assert work.kv_bytes == pytest.approx(layers * row * statistics.mean(keys))
        hidden, inter = config["hidden_size"], config["intermediate_size"]
        weights = layers * (2 * (a.num_heads + a.num_kv_heads) * a.head_dim * hidden + 3 * inter * hidden)
        assert runner.work(prompt) == bench.Work(matrix_ops=2 * weights, integer=quant == "int8")
        for test in (decode, prompt):
            runner.prepare(test)
        for _ in range(3):
            assert runner.seconds(decode) == 1.0
            assert runner.seconds(prompt) == 1.0
            assert runner.filled[decode].length == 45
        runner.close()
        assert [len(free) for free in engine.pool.free] == engine.pool.size


def test_tests_that_do_not_fit(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pyengine.load(folders["llama"], quant="f32", threads=1) as engine:
        runner = bench.ModelRunner(engine)
        runner.check(bench.plan([256], [6], [250]))
        with pytest.raises(RequestError, match="tg7@250: 257 tokens; expected at most 256"):
            runner.check(bench.plan([256], [7], [250]))
        monkeypatch.setattr(bench.cuda.system, "available_memory", lambda: 1000)
        with pytest.raises(ResourceError, match="1000 are available"):
            runner.check(bench.plan([256], [0], [0]))


# ---- the command


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "others_running", lambda: 0)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "measure", lambda *_, **__: Limits(40.0, 900.0, 200.0))


def test_bench_json_and_table(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    quick(monkeypatch)
    argv = [
        "bench",
        str(folders["llama"]),
        "-p",
        "9",
        "-n",
        "2,3",
        "-d",
        "0,7",
        "-r",
        "2",
        "-t",
        "2",
        "--quant",
        "int4",
    ]
    assert main([*argv, "--isa", "scalar", "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert err == ""
    assert record["machine"].keys() >= MACHINE_KEYS
    assert (record["machine"]["isa"], record["machine"]["threads"], record["quant"]) == ("scalar", 2, "int4")
    assert len(record["machine"]["read_samples"]) == 1 + 2 * 5
    assert [row["test"] for row in record["results"]] == ["pp9", "tg2", "tg2@7", "tg3", "tg3@7"]
    for row in record["results"]:
        assert row.keys() >= ROW_KEYS
        assert len(row["samples"]) == row["rounds_used"] == 2
        assert row["steady"]
    assert machine.known_read(2) == 40.0
    assert main(argv) == 0
    out, _ = capsys.readouterr()
    assert "limits: read 40.0 GB/s (40.0 to 40.0 in 11 samples), int8 900 Gop/s, float32 200 GFLOP/s" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["pp9", "tg2", "tg2@7", "tg3", "tg3@7"]
    assert {line.split("|")[-2].strip() for line in lines[2:]} == {"2/2"}
    assert len({len(line) for line in lines}) == 1
    assert "right before and\nright after the run; rounds in which those two differ by more than 10 %" in out
    assert "unsteady" not in out


def test_a_report_survives_a_cache_that_cannot_be_written(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any, cache: Path
) -> None:
    quick(monkeypatch)
    cache.write_text("a file")
    assert main(["bench", str(folders["llama"]), "-p", "4", "-n", "0", "-r", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["results"][0]["stdev"] is None
    assert "warning: the read bandwidth is not kept" in err


def test_a_machine_that_was_not_quiet_is_said_and_not_kept(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    quick(monkeypatch)
    reads = iter([30.0, 40.0, 39.0, 33.0, 38.0, 1.0, 2.0])
    monkeypatch.setattr(machine, "measure", lambda *_, **__: Limits(next(reads), 900.0, 200.0))
    argv = ["bench", str(folders["llama"]), "-p", "4", "-n", "0", "--json", "-r"]
    assert main([*argv, "1"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["machine"]["read_gb_per_s"] == 35.0
    assert "not quiet: read bandwidth went from 30.5 to 39.5 GB/s" in err
    assert machine.known_read(_core.default_threads()) is None
    assert main([*argv, "2"]) == 0
    assert capsys.readouterr().err == ""
    assert machine.known_read(_core.default_threads()) == 38.0
    assert main([*argv, "1", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_a_limit_that_never_stood_still_is_said(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    quick(monkeypatch)
    reads = iter([40.0, 70.0] * 4)
    monkeypatch.setattr(machine, "measure", lambda *_, **__: Limits(next(reads), 900.0, 200.0))
    assert main(["bench", str(folders["llama"]), "-p", "4", "-n", "2", "-r", "2"]) == 0
    out, _ = capsys.readouterr()
    prompt, decode = (line for line in out.splitlines() if line.startswith(("| pp4", "| tg2")))
    assert "2/2 |" in prompt
    assert "2/2 unsteady |" in decode
    assert out.endswith("unsteady: no round was left, and all are used.\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-p", "x"], "'x'; expected lengths"),
        (["-p", "5,"], "expected lengths"),
        (["-d", "-1"], "expected"),
        (["-r", "0"], "-r 0; expected 1 to 1000"),
        (["-p", "0", "-n", "0"], "no prompt and no decode length"),
        (["-n", "0", "-d", "5"], "-d without decode steps"),
        (["--isa", "all"], "--isa all"),
        (["-p", "999"], "pp999: 999 tokens; expected at most 256"),
    ],
)
def test_wrong_options_are_one_line(folders: dict[str, Path], capsys: Any, argv: list[str], says: str) -> None:
    assert main(["bench", str(folders["llama"]), "-t", "1", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_an_unknown_isa_is_refused(folders: dict[str, Path], capsys: Any) -> None:
    assert main(["bench", str(folders["llama"]), "--isa", "abacus"]) == 6
    assert "ISA 'abacus' is unknown" in capsys.readouterr().err
