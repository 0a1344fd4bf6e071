"""Stage 6, account_families: decoder families by how their tensors differ from Llama's, for models not run here too.

Only shapes count: which tensors a layer has, how many of its experts a token is sent to, how far its attention sees.
Facts are from transformers' configuration_*.py and modeling_*.py. Families that the engine runs are listed as well:
a quantized checkpoint of theirs has the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.config import MAX_HEAD_DIM, MAX_LAYERS, MAX_SIZE
from pyengine.config_values import ConfigValues
from pyengine.reports.account_parts import Anatomy, Attention, Ffn, Ffns, Part, Parts, merged

WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: the keys of config.json that say how many there are and how wide."""

    count: str
    width: str = "moe_intermediate_size"
    shared_width: str | None = None  # one shared expert, with a gate of its own
    shared_count: str | None = None  # so many times `width`, as one FFN
    dense_first: bool = False  # first_k_dense_replace
    stepped: bool = False  # decoder_sparse_step and mlp_only_layers
    correction: bool = False  # a bias that only picks
    bias: bool = False  # of the router and of each expert


@dataclass(frozen=True)
class Plain:
    """What a family's tensors look like. Defaults are Llama's; a str names the key that decides."""

    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    qk_norm: str | None = None  # "head": over head_dim; "full": over the projection
    qk_norm_key: str | None = None  # the key that switches it on
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False  # LayerNorm
    gated: bool = True
    positions: bool = False  # a learned table
    sinks: bool = False
    mla: bool = False
    delta_net: bool = False  # linear_attention layers, and a gate as wide as q
    window: str = "none"  # "key": all layers; "n": all but each n-th; "switched": from max_window_layers on, where
    # use_sliding_window is true; "types": where it is true, layer_types must say which
    experts: Experts | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # Llama's name of a key -> the family's


MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
QWEN = {"sliding_window": 4096, "max_window_layers": 28}
FOUR = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
TIED = {"tie_word_embeddings": True}
GEMMA = {**TIED, "head_dim": 256}
GEMMA3 = {
    **GEMMA, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096,
    "max_position_embeddings": 131072,
}  # fmt: skip
DEEPSEEK = Experts("n_routed_experts", shared_count="n_shared_experts", dense_first=True)
DEEPSEEK_V3 = Experts("n_routed_experts", shared_count="n_shared_experts", dense_first=True, correction=True)
QWEN_MOE = Experts("num_experts", shared_width="shared_expert_intermediate_size", stepped=True)
GPT2 = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
}  # fmt: skip
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")

FAMILIES: dict[str, Plain] = {  # by model_type
    "llama": Plain(mlp_bias="mlp_bias"),
    "mistral": Plain(qkv_bias=False, o_bias=False, window="key", defaults=MISTRAL),
    "ministral3": Plain(qkv_bias=False, o_bias=False, window="key"),
    "qwen2": Plain(qkv_bias=True, o_bias=False, window="switched", defaults=QWEN),
    "qwen3": Plain(qk_norm="head", window="switched", defaults={**QWEN, "head_dim": 128}),
    "smollm3": Plain(mlp_bias="mlp_bias", window="types", defaults=TIED),
    "granite": Plain(mlp_bias="mlp_bias"),
    "olmo2": Plain(qk_norm="full", norms=AFTER),
    "olmo3": Plain(qk_norm="full", norms=AFTER, window="4", defaults={"sliding_window": 4096}),
    "phi3": Plain(qkv_bias=False, o_bias=False, window="key"),
    "glm": Plain(o_bias=False, defaults={"attention_bias": True, "head_dim": 128}),
    "glm4": Plain(
        o_bias=False,
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "gemma": Plain(defaults=GEMMA),
    "gemma2": Plain(norms=FOUR, window="2", defaults={**GEMMA, "sliding_window": 4096}),
    "gemma3_text": Plain(norms=FOUR, qk_norm="head", window="6", defaults=GEMMA3),
    "gpt2": Plain(
        qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, positions=True, norm_bias=True, names=GPT2,
        defaults=TIED,
    ),
    "gpt_neox": Plain(mlp_bias=True, gated=False, norm_bias=True, defaults={"attention_bias": True}),
    "mixtral": Plain(
        qkv_bias=False, o_bias=False, window="key", experts=Experts("num_local_experts", width="intermediate_size")
    ),
    "qwen2_moe": Plain(
        qkv_bias="qkv_bias", o_bias=False, window="types", experts=QWEN_MOE, defaults={"qkv_bias": True}
    ),
    "qwen3_moe": Plain(qk_norm="head", window="types", experts=Experts("num_experts", stepped=True)),
    "qwen3_next": Plain(qk_norm="head", delta_net=True, experts=QWEN_MOE, defaults={"head_dim": 256}),
    "olmoe": Plain(qk_norm="full", experts=Experts("num_experts", width="intermediate_size")),
    "gpt_oss": Plain(
        sinks=True, window="2", experts=Experts("num_local_experts", width="intermediate_size", bias=True),
        defaults={"attention_bias": True, "head_dim": 64, "sliding_window": 128},
    ),
    "deepseek_v2": Plain(mla=True, mlp_bias="mlp_bias", experts=DEEPSEEK),
    "deepseek_v3": Plain(mla=True, experts=DEEPSEEK_V3),
    "kimi_k2": Plain(mla=True, experts=DEEPSEEK_V3),
    "glm4_moe": Plain(qk_norm="head", qk_norm_key="use_qk_norm", o_bias=False, experts=DEEPSEEK_V3),
}  # fmt: skip


class Keys:
    """config.json under Llama's names of its keys."""

    def __init__(self, config: ConfigValues, names: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self.names = names
        self.config = config.of_family({names.get(key, key): value for key, value in defaults.items()}, {})

    def name(self, key: str) -> str:
        return self.names.get(key, key)

    def get(self, key: str) -> Any:
        return self.config.get(self.name(key))

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        return self.config.integer(self.name(key), low, high, default)

    def flag(self, value: bool | str) -> bool:
        """A value of the family, or of the key that it names; false where that is absent."""
        return value if isinstance(value, bool) else self.config.flag(self.name(value), False)


class Decoder:
    """Builds the parts of one decoder, layer by layer."""

    def __init__(self, config: ConfigValues, family: Plain) -> None:
        self.family = family
        self.keys = keys = Keys(config, family.names, family.defaults)
        self.layers = keys.integer("num_hidden_layers", high=MAX_LAYERS)
        self.hidden = keys.integer("hidden_size")
        self.heads = keys.integer("num_attention_heads")
        self.kv_heads = keys.integer("num_key_value_heads", self.heads)
        if self.heads % self.kv_heads:
            raise config.bad("num_key_value_heads", self.kv_heads, f"a divisor of {self.heads} heads")
        if not family.mla and keys.get("head_dim") is None and self.hidden % self.heads:
            raise config.bad(keys.name("hidden_size"), self.hidden, f"divisible by {self.heads} heads, or a head_dim")
        self.head_dim = keys.integer("head_dim", self.hidden // self.heads or 1, high=MAX_HEAD_DIM)
        self.parts = Parts()
        self.attention: list[Attention] = []
        self.ffns = Ffns()
        self.stage = "decoder"
        off = family.window in ("switched", "types") and not keys.flag("use_sliding_window")
        self.window = None if off or keys.get("sliding_window") is None else keys.integer("sliding_window")

    # ---- single tensors ----

    def matrix(self, name: str, group: str, rows: int, cols: int, bias: bool = False, **more: Any) -> None:
        self.parts.add(Part(name + ".weight", group, rows, cols, stage=self.stage, **more))
        if bias:
            self.parts.add(Part(name + ".bias", group, rows, stage=self.stage, **{**more, "role": "vector"}))

    def vector(self, name: str, group: str, size: int) -> None:
        self.parts.add(Part(name, group, size, role="vector", stage=self.stage))

    def norm(self, name: str, size: int) -> None:
        self.vector(name + ".weight", "norm", size)
        if self.family.norm_bias:
            self.vector(name + ".bias", "norm", size)

    # ---- a layer ----

    def gqa(self, p: str, window: int | None) -> None:
        f, keys, hidden = self.family, self.keys, self.hidden
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = keys.flag(f.qkv_bias)
        self.matrix(p + "q_proj", "attention", 2 * q if f.delta_net else q, hidden, bias)
        self.matrix(p + "k_proj", "attention", kv, hidden, bias, joined=True)
        self.matrix(p + "v_proj", "attention", kv, hidden, bias, joined=True)
        self.matrix(p + "o_proj", "attention", hidden, q, keys.flag(f.o_bias))
        if f.qk_norm and (f.qk_norm_key is None or keys.flag(f.qk_norm_key)):
            full = f.qk_norm == "full"
            self.vector(p + "q_norm.weight", "norm", q if full else self.head_dim)
            self.vector(p + "k_norm.weight", "norm", kv if full else self.head_dim)
        if f.sinks:
            self.vector(p + "sinks", "attention", self.heads)
        d = self.head_dim
        self.see(Attention(1, self.heads, d, d, self.kv_heads, d, d, window=window))

    def mla(self, p: str) -> None:
        """Latent attention, in absorbed form: a key is the latent and its rotary part, a value the latent again."""
        keys, hidden, heads = self.keys, self.hidden, self.heads
        rank, rope = keys.integer("kv_lora_rank"), keys.integer("qk_rope_head_dim")
        nope, v = keys.integer("qk_nope_head_dim"), keys.integer("v_head_dim")
        bias = keys.flag("attention_bias")
        if keys.get("q_lora_rank") is None:
            self.matrix(p + "q_proj", "attention", heads * (nope + rope), hidden)
        else:
            q_rank = keys.integer("q_lora_rank")
            self.matrix(p + "q_a_proj", "attention", q_rank, hidden, bias)
            self.vector(p + "q_a_layernorm.weight", "norm", q_rank)
            self.matrix(p + "q_b_proj", "attention", heads * (nope + rope), q_rank)
        self.matrix(p + "kv_a_proj_with_mqa", "attention", rank + rope, hidden, bias)
        self.vector(p + "kv_a_layernorm.weight", "norm", rank)
        each: dict[str, Any] = {"role": "heads", "count": heads, "active": heads, "stacked": heads}
        self.matrix(p + "kv_b_proj.keys", "attention", rank, nope, **each)
        self.matrix(p + "kv_b_proj.values", "attention", v, rank, **each)
        self.matrix(p + "o_proj", "attention", hidden, heads * v, bias)
        self.see(Attention(1, heads, rank + rope, rank, 1, rank + rope, rank))

    def delta_net(self, p: str) -> None:
        """Gated delta net: a state [key dim, value dim] per value head in place of keys."""
        keys, hidden = self.keys, self.hidden
        k_dim, v_dim = keys.integer("linear_key_head_dim"), keys.integer("linear_value_head_dim")
        v_heads = keys.integer("linear_num_value_heads")
        key, value = keys.integer("linear_num_key_heads") * k_dim, v_heads * v_dim
        self.matrix(p + "in_proj_qkvz", "attention", 2 * key + 2 * value, hidden)
        self.matrix(p + "in_proj_ba", "attention", 2 * v_heads, hidden)
        self.matrix(p + "conv1d", "attention", 2 * key + value, keys.integer("linear_conv_kernel_dim"))
        self.vector(p + "dt_bias", "attention", v_heads)
        self.vector(p + "A_log", "attention", v_heads)
        self.vector(p + "norm.weight", "norm", v_dim)
        self.matrix(p + "out_proj", "attention", hidden, value)
        self.see(Attention(1, v_heads, 0, 0, state=v_heads * k_dim * v_dim))

    def see(self, attention: Attention) -> None:
        if self.stage == "decoder":
            self.attention.append(attention)

    def ffn(self, p: str, width: int, bias: bool, **more: Any) -> None:
        if self.family.gated:
            self.matrix(p + "gate_proj", "ffn", width, self.hidden, bias, **more)
        self.matrix(p + "up_proj", "ffn", width, self.hidden, bias, joined=self.family.gated, **more)
        self.matrix(p + "down_proj", "ffn", self.hidden, width, bias, **more)

    def width(self) -> int:
        """Of a dense FFN; GPT-2's may be absent."""
        return self.keys.integer("intermediate_size", 4 * self.hidden if self.family.positions else None)

    def feed_forward(self, p: str, index: int) -> None:
        e, keys, matrices = self.family.experts, self.keys, 3 if self.family.gated else 2
        bias = keys.flag(self.family.mlp_bias)  # of dense FFNs and shared experts
        if e is None or self.is_dense(e, index):
            self.ffns.add(Ffn(self.hidden, self.width(), matrices), index)
            self.ffn(p, self.width(), bias)
            return
        count, width = keys.integer(e.count), keys.integer(e.width)
        top_k = keys.integer("num_experts_per_tok", high=count)
        self.ffns.add(Ffn(self.hidden, width, matrices, count, top_k), index)
        self.matrix(p + "gate", "router", count, self.hidden, e.bias, role="router")
        if e.correction:
            self.vector(p + "gate.e_score_correction_bias", "router", count)
        self.ffn(p + "experts.*.", width, e.bias, count=count, active=top_k, experts=count, stacked=count)
        shared = keys.integer(e.shared_count, 0, low=0) * width if e.shared_count else 0
        if e.shared_width:
            shared = keys.integer(e.shared_width, 0, low=0)
            if shared:
                self.vector(p + "shared_expert_gate.weight", "router", self.hidden)
        if shared:
            self.ffn(p + ("shared_expert." if e.shared_width else "shared_experts."), shared, bias)

    def is_dense(self, e: Experts, index: int) -> bool:
        if e.dense_first:
            return index < self.keys.integer("first_k_dense_replace", 0, low=0)
        if not e.stepped:
            return False
        only, step = self.keys.get("mlp_only_layers") or [], self.keys.integer("decoder_sparse_step", 1)
        if not isinstance(only, list):
            raise self.keys.config.bad("mlp_only_layers", only, "a list of layers")
        return index in only or (index + 1) % step != 0

    def layer(self, p: str, index: int, kind: str, window: int | None) -> None:
        for name in self.family.norms:
            self.norm(p + name, self.hidden)
        if kind == "linear_attention":
            self.delta_net(p + "linear_attn.")
        elif self.family.mla:
            self.mla(p + "self_attn.")
        else:
            self.gqa(p + "self_attn.", window)
        self.feed_forward(p + "mlp.", index)

    # ---- the model ----

    def kinds(self) -> list[str]:
        """layer_types, or the family's rule."""
        types = self.keys.get("layer_types")
        if types is not None:
            if not isinstance(types, list) or len(types) != self.layers or not all(isinstance(t, str) for t in types):
                raise self.keys.config.bad("layer_types", types, f"a list of {self.layers} names, one per layer")
            return types
        if self.family.delta_net:
            every = self.keys.integer("full_attention_interval", 4)
            return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(self.layers)]
        rule = self.family.window
        if rule == "none" or self.window is None:
            return ["full_attention"] * self.layers
        if rule == "key":
            return ["sliding_attention"] * self.layers
        if rule == "types":
            raise self.keys.config.unsupported("use_sliding_window", True, "false, or a list layer_types beside it")
        if rule == "switched":
            first = self.keys.integer("max_window_layers", low=0)
            return ["sliding_attention" if i >= first else "full_attention" for i in range(self.layers)]
        every = self.keys.integer("sliding_window_pattern", int(rule))
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(self.layers)]

    def mtp(self, p: str) -> None:
        """Multi-token prediction: a layer of its own, the last two hidden states in, its own embedding and head."""
        vocab = self.keys.integer("vocab_size")
        self.stage = "mtp"
        self.parts.add(Part(p + "embed_tokens.weight", "embedding", vocab, self.hidden, "table", stage="mtp"))
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.norm(p + name, self.hidden)
        self.matrix(p + "eh_proj", "other", self.hidden, 2 * self.hidden)
        self.layer(p, self.layers, "full_attention", None)
        self.matrix(p + "shared_head.head", "lm_head", vocab, self.hidden, role="head")
        self.stage = "decoder"

    def build(self, architecture: str, stored: str | None) -> Anatomy:
        keys, vocab = self.keys, self.keys.integer("vocab_size")
        tied = keys.flag("tie_word_embeddings")
        self.matrix("model.embed_tokens", "embedding", vocab, self.hidden, role="tied" if tied else "table")
        if self.family.positions:
            self.matrix("model.wpe", "embedding", keys.integer("max_position_embeddings"), self.hidden, role="table")
        for index, kind in enumerate(self.kinds()):
            self.layer("model.layers.*.", index, kind, self.window if kind in WINDOWED else None)
        self.norm("model.norm", self.hidden)
        if not tied:
            self.matrix("lm_head", "lm_head", vocab, self.hidden, role="head")
        if self.family.mla or keys.get("num_nextn_predict_layers") is not None:
            for _ in range(keys.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS)):
                self.mtp("model.layers.*.")
        longest = None if keys.get("max_position_embeddings") is None else keys.integer("max_position_embeddings")
        return Anatomy(
            family=str(keys.config.values.get("model_type")),
            architecture=architecture,
            kind="decoder",
            parts=self.parts.result(),
            attention=merged(self.attention),
            ffns=self.ffns.result(),
            max_context=longest,
            stored=stored,
        )
