"""Kills, full disks, damaged caches, Ctrl-C and little memory: a few of each; tools/checks/faults.py does hundreds."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cache_cases import calibrated_model
from tool_scripts import TOOLS

import pyengine
from pyengine import system
from pyengine.errors import RequestError, ResourceError

# interrupt: the 200 ms of the rule hold on a quiet machine; the tests' machine may be busy
CHECKS = {
    "kill": ["--count", "5"],
    "full": ["--count", "5"],
    "flips": ["--count", "50"],
    "interrupt": ["--count", "6", "--limit-ms", "5000"],
    "memory": ["--count", "8"],
}


@pytest.mark.parametrize("check", CHECKS)
def test_faults(tmp_path: Path, check: str) -> None:
    command = [sys.executable, "-W", "ignore", str(TOOLS / "checks" / "faults.py"), check, *CHECKS[check]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{check}: {CHECKS[check][1]} "), done.stdout


def test_a_limit_on_address_space_counts_as_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "_physical_room", lambda: 1000)
    for room, least in ((None, 1000), (700, 700), (2000, 1000)):
        monkeypatch.setattr(system, "_address_room", lambda room=room: room)
        assert system.available_memory() == least
    monkeypatch.setattr(system, "_physical_room", lambda: None)
    assert system.available_memory() == 2000
    monkeypatch.setattr(system, "_address_room", lambda: (64 << 20) - 1)
    with pytest.raises(ResourceError, match=r"67108863 bytes of address space left \(ulimit -v\); expected 67108864"):
        pyengine.load(calibrated_model(tmp_path))


def test_an_engine_closed_while_another_thread_generates(tmp_path: Path) -> None:
    """The step in progress ends first; what comes after is refused, and the request keeps what it had."""
    model = calibrated_model(tmp_path)
    for _ in range(5):
        engine = pyengine.load(model, threads=2)
        expected = engine.generate([5, 17, 3], max_tokens=400, ignore_eos=True).tokens
        stream, begun, errors = engine.stream([5, 17, 3], max_tokens=400, ignore_eos=True), threading.Event(), []

        def use(stream=stream, begun=begun, errors=errors) -> None:
            try:
                for _ in stream:
                    begun.set()
            except RequestError as error:
                errors.append(str(error))

        user = threading.Thread(target=use)
        user.start()
        assert begun.wait(300)
        engine.close()
        del engine
        user.join(300)
        assert not user.is_alive()
        assert stream.result is not None
        if errors:  # unless it was quicker than close()
            assert errors == ["the engine is closed; expected an open one"]
            assert stream.result.finish_reason == "cancelled"
        assert stream.result.tokens == expected[: len(stream.result.tokens)]
