"""Stage 5, results: what a request gives: pieces of text while it runs, and the record at its end."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

TopLogprobs = list[tuple[int, float]]  # the most likely ids and their log probabilities, best first


class Piece(NamedTuple):
    """A step's new text (maybe empty: an unfinished character is held back), its token and log probability; the most
    likely tokens in its place, where `logprobs` asked for them."""

    text: str
    token: int | None
    logprob: float | None
    finish_reason: str | None
    top_logprobs: TopLogprobs | None = None


@dataclass
class GenerationResult:
    """The fields of `generate --json`; str() is the text. Times in ms, shares 0..1, None where nothing was decoded.

    speculation: tokens that were drafted and those of them that the model agreed with; None, and not in the JSON, where
    it was not asked for. routing: of a model with experts, else None and not in the JSON: `top_k`, and `layers` with
    `layer`, `tokens_per_expert` (prompt included) and their `entropy` in nats, from 0 (one expert has all) to
    ln(experts); None, too, of a request that ran in a batch: the counts are those of whole steps.

    logprobs: of each of `tokens`, log softmax of the raw logits; in the JSON where `logprobs=N` asked for more.
    top_logprobs: with it, for each token the N most likely ids, [id, log probability], best first. prompt_logprobs:
    with `prompt_logprobs=True`, of each token of the prompt after those before it (None for the first); and
    prompt_top_logprobs with both.
    """

    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length" or "cancelled"
    stop_reason: str | int | None  # the stop string, or the EOS id
    prompt_format: str
    seed: int
    model: str
    family: str
    quant: str
    group_size: int | None
    device: str
    isa: str
    threads: int
    version: str
    usage: dict[str, int]
    timings: dict[str, Any]
    ffn_share: float | None
    decode_breakdown: dict[str, float] | None
    weight_bytes_per_token: int
    peak_rss_bytes: int
    speculation: dict[str, int] | None = None
    routing: dict[str, Any] | None = None
    logprobs: list[float] = field(default_factory=list, repr=False)
    top_logprobs: list[TopLogprobs] | None = field(default=None, repr=False)
    prompt_logprobs: list[float | None] | None = field(default=None, repr=False)
    prompt_top_logprobs: list[TopLogprobs | None] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """The JSON object, without what was not asked for."""
        record = asdict(self)
        if self.top_logprobs is None:
            del record["logprobs"]
        for name in ("speculation", "routing", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"):
            if record[name] is None:
                del record[name]
        return record


def peak_rss_bytes() -> int:
    """The most memory this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
