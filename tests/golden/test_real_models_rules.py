"""tools/checks/real_models.py must be able to fail: its rules against an engine that answers what the test says."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tool_scripts import load_tool

ROOT = Path(__file__).resolve().parents[2]
PROMPT = {"name": "p", "prompt_ids": [3, 4], "generated_ids": [5, 6, 7], "gaps": [2.0, 0.04, 0.06]}
VOCAB_SIZE = 20


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    return load_tool("checks/real_models")


class ScriptedEngine:
    """Generates `tokens`; its logits are largest at `best` [T], then at ids 0, 1, 2, 3, ... downwards."""

    def __init__(self, tokens: list[int], best: list[int]) -> None:
        self.tokens, self.best = tokens, best

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, ids: list[int], *, max_tokens: int, ignore_eos: bool) -> SimpleNamespace:
        assert (ids, max_tokens, ignore_eos) == (PROMPT["prompt_ids"], 3, True)
        return SimpleNamespace(tokens=self.tokens)

    def logits(self, ids: list[int]) -> np.ndarray:
        assert ids == [3, 4, 5, 6, 7]
        logits = np.tile(-np.arange(VOCAB_SIZE, dtype=np.float32), (len(ids), 1))
        logits[np.arange(len(ids)), self.best] = 1.0
        return logits


def check(rules: ModuleType, patch: pytest.MonkeyPatch, quant: str, tokens: list[int], best: list[int]) -> Any:
    golden = {"prompts": [{**PROMPT, "top5": [[8, 0, 1, 2, 9]] * 5}]}
    patch.setattr(rules, "pyengine", SimpleNamespace(load=lambda *_, **__: ScriptedEngine(tokens, best)))
    return rules.check_model(Path("."), golden, quant, None)


@pytest.mark.parametrize(
    ("tokens", "faults"),
    [([5, 6, 7], 0), ([5, 9, 9], 0), ([5, 6, 9], 1), ([9, 6, 7], 1)],
    ids=["equal", "near tie", "no near tie", "first token"],
)
def test_bf16_tokens(rules: ModuleType, monkeypatch: pytest.MonkeyPatch, tokens: list[int], faults: int) -> None:
    result = check(rules, monkeypatch, "bf16", tokens, [8] * 5)
    assert len(result.faults) == faults
    assert result.same_prompts == int(tokens == [5, 6, 7])


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_top5_both_ways(rules: ModuleType, monkeypatch: pytest.MonkeyPatch, quant: str) -> None:
    right = check(rules, monkeypatch, quant, [5, 6, 9], [8] * 5)
    assert (right.positions, right.ours_in_theirs, right.theirs_in_ours, right.faults) == (5, 5, 5, ())
    one_off = check(rules, monkeypatch, quant, [5, 6, 7], [8, 8, 9, 8, 8])  # 9 is in their 5, their 8 not in ours
    assert (one_off.ours_in_theirs, one_off.theirs_in_ours, len(one_off.faults)) == (5, 4, 1)
    assert [line.split(":")[0] for line in one_off.misses] == ["p, position 2"]
    wrong = check(rules, monkeypatch, quant, [5, 6, 7], [8, 8, 15, 8, 8])
    assert (wrong.ours_in_theirs, wrong.theirs_in_ours, len(wrong.faults)) == (4, 4, 2)


def test_logits_that_are_not_finite_are_refused(rules: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "logits", lambda self, ids: np.full((5, VOCAB_SIZE), np.nan, np.float32))
    with pytest.raises(ValueError, match="finite"):
        check(rules, monkeypatch, "int8", [5, 6, 7], [8] * 5)


@pytest.mark.parametrize("name", ["smollm2", "qwen"])
def test_stored_real_goldens_are_consistent(name: str) -> None:
    path = ROOT / "tests" / "golden" / f"real_{name}.json"
    assert path.stat().st_size < 300_000
    golden = json.loads(path.read_text(encoding="ascii"))
    assert len(golden["prompts"]) == 10
    for prompt in golden["prompts"]:
        ids = prompt["prompt_ids"] + prompt["generated_ids"]
        assert len(prompt["generated_ids"]) == len(prompt["gaps"]) == 32
        assert [len(row) for row in prompt["top5"]] == [5] * len(ids)
        best = [row[0] for row in prompt["top5"][len(prompt["prompt_ids"]) - 1 : -1]]
        differ = [gap for gap, a, b in zip(prompt["gaps"], best, prompt["generated_ids"], strict=True) if a != b]
        assert not differ or max(differ) < 1e-3
