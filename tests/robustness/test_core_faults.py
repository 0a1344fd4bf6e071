"""Failures in the core: allocations and threads, the pool under stress, forks, and how many threads a quota leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cache_cases import calibrated_model
from core_programs import LIBRARY, ROOT, compiled
from faults import shim

SOURCES = ROOT / "csrc" / "core" / "thread_pool.cc", ROOT / "csrc" / "core" / "status.cc"


def test_every_allocation_mapping_and_thread_may_fail(tmp_path: Path) -> None:
    program = compiled(tmp_path, "core_faults", *LIBRARY, "-ldl")
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 100, done.stdout


def test_barriers_under_stress(tmp_path: Path) -> None:
    """A short run; tools/checks/sanitize.sh tsan runs it under ThreadSanitizer."""
    program = compiled(tmp_path, "pool_stress", *map(str, SOURCES), f"-I{ROOT / 'csrc'}", "-pthread")
    done = subprocess.run([program, "0.5"], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("threads: ") == 5, done.stdout


FORK = """
import os, signal, sys, threading
import pyengine
from pyengine import _core
import numpy as np
IDS = [5, 17, 3, 80]
one = pyengine.load(sys.argv[1], threads=int(sys.argv[2]), cache=False)
expected = one.logits(IDS).tobytes()
stream = one.stream(IDS, max_tokens=50, ignore_eos=True)
next(stream)
busy = threading.Thread(target=lambda: [one.logits(IDS * 60) for _ in range(6)])
busy.start()
child = os.fork()
if child == 0:
    signal.alarm(300)
    for call in (lambda: one.logits(IDS), lambda: one.generate(IDS), lambda: next(stream), one.build):
        try:
            call()
        except pyengine.RequestError as error:
            assert "forked" in str(error), error
        else:
            raise SystemExit("no error in the child")
    del stream
    try:  # the core for itself
        one.backend.tensor_dequantize(one.weights.final_norm)
    except pyengine.ResourceError as error:
        assert one.threads > 1 and "forked" in str(error), error
    else:
        assert one.threads == 1
    one.close()
    with pyengine.load(sys.argv[1], threads=int(sys.argv[2]), cache=False) as fresh:
        assert fresh.logits(IDS).tobytes() == expected
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
busy.join()
assert one.logits(IDS).tobytes() == expected
assert len(stream.finish().tokens) == 50
one.close()
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_report_g27_a_forked_child(tmp_path: Path, threads: int) -> None:
    """While threads compute: its copy of the engine is refused and can be closed, and one of its own works."""
    model = calibrated_model(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(model), str(threads)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


V2 = "0::/app.slice/job\n"
V1 = "5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n"
PAIRS = {f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
RANGES = {
    f"devices/system/cpu/cpu{c}/topology/thread_siblings_list": f"{c // 2 * 2}-{c // 2 * 2 + 1}" for c in range(8)
}
QUOTAS: dict[str, tuple[int, str | None, dict[str, str]]] = {
    "nothing known": (8, None, {}),
    "unlimited": (8, "0::/\n", {"fs/cgroup/cpu.max": "max 100000"}),
    "7.65": (7, "0::/\n", {"fs/cgroup/cpu.max": "765000 100000"}),
    "two and a half": (2, "0::/\n", {"fs/cgroup/cpu.max": "250000 100000"}),
    "half of one": (1, "0::/\n", {"fs/cgroup/cpu.max": "50000 100000"}),
    "more than there are": (8, "0::/\n", {"fs/cgroup/cpu.max": "6400000 100000"}),
    "another period": (3, "0::/\n", {"fs/cgroup/cpu.max": "30000 10000"}),
    "own group": (3, V2, {"fs/cgroup/app.slice/job/cpu.max": "300000 100000", "fs/cgroup/cpu.max": "max 100000"}),
    "group above": (
        2,
        V2,
        {"fs/cgroup/app.slice/job/cpu.max": "max 100000", "fs/cgroup/app.slice/cpu.max": "200000 100000"},
    ),
    "no file of groups": (5, None, {"fs/cgroup/cpu.max": "500000 100000"}),
    "a group outside": (5, "0::/../../other\n", {"fs/cgroup/cpu.max": "500000 100000"}),
    "damaged": (8, "0::/\nnonsense\n:::\n", {"fs/cgroup/cpu.max": "many 0"}),
    "version 1": (
        4,
        V1,
        {"fs/cgroup/cpu/job/cpu.cfs_quota_us": "450000", "fs/cgroup/cpu/job/cpu.cfs_period_us": "1e5"},
    ),
    "version 1, unlimited": (
        8,
        V1,
        {"fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1", "fs/cgroup/cpu/job/cpu.cfs_period_us": "100000"},
    ),
    "version 1, in a container": (
        4,
        V1,
        {"fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
    ),
    "two threads a core": (4, None, PAIRS),
    "neighbours of a core": (4, None, RANGES),
    "quota and cores": (3, "0::/\n", {**PAIRS, "fs/cgroup/cpu.max": "300000 100000"}),
}


THREADS = """
import os, sys
from pyengine import _core
for root in sys.argv[1:]:
    os.environ["FAULT_ROOT"] = root
    print(_core.default_threads())
"""


def test_report_g19_default_threads(tmp_path: Path) -> None:
    """min(CPUs of this process's set, their cores, quotas of its cgroup and of those above), on a machine of 8 CPUs."""
    roots = {name: tmp_path / name.replace(" ", "_") for name in QUOTAS}
    for name, (_, groups, files) in QUOTAS.items():
        for path, text in files.items():
            (roots[name] / "sys" / path).parent.mkdir(parents=True, exist_ok=True)
            (roots[name] / "sys" / path).write_text(text + "\n")
        if groups is not None:
            (roots[name] / "proc" / "self").mkdir(parents=True)
            (roots[name] / "proc" / "self" / "cgroup").write_text(groups)
    environment = shim.environment(shim.build(tmp_path), FAULT_CPUS="8")
    command = [sys.executable, "-c", THREADS, *map(str, roots.values())]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = dict(zip(QUOTAS, map(int, done.stdout.split()), strict=True))
    assert found == {name: expected for name, (expected, _, _) in QUOTAS.items()}
