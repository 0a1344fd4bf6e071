"""The test programs of tests/core, built against the installed library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from c_client import FOLDER

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = (str(FOLDER / "libpyengine_cpu.so"), f"-Wl,-rpath,{FOLDER}")


def compiled(folder: Path, name: str, *arguments: str) -> Path:
    """tests/core/<name>.cc as a program in `folder`; arguments: other sources, libraries, options of g++. Skips the
    test without g++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    source, include = ROOT / "tests" / "core" / f"{name}.cc", ROOT / "csrc" / "include"
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{include}"]
    subprocess.run(["g++", *options, str(source), *arguments, "-o", str(folder / name)], check=True)
    return folder / name
