"""JSON with everything refused that two readers could understand differently."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyengine import strict_json
from pyengine.errors import ModelFormatError
from pyengine.strict_json import SCAN_BYTES, loads, read_bytes, shown


def parse(data: bytes | str, **limits: Any) -> Any:
    return loads(data.encode() if isinstance(data, str) else data, where="f.json", max_bytes=1 << 30, **limits)


def refusal(data: bytes | str, **limits: Any) -> str:
    with pytest.raises(ModelFormatError) as caught:
        parse(data, **limits)
    assert str(caught.value).startswith("f.json: ")
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [{}, [], "", 'a"b\\c\n\u00e9\U0001f600', 0, -7, 2**64, 1.5, -0.0, 1e-300, True, None, {"a": [{"b": "[[{{"}]}],
    ids=repr,
)
def test_what_json_writes_is_read(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=3, ensure_ascii=False)):
        assert parse(text) == value


@pytest.mark.parametrize("text", ["[-0.0, -0e1, -0.5, 1e-0, 10, -10]", '{"-0": "-0 , -0]"}'])
def test_zeros_that_are_no_negative_integer_zero(text: str) -> None:
    assert parse(text) == json.loads(text)


@pytest.mark.parametrize("text", ["[-0]", "[1,-0 ]", '{"a":-0}', '{"a":-0\n}'])
def test_negative_zero(text: str) -> None:
    assert f"-0 at byte {text.index('-0')}" in refusal(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1,"a":1}', "duplicate key 'a'; "),
        ('{"x":{"y":[0,{"a":1,"b":2,"a":3}]}}', "duplicate key 'a' in 'x'.'y'.'1'; "),
        ('{"a":{"b":1,"b":2},"a":{}}', "duplicate key 'a'; "),  # the outer one, whose first value is gone
        ('{"a":1,"\\u0061":2}', "duplicate key 'a'; "),
    ],
)
def test_duplicate_key_is_named_with_its_place(text: str, expected: str) -> None:
    assert expected in refusal(text)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_literals_of_other_languages(literal: str) -> None:
    assert f"the literal {literal} is not JSON" in refusal(f'{{"a":{literal}}}')


@pytest.mark.parametrize("number", ["1e400", "-1e309"])
def test_numbers_out_of_range(number: str) -> None:
    assert f"{number} is out of range" in refusal(f"[{number}]")


@pytest.mark.parametrize("at", [0, 1, SCAN_BYTES - 70, SCAN_BYTES - 64, SCAN_BYTES - 33, SCAN_BYTES - 1, SCAN_BYTES])
def test_number_of_64_characters_wherever_it_lies(at: int) -> None:
    before = "[" + " " * at
    assert parse(f"{before}{'1' * 63}]") == [int("1" * 63)]
    assert "number too large" in refusal(f"{before}{'1' * 64}]")
    assert "number too large" in refusal(f"{before}0.{'1' * 62}]")
    assert parse(f'{before}"{"1" * 64}"]') == ["1" * 64]


@pytest.mark.parametrize("at", range(SCAN_BYTES - 3, SCAN_BYTES + 1))
def test_negative_zero_across_the_pieces_looked_at(at: int) -> None:
    before = "[" + " " * (at - 1)
    assert f"-0 at byte {at}" in refusal(before + "-0]")
    assert parse(before + "-0.5]") == [-0.5]


def test_depth() -> None:
    assert parse("[" * 64 + "]" * 64)
    assert "nesting deeper than 64" in refusal("[" * 65 + "]" * 65)
    assert "nesting deeper than 64" in refusal('{"a":' * 65 + "1" + "}" * 65)
    assert "nesting deeper than 64" in refusal("[" * 10**6)
    assert parse(json.dumps("[" * 1000)) == "[" * 1000
    assert parse('["\\"", "' + "[" * 100 + '"]')[1] == "[" * 100
    assert parse('["\\\\", ' + "[" * 63 + "]" * 63 + "]")[0] == "\\"
    assert "nesting deeper than 64" in refusal('["\\\\", ' + "[" * 64 + "]" * 64 + "]")
    assert "nesting deeper than 3" in refusal("[[[[]]]]", max_depth=3)


def test_depth_across_the_pieces_looked_at() -> None:
    filler = " " * (SCAN_BYTES - 40)
    assert "nesting deeper than 64" in refusal("[" * 40 + filler + "[" * 30 + "]" * 70)
    quoted = '"' + "[" * (SCAN_BYTES + 100) + '"'
    assert parse(f"[{quoted}]")


def test_objects_are_counted_outside_strings() -> None:
    assert parse('[{},{},"{{{"]', max_objects=2) == [{}, {}, "{{{"]
    assert "more than 2 tensors" in refusal("[{},{},{}]", max_objects=2, objects="tensors")


@pytest.mark.parametrize(
    "text",
    ['"\\ud800"', '"\\udfff"', '"\\ud83d\\ud83d\\ude00"', '"\\ud83d x\\ude00"', '{"\\uD800":1}', '"\\\\\\ud800"'],
)
def test_half_a_surrogate_pair(text: str) -> None:
    assert "bad escape" in refusal(text)


@pytest.mark.parametrize("text", ['"\\ud83d\\ude00"', '"\\\\ud800"', '"\\uD83D\\uDE00\\ud83d\\ude01"'])
def test_whole_surrogate_pairs(text: str) -> None:
    assert parse(text) == json.loads(text)


def test_positions_are_bytes() -> None:
    assert "at byte 7" in refusal('"éé" x')
    assert "not UTF-8 at byte 1" in refusal(b'"\xe9"')
    assert "trailing characters at byte 2" in refusal("{}\0")


def test_bytes_and_byte_order_mark() -> None:
    assert "BOM not allowed" in refusal(b"\xef\xbb\xbf{}")
    with pytest.raises(ModelFormatError, match=r"f\.json: 3 bytes; expected at most 2"):
        loads(b"{ }", where="f.json", max_bytes=2)
    assert "not JSON" in refusal(b"")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a'b", "'a'b'"),
        ("\n\x1b[2J\0", "'\\n\\x1b[2J\\x00'"),
        ("\u202e\ud800\U0001f600", "'\\u202e\\ud800\\U0001f600'"),
        (12, "'12'"),
        (None, "'None'"),
        ("x" * 200, "'" + "x" * 200 + "'"),
        ("x" * 201, "'" + "x" * 200 + "...'"),
    ],
)
def test_shown(value: Any, text: str) -> None:
    assert shown(value) == text


def test_read_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for data in (b"", b"x", os.urandom(70_000)):
        path.write_bytes(data)
        assert read_bytes(path, 70_000) == data
    with pytest.raises(ModelFormatError, match="70000 bytes; expected at most 69999"):
        read_bytes(path, 69_999)
    with pytest.raises(ModelFormatError, match="no such file"):
        read_bytes(tmp_path / "b.json", 10)


def test_read_bytes_of_a_file_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"{}")
    status = os.fstat

    def then_grow(fd: int) -> os.stat_result:
        result = status(fd)
        path.write_bytes(b"{}  ")
        return result

    monkeypatch.setattr(strict_json.os, "fstat", then_grow)
    with pytest.raises(ModelFormatError, match="changed while loading"):
        read_bytes(path, 100)
