"""Stage 7, cli cache: what is listed and what is cleared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import write_tiny_model
from cache_cases import own_cache
from golden.golden_cases import CONFIGS

import pyengine
from pyengine.cli import cache, generate
from pyengine.cli.main import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two packed models, one of them damaged, and a demo folder."""
    home = own_cache(tmp_path, monkeypatch).parent
    model = write_tiny_model(tmp_path / "model", CONFIGS["llama"])
    for quant in ("int8", "int4"):
        pyengine.load(model, quant=quant, threads=1, log=lambda _: None).close()
    damaged = home / "weights" / "0.weights"
    damaged.write_bytes(bytes(5000))
    demo = home / "demo" / "a-model"
    demo.mkdir(parents=True)
    (demo / "model.safetensors").write_bytes(bytes(7000))
    (home / "demo" / ".half").mkdir()
    return home


def test_the_list(home: Path, capsys: Any) -> None:
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines[:4]] == ["weights", "weights", "weights", "demo"]
    assert sorted(" ".join(line.split()[1:3]) for line in lines[:3]) == ["? 5.0", "int4 g32", "int8 g64"]
    assert lines[3].endswith("a-model")
    assert str(home) in lines[4]


def test_the_object(home: Path, capsys: Any) -> None:
    assert main(["cache", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record.keys() == {"folder", "entries", "cleared"}
    assert (record["folder"], record["cleared"]) == (str(home), 0)
    entries = record["entries"]
    assert all(
        entry.keys() == {"kind", "model", "quant", "group_size", "bytes", "last_used", "path"} for entry in entries
    )
    assert {entry["quant"]: entry["bytes"] for entry in entries if entry["quant"] in (None, "?")} == {
        None: 7000,
        "?": 5000,
    }
    assert all(Path(entry["path"]).exists() for entry in entries)


@pytest.mark.parametrize(
    ("argv", "left"), [(["--clear"], []), (["--clear", "demo"], ["weights"] * 3), (["--clear", "weights"], ["demo"])]
)
def test_clear(home: Path, capsys: Any, argv: list[str], left: list[str]) -> None:
    assert main(["cache", *argv]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"pyengine: {4 - len(left)} removed")
    assert [entry.kind for entry in cache.kept()] == left


def test_nothing_there_and_nothing_to_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "none"))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"nothing in {tmp_path / 'none'}\n"
    assert main(["cache", "--clear", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "none").exists()


def test_a_folder_that_refuses_is_a_resource_error(home: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "--clear", "weights"]) == 6
    assert "Permission denied" in capsys.readouterr().err


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def stop(args: Any) -> Any:
        seen.append(cache._options.engine_arguments(args))
        raise SystemExit

    monkeypatch.setattr(generate, "run", stop)
    for argv in (["--no-cache"], ["--cache-limit", "1.5"], []):
        with pytest.raises(SystemExit):
            main(["generate", "--raw", "-p", "Hi", *argv])
    assert [one["cache"] for one in seen] == [False, True, True]
    assert [one.get("cache_limit") for one in seen] == [None, 1_500_000_000, None]
