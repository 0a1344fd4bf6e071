"""Stage 2, spec: what a decoder is made of, as plain values. No I/O, no family names.

A family (families.py) turns config.json into a ModelSpec; everything after stage 2 reads only this.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class NormSpec:
    """What every norm of a model computes: x / sqrt(mean(x^2) + eps) * weight, or the same of x - mean(x), + bias.

    Where norms stand is in LayerSpec.
    """

    eps: float
    kind: str = "rms"  # "rms"; "layer": LayerNorm, which takes the mean off first
    bias: bool = False  # of norms over the hidden state; kind "layer" alone has one
    plus_one: bool = False  # what is stored is the weight less 1


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one layer kind.

    Formulas (float32, as in transformers' modeling_rope_utils) are in rope.py. `parameters` holds the numbers of the
    scaling type under their config names: linear {factor}; dynamic {factor, original_max_position_embeddings};
    llama3 {factor, low_freq_factor, high_freq_factor, original_max_position_embeddings}; yarn {factor, beta_fast,
    beta_slow, mscale?, mscale_all_dim?, attention_factor?, truncate, original_max_position_embeddings,
    llama_4_scaling_beta?}.
    """

    rope_type: str  # "default", "linear", "dynamic", "llama3", "yarn"
    theta: float
    rotary_dim: int  # even, <= head_dim; dimensions from there on are not rotated
    parameters: tuple[tuple[str, float], ...] = ()
    interleaved: bool = False  # the pairs are (0, 1), (2, 3) ... on disk, in place of (i, i + rotary_dim / 2)
    divisors: tuple[float, ...] = ()  # of the frequencies, rotary_dim / 2 numbers from a file; (): 1


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention with grouped KV heads: q [heads*head_dim], k and v [kv_heads*head_dim]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k; head_dim ** -0.5 in the Llama line
    rope: RopeSpec | None  # None: no positions in this layer
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str | None = None  # RMSNorm of q and k before RoPE: "head", over head_dim; "whole", over all their heads
    window: int | None = None  # keys seen, the query's own included; None = all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) before the softmax

    @property
    def k_dim(self) -> int:
        """Columns of a key in the cache; v_dim: of a value."""
        return self.head_dim

    @property
    def v_dim(self) -> int:
        return self.head_dim

    @property
    def width(self) -> int:
        """Columns of the attention's result, which o_proj reads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-AI 2024): keys and values of all heads come from one latent a token.

    latent [kv_lora_rank] = norm(kv_a(x)), and beside it a rotary key [qk_rope_head_dim] that all heads share. Head h
    has q = [nope | rope], k = [W_UK_h latent | rotary key] and v = W_UV_h latent; W_UK_h and W_UV_h are its rows of
    kv_b_proj. q comes from a latent of its own, or straight from x where q_lora_rank is None.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float  # multiplies q.k; (nope + rope) ** -0.5, under yarn times the square of its mscale
    rope: RopeSpec  # over qk_rope_head_dim
    bias: bool = False  # of the projections to latents and of o_proj
    latent_eps: float = 1e-6  # of the norms of both latents

    num_kv_heads: int = field(default=1, init=False)  # the cache holds [latent | rotary key] once, for all heads
    window: int | None = field(default=None, init=False)
    softcap: float | None = field(default=None, init=False)

    @property
    def head_dim(self) -> int:
        """Of q and k."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q_name(self) -> str:
        """The projection to q."""
        return "q_proj" if self.q_lora_rank is None else "q_b_proj"

    @property
    def k_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def v_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def width(self) -> int:
        return self.num_heads * self.v_head_dim

    @property
    def o_bias(self) -> bool:
        return self.bias


@dataclass(frozen=True)
class FFNSpec:
    """Gated FFN: down(act(gate(x)) * up(x)); of two matrices: down(act(up(x)))."""

    intermediate_size: int
    activation: str = "silu"  # "silu", "gelu" (with erf), "gelu_tanh", "relu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True)
class RouterSpec:
    """Which experts a token goes to: the top_k best of its scores, from the top_groups best groups of them.

    The scores are of logits x . weight^T. A softmax over the chosen experts alone is the same as one over all with
    `normalise`.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"  # over all experts; or "sigmoid" of each
    normalise: bool = False  # weights divided by (their sum + eps)
    eps: float = 0.0
    scale: float = 1.0  # of the weights, at last
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # a group's best expert; or "top2_sum", its two best
    selection_bias: bool = False  # a vector added to the scores for the choice alone


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: the sum of router weight * expert(x), and of a shared expert that every token goes to."""

    router: RouterSpec
    expert: FFNSpec
    shared: FFNSpec | None = None
    shared_gate: bool = False  # the shared expert is multiplied by sigmoid(x . gate), one number a token


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: x += attention(norm(x)); x += ffn(norm(x)). Norms stand before a branch, after it, or both."""

    index: int
    attention: AttentionSpec | MLASpec
    ffn: FFNSpec | MoESpec
    norm_before: bool = True
    norm_after: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder: embedding, layers, final norm, head."""

    family: str  # Family.name: "llama", "gemma2" ...
    architecture: str  # config.json architectures[0]
    hidden_size: int
    vocab_size: int
    norm: NormSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    mtp_layers: int = 0  # layers behind the last that predict further tokens; in the files, not used
    fp8_block: tuple[int, int] | None = None  # of matrices stored as float8 (fp8.py); None: there are none
    embedding_scale: float = 1.0  # multiplies the embedding's rows, not the head
    residual_scale: float = 1.0  # multiplies what attention and the FFN add to the hidden state
    logits_scale: float = 1.0  # divides the logits
    logits_softcap: float | None = None  # then they become softcap * tanh(logit / softcap)
    learned_positions: int = 0  # rows of a table that is added to the embedding, by position
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_context(self) -> int:
        """Tokens of context the model is made for: max_position_embeddings, which already counts any scaling.

        Only a dynamic RoPE keeps the original maximum there and goes past it by its factor.
        """
        longest = self.max_position_embeddings
        for layer in self.layers:
            rope = layer.attention.rope
            if rope is not None and rope.rope_type == "dynamic":
                factor = dict(rope.parameters)["factor"]
                longest = max(longest, int(self.max_position_embeddings * factor))
        return longest
