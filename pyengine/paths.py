"""Stage 0, paths: where pyengine keeps what it makes."""

from __future__ import annotations

import os
from pathlib import Path

SOURCE_MARK = "pyengine_source.json"  # in a folder that was made from a 4-bit file


def weights_cache_dir() -> Path:
    """Where packed weights are kept. Not created here."""
    return cache_dir() / "weights"


def cache_dir() -> Path:
    """$PYENGINE_CACHE, else $XDG_CACHE_HOME/pyengine, else ~/.cache/pyengine. Not created here."""
    own = os.environ.get("PYENGINE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "pyengine" if base else Path.home() / ".cache" / "pyengine"
