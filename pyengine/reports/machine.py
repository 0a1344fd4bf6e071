"""Stage 6, machine: what this machine can do at most: read bandwidth, int8 and float32 rates, how far its threads are
from each other; docs/benchmarking.md.

A rate is the best of several short passes of the core's probes with the threads and the ISA of a backend: a pass that
another process interrupted says nothing about the machine. The bandwidth is the median over longer ones: what lasts is
decode's limit. A report measures right before and right after each run that it times, and compares the run with those
two: virtual machines change their bandwidth within minutes. The median read bandwidth is kept in the cache folder, so
that `generate` can show it later.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyengine import __version__, _core, cuda
from pyengine._core import Limit
from pyengine.errors import ResourceError
from pyengine.paths import cache_dir

READ_BYTES, READ_PASSES = 256 << 20, 8
FIRST_OPS, COMPUTE_PASSES = 1_000_000, 8
COMPUTE_SECONDS = 1e-3  # of a pass
HOPS, HOP_PASSES = 4000, 5
QUIET = 1.25  # how far nine in ten of the read bandwidth's samples may lie apart on a quiet machine
STEADY = 1.1  # how far a limit may lie apart before and after a run whose fraction of it counts
FILE = "machine.json"  # in the cache folder


class Prober(Protocol):
    """What measuring needs of a backend; _core.Backend has it."""

    @property
    def threads(self) -> int: ...
    @property
    def device(self) -> str: ...
    def measure(self, limit: int, work: int, passes: int) -> npt.NDArray[np.float64]: ...


@dataclass(frozen=True)
class Limits:
    """Bandwidth in 1e9 bytes per second, rates in 1e9 operations per second; a multiply-add is two operations.

    hop_ns: until one thread sees what another wrote; None for one thread and on a device.
    """

    read_gb_per_s: float
    int8_gops: float
    f32_gflops: float
    hop_ns: float | None = None

    @property
    def rates(self) -> dict[str, float]:
        """By name, all but hop_ns: what a bound can be computed of."""
        return {name: value for name, value in vars(self).items() if name != "hop_ns"}


def compute_rate(backend: Prober, limit: Limit, work: dict[Limit, int]) -> float:
    """Operations per second, best of the passes. `work` keeps how many a pass has; what it lacks is measured first."""
    if limit not in work:
        work[limit] = FIRST_OPS
        for _ in range(2):
            rate = float(backend.measure(int(limit), work[limit], COMPUTE_PASSES).max())
            work[limit] = max(FIRST_OPS, int(rate * COMPUTE_SECONDS))
    return float(backend.measure(int(limit), work[limit], COMPUTE_PASSES).max())


def measure(backend: Prober, work: dict[Limit, int] | None = None) -> Limits:
    """The limits, once: about 0.5 s, a little more without the `work` of an earlier call."""
    work = {} if work is None else work
    read = float(np.median(backend.measure(int(Limit.READ), READ_BYTES, READ_PASSES)))
    hop = None
    if backend.threads > 1 and backend.device == "cpu":
        hop = 1e9 / float(np.median(backend.measure(int(Limit.HOP), HOPS, HOP_PASSES)))
    return Limits(
        read / 1e9, compute_rate(backend, Limit.INT8, work) / 1e9, compute_rate(backend, Limit.F32, work) / 1e9, hop
    )


def median(samples: list[Limits]) -> Limits:
    def middle(name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in samples))

    hop = None if any(sample.hop_ns is None for sample in samples) else middle("hop_ns")
    return Limits(middle("read_gb_per_s"), middle("int8_gops"), middle("f32_gflops"), hop)


class Gauge:
    """Measures a machine's limits again and again beside what else a report times."""

    def __init__(self, measure_once: Callable[[], Limits]) -> None:
        self.measure_once = measure_once
        self.samples: list[Limits] = []
        self.others: list[int] = []  # other threads that wanted to run, before each sample

    @classmethod
    def of(cls, backend: Prober) -> Gauge:
        work: dict[Limit, int] = {}
        return cls(lambda: measure(backend, work))

    def sample(self) -> Limits:
        self.others.append(others_running())
        self.samples.append(self.measure_once())
        return self.samples[-1]

    def disturbed(self, threads: int) -> str | None:
        """What kept so many threads from having the machine to themselves; None if nothing is known."""
        reads = [sample.read_gb_per_s for sample in self.samples]
        low, high = np.percentile(reads, (5, 95))
        others = statistics.median_low(self.others)
        if others + threads > (os.cpu_count() or 1):
            return f"{others} other threads were running beside {threads} on {os.cpu_count()} CPUs"
        if high > QUIET * low:
            return f"read bandwidth went from {low:.1f} to {high:.1f} GB/s"
        return None

    @property
    def limits(self) -> Limits:
        return median(self.samples)

    def to_json(self, *, isa: str, threads: int, device: str = "cpu") -> dict[str, Any]:
        """The `machine` object of `bench --json`."""
        limits = self.limits
        return {
            "device": device,
            "device_model": device_model(device),
            "cpu": cpu_name(),
            "isa": isa,
            "threads": threads,
            "version": __version__,
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
            "compiler": _core.compiler(),
            "read_gb_per_s": limits.read_gb_per_s,
            "int8_gops": limits.int8_gops,
            "f32_gflops": limits.f32_gflops,
            "hop_ns": limits.hop_ns,
            "read_samples": [sample.read_gb_per_s for sample in self.samples],
            "hop_samples": [sample.hop_ns for sample in self.samples],
            "disturbed": self.disturbed(threads),
        }


# ---- runs beside the limits ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """Seconds of a run, and the limits measured right before and right after it."""

    seconds: float
    before: Limits
    after: Limits


@dataclass(frozen=True)
class Fraction:
    """Of a limit: the median over `rounds_used` runs, those with equal limits (STEADY) around them.

    Not steady: there was none, and all are used.
    """

    value: float
    rounds_used: int
    steady: bool


def take_turns(gauge: Gauge, runs: list[Callable[[], float]], rounds: int) -> list[list[Timed]]:
    """Every run once in each round, the limits measured between any two; run() gives its seconds. One list per run."""
    timed: list[list[Timed]] = [[] for _ in runs]
    before = gauge.sample()
    for _ in range(rounds):
        for run, some in zip(runs, timed, strict=True):
            seconds = run()
            after = gauge.sample()
            some.append(Timed(seconds, before, after))
            before = after
    return timed


def fraction(limit: str, amount: float, timed: list[Timed]) -> Fraction:
    """Runs of `amount` (1e9 bytes or operations) beside a limit, a field of Limits: each over the mean of the two
    samples around it."""
    every, steady = [], []
    for run in timed:
        around = (getattr(run.before, limit), getattr(run.after, limit))
        every.append(2 * amount / run.seconds / sum(around))
        if max(around) <= STEADY * min(around):
            steady.append(every[-1])
    return Fraction(statistics.median(steady or every), len(steady or every), bool(steady))


# ---- which machine ---------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    """The CPU's own name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def others_running() -> int:
    """Threads on the machine that run or wait for a CPU, but for this one; 0 where the system does not say."""
    try:
        running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].split("/")[0]
        return max(int(running) - 1, 0)
    except (OSError, ValueError, IndexError):
        return 0


def commit() -> str | None:
    """The commit of the sources that run: of the checkout they lie in, else the one that was installed; None without.

    '-dirty' behind it: there were changes on top.
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    return _core.commit() or None


# ---- what is kept ----------------------------------------------------------------------------------------------------


def _entries() -> list[dict[str, Any]]:
    """What the file holds; nothing where there is none or it is not as `remember_read` writes it."""
    try:
        entries = json.loads((cache_dir() / FILE).read_text(encoding="utf-8"))["read"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    keys = {"cpu": str, "threads": int, "gb_per_s": float}
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in keys.items())
    ]


def device_model(device: str) -> str:
    """What the maker calls a device that a model runs on."""
    return cpu_name() if device == "cpu" else cuda.devices()[int(device.partition(":")[2])].model


def processor(machine: dict[str, Any]) -> str:
    """A `machine` object in words: what computed."""
    if machine["device"] != "cpu":
        return f"{machine['device_model']} ({machine['device']})"
    threads = machine["threads"]
    return f"{machine['cpu']}, {machine['isa']}, {threads} thread{'' if threads == 1 else 's'}"


def hop_text(machine: dict[str, Any]) -> str:
    """Of a `machine` object: how far its threads are from each other; nothing where that has no meaning."""
    return "" if machine["hop_ns"] is None else f", thread to thread {machine['hop_ns']:.0f} ns"


def reader(device: str, threads: int) -> tuple[int, str]:
    """Of what `known_read` and `remember_read` keep the bandwidth: threads of this CPU, or a device."""
    return threads if device == "cpu" else 0, device_model(device)


def known_read(threads: int, cpu: str | None = None) -> float | None:
    """The read bandwidth (1e9 bytes per second) last measured on this CPU with so many threads, None if never."""
    name = cpu_name() if cpu is None else cpu
    values = [entry["gb_per_s"] for entry in _entries() if (entry["cpu"], entry["threads"]) == (name, threads)]
    return float(values[-1]) if values and values[-1] > 0 else None


def remember_read(threads: int, gb_per_s: float, cpu: str | None = None) -> None:
    """Keep a read bandwidth for `known_read`. ResourceError where the cache folder cannot be written."""
    name = cpu_name() if cpu is None else cpu
    entries = [entry for entry in _entries() if (entry["cpu"], entry["threads"]) != (name, threads)]
    entries.append({"cpu": name, "threads": threads, "gb_per_s": gb_per_s})
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump({"read": entries}, file, indent=1)
        os.replace(file.name, folder / FILE)
    except OSError as error:
        raise ResourceError(f"{folder}: {error.strerror or error}; expected a cache folder (PYENGINE_CACHE)") from error
