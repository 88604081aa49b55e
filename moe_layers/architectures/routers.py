"""Functions that read a router's settings from a model's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_kernels import RouterSpec

from .fields import ModelConfig


def softmax(normalize: bool) -> Callable[[ModelConfig], RouterSpec]:
    return lambda config: RouterSpec.softmax(normalize=normalize)


def softmax_by_flag(default: bool) -> Callable[[ModelConfig], RouterSpec]:
    return lambda config: RouterSpec.softmax(normalize=config.flag("norm_topk_prob", default=default))


def dbrx(config: ModelConfig) -> RouterSpec:
    """Read DBRX's router, which divides weights by their p-norm. `moe_normalize_expert_weights` is p, by default 1. If
    this field is null, weights are not normalised."""
    config = config.nested("ffn_config")
    if config.values.get("moe_normalize_expert_weights", 1.0) is None:
        return RouterSpec.softmax(normalize=False)
    return RouterSpec.dbrx(config.number("moe_normalize_expert_weights", default=1.0))


def _groups(config: ModelConfig) -> tuple[int, int]:
    num_groups = config.integer("n_group", "num_expert_group", default=1, minimum=1)
    return num_groups, config.integer("topk_group", default=1, minimum=1)


def deepseek_v2(config: ModelConfig) -> RouterSpec:
    scale = config.number("routed_scaling_factor", default=1.0)
    if config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        return RouterSpec.softmax(normalize=False, scale=scale)
    return RouterSpec.deepseek_v2(*_groups(config), scale=scale)


def deepseek_v3(config: ModelConfig) -> RouterSpec:
    config.refuse_unless(scoring_func="sigmoid", topk_method="noaux_tc", score_function="sigmoid")
    return RouterSpec.deepseek_v3(
        *_groups(config),
        normalize=config.flag("norm_topk_prob", "moe_renormalize", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
    )


def dots(config: ModelConfig) -> RouterSpec:
    if config.values.get("scoring_func") == "noaux_tc":  # in published files, this means sigmoid scores with a bias
        config = replace(config, values=config.values | {"scoring_func": "sigmoid"})
    return deepseek_v3(config)


def minimax_m2(config: ModelConfig) -> RouterSpec:
    config.refuse_unless(scoring_func="sigmoid")
    return RouterSpec.deepseek_v3(norm_epsilon=0.0, scale=config.number("routed_scaling_factor", default=1.0))


def step3(config: ModelConfig) -> RouterSpec:
    """Read Step 3.5's router. The block scales the experts' sum, which is equivalent to scaling the weights."""
    config.refuse_unless(moe_router_activation="sigmoid", norm_expert_weight=True, use_moe_router_bias=True)
    return RouterSpec.deepseek_v3(norm_epsilon=0.0, scale=config.number("moe_router_scaling_factor", default=1.0))


def deepseek_v4(config: ModelConfig) -> RouterSpec:
    """Read DeepSeek-V4's router, which always normalises weights.

    Raises:
        ValueError: the layer has type "hash_moe", in which a table chooses experts by token id. "hash_moe" is the
            default for the first `num_hash_layers` layers (3 by default).
    """
    default = "hash_moe" if config.layer < config.integer("num_hash_layers", default=3) else "moe"
    if config.choice("mlp_layer_types", ("moe", "hash_moe"), default) == "hash_moe":
        raise ValueError(
            f"MoEConfig: layer {config.layer} of deepseek_v4 is not supported: a table chooses its experts by token id "
            '("hash_moe" in mlp_layer_types)'
        )
    scores = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
    return RouterSpec.deepseek_v3(
        score=scores[config.choice("scoring_func", tuple(scores), "sqrtsoftplus")],
        scale=config.number("routed_scaling_factor"),
    )


def lfm2(config: ModelConfig) -> RouterSpec:
    return RouterSpec.deepseek_v3(
        normalize=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
        norm_epsilon=1e-6,
        selection_bias="score" if config.flag("use_expert_bias", default=True) else None,
    )


def scaled_by(field: str, **default: float) -> Callable[[ModelConfig], RouterSpec]:
    return lambda config: RouterSpec.deepseek_v3(scale=config.number(field, **default))


def laguna(config: ModelConfig) -> RouterSpec:
    config.refuse_unless(moe_apply_router_weight_on_input=False)
    return RouterSpec.deepseek_v3(
        norm_epsilon=0.0,
        scale=config.number("moe_routed_scaling_factor", default=1.0),
        logit_softcap=config.number("moe_router_logit_softcapping", default=0.0) or None,
    )


def sigmoid_by_flag(default: bool, bias: str | None) -> Callable[[ModelConfig], RouterSpec]:
    return lambda config: RouterSpec.deepseek_v3(
        normalize=config.flag("norm_topk_prob", default=default), norm_epsilon=0.0, selection_bias=bias
    )


def cohere(config: ModelConfig) -> RouterSpec:
    if config.integer("num_shared_experts", default=0):
        config.refuse_unless(shared_expert_combination_strategy="sum")
        config.choice("shared_expert_combination_strategy", ("sum",), "average")
    if config.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax") == "softmax":
        return RouterSpec.softmax()
    return RouterSpec(score="sigmoid", normalize=config.flag("norm_topk_prob", default=True))


def mistral(config: ModelConfig) -> RouterSpec:
    num_groups, topk_groups = _groups(config)
    return RouterSpec.softmax(
        normalize=config.flag("norm_topk_prob", default=True),
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score="top2_sum",
        norm_epsilon=1e-20,
        scale=config.number("routed_scaling_factor", default=1.0),
    )


def longcat(config: ModelConfig) -> RouterSpec:
    config.refuse_unless(zero_expert_type="identity")
    return RouterSpec.ernie(normalize=False, scale=config.number("routed_scaling_factor"))
