"""Stage 6, account_memory: what a model's activations take in the engine, from its anatomy."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyengine.reports.account_parts import Anatomy, Ffn
from pyengine.steps import MAX_BATCH_TOKENS, MAX_SEQUENCES

TILE_ROWS = 12  # that a tile of a matrix product may read past a batch
CHOICE, ROUTED, SHARED, PHASES = 0, 1, 2, 3  # parts of a layer's FFN, one after the other


class Life(NamedTuple):
    """Bytes of a buffer for one token, and the phases (layers times PHASES) it lives from and to, both included."""

    size: int
    first: int
    last: int


def most_alive(lives: Sequence[Life]) -> int:
    """The most bytes that live at once."""
    return max((sum(one.size for one in lives if one.first <= at.first <= one.last) for at in lives), default=0)


def ffn_buffers(
    ffns: Sequence[Ffn],
    floats: Callable[[int], int],
    read: Callable[[int], int],
    shared: int,
    *,
    gate: bool,
    integer: bool,
) -> list[Life]:
    """Buffers of FFNs alone. floats, read: bytes of a row of such a width, as float32 or as a matrix reads it.

    shared: of a shared expert's hidden values; gate: whether it has one.
    """

    def life(size: int, f: Ffn, first: int = ROUTED, last: int = ROUTED) -> Life:
        return Life(size, PHASES * f.first + first, PHASES * f.last + last)

    lives = []
    for f in ffns:
        lives.append(life(max(f.top_k, 1) * read(f.intermediate), f))
        if not f.experts:
            continue
        lives.append(life(floats(f.experts), f, CHOICE, CHOICE))
        lives.append(life(floats(2 * f.top_k), f, CHOICE, ROUTED))
        lives.append(life(f.top_k * floats(f.hidden), f))
        lives.append(life(shared, f, SHARED, SHARED))
        if integer:  # what the router reads, and a gate
            lives.append(life(floats(f.hidden), f, CHOICE, SHARED if gate else CHOICE))
        if gate:  # the shared expert's result, before the gate multiplies it
            lives.append(life(floats(f.hidden), f, SHARED, SHARED))
    return lives


def activation_bytes(anatomy: Anatomy, integer: bool, threads: int) -> int:
    """The engine's arena for a full batch (512 tokens, 64 sequences): buffers, logits and the threads' scratch.

    The residual, the normed input, q with k and v, the heads' output and the head's input live through all layers, the
    hidden values of a kind of FFN from the first layer that has it to the last: float32, or int8 where an int8 matrix
    reads them; of experts a row for each that a token goes to; of latent attention the latents and both forms of q.
    Within 2 % for what runs.
    """

    def floats(width: int) -> int:
        return 4 * (up(width, 16) + 16)

    def int8s(width: int) -> int:  # with a scale, sums and a place for an outlier for each 64 values
        groups = -(-width // 64)
        return up(width, 64) + 64 + 32 * groups + up(groups, 8)

    read = int8s if integer else floats
    modules = {p.name.rsplit(".", 2)[-2]: p for p in anatomy.main if p.stage == anatomy.stack}
    hidden = max((f.hidden for f in anatomy.ffns), default=0)
    seen = [a for a in anatomy.attention if a.stage == anatomy.stack]
    vocab = max((p.rows for p in anatomy.main if p.computed_as == "lm_head"), default=0)
    widest = max((p.cols for p in anatomy.main if p.computes), default=0)
    attended = max((a.heads * a.v_dim for a in seen), default=0)
    per_token = floats(hidden) + 2 * read(hidden)
    if anatomy.not_run is None and "input_layernorm" not in modules and not integer:
        per_token -= floats(hidden)  # branches read the residual itself
    if "kv_a_proj_with_mqa" in modules:
        a, q_a = seen[0], modules["q_a_proj"].rows if "q_a_proj" in modules else 0
        q = modules["q_b_proj" if q_a else "q_proj"].rows
        per_token += floats(q) + floats(a.k_dim) + floats(a.heads * a.k_dim) + floats(a.heads * a.v_dim)
        per_token += floats(q_a) + read(q_a) if q_a else 0
        attended = a.heads * modules["values"].rows
    else:
        per_token += floats(max((a.heads * a.k_dim + a.kv_heads * (a.k_cached + a.v_cached) for a in seen), default=0))
    per_token += floats(attended) + (int8s(attended) if integer else 0)
    shared = sum(read(p.rows) for p in anatomy.main if re.search(r"shared_experts?\.up_proj\.weight", p.name))
    gate = "shared_expert_gate" in modules
    per_token += most_alive(ffn_buffers(anatomy.ffns, floats, read, shared, gate=gate, integer=integer))
    if {"post_feedforward_layernorm", "post_mlp_layernorm"} & set(modules):
        per_token += floats(hidden)
    rows = MAX_BATCH_TOKENS + TILE_ROWS
    logits = (MAX_SEQUENCES + TILE_ROWS) * floats(vocab) if vocab else 0
    scratch = max(rows * 512 + 32 * widest, 8 * vocab)  # results of eight panels, two unpacked panels; a row to sort
    return rows * per_token + logits + threads * scratch


def up(n: int, step: int) -> int:
    return -(-n // step) * step
