"""Stage 0, system: what the machine has left."""

from __future__ import annotations


def available_memory() -> int | None:
    """Bytes that can still be taken without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
