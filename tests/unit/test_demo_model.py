"""The demo model against answers of transformers. These tests need a network once, then the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from pyengine import demo
from pyengine.chat_template import ChatTemplate, encode_chat
from pyengine.checkpoint import Checkpoint
from pyengine.config import load_model_spec
from pyengine.engine import load
from pyengine.errors import ModelNotFoundError
from pyengine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def real() -> Path:
    try:
        return demo.demo_folder()
    except ModelNotFoundError as error:
        pytest.skip(f"the demo model is not in the cache and cannot be fetched: {error}")


# made with transformers 5.24.0: AutoTokenizer.from_pretrained(folder)(text).input_ids
AUTO_TOKENIZER = [
    ("", []),
    (" ", [216]),
    ("\nfoo \U0001f917 bar   ", [198, 15236, 15107, 114, 241, 2753, 333]),
    ("3333+777", [35, 35, 35, 35, 27, 39, 39, 39]),
    ("123456789012", [33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 33, 34]),
    ("C\u1eeda Vi\u1ec7t", [51, 25275, 251, 81, 10506, 25275, 225, 100]),
    (" Vi\u1ec7t", [10506, 25275, 225, 100]),
    ("theorem t (a b : \u2115)", [1195, 390, 93, 252, 365, 81, 278, 1577, 4636, 222, 239, 25]),
    ("a\r\nb\r\n", [81, 201, 198, 82, 2738]),
    (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
        [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 321, 231, 10813, 235, 116],
    ),
    (
        "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
        [38229, 31838, 23970, 162, 247, 12960, 112, 23970, 31838, 162, 247],
    ),
    (
        "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
        [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    ),
    ("\u010d\x00\xe9", [30033, 190, 2756]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("don't I'LL", [12420, 982, 339, 23, 16421]),
    ("\t\t  x", [1656, 216, 1792]),
    ("e\u0301 vs \xe9", [85, 151, 219, 6375, 26411]),
]
CHAT_IDS = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
    198,
    1,
    4093,
    198,
    81,
    44,
    108,
    306,
    79,
    486,
    108,
    46,
    198,
    44,
    108,
    306,
    79,
    3738,
    108,
    46,
    9690,
    198,
    82,
    2,
    198,
    1,
    520,
    9531,
    198,
]


@pytest.mark.parametrize(("text", "ids"), AUTO_TOKENIZER)
def test_the_demos_tokenizer_is_autotokenizers(real: Path, text: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.load(real, vocab_size=49152)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_the_demos_template_is_autotokenizers(real: Path) -> None:
    """What apply_chat_template gives, with sanitize_control_tokens=True: the user's special tokens are text."""
    tokenizer = Tokenizer.load(real, vocab_size=49152)
    template = ChatTemplate.load(real, tokenizer)
    assert template is not None
    messages = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb"}]
    assert encode_chat(tokenizer, template, messages) == CHAT_IDS


def test_the_demo_is_the_model(real: Path) -> None:
    spec = load_model_spec(real)
    assert (spec.hidden_size, len(spec.layers), spec.vocab_size) == (576, 30, 49152)
    with Checkpoint.open(real) as checkpoint:
        assert sum(int(np.prod(info.shape)) for info in checkpoint.tensors.values()) == 134_515_008
        digest = hashlib.sha256(checkpoint.read("model.layers.7.self_attn.q_proj.weight").tobytes()).hexdigest()
    assert digest == "9d971d3ae42b2d705a12875ee98c918c36850df918fa88e858d8ea17401f4813"
    assert (real / demo.SOURCE_MARK).exists()


@pytest.mark.parametrize("quant", ["f32", "bf16", "int8", "int4"])
def test_the_demo_knows_its_capitals(real: Path, quant: str) -> None:
    with load(real, quant=quant) as engine:
        assert engine.tokenizer is not None
        template = ChatTemplate.load(real, engine.tokenizer)
        assert template is not None
        ids = encode_chat(engine.tokenizer, template, [{"role": "user", "content": "What is the capital of Japan?"}])
        japan = engine.generate(ids, max_tokens=32)
        france = engine.generate("The capital of France is", max_tokens=32)
        pieces = [piece.text for piece in engine.stream(ids, max_tokens=32)]
    assert "Tokyo" in japan.text
    assert japan.finish_reason == "stop"
    assert "Paris" in france.text
    assert "".join(pieces) == japan.text
