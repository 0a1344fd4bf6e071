"""Stage 6, account_encoders: BERT, T5 and the original Transformer (Marian, BART) as parts. The engine runs none.

Every layer here is dense, with heads of d / heads (T5: d_kv) that all have their own keys and values. A cross-attention
layer multiplies k and v of the encoder's output once per source token, so those two count to the encoder.
"""

from __future__ import annotations

from collections.abc import Callable

from pyengine.config import MAX_LAYERS
from pyengine.config_values import ConfigValues
from pyengine.reports.account_families import Keys
from pyengine.reports.account_parts import Anatomy, Attention, Ffn, Ffns, Part, Parts, merged


class Stack:
    """Parts of an encoder or a decoder. bias: of every matrix; norm_bias: LayerNorm rather than RMSNorm."""

    def __init__(self, hidden: int, *, bias: bool, norm_bias: bool) -> None:
        self.hidden = hidden
        self.bias = bias
        self.norm_bias = norm_bias
        self.parts = Parts()
        self.attention: list[Attention] = []
        self.ffns = Ffns()

    def matrix(self, name: str, group: str, rows: int, cols: int, stage: str, role: str = "matrix") -> None:
        self.parts.add(Part(name + ".weight", group, rows, cols, role, stage=stage))
        if self.bias and role in ("matrix", "once"):
            self.parts.add(Part(name + ".bias", group, rows, role="vector", stage=stage))

    def vector(self, name: str, group: str, size: int, stage: str) -> None:
        self.parts.add(Part(name, group, size, role="vector", stage=stage))

    def norm(self, name: str, stage: str) -> None:
        self.vector(name + ".weight", "norm", self.hidden, stage)
        if self.norm_bias:
            self.vector(name + ".bias", "norm", self.hidden, stage)

    def attend(self, p: str, stage: str, heads: int, head_dim: int, kind: str = "self") -> None:
        inner, hidden = heads * head_dim, self.hidden
        source = "encoder" if kind == "cross" else stage
        for name, where in (("q", stage), ("k", source), ("v", source)):
            self.matrix(f"{p}{name}", "attention", inner, hidden, where)
        self.matrix(p + "o", "attention", hidden, inner, stage)
        cached = heads if stage == "decoder" else 0
        dims = (head_dim, head_dim) if cached else (0, 0)
        self.attention.append(Attention(1, heads, head_dim, head_dim, cached, *dims, stage=stage, kind=kind))

    def ffn(self, p: str, stage: str, width: int, *, gated: bool = False) -> None:
        self.ffns.add(Ffn(self.hidden, width, 3 if gated else 2), 0)
        for name in ("gate", "up") if gated else ("up",):
            self.matrix(p + name, "ffn", width, self.hidden, stage)
        self.matrix(p + "down", "ffn", self.hidden, width, stage)

    def anatomy(self, config: ConfigValues, architecture: str, kind: str, longest: int | None) -> Anatomy:
        return Anatomy(
            family=str(config.values.get("model_type")),
            architecture=architecture,
            kind=kind,
            parts=self.parts.result(),
            attention=merged(self.attention),
            ffns=self.ffns.result(),
            max_context=longest,
            stored=None,
        )


def heads_of(keys: Keys, key: str, hidden: int) -> tuple[int, int]:
    heads = keys.integer(key)
    if hidden % heads:
        raise keys.config.bad(keys.name(key), heads, f"a divisor of the hidden size {hidden}")
    return heads, hidden // heads


def bert(config: ConfigValues, architecture: str) -> Anatomy:
    """BERT and RoBERTa: the encoder and the pooler; a head for a task is not counted."""
    keys = Keys(config, {}, {"type_vocab_size": 2, "max_position_embeddings": 512})
    hidden, longest = keys.integer("hidden_size"), keys.integer("max_position_embeddings")
    heads, head_dim = heads_of(keys, "num_attention_heads", hidden)
    stack = Stack(hidden, bias=True, norm_bias=True)
    for name, rows in (
        ("word", keys.integer("vocab_size")),
        ("position", longest),
        ("token_type", keys.integer("type_vocab_size")),
    ):
        stack.matrix(f"embeddings.{name}_embeddings", "embedding", rows, hidden, "encoder", "table")
    stack.norm("embeddings.LayerNorm", "encoder")
    for _ in range(keys.integer("num_hidden_layers", high=MAX_LAYERS)):
        stack.attend("encoder.layer.*.attention.", "encoder", heads, head_dim)
        stack.ffn("encoder.layer.*.ffn.", "encoder", keys.integer("intermediate_size"))
        stack.norm("encoder.layer.*.attention.LayerNorm", "encoder")
        stack.norm("encoder.layer.*.output.LayerNorm", "encoder")
    stack.matrix("pooler.dense", "other", hidden, hidden, "encoder", "once")
    offset = 2 if config.values.get("model_type") == "roberta" else 0  # positions that padding takes
    return stack.anatomy(config, architecture, "encoder", longest - offset)


def t5(config: ConfigValues, architecture: str) -> Anatomy:
    """T5, its 1.1 and mT5: no biases, RMSNorm, relative positions in the first layer of each stack."""
    multilingual = config.values.get("model_type") == "mt5"
    form = "gated-gelu" if multilingual else "relu"
    defaults = {"relative_attention_num_buckets": 32, "tie_word_embeddings": not multilingual}
    keys = Keys(config, {}, {**defaults, "feed_forward_proj": form})
    hidden, heads, head_dim = keys.integer("d_model"), keys.integer("num_heads"), keys.integer("d_kv")
    form = keys.get("feed_forward_proj")
    if not isinstance(form, str):
        raise config.bad("feed_forward_proj", form, "relu or gated-gelu")
    encoder = keys.integer("num_layers", high=MAX_LAYERS)
    stack = Stack(hidden, bias=False, norm_bias=False)
    tied, vocab = keys.flag("tie_word_embeddings"), keys.integer("vocab_size")
    stack.matrix("shared", "embedding", vocab, hidden, "decoder", "tied" if tied else "table")
    for stage, count in (("encoder", encoder), ("decoder", keys.integer("num_decoder_layers", encoder))):
        buckets = keys.integer("relative_attention_num_buckets")
        stack.matrix(stage + ".relative_attention_bias", "attention", buckets, heads, stage, "table")
        for _ in range(count):
            p = f"{stage}.block.*."
            stack.norm(p + "attention.layer_norm", stage)
            stack.attend(p + "attention.", stage, heads, head_dim)
            if stage == "decoder":
                stack.norm(p + "cross.layer_norm", stage)
                stack.attend(p + "cross.", stage, heads, head_dim, "cross")
            stack.norm(p + "ffn.layer_norm", stage)
            stack.ffn(p + "ffn.", stage, keys.integer("d_ff"), gated=form.startswith("gated"))
        stack.norm(stage + ".final_layer_norm", stage)
    if not tied:
        stack.matrix("lm_head", "lm_head", vocab, hidden, "decoder", "head")
    return stack.anatomy(config, architecture, "encoder-decoder", None)


def transformer(config: ConfigValues, architecture: str) -> Anatomy:
    """The original Transformer as Marian has it (sinusoidal positions, one matrix for both embeddings and the head),
    or BART (learned positions, a norm after the embedding). Norms come after the branches; every matrix has a bias."""
    bart = config.values.get("model_type") == "bart"
    keys = Keys(config, {}, {"tie_word_embeddings": True, "max_position_embeddings": 1024})
    hidden, longest = keys.integer("d_model"), keys.integer("max_position_embeddings")
    if not keys.flag("tie_word_embeddings") or keys.get("share_encoder_decoder_embeddings") is False:
        raise config.unsupported("tie_word_embeddings", False, "one embedding shared by both stacks and the head")
    stack = Stack(hidden, bias=True, norm_bias=True)
    stack.matrix("model.shared", "embedding", keys.integer("vocab_size"), hidden, "decoder", "tied")
    for stage in ("encoder", "decoder"):
        heads, head_dim = heads_of(keys, f"{stage}_attention_heads", hidden)
        if bart:  # two rows more than positions
            stack.matrix(f"model.{stage}.embed_positions", "embedding", longest + 2, hidden, stage, "table")
            stack.norm(f"model.{stage}.layernorm_embedding", stage)
        for _ in range(keys.integer(f"{stage}_layers", high=MAX_LAYERS)):
            p = f"model.{stage}.layers.*."
            stack.attend(p + "self_attn.", stage, heads, head_dim)
            stack.norm(p + "self_attn_layer_norm", stage)
            if stage == "decoder":
                stack.attend(p + "encoder_attn.", stage, heads, head_dim, "cross")
                stack.norm(p + "encoder_attn_layer_norm", stage)
            stack.ffn(p + "ffn.", stage, keys.integer(f"{stage}_ffn_dim"))
            stack.norm(p + "final_layer_norm", stage)
    return stack.anatomy(config, architecture, "encoder-decoder", longest)


BUILDERS: dict[str, Callable[[ConfigValues, str], Anatomy]] = {
    "bert": bert,
    "roberta": bert,
    "t5": t5,
    "mt5": t5,
    "marian": transformer,
    "bart": transformer,
}
