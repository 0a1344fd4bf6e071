"""Stage 2, config_moe: which layers of a config.json have experts, and how tokens are routed to them."""

from __future__ import annotations

from pyengine.config_values import ConfigValues
from pyengine.family import Experts
from pyengine.spec import FFNSpec, MoESpec, RouterSpec

MAX_EXPERTS = 4096
MAX_SIZE = 2**31 - 1


def ffn_specs(config: ConfigValues, experts: Experts, dense: FFNSpec, count: int) -> list[FFNSpec | MoESpec]:
    """The FFN of each of `count` layers; `dense` is that of layers without experts.

    Where it has biases a shared expert has them too; those that tokens are routed to have none.
    Errors: ModelFormatError for a value that is wrong, UnsupportedModelError for a method that is not implemented.
    """
    sparse = _sparse_layers(config, experts, count)
    if not any(sparse):
        return [dense] * count
    router = _router(config, experts)
    size = config.integer(experts.size_key, 1, MAX_SIZE)
    shared = None
    if experts.shared_count_key is not None:
        number = config.integer(experts.shared_count_key, 0, MAX_EXPERTS, 0)
        shared = FFNSpec(size * number, dense.activation, dense.bias) if number else None
    elif experts.shared_size_key is not None:
        shared = FFNSpec(config.integer(experts.shared_size_key, 1, MAX_SIZE), dense.activation, dense.bias)
    moe = MoESpec(router, FFNSpec(size, dense.activation), shared, shared is not None and experts.shared_gate)
    return [moe if has else dense for has in sparse]


def _router(config: ConfigValues, experts: Experts) -> RouterSpec:
    key = next((key for key in experts.count_keys if config.values.get(key) is not None), experts.count_keys[0])
    number = config.integer(key, 1, MAX_EXPERTS)
    top_k = config.integer("num_experts_per_tok", 1, number)
    method = experts.method
    if experts.method_key is not None and config.values.get(experts.method_key) is not None:
        method = config.values[experts.method_key]
    if method not in experts.methods:
        raise config.unsupported(experts.method_key or "", method, f"one of {', '.join(experts.methods)}")
    scoring, grouped, group_score, bias = METHODS[method]
    if experts.scoring_key is not None and config.values.get(experts.scoring_key, scoring) != scoring:
        raise config.unsupported(experts.scoring_key, config.values[experts.scoring_key], f"{scoring} for {method}")
    normalise = experts.normalise
    if normalise is None:
        normalise = config.flag("norm_topk_prob", False)
    elif "norm_topk_prob" in config.values and config.flag("norm_topk_prob", normalise) != normalise:
        raise config.unsupported("norm_topk_prob", config.values["norm_topk_prob"], str(normalise).lower())
    groups = top_groups = 1
    if grouped:
        groups = config.integer("n_group", 1, MAX_EXPERTS)
        top_groups = config.integer("topk_group", 1, groups)
        if number % groups:
            raise config.bad("n_group", groups, f"a divisor of {key} {number}")
        if group_score == "top2_sum" and number // groups < 2:
            raise config.bad("n_group", groups, f"at most {number // 2}: the score of a group is of two experts")
        if top_k > number // groups * top_groups:
            raise config.bad("topk_group", top_groups, f"groups with at least num_experts_per_tok {top_k} experts")
    scale = config.positive("routed_scaling_factor", 1.0) if experts.scaled else 1.0
    eps = 1e-20 if scoring == "sigmoid" else 0.0
    return RouterSpec(number, top_k, scoring, normalise, eps, scale, groups, top_groups, group_score, bias)


# Of choosing experts: scoring, whether groups are chosen first, by which score, whether a bias is added for the choice.
METHODS = {
    "softmax": ("softmax", False, "max", False),
    "greedy": ("softmax", False, "max", False),
    "group_limited_greedy": ("softmax", True, "max", False),
    "noaux_tc": ("sigmoid", True, "top2_sum", True),
}


def _sparse_layers(config: ConfigValues, experts: Experts, count: int) -> list[bool]:
    """Whether each layer has experts."""
    if experts.first_dense_key is not None:
        first = config.integer(experts.first_dense_key, 0, MAX_SIZE, 0)
        if config.integer("moe_layer_freq", 1, MAX_SIZE, 1) != 1:
            raise config.unsupported("moe_layer_freq", config.values["moe_layer_freq"], "1")
        return [index >= first for index in range(count)]
    if not experts.steps:
        return [True] * count
    step = config.integer("decoder_sparse_step", 1, MAX_SIZE, 1)
    dense = config.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise config.bad("mlp_only_layers", dense, "a list of layers")
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]
