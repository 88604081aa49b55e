"""Routers beyond the plain softmax: the settings of a `RouterSpec`, on logits or behind the linear map as one op.

    scores = f(logits)     chosen = top-k of scores [+ bias] in the best groups     w = scale * s / (sum of s + epsilon)

One kernel computes all of it forward and another backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..router_spec import RouterSpec
from ..runtime.dispatch import without_autocast
from ..runtime.ops import registered_op
from .linear import halves_dtype, router_gradients, router_logits, router_logits_op
from .scored_kernels import Facts, launch_backward, launch_forward


def spec_fields(spec: RouterSpec) -> Facts:
    """The settings that the ops take."""
    return Facts(
        spec.chooses_by_logit,
        spec.num_groups,
        spec.topk_groups,
        spec.group_score == "top2_sum",
        spec.score,
        spec.normalize,
        spec.norm_epsilon,
        spec.norm_minimum,
        spec.scale,
    )


@registered_op("scored_routing")
def scored_routing_op(
    logits: Tensor,
    selection_bias: Tensor | None,
    top_k: int,
    by_logit: bool,
    num_groups: int,
    topk_groups: int,
    top2_sum: bool,
    score: str,
    normalize: bool,
    norm_epsilon: float,
    norm_minimum: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # weights [T, K], experts [T, K]
    facts = Facts(by_logit, num_groups, topk_groups, top2_sum, score, normalize, norm_epsilon, norm_minimum, scale)
    return launch_forward(logits, selection_bias, top_k, facts)


@scored_routing_op.register_fake
def _(logits, selection_bias, top_k, *facts):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _setup(ctx, inputs, output):
    logits, _, _, *facts = inputs
    ctx.facts = Facts(*facts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1])


def _backward(ctx, dweights, _):
    logits, topk_experts = ctx.saved_tensors
    if dweights is None:
        return (None,) * (3 + len(ctx.facts))
    dlogits = _call_backward(dweights, topk_experts, logits, None, ctx.facts, None)
    return dlogits.to(logits.dtype), *(None,) * (2 + len(ctx.facts))


scored_routing_op.register_autograd(_backward, setup_context=_setup)


@registered_op("scored_linear_routing")
def scored_linear_routing_op(
    tokens: Tensor,
    w_router: Tensor,
    logit_bias: Tensor | None,
    selection_bias: Tensor | None,
    batch_invariant: bool,
    top_k: int,
    by_logit: bool,
    num_groups: int,
    topk_groups: int,
    top2_sum: bool,
    score: str,
    normalize: bool,
    norm_epsilon: float,
    norm_minimum: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # weights [T, K], experts [T, K], logits [T, E]
    facts = Facts(by_logit, num_groups, topk_groups, top2_sum, score, normalize, norm_epsilon, norm_minimum, scale)
    logits = router_logits(tokens, w_router, logit_bias, batch_invariant)
    return *launch_forward(logits, selection_bias, top_k, facts), logits


@scored_linear_routing_op.register_fake
def _(tokens, w_router, logit_bias, selection_bias, batch_invariant, top_k, *facts):
    shape = (tokens.shape[0], top_k)
    logits = tokens.new_empty(tokens.shape[0], w_router.shape[0], dtype=torch.float32)
    return tokens.new_empty(shape, dtype=torch.float32), tokens.new_empty(shape, dtype=torch.int32), logits


def _linear_setup(ctx, inputs, output):
    tokens, w_router, logit_bias, _, ctx.batch_invariant, _, *facts = inputs
    ctx.facts = Facts(*facts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(tokens, w_router, logit_bias, output[1])


def _linear_backward(ctx, dweights, _, dlogits_direct):
    tokens, w_router, logit_bias, topk_experts = ctx.saved_tensors
    rest = (None,) * (3 + len(ctx.facts))
    if dweights is None and dlogits_direct is None:
        return None, None, None, *rest
    with without_autocast(tokens):
        dlogits = dlogits_direct
        if dweights is not None:
            logits = router_logits_op(tokens, w_router, logit_bias, ctx.batch_invariant)
            split_dtype = halves_dtype(tokens, w_router)
            dlogits = _call_backward(dweights, topk_experts, logits, dlogits_direct, ctx.facts, split_dtype)
        dlogit_bias = None
        if ctx.needs_input_grad[2]:
            dlogit_bias = dlogits.sum(0, dtype=torch.float32).view(-1, len(w_router)).sum(0).to(logit_bias.dtype)
        gradients = router_gradients(dlogits, tokens, w_router, ctx.needs_input_grad[:2], ctx.batch_invariant)
        return *gradients, dlogit_bias, *rest


scored_linear_routing_op.register_autograd(_linear_backward, setup_context=_linear_setup)


def _call_backward(
    dweights: Tensor,  # [T, K]
    topk_experts: Tensor,  # [T, K]
    logits: Tensor,  # [T, E]
    dlogits_direct: Tensor | None,  # [T, E]
    facts: Facts,
    split_dtype: torch.dtype | None,
) -> Tensor:
    numbers = facts.score, facts.normalize, facts.norm_epsilon, facts.norm_minimum, facts.scale
    return _scored_routing_backward_op(dweights, topk_experts, logits, dlogits_direct, split_dtype, *numbers)


@registered_op("scored_routing_backward")
def _scored_routing_backward_op(
    dweights: Tensor,
    topk_experts: Tensor,
    logits: Tensor,
    dlogits_direct: Tensor | None,  # a gradient to add
    split_dtype: torch.dtype | None,
    score: str,
    normalize: bool,
    norm_epsilon: float,
    norm_minimum: float,
    scale: float,
) -> Tensor:  # [T, E] float32; [T, 2E] with a split dtype: [high | low], see `softmax._topk_backward_op`
    numbers = score, normalize, norm_epsilon, norm_minimum, scale
    return launch_backward(dweights, topk_experts, logits, dlogits_direct, split_dtype, *numbers)


@_scored_routing_backward_op.register_fake
def _(dweights, topk_experts, logits, dlogits_direct, split_dtype, *facts):
    num_columns = logits.shape[1] if split_dtype is None else 2 * logits.shape[1]
    return dweights.new_empty(logits.shape[0], num_columns, dtype=split_dtype)
