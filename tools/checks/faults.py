"""Kills, damage, Ctrl-C and little memory, many times at random: what is left must be usable and give the same bits.

    faults.py kill|full|flips|interrupt|memory [--count N] [--seed S] [--model MODEL] [--limit-ms 200]

kill       kill -9 while a load writes the cache; the next start gives the same bits and leaves no temporary file.
full       the disk is full after so many bytes (a limit on the size of files): said in one line, nothing is left.
flips      a bit of the cached file is wrong: found, quantized again, the same bits.
interrupt  Ctrl-C in load, prefill and decode: stops within --limit-ms, and the next call gives the same bits.
memory     a limit on address space, from none left upwards: the text, or exit 6 with one line.

Without --model a small one is made. Counts, unless given: 200, 50, 1000, 100, 24. Exit 1 with the first that went
wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import numpy as np
from builders import write_tiny_model
from golden.golden_cases import CONFIGS
from tiny_tokenizers import byte_level
from tiny_tokenizers import write as write_tokenizer

import pyengine
from pyengine import weights_cache
from pyengine.cli.main import main as command_line
from pyengine.paths import weights_cache_dir

PROMPT = np.random.default_rng(0).integers(0, 256, 600).tolist()
CONFIG = {
    **CONFIGS["llama"], "vocab_size": 259, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": 258,
}  # fmt: skip


class Run:
    """What the checks share: the model, how it is loaded, its bits, the source of random places."""

    def __init__(self, model: Path, seed: int, limit_ms: float) -> None:
        self.model, self.random, self.limit_ms = model, random.Random(seed), limit_ms
        weights_cache.WORTH_SECONDS = -1.0

    def load(self, log: Callable[[str], None] = lambda _: None, *, cache: bool = True) -> pyengine.Engine:
        return pyengine.load(self.model, quant="int4", threads=2, calibration=False, cache=cache, log=log)

    def bits(self, engine: pyengine.Engine) -> bytes:
        return np.ascontiguousarray(engine.logits(PROMPT[:40])).tobytes()


def need(condition: bool, *found: object) -> None:
    if not condition:
        raise SystemExit("faults: " + " ".join(map(str, found)))


def forked(body: Callable[[], object], *, stderr: Path | None = None) -> int:
    """The process id of a child that runs `body` and ends with the exit status that it returns, or 0."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code: object = 99
    try:
        if stderr is not None:
            os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = body() or 0
    except SystemExit as error:
        print(error, file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 98)


def status_of(child: int) -> int:
    """Its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def empty(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()


def start(run: Run, expected: bytes) -> None:
    """One start as a user makes it: the bits, no warning, no temporary file."""
    lines: list[str] = []
    with run.load(lines.append) as engine:
        need(run.bits(engine) == expected, "other bits")
    left = [path.name for path in weights_cache_dir().iterdir() if path.suffix == ".tmp"]
    need(not left, "left behind:", left)
    need("warning" not in "".join(lines), lines)


def expected_bits(run: Run) -> bytes:
    """From a process of its own: this one forks, and stays without threads."""
    reader, writer = os.pipe()

    def write() -> None:
        with run.load(cache=False) as engine, os.fdopen(writer, "wb") as file:
            file.write(run.bits(engine))

    child = forked(write)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        bits = file.read()
    need(status_of(child) == 0 and bits, "the model does not load")
    return bits


def kill(run: Run, count: int) -> str:
    expected, folder = expected_bits(run), weights_cache_dir()
    started = time.perf_counter()
    need(status_of(forked(lambda: start(run, expected))) == 0, "the first start")
    duration, hits, dead = time.perf_counter() - started, 0, 0
    for at in range(count):
        empty(folder)
        child = forked(lambda: start(run, expected))
        wait = run.random.uniform(0, 1.2) * duration
        if at % 2:  # every other one once it has begun to write
            begun = time.perf_counter()
            while not list(folder.glob(".*.tmp")) and time.perf_counter() < begun + 10 * duration:
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    break
            wait = run.random.uniform(0, 0.02)
        time.sleep(wait)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        hits += bool(list(folder.glob(".*.tmp")))
        dead += status_of(child) == -signal.SIGKILL
        need(status_of(forked(lambda: start(run, expected))) == 0, f"the start after kill {at + 1}")
    return f"{count} starts, {dead} killed before they ended, {hits} while they wrote"


def full(run: Run, count: int) -> str:
    expected, folder = expected_bits(run), weights_cache_dir()
    need(status_of(forked(lambda: start(run, expected))) == 0, "the first start")
    (size,) = (path.stat().st_size for path in folder.iterdir())

    def limited(most: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        lines: list[str] = []
        with run.load(lines.append) as engine:
            need(run.bits(engine) == expected, "other bits")
        need(len(lines) == 1 and "not cached" in lines[0], lines)
        need(not list(folder.iterdir()), "left behind")

    for at in range(count):
        empty(folder)
        most = run.random.randrange(size)
        need(status_of(forked(lambda most=most: limited(most))) == 0, f"full {at + 1}, after {most} of {size} bytes")
    return f"{count} full disks"


def flips(run: Run, count: int) -> str:
    expected, folder = expected_bits(run), weights_cache_dir()
    start(run, expected)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    for at in range(count):
        bit = run.random.randrange(8 * (len(good) if at % 2 else min(8192, len(good))))  # half of them in the beginning
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(bit // 8)
            file.write(bytes([good[bit // 8] ^ 1 << bit % 8]))
        lines: list[str] = []
        with run.load(lines.append) as engine:
            need(run.bits(engine) == expected, f"bit {bit}: other bits")
        need(len(lines) == 2 and "quantizing again" in lines[0], f"bit {bit}:", lines)
        need(path.read_bytes() == good, f"bit {bit}: another file was made")
    return f"{count} bits, each found"


def takes(lock: Any) -> bool:
    """Whether this thread can have the lock."""
    if not lock.acquire(timeout=10):
        return False
    lock.release()
    return True


def interrupt(run: Run, count: int) -> str:
    engine = run.load(cache=False)
    expected, tokens = run.bits(engine), engine.generate(PROMPT[:20], max_tokens=60, ignore_eos=True).tokens

    def decode() -> None:
        stream = engine.stream(PROMPT[:20], max_tokens=60, ignore_eos=True)
        try:
            stream.finish()
        finally:
            stream.close()

    actions: list[Callable[[], object]] = [
        lambda: run.load(cache=False).close(),
        lambda: engine.logits(PROMPT, rows=[len(PROMPT) - 1]),
        decode,
    ]
    took = [0.0] * len(actions)
    for index, action in enumerate(actions):
        started = time.perf_counter()
        action()
        took[index] = time.perf_counter() - started
    slowest, caught, late = 0.0, 0, 0
    for at in range(count):
        sent: list[float] = []

        def send(sent: list[float] = sent) -> None:
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        index = at % len(actions)
        timer = threading.Timer(run.random.uniform(0, took[index]), send)
        inside = False
        try:
            timer.start()
            inside = True
            actions[index]()
            inside = False
            timer.join()
            time.sleep(1)  # the signal of a timer that has just run is on its way
            need(False, "a signal was lost")
        except KeyboardInterrupt:
            waited = (time.perf_counter() - sent[0]) * 1e3
        caught += inside
        if inside:
            slowest, late = max(slowest, waited), late + (waited > run.limit_ms)
        need(run.bits(engine) == expected, f"other bits after interrupt {at + 1}")
        again = engine.generate(PROMPT[:20], max_tokens=60, ignore_eos=True).tokens
        need(again == tokens, f"other tokens after interrupt {at + 1}")
        while engine.pool.prefixes.evict():  # what is kept of earlier requests
            pass
        for free, size in zip(engine.pool.free, engine.pool.size, strict=True):
            need(sorted(free) == list(range(size)), f"blocks lost after interrupt {at + 1}")
        with ThreadPoolExecutor(1) as other:
            need(other.submit(takes, engine._lock).result(), f"the lock is held after interrupt {at + 1}")
    need(not late, f"{late} of {count} took over {run.limit_ms:g} ms, up to {slowest:.0f}")
    return f"{count} interrupts, {caught} inside a call, the slowest after {slowest:.0f} ms"


def memory(run: Run, count: int) -> str:
    """Rungs from no address space beyond what the imports take to 512 MiB, evenly by ratio."""
    import pyengine.engine  # noqa: F401 (what the imports take)

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    base, works, texts = pages * resource.getpagesize(), 0, set()
    with tempfile.TemporaryDirectory() as name:
        errors = Path(name) / "stderr"
        for at in range(count):
            extra = int(2 ** (18 + 11 * at / max(count - 1, 1)))

            def limited(extra: int = extra) -> int:
                resource.setrlimit(resource.RLIMIT_AS, (base + extra, base + extra))
                options = ["--raw", "-n", "4", "-t", "2", "--no-cache", "-q", "--ignore-eos"]
                return command_line(["generate", str(run.model), "-p", "Hello", *options])

            status, text = status_of(forked(limited, stderr=errors)), errors.read_text()
            where = f"{extra / 2**20:.1f} MiB beyond the imports: exit {status}, {text!r}"
            need(status in (0, 6), where)
            need(status == 0 or (text.count("\n") == 1 and text.startswith("pyengine: error: ")), where)
            works += status == 0
            texts.add(text.partition(";")[0][:60])
    need(works > 0 or count == 1, "no rung was enough")
    return f"{count} rungs, {works} gave the text, the others one line: {len(texts - {''})} kinds"


CHECKS = {"kill": (kill, 200), "full": (full, 50), "flips": (flips, 1000), "interrupt": (interrupt, 100),
          "memory": (memory, 24)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--limit-ms", type=float, default=200.0)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check, count = CHECKS[args.check]
    with tempfile.TemporaryDirectory() as name:
        os.environ["PYENGINE_CACHE"] = str(Path(name) / "cache")
        model = args.model
        if model is None:
            model = write_tiny_model(Path(name) / "model", CONFIG, seed=3)
            write_tokenizer(model, byte_level())
        print(f"{args.check}: {check(Run(model, args.seed, args.limit_ms), args.count or count)}")


if __name__ == "__main__":
    main()
