"""tools/bench/peers.py: engines take turns, ratios are of rounds, and a peer that is missing is named."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS

from pyengine.reports import machine
from pyengine.reports.machine import Limits


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / "bench" / "peers.py"
    spec = importlib.util.spec_from_file_location("peers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(machine, "measure", lambda backend: Limits(40.0, 900.0, 200.0))
    return module


def test_engines_take_turns_and_ratios_are_of_rounds(peers: ModuleType) -> None:
    order: list[str] = []

    def runner(name: str, times: list[tuple[float, float]]) -> Any:
        given = iter([(9.0, 9.0), *times])  # the first is the untimed round

        def run(prompt: list[int], steps: list[int]) -> tuple[float, float]:
            order.append(name)
            return next(given)

        return run

    contenders = [
        peers.Contender("us", "int4", runner("us", [(1.0, 2.0), (2.0, 2.0), (4.0, 2.0)])),
        peers.Contender("them", "q4", runner("them", [(3.0, 1.0), (4.0, 1.0), (4.0, 8.0)])),
        peers.Contender("nobody", "q4", None, "not installed: x"),
    ]
    gauge = machine.Gauge(lambda: Limits(len(order), 1.0, 1.0))
    peers.compete(contenders, [0] * 12, [0] * 6, 3, gauge)
    assert order == ["us", "them"] * 4
    assert [sample.read_gb_per_s for sample in gauge.samples] == [2, 4, 6, 8]
    us, them, nobody = peers.summarize(contenders, 12, 6)
    assert (us["prompt_per_second"], us["prompt_ratio"], us["decode_ratio"]) == (6.0, 1.0, 1.0)
    assert (them["prompt_per_second"], them["decode_per_second"]) == (3.0, 6.0)
    assert (them["prompt_ratio"], them["decode_ratio"]) == (2.0, 0.5)  # of 3, 2, 1 and of 0.5, 0.5, 4
    assert (nobody["problem"], nobody["prompt_per_second"], nobody["decode_ratio"]) == ("not installed: x", None, None)
    assert "q4 (not installed: x)" in peers.report([us, them, nobody])


def test_a_model_beside_a_peer_and_without_one(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = write_tiny_model(tmp_path / "llama", CONFIGS["llama"])
    seen: list[Any] = []

    class Llama:
        def __init__(self, path: str, **options: Any) -> None:
            seen.append((path, options["n_threads"], options["n_ctx"]))

        def reset(self) -> None:
            seen.append("reset")

        def eval(self, ids: list[int]) -> None:
            seen.append(len(ids))

    argv = [str(folder), "--gguf", "a.gguf", "--quant", "int8", "--threads", "2", "-p", "9", "-n", "2", "-r", "1"]
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama, __version__="1.2"))
    peers.main([*argv, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert seen == [("a.gguf", 2, 19), *("reset", 9, 1, 1) * 2]
    assert [r["engine"].split()[0] for r in record["results"]] == ["pyengine", "llama-cpp-python"]
    assert all(r["prompt_per_second"] > 0 and r["decode_ratio"] > 0 for r in record["results"])
    assert record["machine"]["read_gb_per_s"] == 40.0
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # importing it fails
    peers.main(argv)
    out = capsys.readouterr().out
    assert "a.gguf (not installed: " in out
    assert "limits: read 40.0 GB/s" in out


def test_wrong_arguments(peers: ModuleType, tmp_path: Path, capsys: Any) -> None:
    for extra, says in ((["-r", "0"], "at least 1"), (["--llama", str(tmp_path / "none")], "no such folder")):
        with pytest.raises(SystemExit) as ended:
            peers.main([str(tmp_path), "--gguf", "a.gguf", *extra])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
