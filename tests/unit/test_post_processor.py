"""What a tokenizer's post-processor adds to a text: BOS or not, and nothing that a model has no row for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from tiny_tokenizers import ids_of
from tokenizers import processors

from pyengine.errors import TokenizerError
from pyengine.tokenizer import Tokenizer


def load(folder: Path, tokenizer: Any, **settings: Any) -> Tokenizer:
    return Tokenizer.load(tiny.write(folder, tokenizer, **settings), vocab_size=300)


def test_the_post_processor_decides_about_bos(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path, tiny.byte_level(post=tiny.bos_processor()), bos_token=tiny.SPECIAL[0], add_bos_token=False
    )
    assert tokenizer.encode("a") == [256, *ids_of("a")]
    assert tokenizer.encode("") == [256]
    assert tokenizer.encode("a<|im_end|>", parse_special=False) == [256, *ids_of("a<|im_end|>")]
    assert tokenizer.encode("a", add_special_tokens=False) == ids_of("a")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"special_tokens": {}}, r"post_processor adds '<\|im_start\|>'; expected it under its special_tokens"),
        ({"special_tokens": None}, r"post_processor adds '<\|im_start\|>'; expected it under its special_tokens"),
        ({"single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}, r"post_processor adds 'x'; expected"),
        (
            {"special_tokens": {"<|im_start|>": {"id": "", "ids": [7, 300], "tokens": []}}},
            r"token id 300; .* below 300",
        ),
        ({"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 300]}, r"adds token id 300; expected ids below 300"),
        ({"type": "RobertaProcessing", "sep": ["a", 2**32], "cls": ["b", 1]}, r"adds token id 4294967296; expected"),
    ],
)
def test_what_a_post_processor_adds_is_checked_at_load(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, Any], message: str, nested: bool
) -> None:
    document = tiny.document(tiny.byte_level(post=tiny.bos_processor()))
    document["post_processor"].update(change)
    if nested:
        document["post_processor"] = {"type": "Sequence", "processors": [document["post_processor"]]}
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: .*{message}"):
        load(tmp_path, document)
    assert capfd.readouterr().err == ""  # a panic of the package would be there


def test_a_template_of_two_texts_is_not_looked_at(tmp_path: Path) -> None:
    document = tiny.document(tiny.byte_level(post=tiny.bos_processor()))
    document["post_processor"]["pair"] = [{"SpecialToken": {"id": "x", "type_id": 0}}]
    document["post_processor"]["special_tokens"]["y"] = {"id": "y", "ids": [2**31], "tokens": ["y"]}
    assert load(tmp_path, document).encode("a") == [256, *ids_of("a")]


@pytest.mark.parametrize("add", [True, False, None])
def test_a_post_processor_without_bos_wins_over_add_bos_token(tmp_path: Path, add: bool | None) -> None:
    """As AutoTokenizer of transformers 5.24, for the classes of Llama, Qwen2 and PreTrainedTokenizerFast alike."""
    processor = processors.ByteLevel(trim_offsets=False)
    tokenizer = load(tmp_path, tiny.byte_level(post=processor), bos_token=tiny.SPECIAL[0], add_bos_token=add)
    assert tokenizer.encode("a") == ids_of("a")


@pytest.mark.parametrize(("add", "expected"), [(True, [256]), (False, []), (None, [])])
def test_without_a_post_processor_add_bos_token_decides(tmp_path: Path, add: bool | None, expected: list[int]) -> None:
    tokenizer = load(tmp_path, tiny.byte_level(), bos_token={"content": tiny.SPECIAL[0]}, add_bos_token=add)
    assert tokenizer.encode("a") == expected + ids_of("a")
    assert tokenizer.encode("<|im_end|>", parse_special=False) == expected + ids_of("<|im_end|>")
    assert tokenizer.encode("a", add_special_tokens=False) == ids_of("a")
