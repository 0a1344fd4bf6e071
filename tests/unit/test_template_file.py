"""Which template a folder has, and what is refused before anything is compiled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyengine.errors import ChatTemplateError
from pyengine.template_file import MAX_TEMPLATE_BYTES, find_template, read_template


def settings(folder: Path, value: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}), encoding="utf-8")
    return folder


def test_the_file_comes_before_the_settings(tmp_path: Path) -> None:
    assert find_template(tmp_path) is None
    assert find_template(settings(tmp_path, None)) is None
    found = find_template(settings(tmp_path, "one"))
    assert found == ("one", f"{tmp_path / 'tokenizer_config.json'}: chat_template")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    assert find_template(settings(tmp_path, named))[0] == "two"  # type: ignore[index]
    (tmp_path / "chat_template.jinja").write_text("three", encoding="utf-8")
    assert find_template(tmp_path) == ("three", str(tmp_path / "chat_template.jinja"))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "named nothing; expected one named 'default'"),
        (
            [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "x"}],
            "named 'rag', 'tool_use'; expected",
        ),
        ([{"name": "default", "template": "x"}, {"name": "default", "template": "y"}], "named 'default', 'default'"),
        (["x"], "chat_template[0] is 'x'"),
        ([{"name": "default", "template": "x"}, {"template": "y"}], "chat_template[1]"),
        ([{"name": ["default"], "template": "x"}], "chat_template[0]"),
        ([{"name": None, "template": "x"}], "chat_template[0]"),
        ([{"name": "default"}], "chat_template is 'None'"),
        ({"default": "x"}, "expected text or a list of templates"),
        (False, "expected text or a list of templates"),
    ],
)
def test_wrong_settings(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json") as caught:
        find_template(settings(tmp_path, value))
    assert says in str(caught.value)


def test_a_file_that_is_there_and_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    settings(tmp_path, "one")
    file = tmp_path / "chat_template.jinja"
    for make, says in (
        (lambda: file.symlink_to(tmp_path / "gone"), "no such file"),
        (file.mkdir, "not a regular file"),
        (lambda: os.mkfifo(file), "not a regular file"),  # reading it would never end
        (lambda: file.write_bytes(b"ab\xff"), "byte 2 is not UTF-8"),
        (
            lambda: file.write_bytes(b"x" * (MAX_TEMPLATE_BYTES + 1)),
            f"{MAX_TEMPLATE_BYTES + 1} bytes; expected at most",
        ),
    ):
        make()
        with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja: ") as caught:
            find_template(tmp_path)
        assert says in str(caught.value)
        file.rmdir() if file.is_dir() else file.unlink()
    file.write_bytes(b"x" * MAX_TEMPLATE_BYTES)
    assert len(read_template(file).text) == MAX_TEMPLATE_BYTES
