"""Stage 2, config_values: typed reads from a JSON object of a model folder; every error names file, key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyengine import strict_json
from pyengine.errors import ModelFormatError, UnsupportedModelError
from pyengine.strict_json import shown

MAX_CONFIG_BYTES = 16 << 20


class ConfigValues:
    """A JSON object and, for keys that are absent, a family's defaults. A key that is null counts as given.

    spelled: the file's own names of keys that `values` has under the usual ones; errors give the file's.
    """

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.values = values
        self.defaults = defaults
        self.spelled = spelled or {}

    @classmethod
    def read(cls, path: Path) -> ConfigValues:
        """A file that must hold one JSON object of at most 16 MiB. Errors: ModelFormatError."""
        data = strict_json.read_bytes(path, MAX_CONFIG_BYTES)
        if not data:
            raise ModelFormatError(f"{path}: empty; expected a JSON object")
        values = strict_json.loads(data, where=str(path), max_bytes=MAX_CONFIG_BYTES)
        if not isinstance(values, dict):
            raise ModelFormatError(f"{path}: root is {type(values).__name__}; expected an object")
        return cls(path, values, {})

    def of_family(self, defaults: Mapping[str, Any], spellings: Mapping[str, str]) -> ConfigValues:
        """The same under the usual names of keys. spellings: usual name -> a family's own, which may stand for it.

        Errors: ModelFormatError where both are there and differ.
        """
        values, spelled = dict(self.values), dict(self.spelled)
        for usual, own in spellings.items():
            if own not in values:
                continue
            value = values.pop(own)
            if usual in values and values[usual] != value:
                raise self.bad(own, value, f"{shown(values[usual])}, as key '{usual}' says")
            values[usual], spelled[usual] = value, own
        return ConfigValues(self.path, values, defaults, spelled)

    def bad(self, key: str, value: Any, expected: str) -> ModelFormatError:
        """The error for a value that is wrong."""
        return ModelFormatError(f"{self.path}: key '{self.name(key)}': {shown(value)}; expected {expected}")

    def unsupported(self, key: str, value: Any, expected: str) -> UnsupportedModelError:
        """The error for a value that is valid and not implemented."""
        return UnsupportedModelError(f"{self.path}: key '{self.name(key)}': {shown(value)}; expected {expected}")

    def name(self, key: str) -> str:
        """What the file calls a key."""
        return self.spelled.get(key, key)

    def get(self, key: str) -> Any:
        """The value, else the default, else None."""
        return self.values[key] if key in self.values else self.defaults.get(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """low <= value <= high; `default` where the value is absent or null. 64.0 is accepted as 64."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelFormatError(
                f"{self.path}: key '{self.name(key)}' is missing; expected an integer from {low} to {high}"
            )
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(key, value, f"an integer from {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false; `default` where the value is absent or null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0; `default` where the value is absent or null."""
        value = self.get(key)
        return default if value is None else self.number(key, value, above=0)

    def number(self, key: str, value: Any, *, above: float | None = None, at_least: float | None = None) -> float:
        """`value`, which stands under `key`, as a finite float within the bounds given."""
        expected = "a finite number"
        expected += "" if above is None else f" above {above:g}"
        expected += "" if at_least is None else f", at least {at_least:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.bad(key, value, expected)
        if (above is not None and value <= above) or (at_least is not None and value < at_least):
            raise self.bad(key, value, expected)
        return float(value)
