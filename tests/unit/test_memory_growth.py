"""Requests leave no memory behind: tools/checks/memory_growth.py on a tiny model, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from golden.golden_cases import CONFIGS, build

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tools" / "checks" / "memory_growth.py"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_requests_leave_no_memory(tmp_path: Path) -> None:
    folder = build(tmp_path, {**CONFIGS["qwen2_window"], "max_position_embeddings": 512}, seed=4)
    command = [sys.executable, str(CHECK), str(folder), "--requests", "400", "--tokens", "10", "--limit-mib", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    said = re.fullmatch(r"400 requests, (\d+) tokens: resident memory grew by (-?[\d.]+) MiB\n", done.stdout)
    assert said, done.stderr
    assert done.returncode == 0, done.stdout
    assert int(said[1]) > 3800
