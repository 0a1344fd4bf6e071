"""Stage 5, rope_tables: cos and sin of an engine's model in the core, as long as the context in use."""

from __future__ import annotations

from pyengine import rope
from pyengine._core import Backend
from pyengine.spec import ModelSpec, RopeSpec

FIRST_ROPE_POSITIONS = 1024


class RopeTables:
    """cos/sin tables of a model in the core, as long as the context in use."""

    def __init__(self, backend: Backend, spec: ModelSpec) -> None:
        self.backend = backend
        self.limit = spec.max_context
        self.positions = 0
        self.ids: dict[RopeSpec, int] = {layer.attention.rope: -1 for layer in spec.layers if layer.attention.rope}
        self.grow(1)

    def grow(self, positions: int) -> None:
        """Tables of at least this many positions."""
        if positions <= self.positions:
            return
        size = min(max(positions, 2 * self.positions, FIRST_ROPE_POSITIONS), max(self.limit, positions))
        for spec, table in self.ids.items():
            self.ids[spec] = self.backend.rope_set(table, *rope.tables(spec, size))
        self.positions = size
