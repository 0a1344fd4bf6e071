"""Stage 0, text_file: a prompt and a text to measure on are read by the same rules."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyengine import text_file
from pyengine.cli._options import read_text
from pyengine.errors import RequestError
from pyengine.reports.compare import read_text as measured_text

FAULTS = {
    "missing": "No such file or directory; expected a readable text file",
    "folder": "Is a directory; expected a readable text file",
    "long": "over 10 bytes; expected a shorter text",
    "latin1": "byte 3 is not UTF-8; expected UTF-8 text",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_error_for_both(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "MAX_TEXT_BYTES", 10)
    (tmp_path / "folder").mkdir()
    (tmp_path / "long").write_bytes(b"x" * 11)
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    for read in (lambda path: read_text(str(path)), measured_text):
        with pytest.raises(RequestError) as caught:
            read(tmp_path / fault)
        assert fault in str(caught.value)
        assert str(caught.value).endswith(FAULTS[fault])


def test_an_offset_inside_a_character_counts_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("né!".encode())
    assert measured_text(path, offset=3).content == "!"
    with pytest.raises(RequestError, match="text: byte 2 is not UTF-8"):
        measured_text(path, offset=2)


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    for data, text in ((b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"", "")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        assert read_text("-") == text
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff")))
    with pytest.raises(RequestError, match=r"^stdin: byte 0 is not UTF-8"):
        read_text("-")
