"""Tokenizer, templates and end of sequence: what users of other engines ran into. Ids: case_ids.txt, section E."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import tiny_tokenizers as tiny
from builders import write_tiny_model
from golden.golden_cases import TL
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import pyengine
from pyengine.chat_template import ChatTemplate, encode_chat
from pyengine.detokenize import BYTE_OF
from pyengine.errors import RequestError
from pyengine.tokenizer import Tokenizer

CONFIG = {**TL, "vocab_size": 264, "max_position_embeddings": 256}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The pattern of Llama 3's tokenizer.json: digits in groups of one to three.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def bytes_as_text(text: str) -> str:
    character = {byte: c for c, byte in BYTE_OF.items()}
    return "".join(character[byte] for byte in text.encode())


def llama3(merges: list[tuple[str, str]], words: list[str], *, ignore_merges: bool, pattern: str = PATTERN) -> Any:
    """A tokenizer in Llama 3's form: its pattern, then bytes; whole words of the vocabulary before any merge."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in [*(a + b for a, b in merges), *map(bytes_as_text, words)]:
        vocab.setdefault(token, len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def load(folder: Path, backend: Any, **settings: Any) -> Tokenizer:
    return Tokenizer.load(tiny.write(folder, backend, **settings), vocab_size=400)


# ---- text to ids ----------------------------------------------------------------------------------------------------

DIGITS = [(a, b) for a, b in (("3", "3"), ("33", "33"), ("33", "3"), ("7", "7"), ("77", "7"), ("1", "2"), ("12", "3"))]
TEXTS = ["3333+777", *("123456789012"[:n] for n in range(1, 13)), "a33 3333", "33 333 3333 33333"]


@pytest.mark.parametrize("text", TEXTS)
def test_report_e01_digits_come_in_groups_of_three(text: str, tmp_path: Path) -> None:
    right = llama3(DIGITS, [], ignore_merges=False)
    tokenizer = load(tmp_path / "right", right)
    ids = tokenizer.encode(text)
    assert ids == right.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(len(right.id_to_token(i)) <= 3 for i in ids)
    if text == "3333+777":
        assert [right.id_to_token(i) for i in ids] == ["333", "3", "+", "777"]
        one = load(tmp_path / "wrong", llama3(DIGITS, [], ignore_merges=False, pattern=PATTERN.replace("{1,3}", "+")))
        assert one.encode(text) != ids, "digits in one piece give the same ids"


def test_report_e02_whole_words_come_before_merges(tmp_path: Path) -> None:
    """Merges work on bytes, and ignore_merges takes a word of the vocabulary that no merge could make."""
    words = ["ửa", " Việt", "C"]
    tokenizer = load(tmp_path / "right", llama3([], words, ignore_merges=True))
    ids = tokenizer.encode("Cửa Việt")
    assert ids[-1] == 257
    assert tokenizer.encode(" Việt") == [257]
    assert tokenizer.decode(ids) == "Cửa Việt"
    wrong = load(tmp_path / "wrong", llama3([], words, ignore_merges=False))
    assert len(wrong.encode(" Việt")) == len(" Việt".encode())
    assert wrong.decode(wrong.encode("Cửa Việt")) == "Cửa Việt"


SCRIPTS = {
    "line ends": "line\r\nline\r\n",
    "joined emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 ok",
    "hebrew": "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "arabic": "\u0645\u0631\u062d\u0628\u0627",
    "chinese": "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "japanese": "\u3053\u3093\u306b\u3061\u306f",
    "digits": "3333+777",
    "accents": "e\u0301 \xe9",
    "direction marks": "\u200f\u202eabc",
    "controls": "\t\x00\x7f",
    "flags": "\U0001f1e9\U0001f1ea\U0001f3f3\ufe0f\u200d\U0001f308",
}


@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_malformed_p20_report_e06_texts_of_every_script_come_back(
    script: str, legacy: bool | None, tmp_path: Path
) -> None:
    text = SCRIPTS[script]
    base = tiny.byte_level(merges=(("a", "b"),)) if legacy is None else tiny.sentencepiece(legacy=legacy)
    tokenizer = load(tmp_path, base, clean_up_tokenization_spaces=True)
    ids = tokenizer.encode(text)
    assert ids == base.encode(text).ids
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == text
    assert tokenizer.encode(text + "x") != ids


# ---- ids of the model and of the tokenizer --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pyengine.Engine]:
    """264 rows of embedding, 258 ids of the tokenizer."""
    folder = write_tiny_model(tmp_path_factory.mktemp("text"), CONFIG, seed=4)
    with pyengine.load(tiny.write(folder, tiny.byte_level()), quant="f32", threads=1) as one:
        yield one


@pytest.mark.parametrize("i", [256, 257, 258, 263])
def test_report_e25_e26_e27_ids_of_padding_rows_are_ids(i: int, engine: pyengine.Engine) -> None:
    assert engine.detokenize([i]) == ""
    result = engine.generate([5, i], max_tokens=4, ignore_eos=True)
    assert len(engine.generate([5, i, *result.tokens], max_tokens=1, ignore_eos=True).tokens) == 1
    assert np.abs(engine.logits([5, i], [1]) - engine.logits([5, 256 + (i + 1) % 8], [1])).max() > 1e-2


@pytest.mark.parametrize("i", [-1, 264, 265, 151936])
def test_report_e25_ids_past_the_model_are_none(i: int, engine: pyengine.Engine) -> None:
    for call in (lambda: engine.generate([5, i]), lambda: engine.logits([i]), lambda: engine.detokenize([i])):
        with pytest.raises(RequestError, match=f"token id {i} at index .; expected 0 to 263"):
            call()


# row -> eos of config.json, of generation_config.json; n is the n-th token that greedy gives, a number an id
EOS: dict[str, tuple[Any, Any]] = {
    "report-E14-second-of-two": ([263], [263, "n3"]),
    "report-E14-config-alone": (["n3"], [263]),
    "report-E15-end-of-turn": (263, "n3"),
    "report-E15-a-list": (263, [262, "n3"]),
}


@pytest.mark.parametrize("case", EOS)
def test_eos_ids_of_both_files_end_an_answer(case: str, engine: pyengine.Engine, tmp_path: Path) -> None:
    free = engine.generate([5, 9], max_tokens=12, ignore_eos=True).tokens
    at = next(n for n in range(3, 12) if free[n] not in free[:n])

    def ids(value: Any) -> Any:
        return [ids(v) for v in value] if isinstance(value, list) else free[at] if value == "n3" else value

    config, generation = map(ids, EOS[case])
    folder = write_tiny_model(tmp_path, {**CONFIG, "eos_token_id": config}, seed=4)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    with pyengine.load(folder, quant="f32", threads=1) as one:
        result = one.generate([5, 9], max_tokens=12)
    assert (result.tokens, result.finish_reason, result.stop_reason) == (free[:at], "stop", free[at])
    if case != "report-E14-config-alone":
        (folder / "generation_config.json").unlink()
        with pyengine.load(folder, quant="f32", threads=1) as one:
            assert one.generate([5, 9], max_tokens=12).finish_reason == "length"


def test_report_e16_generate_is_greedy_whatever_generation_config_says(engine: pyengine.Engine, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, CONFIG, seed=4)
    said = {"repetition_penalty": 50.0, "temperature": 0.1, "top_k": 1, "top_p": 0.001, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(said))
    with pyengine.load(folder, quant="f32", threads=1) as one:
        found = one.generate([5, 9], max_tokens=60, ignore_eos=True).tokens
        assert found == engine.generate([5, 9], max_tokens=60, ignore_eos=True).tokens
        asked = one.generate([5, 9], max_tokens=60, ignore_eos=True, repetition_penalty=50.0).tokens
    assert asked != found, "the values of the file would not show"


# ---- templates ------------------------------------------------------------------------------------------------------

# In the forms of public models: header tokens, instruction brackets, a system turn put into the first one, tools.
TEMPLATES = {
    "report-E21-chatml": CHATML,
    "report-E21-headers": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>"
        "\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "report-E21-brackets": (
        "{%- if messages[0]['role'] == 'system' -%}\n    {%- set system = messages[0]['content'] -%}\n"
        "    {%- set loop_messages = messages[1:] -%}\n{%- else -%}\n    {%- set loop_messages = messages -%}\n"
        "{%- endif -%}\n{{ bos_token }}\n{%- for m in loop_messages -%}\n"
        "    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
        "        {{- raise_exception('roles must alternate') -}}\n    {%- endif -%}\n"
        "    {%- if m.role == 'user' -%}\n        {%- if loop.first and system is defined -%}\n"
        "            {{- ' [INST] ' + system + '\\n\\n' + m['content'] + ' [/INST]' -}}\n        {%- else -%}\n"
        "            {{- ' [INST] ' + m['content'] + ' [/INST]' -}}\n        {%- endif -%}\n"
        "    {%- else -%}\n        {{- ' ' + m['content'] + eos_token -}}\n    {%- endif -%}\n{%- endfor -%}"
    ),
    "report-E21-turns": (
        "{{ bos_token }}{% for m in messages if m.role != 'system' %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "report-E21-thinking": (
        "{%- set ns = namespace(last=messages | length - 1) -%}\n{% for m in messages %}\n"
        "    {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}\n"
        "    {{- '<|' ~ m.role ~ '|>' ~ ('<think>\\n' if loop.index0 == ns.last) ~ content }}\n"
        "    {%- if not loop.last %}{{ '\\n' }}{% endif %}\n{% endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
    ),
    "report-E21-macros": (
        "{% macro turn(role, text) %}[{{ role | upper }}] {{ text | replace('\\n', ' ') }}\n{% endmacro %}"
        "{% for m in messages %}{{ turn(m.role, m.content) }}{% endfor %}{{ messages | tojson(indent=2) }}"
        "{{ messages | map(attribute='role') | unique | sort | join(',') }}"
    ),
    "report-E21-blocks": (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\nUser: {{ m.content }}\n  {% elif loop.first %}\n"
        "S: {{ m.content }}\n  {% else %}\nA: {{ m.content }}\n  {% endif %}\n{# nothing #}\n{% endfor %}\n"
        "{%- for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    ),
}  # fmt: skip
CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " a\nb  "}],
    [
        {"role": "user", "content": "1 < 2 & 'x'"},
        {"role": "assistant", "content": "<think>\nno\n</think>\n\nYes."},
        {"role": "user", "content": "\U0001f917 <b>"},
    ],
]


def plain_jinja(source: str, messages: list[dict[str, str]], prompt: bool, **names: str) -> str:
    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    return environment.from_string(source).render(messages=messages, add_generation_prompt=prompt, **names)


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_come_out_as_jinja2_renders_them(case: str, tmp_path: Path) -> None:
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = load(tmp_path, tiny.byte_level(), **settings)
    chat = ChatTemplate(TEMPLATES[case], "a.jinja", tokenizer)
    texts = []
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            found = chat.render(messages, add_generation_prompt=prompt)
            assert found == plain_jinja(TEMPLATES[case], messages, prompt, **settings)
            texts.append(found)
            ids = encode_chat(tokenizer, chat, messages, add_generation_prompt=prompt)
            assert ids == tokenizer.encode(found, add_special_tokens=False)
    assert len(set(texts)) >= len(CONVERSATIONS)


IMPORTS = """
import sys
from pathlib import Path
from pyengine.chat_template import ChatTemplate, encode_chat
from pyengine.tokenizer import Tokenizer
tokenizer = Tokenizer.load(Path(sys.argv[1]), vocab_size=300)
ids = encode_chat(tokenizer, ChatTemplate.load(Path(sys.argv[1]), tokenizer), [{"role": "user", "content": "Hi"}])
assert type(ids) is list and set(map(type, ids)) == {int}, ids
print(sorted(name for name in ("transformers", "torch", "tensorflow", "huggingface_hub.file_download")
             if name in sys.modules))
"""


def test_report_e20_templates_are_rendered_without_other_packages(tmp_path: Path) -> None:
    tiny.write(tmp_path, tiny.byte_level(), chat_template=CHATML)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(tmp_path)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("length", range(1, 13))
def test_report_e31_short_prompts_in_a_chat(length: int, engine: pyengine.Engine) -> None:
    assert engine.tokenizer is not None
    for source in ("{{ messages[0].content }}", CHATML):
        chat = ChatTemplate(source, "a.jinja", engine.tokenizer)
        ids = encode_chat(engine.tokenizer, chat, [{"role": "user", "content": "hi, you there"[:length]}])
        assert len(ids) == length or source == CHATML
        result = engine.generate(ids, max_tokens=3, ignore_eos=True)
        assert result.usage["prompt_tokens"] == len(ids)
        assert len(result.tokens) == 3
