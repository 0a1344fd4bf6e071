"""Downloads with the hub client itself, from a hub on 127.0.0.1 (HF_ENDPOINT), each in a process of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import hub_server
import pytest
import tiny_tokenizers
from builders import tiny_tensors, write_tiny_model
from golden.golden_cases import CONFIGS
from hub_server import Hub
from safetensors.numpy import save

CONFIG = {**CONFIGS["llama"], "vocab_size": 280}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def model_files(folder: Path, *, sharded: bool = False) -> dict[str, bytes]:
    write_tiny_model(folder, CONFIG)
    tiny_tokenizers.write(folder, tiny_tokenizers.byte_level(), bos_token="<|im_start|>")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if sharded:
        del files["model.safetensors"]
        tensors = tiny_tensors(CONFIG)
        names = [{n for n in tensors if "layers.1" in n}, {n for n in tensors if "layers.1" not in n}]
        for shard, part in zip(SHARDS, names, strict=True):
            files[shard] = save({name: tensors[name] for name in part})
        weight_map = {name: shard for shard, part in zip(SHARDS, names, strict=True) for name in part}
        files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    others = ("README.md", "pytorch_model.bin", "onnx/model.safetensors", "consolidated.safetensors", "model.gguf")
    return files | dict.fromkeys(others, b"not wanted")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with hub_server.running() as running:
        running.models["org/whole"] = model_files(tmp_path / "source")
        running.models["org/shards"] = model_files(tmp_path / "source", sharded=True)
        yield running


RUN = """
import contextlib, io, json, sys
from pyengine.cli.main import main
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
Done = tuple[int, str, str]  # exit code, stdout, stderr


def commands(hub: Hub, tmp_path: Path, *argvs: list[str], **settings: str) -> list[Done]:
    """Commands in a process of its own, one after the other: the client reads HF_ENDPOINT once."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(argvs)],
        env=environment(hub, tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def environment(hub: Hub, tmp_path: Path, **settings: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "PYENGINE_"))}
    own = {"HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "NO_PROXY": "*"}
    return {**kept, **own, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **settings}


def generate(model: str, *extra: str) -> list[str]:
    return ["generate", model, "-p", "hi", "-n", "2", "--json", "--no-cache", "-t", "1", *extra]


@pytest.mark.parametrize("name", ["org/whole", "org/shards@v1"])
def test_a_model_is_downloaded_once(name: str, hub: Hub, tmp_path: Path) -> None:
    (first,) = commands(hub, tmp_path, generate(name))
    assert first[0] == 0, first[2]
    model = name.split("@")[0]
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    if model == "org/shards":
        wanted = wanted - {"model.safetensors"} | {*SHARDS, "model.safetensors.index.json"}
    assert hub.files_asked() == wanted
    size = sum(len(hub.models[model][file]) for file in wanted) / 1e6
    assert first[2].splitlines() == [  # and no bar: stderr is no terminal
        f"pyengine: downloading {model}: {len(wanted)} files, {size:.1f} MB, to {tmp_path / 'hub'}"
    ]
    hub.requests.clear()
    source = str(tmp_path / "source")
    (again, folder) = commands(hub, tmp_path, generate(name, "-q"), generate(source, "-q"))
    assert again[0] == folder[0] == 0, again[2]
    assert again[2] == ""
    assert json.loads(again[1])["tokens"] == json.loads(first[1])["tokens"] == json.loads(folder[1])["tokens"]
    assert hub.requests == []


@pytest.mark.parametrize("command", [["account", "-t", "1"], ["generate", "-p", "hi"]])
def test_without_a_network_it_is_one_line_at_once(command: list[str], hub: Hub, tmp_path: Path) -> None:
    (done,) = commands(hub, tmp_path, [*command, "org/whole"], HF_ENDPOINT="http://127.0.0.1:9")
    assert (done[0], done[1], done[2].count("\n")) == (3, "", 1)
    assert "org/whole: cannot be downloaded (" in done[2]


def test_quiet_and_config_alone(hub: Hub, tmp_path: Path) -> None:
    account, whole = commands(
        hub, tmp_path, ["account", "org/shards", "--json", "-t", "1"], generate("org/whole", "-q")
    )
    assert account[0] == 0, account[2]
    assert (whole[0], whole[2]) == (0, "")
    shards = {path for _, path in hub.requests if path.startswith("/org/shards/")}
    assert shards == {"/org/shards/resolve/main/config.json"}


def test_a_bar_on_a_terminal(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/whole"]["config.json"] += b" " * 100_000
    for extra, there in (([], True), (["-q"], False)):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        argv = [sys.executable, "-m", "pyengine", "inspect", "org/whole", *extra]
        settings = environment(hub, tmp_path, HF_HUB_CACHE=str(tmp_path / f"hub{there}"))
        process = subprocess.Popen(argv, env=settings, stdout=subprocess.DEVNULL, stderr=theirs, cwd=tmp_path)
        os.close(theirs)
        seen = b""
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not block:
                break
            seen += block
        os.close(ours)
        assert process.wait(60) == 0, seen
        assert (b"%|" in seen) == there, seen


def test_not_found(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/gated"] = hub.models["org/private"] = hub.models["org/whole"]
    hub.gated.add("org/gated")
    hub.private.add("org/private")
    expected = {
        "org/nothing": "not a folder and not on the hub; expected a model that `hf download org/nothing` finds",
        "org/whole@v9": "no revision 'v9' on the hub; run `hf download org/whole --revision v9` with one",
        "org/gated": "gated; accept its licence, set HF_TOKEN and run `hf download org/gated`",
        "org/private": "not a folder and not on the hub; expected a model that `hf download org/private` finds",
    }
    found = commands(hub, tmp_path, *(generate(name) for name in expected))
    for (name, says), (code, out, err) in zip(expected.items(), found, strict=True):
        assert (code, out) == (3, ""), err
        lines = err.splitlines()
        assert lines[-1] == f"pyengine: error: {name.split('@')[0]}: {says}"
        assert len(lines) == 1 + (name == "org/gated")  # whose size is public
    for name, (code, _, err) in zip(
        expected, commands(hub, tmp_path, *(["account", name, "-t", "1"] for name in expected)), strict=True
    ):
        assert code == 3
        assert f"hf download {name.split('@')[0]} config.json" in err


@pytest.mark.parametrize("kind", ["gated", "private"])
def test_token(kind: str, hub: Hub, tmp_path: Path) -> None:
    getattr(hub, kind).add("org/whole")
    (wrong,) = commands(hub, tmp_path, ["inspect", "org/whole"], HF_TOKEN="hf_wrong")
    (right,) = commands(hub, tmp_path, ["inspect", "org/whole"], HF_TOKEN=hub_server.TOKEN)
    assert (wrong[0], right[0]) == (3, 0), (wrong, right)
    assert hub_server.TOKEN not in right[2] + wrong[2]


def test_a_download_that_breaks_off_is_finished_by_the_next(hub: Hub, tmp_path: Path) -> None:
    hub.cut.add("model.safetensors")
    name = "org/whole"
    broken, offline = commands(hub, tmp_path, ["inspect", name], ["inspect", name, "--offline"])
    assert (broken[0], offline[0]) == (3, 3)
    assert "org/whole: cannot be downloaded" in broken[2]
    assert "`hf download org/whole`" in broken[2]
    assert "incomplete in the hub cache (without model.safetensors), and offline" in offline[2]
    hub.cut.clear()
    (done,) = commands(hub, tmp_path, generate(name))
    assert done[0] == 0, done[2]


def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    del hub.models["org/shards"][SHARDS[1]]
    cases = {
        "org/shards": (3, f"without {SHARDS[1]} on the hub; expected a complete model"),
        "org/gguf": (3, "2 GGUF files and no safetensors; run `hf download org/gguf x-Q4_0.gguf`"),
        "org/pickle": (4, "only pytorch_model.bin, and pickle is never read"),
        "org/text": (3, "2 files on the hub and no weights"),
        "org/onnx": (3, "2 files on the hub and no weights"),
    }
    for name, files in (
        ("org/gguf", ("x-Q8_0.gguf", "x-Q4_0.gguf")),
        ("org/pickle", ("pytorch_model.bin",)),
        ("org/text", ("README.md",)),
        ("org/onnx", ("onnx/model.safetensors",)),
    ):
        hub.models[name] = dict.fromkeys(files, b"x") | {"config.json": b"{}"}
    found = commands(hub, tmp_path, *(["inspect", name] for name in cases))
    for (name, (code, says)), (got, _, err) in zip(cases.items(), found, strict=True):
        assert got == code, err
        assert f"{name}: {says}" in err
    assert not any(path.startswith("/org/") and "/shards/" not in path for _, path in hub.requests)


def test_offline_asks_nothing(hub: Hub, tmp_path: Path) -> None:
    (option,) = commands(hub, tmp_path, generate("org/whole", "--offline"))
    (setting,) = commands(hub, tmp_path, generate("org/whole"), HF_HUB_OFFLINE="1")
    for code, _, err in (option, setting):
        assert code == 3
        assert "not in the hub cache, and offline; run `hf download org/whole` with a network" in err
    assert hub.requests == []
