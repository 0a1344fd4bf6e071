"""What MODEL resolves to: paths, the hub cache, offline, and a hub client replaced by a recorder (no network)."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import safetensors_bytes

from pyengine import hub
from pyengine.errors import ModelNotFoundError, PyEngineError, RequestError, ResourceError
from pyengine.paths import cache_dir

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, no other settings, and a working folder without models."""
    for name in list(os.environ):
        if name.startswith(("HF_", "XDG_", "HUGGINGFACE_", "PYENGINE_")):
            monkeypatch.delenv(name)
    folder, elsewhere = tmp_path / "hub", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(elsewhere)
    return folder


def snapshot(cache: Path, name: str = "org/name", *, ref: str = "main", sharded: bool = False) -> Path:
    """A model in the hub cache as the hub client lays it out: refs, blobs, and a snapshot of links."""
    repository = cache / ("models--" + name.replace("/", "--"))
    (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(COMMIT)
    files = {"config.json": b"{}"}
    if sharded:
        files |= dict.fromkeys(SHARDS, safetensors_bytes("{}"))
        index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
        files["model.safetensors.index.json"] = json.dumps(index).encode()
    else:
        files["model.safetensors"] = safetensors_bytes("{}")
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for at, (file, data) in enumerate(files.items()):
        (repository / "blobs" / str(at)).write_bytes(data)
        (folder / file).symlink_to(Path("../../blobs") / str(at))
    return folder


def refused(error: type[PyEngineError], model: str, *texts: str, offline: bool = True) -> None:
    with pytest.raises(error) as caught:
        hub.resolve(model, offline=offline)
    assert type(caught.value) is error
    for text in texts:
        assert text in str(caught.value)


# ---- paths


def test_existing_path_wins(cache: Path) -> None:
    snapshot(cache)
    Path("org/name").mkdir(parents=True)
    assert hub.resolve("org/name", offline=True) == Path("org/name")


@pytest.mark.parametrize("name", ["with space", "modèle 模型", "-n"])
def test_path_as_it_is(name: str, cache: Path) -> None:
    Path(name).mkdir()
    assert hub.resolve(name) == Path(name)


def test_home(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/elsewhere") == tmp_path / "elsewhere"


def test_path_that_is_not_utf8(cache: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    try:
        Path(name).mkdir()
    except OSError as error:
        pytest.skip(f"this file system has no such names: {error.strerror}")
    assert hub.resolve(name) == Path(name)


def test_file_is_no_model(cache: Path) -> None:
    Path("model.safetensors").write_bytes(b"")
    refused(RequestError, "model.safetensors", "a file", "expected the folder of a model")
    Path("model.gguf").write_bytes(b"")
    assert hub.resolve("model.gguf") == Path("model.gguf")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere-at-all", "../x", "org/name/"])
def test_path_that_is_not_there(model: str, cache: Path) -> None:
    refused(ModelNotFoundError, model, model, "no such folder")


@pytest.mark.parametrize("model", ["Why is the sky blue?", "x" * 5000, "nul\0byte"])
def test_a_prompt_in_the_wrong_place(model: str, cache: Path) -> None:
    refused(RequestError, model, "did you mean -p", offline=False)


@pytest.mark.parametrize("model", ["gpt2", "name@main"])
def test_neither_path_nor_id(model: str, cache: Path) -> None:
    refused(RequestError, model, f"'{model}' is neither a folder nor org/name; expected one of them", offline=False)
    with pytest.raises(RequestError) as caught:
        hub.resolve(model)
    assert "-p" not in str(caught.value)


@pytest.mark.parametrize("model", ["", "  "])
def test_empty_name_is_not_the_current_folder(model: str, cache: Path) -> None:
    refused(RequestError, model, "empty model name")


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("models/qwen-smal", "models/qwen-small"),  # as an id of the hub, it would be looked for there
        ("./modls/qwen-small", "models/qwen-small"),
        ("./models/Qwen-Small", "models/qwen-small"),
        ("./modles/qwen-small/x.gguf", "models/qwen-small/x.gguf"),
        ("./models/qwen-small/y.gguf", "models/qwen-small/x.gguf"),
        ("{here}/models/qwensmall", "{here}/models/qwen-small"),
        ("org/nmae", "org/name"),
        ("ORG/name@v2", "org/name"),
    ],
)
def test_a_name_almost_like_one_that_is_there(model: str, meant: str, cache: Path) -> None:
    snapshot(cache)
    Path("models/qwen-small").mkdir(parents=True)
    Path("models/qwen-small/x.gguf").touch()
    Path("models/qwen-smalls").touch()  # a file is no model
    model, meant = (text.format(here=os.getcwd()) for text in (model, meant))
    refused(ModelNotFoundError, model, f"; did you mean {meant}?")
    with pytest.raises(ModelNotFoundError, match="; did you mean "):
        hub.config_file(model, offline=True)


def test_a_word_almost_like_a_model(cache: Path) -> None:
    snapshot(cache, "org/qwen-small")
    refused(RequestError, "qwen-smal", "expected one of them; did you mean org/qwen-small?")
    Path("qwen-small").mkdir()
    refused(RequestError, "qwen_small", "expected one of them; did you mean qwen-small?")
    refused(RequestError, "qwen small", "did you mean qwen-small, or -p 'qwen small'?")


@pytest.mark.parametrize(
    "model", ["./nowhere/at/all", "org/other", "/", "..", "a/b/c", "x" * 300 + "/y", "é" * 90 + "/y"]
)
def test_nothing_is_guessed_from_afar(model: str, cache: Path) -> None:
    snapshot(cache)
    Path("models").mkdir()
    if os.path.exists(model):
        assert hub._near(model) is None
        return
    with pytest.raises(PyEngineError) as caught:
        hub.resolve(model, offline=True)
    assert "did you mean" not in str(caught.value).replace("did you mean -p", "")


# ---- the cache


@pytest.mark.parametrize("sharded", [False, True])
def test_cached(sharded: bool, cache: Path) -> None:
    folder = snapshot(cache, sharded=sharded)
    for model in ("org/name", "org/name@main", f"org/name@{COMMIT}"):
        assert hub.resolve(model, offline=True) == folder


@pytest.mark.parametrize("ref", ["v1.0", "refs/pr/1"])
def test_cached_revision(ref: str, cache: Path) -> None:
    folder = snapshot(cache, ref=ref)
    assert hub.resolve(f"org/name@{ref}", offline=True) == folder
    refused(ModelNotFoundError, "org/name", "not in the hub cache", "`hf download org/name`")
    refused(ModelNotFoundError, "org/name@v2", "`hf download org/name --revision v2`")


@pytest.mark.parametrize("lost", ["config.json", SHARDS[1], "model.safetensors"])
def test_incomplete_snapshot(lost: str, cache: Path) -> None:
    folder = snapshot(cache, sharded=lost == SHARDS[1])
    os.unlink(
        folder.parent.parent / "blobs" / os.path.basename(os.readlink(folder / lost))
    )  # a link to nothing is left
    refused(ModelNotFoundError, "org/name", "incomplete", lost, "offline", "`hf download org/name`")


def test_damaged_index_is_not_an_incomplete_download(cache: Path) -> None:
    folder = snapshot(cache, sharded=True)
    (folder / "model.safetensors.index.json").resolve().write_text("{")
    assert hub.resolve("org/name", offline=True) == folder


def test_pickle_only_snapshot_is_complete(cache: Path) -> None:
    """Loading it says that pickle is never read; downloading again would not help."""
    folder = snapshot(cache)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert hub.resolve("org/name", offline=True) == folder


@pytest.mark.parametrize("text", ["../../../elsewhere", "", "a/b"])
def test_reference_that_leaves_the_cache(text: str, cache: Path) -> None:
    snapshot(cache)
    (cache / "models--org--name" / "refs" / "main").write_text(text)
    refused(ModelNotFoundError, "org/name", "not in the hub cache")


def test_revision_that_leaves_the_cache(cache: Path) -> None:
    refused(ModelNotFoundError, "org/name@../../x", "no such folder")


def test_order_of_cache_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.hub_cache() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub.hub_cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", "~/own")
    assert hub.hub_cache() == tmp_path / "own"


def test_own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYENGINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "pyengine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "pyengine"
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    assert list(tmp_path.iterdir()) == []


# ---- downloads

FILES = {
    "config.json": 500,
    "model.safetensors": 2_000_000,
    "tokenizer.json": 7_000,
    "chat_template.jinja": 500,
    "README.md": 10**9,
    "pytorch_model.bin": 10**9,
    "onnx/model.safetensors": 10**9,
    "original/params.json": 10**9,
    "consolidated.safetensors": 10**9,
}


@pytest.fixture
def client(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The hub client, replaced: records its calls and lays a snapshot into the cache."""
    import huggingface_hub

    calls: list[dict[str, Any]] = []

    class Api:
        def model_info(self, name: str, **kwargs: Any) -> Any:
            calls.append({"name": name, **kwargs})
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f, size=s) for f, s in FILES.items()])

    def snapshot_download(name: str, **kwargs: Any) -> str:
        calls.append({"name": name, **kwargs})
        return str(snapshot(cache, name))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_download(client: list[dict[str, Any]], cache: Path) -> None:
    said: list[str] = []
    folder = hub.resolve("org/name@v1", log=said.append)
    assert folder == cache / "models--org--name" / "snapshots" / COMMIT
    assert said == [f"downloading org/name: 4 files, 2.0 MB, to {cache}"]
    assert [call["revision"] for call in client] == ["v1", "v1"]
    assert client[1]["cache_dir"] == cache
    wanted = {f for f in FILES if hub._is_wanted(f)}
    assert wanted == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert client[1]["allow_patterns"] == hub.PATTERNS
    assert client[1]["ignore_patterns"] == hub.IGNORED
    client.clear()
    assert hub.resolve("org/name", log=said.append) == folder
    assert client == []


def test_no_route_to_the_hub(cache: Path) -> None:
    """The hub client itself, in a process of its own (it reads its settings once), sent to a port nobody listens on."""
    script = "from pyengine import hub; from pyengine.errors import ModelNotFoundError as E\n"
    script += "try: hub.resolve('org/name')\nexcept E as error: print(error)"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "org/name: cannot be downloaded" in done.stdout
    assert "`hf download org/name`" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_offline_setting(value: str, client: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    refused(ModelNotFoundError, "org/name", "offline", "`hf download org/name`", offline=False)
    assert client == []


def failing(make: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(name: str, **kwargs: Any) -> str:
        raise make()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("make", "error", "texts"),
    [
        (lambda: OSError(errno.ENOSPC, "No space left on device"), ResourceError, ("No space left", "org/name")),
        (lambda: ConnectionError("no route\nto host"), ModelNotFoundError, ("(no route)", "`hf download org/name`")),
        (lambda: RuntimeError(), ModelNotFoundError, ("(RuntimeError)", "`hf download org/name`")),
    ],
    ids=["disk-full", "no-network", "anything-else"],
)
def test_download_that_fails(
    make: Callable[[], Exception],
    error: type[PyEngineError],
    texts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(make, monkeypatch)
    refused(error, "org/name", *texts, offline=False)
    assert "downloading org/name" in capsys.readouterr().err


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("GatedRepoError", "set HF_TOKEN"),
        ("RepositoryNotFoundError", "not on the hub"),
        ("RevisionNotFoundError", "v1"),
    ],
)
def test_answers_of_the_hub(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    error_class = getattr(errors, kind)
    failing(lambda: error_class.__new__(error_class), monkeypatch)
    refused(ModelNotFoundError, "org/name@v1", text, "`hf download org/name --revision v1`", offline=False)
