"""Models whose config.json the tests of this folder change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import write_tiny_model
from config_models import BASES, GONE, write


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good model of each kind. Tests link to its weights and write their own config beside them."""
    return {kind: write_tiny_model(tmp_path_factory.mktemp(kind), base) for kind, base in BASES.items()}


@pytest.fixture
def make(tmp_path: Path, models: dict[str, Path]) -> Callable[..., Path]:
    """A model folder: kind, then changes of its config; weights stay those of the unchanged config."""

    def model(kind: str = "llama", /, **changes: Any) -> Path:
        config = {key: value for key, value in {**BASES[kind], **changes}.items() if value is not GONE}
        return write(tmp_path, json.dumps(config), models[kind])

    return model
