"""Routers of every kind that families have, and their ends: one expert, all of them, more than a block has threads."""

from __future__ import annotations

import pytest

from pyengine.spec import RouterSpec

ROUTERS = [
    RouterSpec(1, 1),
    RouterSpec(7, 7, normalise=True),
    RouterSpec(8, 2, normalise=True),
    RouterSpec(60, 4),
    RouterSpec(128, 8, normalise=True),
    RouterSpec(256, 256),
    RouterSpec(64, 6, scale=16.0, groups=8, top_groups=3),
    RouterSpec(256, 8, scoring="sigmoid", normalise=True, eps=1e-20, scale=2.5, groups=8, top_groups=4,
               group_score="top2_sum", selection_bias=True),
    RouterSpec(33, 3, scoring="sigmoid", selection_bias=True),
    RouterSpec(1600, 3),
]  # fmt: skip


def named(router: RouterSpec) -> str:
    return f"{router.num_experts}_{router.top_k}_{router.scoring}_{router.groups}"


by_router = pytest.mark.parametrize("router", ROUTERS, ids=map(named, ROUTERS))
