"""tools/bench/peers.py: engines take turns, ratios are of rounds, and a peer that is missing or fails is named."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from builders import write_tiny_model
from golden.golden_cases import CONFIGS

from pyengine.reports import machine
from pyengine.reports.machine import Limits

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
# answers with the seconds of its file, one pair a line, and writes into a log whose turn it is
FAKE = """
import json, os, sys
kind, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
print("noise", file=sys.stderr)
rounds = open(model).read().splitlines()
if rounds[0] != "ok":
    if rounds[0] == "die":
        sys.exit("it broke")
    print(json.dumps({"problem": "not installed: " + rounds[0]}), flush=True)
    sys.exit()
print(json.dumps({"engine": kind + " 1.0", "build": "AVX2"}), flush=True)
for line, seconds in zip(sys.stdin, rounds[1:]):
    work = json.loads(line)
    with open(os.environ["TURNS"], "a") as log:
        sizes = [len(work["prompt"]), len(work["steps"])]
        print(json.dumps([os.path.basename(model), *sizes, options]), file=log)
    print(json.dumps({"seconds": json.loads(seconds)}), flush=True)
"""
LLAMA = """
__version__ = "1.2"
def llama_print_system_info():
    return b"CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | AVX512_VNNI = 1 | "
class Llama:
    def __init__(self, path, *, n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, flash_attn, verbose):
        assert (n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch) == (19, 512, 512, 2, 2)
        self.seen = []
        print("a library's own words")
    def reset(self):
        assert self.seen in ([], [9, 1, 1])
        self.seen = []
    def eval(self, ids):
        self.seen.append(len(ids))
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers", BENCH / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(machine, "measure", lambda *_, **__: Limits(40.0, 900.0, 200.0))
    return module


def write_gguf(path: Path, kind: str = "Q4_0") -> Path:
    """One layer of one matrix, an embedding of another type, and a norm."""
    matrix = np.zeros((4, 64), np.float32)
    quantized = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(matrix, quantized), raw_dtype=quantized)
    writer.add_tensor("token_embd.weight", matrix)
    writer.add_tensor("blk.0.attn_norm.weight", matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def python_with(folder: Path, module: str, text: str) -> Path:
    """An interpreter that finds `module` in its folder."""
    folder.mkdir()
    (folder / f"{module}.py").write_text(text)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def fake(peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers become fake ones; returns the log of their turns."""
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE)
    monkeypatch.setattr(peers, "WORKER", worker)
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))
    return tmp_path / "turns"


def test_engines_take_turns_and_ratios_are_of_rounds(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = fake(peers, tmp_path, monkeypatch)

    def contender(name: str, file: str, *rounds: str) -> Any:
        (tmp_path / file).write_text("\n".join(rounds))
        return peers.Contender(name, sys.executable, tmp_path / file, file, "int4")

    contenders = [
        contender("pyengine", "int4", "ok", "[9, 9]", "[1, 2]", "[2, 2]", "[4, 2]"),  # the first is the untimed round
        contender("ik-llama-cpp-python+repack", "Q4_0", "ok", "[9, 9]", "[3, 1]", "[4, 1]", "[4, 8]"),
        contender("llama-cpp-python", "Q4_1", "x"),
        contender("llama-cpp-python", "Q4_K", "die"),
        contender("ctranslate2", "late", "ok", "[1, 1]", "[1, 1]"),
    ]
    gauge = machine.Gauge(lambda: Limits(len(turns.read_text().splitlines()), 1.0, 1.0))
    peers.compete(contenders, {"threads": 2}, [0] * 12, [0] * 6, 3, gauge)
    order = [json.loads(line) for line in turns.read_text().splitlines()]
    assert [turn[0] for turn in order] == ["int4", "Q4_0", "late"] * 2 + ["int4", "Q4_0"] * 2
    assert all(turn[1:3] == [12, 6] for turn in order)
    assert order[0][3] == {"threads": 2, "quant": "int4"}
    assert order[1][3] == {"threads": 2, "quant": "Q4_0", "repack": True}
    assert [sample.read_gb_per_s for sample in gauge.samples] == [3, 6, 8, 10]
    us, them, missing, broken, late = records = peers.summarize(contenders, 12, 6)
    assert (us["prompt_per_second"], us["prompt_ratio"], us["decode_ratio"]) == (6.0, 1.0, 1.0)
    assert (them["prompt_per_second"], them["decode_per_second"]) == (3.0, 6.0)
    assert (them["prompt_ratio"], them["decode_ratio"]) == (2.0, 0.5)  # of 3, 2, 1 and of 0.5, 0.5, 4
    assert them["engine"] == "ik-llama-cpp-python 1.0+repack"
    assert (missing["problem"], missing["prompt_per_second"], missing["decode_ratio"]) == (
        "not installed: x",
        None,
        None,
    )
    assert broken["problem"] == "ended (1): it broke"
    assert (late["problem"], late["prompt_samples"]) == ("ended (0): noise", [])
    assert "Q4_1 (not installed: x)" in peers.report(records)


def test_ratios_are_to_the_format_of_the_same_size(peers: ModuleType) -> None:
    contenders = [
        peers.Contender("pyengine", "", Path("m"), "int4", "int4", seconds=[(1.0, 1.0)]),
        peers.Contender("pyengine", "", Path("m"), "int8", "int8", seconds=[(2.0, 4.0)]),
        peers.Contender("ctranslate2", "", Path("c"), "int8", "int8", seconds=[(4.0, 4.0)]),
        peers.Contender("llama-cpp-python", "", Path("b"), "BF16", "bf16", seconds=[(4.0, 4.0)]),
    ]
    records = peers.summarize(contenders, 1, 1)
    assert [r["against"] for r in records] == ["int4", "int8", "int8", None]  # pyengine did not run in bf16
    assert [r["prompt_ratio"] for r in records] == [1.0, 1.0, 2.0, None]
    assert [r["decode_ratio"] for r in records] == [1.0, 1.0, 1.0, None]


def test_the_size_of_a_gguf(peers: ModuleType, tmp_path: Path) -> None:
    for kind, bits in (("Q4_0", 4.5), ("Q4_1", 5.0), ("Q8_0", 8.5), ("BF16", 16.0)):
        path = write_gguf(tmp_path / f"{kind}.gguf", kind)
        assert peers.of_gguf(path) == (kind, {"bytes": path.stat().st_size, "bits_per_weight": bits})


def test_real_workers_with_a_peer_and_without_it(peers: ModuleType, tmp_path: Path, capsys: Any) -> None:
    folder = write_tiny_model(tmp_path / "llama", CONFIGS["llama"])
    (tmp_path / "ct2").mkdir()
    (tmp_path / "ct2" / "model.bin").write_bytes(bytes(1000))
    q4, q8 = write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf", "Q8_0")
    there = python_with(tmp_path / "there", "llama_cpp", LLAMA)
    away = python_with(tmp_path / "away", "ctranslate2", "raise ImportError('gone')")
    argv = [str(folder), "--gguf", str(q4), "--gguf", str(q8), "--ctranslate2", str(tmp_path / "ct2")]
    argv += ["--quant", "int8", "--threads", "2", "-p", "9", "-n", "2", "-r", "1"]
    argv += ["--peer", f"llama-cpp-python={there}", "--peer", f"ctranslate2={away}"]
    peers.main([*argv, "--json"])
    record = json.loads(capsys.readouterr().out)
    rows = {(r["engine"].split()[0], r["format"]): r for r in record["results"]}
    assert list(rows) == [
        ("pyengine", "int8"),
        ("llama-cpp-python", "Q8_0"),
        ("ctranslate2", "int8"),
        ("llama-cpp-python", "Q4_0"),
    ]
    us, them, gone, alone = rows.values()
    assert us["bits_per_weight"] > 8
    assert us["bytes"] > 0
    assert us["model"] == them["model"] == "llama"
    assert them["engine"] == "llama-cpp-python 1.2"
    assert (them["build"], them["bits_per_weight"], them["against"]) == ("AVX512_VNNI", 8.5, "int8")
    assert all(r["prompt_per_second"] > 0 and r["decode_ratio"] > 0 for r in (us, them))
    assert gone["problem"] == "not installed: gone"
    assert (alone["against"], alone["prompt_ratio"]) == (None, None)
    assert alone["decode_per_second"] > 0
    assert record["machine"]["read_gb_per_s"] == 40.0
    assert record["date"].endswith("+00:00")
    peers.main(argv)
    out = capsys.readouterr().out
    assert "int8 (not installed: gone)" in out
    assert "limits: read 40.0 GB/s" in out


def test_pyengine_must_run(peers: ModuleType, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "llama", CONFIGS["llama"])
    with pytest.raises(SystemExit, match=r"pyengine int3: ended \(1\): .*int3"):
        peers.main([str(folder), "--quant", "int3", "-p", "1", "-n", "1", "-r", "1"])


def test_wrong_arguments(peers: ModuleType, tmp_path: Path, capsys: Any) -> None:
    folder = write_tiny_model(tmp_path / "llama", CONFIGS["llama"])
    q4, text = write_gguf(tmp_path / "a.gguf"), tmp_path / "text"
    text.write_text("no GGUF of anything, but long enough to have a header")
    llama, other = f"llama-cpp-python={sys.executable}", f"ctranslate2={sys.executable}"
    for extra, says in (
        (["-r", "0"], "at least 1"),
        (["--peer", "vllm=python"], "expected NAME=PYTHON"),
        (["--peer", f"llama-cpp-python={tmp_path / 'none'}"], "no such interpreter"),
        (["--peer", llama], "needs --gguf FILE"),
        (["--peer", other], "needs --ctranslate2 FOLDER"),
        (["--gguf", str(q4)], "--gguf: no --peer reads it"),
        (["--ctranslate2", str(tmp_path)], "--ctranslate2: no --peer reads it"),
        (["--peer", other, "--ctranslate2", str(tmp_path)], "no model.bin"),
        (["--peer", llama, "--gguf", str(text)], f"--gguf {text}: "),
        (["--peer", llama, "--gguf", str(tmp_path / "none.gguf")], "none.gguf: "),
    ):
        with pytest.raises(SystemExit) as ended:
            peers.main([str(folder), *extra])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
