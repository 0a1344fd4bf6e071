"""Stage 6, memory: the limit of a cgroup, v2 and v1, and of those above it."""

from __future__ import annotations

from pathlib import Path

from pyengine.reports.memory import cgroup_room


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    own = root / "outer" / "own"
    own.mkdir(parents=True)
    proc.write_text("0::/outer/own\n")
    assert cgroup_room(proc, root) == []
    (own / "memory.max").write_text("max\n")
    (root / "outer" / "memory.max").write_text("1000\n")
    (root / "outer" / "memory.current").write_text("700\n")
    (root / "outer" / "memory.stat").write_text("anon 100\nactive_file 150\ninactive_file 250\n")
    assert cgroup_room(proc, root) == [(1000, 700)]
    (own / "memory.max").write_text("500\n")
    (own / "memory.current").write_text("900\n")
    assert cgroup_room(proc, root) == [(500, 0), (1000, 700)]
    proc.write_text("4:cpu,memory:/job\n3:cpu:/job\n")
    old = root / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    (root / "memory" / "memory.limit_in_bytes").write_text("4000")
    (root / "memory" / "memory.usage_in_bytes").write_text("1000")
    assert cgroup_room(proc, root) == [(4000, 3000)]
    assert cgroup_room(tmp_path / "none", root) == []
