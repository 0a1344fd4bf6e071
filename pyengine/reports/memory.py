"""Stage 6, memory: what this machine can still give to a process: free memory, and the limit of its cgroup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyengine.system import available_memory

MAX_LIMIT = 1 << 60  # above it a cgroup says "no limit" (v1 does so with a large number)


@dataclass(frozen=True)
class MemoryRoom:
    """Bytes. available: the smaller of what the machine and the cgroup have left; None where neither says."""

    available: int | None
    cgroup_limit: int | None


def _number(path: Path) -> int | None:
    """The number in a cgroup's file; None for "max" and for a file that is not there."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path) -> int:
    """Page cache that the kernel gives up before it refuses memory, from a cgroup's memory.stat."""
    total = 0
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key in ("active_file", "inactive_file"):
                total += int(value)
    except (OSError, ValueError):
        return 0
    return total


def cgroup_room(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[tuple[int, int]]:
    """(limit, what is left of it) of this process's memory cgroup and of those above it that have one; v2 and v1."""
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            base, limit_file, used_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_file, used_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = base / name.strip("/")
        for folder in [own, *own.parents]:  # a container may see its own group as the root
            if folder == base.parent:
                break
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and limit < MAX_LIMIT:
                left = limit - max((used or 0) - _reclaimable(folder / "memory.stat"), 0)
                found.append((limit, max(left, 0)))
    return found


def memory_room() -> MemoryRoom:
    """What can be taken now without swapping."""
    groups = cgroup_room()
    free = available_memory()
    left = [room for _, room in groups] + ([] if free is None else [free])
    return MemoryRoom(min(left) if left else None, min((limit for limit, _ in groups), default=None))
