"""The tokenizer in a GGUF file: the same ids and texts as the tokenizer.json it stands for, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from pyengine import gguf_tokenizer
from pyengine.chat_template import ChatTemplate
from pyengine.errors import PyEngineError
from pyengine.tokenizer import Tokenizer
from pyengine.tokenizer_file import has_tokenizer

SIZE = 320
TEXTS = (
    "",
    " ",
    "hihi Hi 12345 x",
    "don't WE'LL I'm",
    "  a\n\n\tb \r\n c   ",
    "caf\u00e9 e\u0301 \u65e5\u672c\u8a9e \U0001f642 \u0661\u0662",
    "HelloWorld fooBar ABCdef",
    "<|im_start|>hi<|im_end|> <tool> </tool>!",
    "a/b//c -- ''s",
)
MERGES = (("h", "i"), ("hi", "hi"), ("1", "2"), ("\u0120", "a"))


def write(path: Path, keys: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        if value is not None:
            tiny_gguf.add(writer, key, value)
    writer.add_tensor("x", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(pattern: str) -> Any:
    parts = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
ORIGINALS = {  # what the tokenizer.json of each kind of model has
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "llama-bpe": split(WORDS + r"\p{N}{1,3}" + REST),
    "qwen2": split(WORDS + r"\p{N}" + REST),
}


def byte_level(pre: str) -> Any:
    tokenizer = tiny_tokenizers.byte_level(merges=MERGES)
    tokenizer.pre_tokenizer = ORIGINALS[pre]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("pre", list(ORIGINALS))
def test_byte_level_bpe(pre: str, tmp_path: Path) -> None:
    original = byte_level(pre)
    folder = tiny_tokenizers.write(tmp_path / "folder", original)
    path = write(tmp_path / "m.gguf", tiny_gguf.tokenizer_keys(original, SIZE, pre, add_bos_token=False))
    assert has_tokenizer(path)
    ours, theirs = (Tokenizer.load(model, vocab_size=SIZE) for model in (path, folder))
    assert ours.special_tokens == theirs.special_tokens
    for text in TEXTS:
        for parse in (True, False):
            ids = ours.encode(text, parse_special=parse)
            assert ids == theirs.encode(text, parse_special=parse), text
            assert ours.decode(ids) == theirs.decode(ids), text
    assert ours.token_to_id("[PAD319]") is None  # a place that only fills up the embedding
    assert ours.decode([SIZE - 1]) == ""


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab 12345's x", ["ab", " 12345", "'s", " x"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("llama-bpe", "a 12345'LL", ["a", " ", "123", "45", "'LL"]),
        ("llama3", "12345", ["123", "45"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("deepseek-r1-qwen", "12 a", ["1", "2", " a"]),
        ("tekken", "HelloWorld 12 ABCdef a/\n", ["Hello", "World", " ", "1", "2", " ABCdef", " a", "/\n"]),
    ],
)
def test_words_of_a_pre_tokenizer(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    """A token for each word and no merges to it but for `ignore_merges`: what is joined across a border would show."""
    keys = tiny_gguf.tokenizer_keys(tiny_tokenizers.byte_level(merges=MERGES), SIZE, pre)
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", keys), vocab_size=SIZE)
    split = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in split] == words


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [256]), ("qwen2", [ord("a") - 33, ord("b") - 33])])
def test_whole_words_of_the_vocabulary(pre: str, ids: list[int], tmp_path: Path) -> None:
    """Llama 3's kind takes a word that is a token, also where no merge leads to it."""
    document = tiny_tokenizers.document(tiny_tokenizers.byte_level(special=()))
    document["model"]["vocab"]["ab"] = 256
    document["model"]["vocab"]["cd"] = 257
    document["model"]["merges"] = [["c", "d"]]
    from tokenizers import Tokenizer as Backend

    keys = tiny_gguf.tokenizer_keys(Backend.from_str(json.dumps(document)), SIZE, pre, add_bos_token=False)
    assert Tokenizer.load(write(tmp_path / "m.gguf", keys), vocab_size=SIZE).encode("ab") == ids


@pytest.mark.parametrize(
    ("pre", "flags", "ids"),
    [
        ("gpt-2", {}, [260]),
        ("gpt-2", {"add_bos_token": True}, [261, 260]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [261, 260, 262]),
        ("gpt-2", {"add_eos_token": True}, [260, 262]),
        ("llama-bpe", {}, [261, 260]),
        ("llama-bpe", {"add_bos_token": False}, [260]),
    ],
)
def test_bos_and_eos(pre: str, flags: dict[str, bool], ids: list[int], tmp_path: Path) -> None:
    original = tiny_tokenizers.byte_level(merges=(*MERGES, ("hihi", "hihi")), special=("<s>", "</s>"))
    keys = tiny_gguf.tokenizer_keys(original, SIZE, pre, bos_token_id=261, eos_token_id=262, **flags)
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", keys), vocab_size=SIZE)
    assert tokenizer.encode("hihihihi") == ids
    assert tokenizer.encode("hihihihi", add_special_tokens=False) == [260]
    assert tokenizer.token_names == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (261, 262)


def test_the_chat_template(tmp_path: Path) -> None:
    keys = tiny_gguf.tokenizer_keys(byte_level("gpt-2"), SIZE, "gpt-2", bos_token_id=260)
    path = write(
        tmp_path / "m.gguf", {**keys, "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}"}
    )
    tokenizer = Tokenizer.load(path, vocab_size=SIZE)
    template = ChatTemplate.load(path, tokenizer)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<|im_start|>x"
    plain = write(tmp_path / "plain.gguf", keys)
    assert ChatTemplate.load(plain, tokenizer) is None


# ---- SentencePiece


def pieces_keys(tokenizer: Any, **further: Any) -> dict[str, Any]:
    """The keys of a SentencePiece-like tokenizer: a merged piece scores by its rank, better ones higher."""
    model = json.loads(tokenizer.to_str())["model"]
    names = {i: token for token, i in model["vocab"].items()}
    rank = {"".join(merge): at for at, merge in enumerate(model["merges"])}
    tokens = [names[i] for i in range(len(names))]
    types = [2 if t == "<unk>" else 3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1 for t in tokens]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [float(-rank.get(token, 10**6)) for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **further,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


@pytest.mark.parametrize("text", [*TEXTS, "hi hi abab", " a ab", "<s>hi</s> a", "zzz\u2581a"])
def test_sentencepiece(text: str, tmp_path: Path) -> None:
    original = tiny_tokenizers.sentencepiece()
    folder = tiny_tokenizers.write(tmp_path / "folder", original, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    path = write(tmp_path / "m.gguf", pieces_keys(original))
    ours, theirs = (Tokenizer.load(model, vocab_size=SIZE) for model in (path, folder))
    assert ours.token_names == theirs.token_names
    for parse in (True, False):
        assert ours.encode(text, parse_special=parse) == theirs.encode(text, parse_special=parse)
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)


def test_no_space_prefix(tmp_path: Path) -> None:
    keys = pieces_keys(tiny_tokenizers.sentencepiece(), add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", keys), vocab_size=SIZE)
    ids = tokenizer.encode("hi")
    assert [tokenizer._backend.id_to_token(i) for i in ids] == ["hi"]
    assert tokenizer.decode(tokenizer.encode(" a hi")) == " a hi"


def best_pairs_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own rule: join the neighbours whose piece scores best, the leftmost of equals."""
    parts = list(text)
    while True:
        joined = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joined:
            return parts
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_merges_follow_from_scores() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        pieces = list("abcd")
        for _ in range(40):
            piece = "".join(rng.choice(pieces, 2))
            if piece not in pieces and len(piece) <= 8:
                pieces.append(piece)
        scores = {piece: -float(at) for at, piece in enumerate(pieces)}
        vocab = {piece: at for at, piece in enumerate(pieces)}
        merges = [tuple(merge) for merge in gguf_tokenizer.merges_of(scores)]
        model = models.BPE(vocab=vocab, merges=merges)
        for _ in range(50):
            text = "".join(rng.choice(list("abcd"), 20))
            assert [token.value for token in model.tokenize(text)] == best_pairs_first(text, scores)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "t5"}, "key 'tokenizer.ggml.model': 't5'"),
        ({"pre": "dbrx"}, "key 'tokenizer.ggml.pre': 'dbrx'"),
        ({"pre": None}, "key 'tokenizer.ggml.pre'"),
        ({"tokens": None}, "key 'tokenizer.ggml.tokens' is missing"),
        ({"merges": None}, "key 'tokenizer.ggml.merges' is missing"),
        ({"tokens": [1, 2]}, "key 'tokenizer.ggml.tokens'"),
        ({"tokens": "text"}, "key 'tokenizer.ggml.tokens'"),
        ({"token_type": [1, 1]}, "key 'tokenizer.ggml.token_type': 2 values; expected 320"),
        ({"merges": ["h i", "hi"]}, "key 'tokenizer.ggml.merges'[1]: 'hi'"),
        ({"merges": ["h i", "hi zz"]}, "merge 1"),
        ({"bos_token_id": 320, "add_bos_token": True}, "key 'tokenizer.ggml.bos_token_id': '320'"),
        ({"add_bos_token": True}, "key 'tokenizer.ggml.bos_token_id'"),
        ({"add_bos_token": 1}, "key 'tokenizer.ggml.add_bos_token'"),
        ({"padding_token_id": 999}, "key 'tokenizer.ggml.padding_token_id'"),
    ],
)
def test_damaged(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    keys = tiny_gguf.tokenizer_keys(byte_level("gpt-2"), SIZE, "gpt-2")
    keys |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(PyEngineError) as caught:
        Tokenizer.load(write(tmp_path / "m.gguf", keys), vocab_size=SIZE)
    assert says in str(caught.value)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scores": None}, "key 'tokenizer.ggml.scores' is missing"),
        ({"scores": [0.5]}, "key 'tokenizer.ggml.scores': 1 values"),
        ({"tokens": ["<unk>", "a"], "token_type": [2, 1], "scores": [0.0, 0.0]}, "no <0x00>"),
    ],
)
def test_damaged_pieces(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    keys = pieces_keys(tiny_tokenizers.sentencepiece(), **changes)
    with pytest.raises(PyEngineError) as caught:
        Tokenizer.load(write(tmp_path / "m.gguf", keys), vocab_size=SIZE)
    assert says in str(caught.value)


def test_a_token_twice(tmp_path: Path) -> None:
    keys = tiny_gguf.tokenizer_keys(byte_level("gpt-2"), SIZE, "gpt-2")
    keys["tokenizer.ggml.tokens"][7] = keys["tokenizer.ggml.tokens"][5]
    with pytest.raises(PyEngineError, match="has ids 5 and 7"):
        Tokenizer.load(write(tmp_path / "m.gguf", keys), vocab_size=SIZE)


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    keys = tiny_gguf.tokenizer_keys(byte_level("gpt-2"), SIZE, "gpt-2")
    with pytest.raises(PyEngineError, match="255 embedding rows"):
        Tokenizer.load(write(tmp_path / "m.gguf", keys), vocab_size=255)
