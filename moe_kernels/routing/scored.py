"""Routers beyond the plain softmax, as ops on logits and as ops that include the linear map.

    scores = f(logits)     chosen = top-k of scores [+ bias] in the best groups     w = scale * s / (sum of s + epsilon)

One kernel computes the forward and another the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.dispatch import without_autocast
from ..runtime.ops import registered_op
from ..specs import RouterSpec
from .linear import halves_dtype, router_gradients, router_logits, router_logits_op
from .scored_kernels import ScoreSettings, launch_backward, launch_forward


def score_settings(spec: RouterSpec) -> ScoreSettings:
    """Return the settings that the ops take."""
    return ScoreSettings(
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
    logits: Tensor, selection_bias: Tensor | None, top_k: int, settings: ScoreSettings
) -> tuple[Tensor, Tensor]:  # weights [T, K], experts [T, K]
    return launch_forward(logits, selection_bias, top_k, settings)


@scored_routing_op.register_fake
def _(logits, selection_bias, top_k, settings):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _setup(ctx, inputs, output):
    logits, _, _, ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1])


def _backward(ctx, dweights, _):
    logits, topk_experts = ctx.saved_tensors
    if dweights is None:
        return {}
    dlogits = _backward_op(dweights, topk_experts, logits, None, None, ctx.settings)
    return {"logits": dlogits.to(logits.dtype)}


scored_routing_op.register_autograd(_backward, setup_context=_setup)


@registered_op("scored_linear_routing")
def scored_linear_routing_op(
    tokens: Tensor,
    w_router: Tensor,
    logit_bias: Tensor | None,
    selection_bias: Tensor | None,
    batch_invariant: bool,
    top_k: int,
    settings: ScoreSettings,
) -> tuple[Tensor, Tensor, Tensor]:  # weights [T, K], experts [T, K], logits [T, E]
    logits = router_logits(tokens, w_router, logit_bias, batch_invariant)
    return *launch_forward(logits, selection_bias, top_k, settings), logits


@scored_linear_routing_op.register_fake
def _(tokens, w_router, logit_bias, selection_bias, batch_invariant, top_k, settings):
    shape = (tokens.shape[0], top_k)
    logits = tokens.new_empty(tokens.shape[0], w_router.shape[0], dtype=torch.float32)
    return tokens.new_empty(shape, dtype=torch.float32), tokens.new_empty(shape, dtype=torch.int32), logits


def _linear_setup(ctx, inputs, output):
    tokens, w_router, logit_bias, _, ctx.batch_invariant, _, ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(tokens, w_router, logit_bias, output[1])


def _linear_backward(ctx, dweights, _, dlogits_direct):
    tokens, w_router, logit_bias, topk_experts = ctx.saved_tensors
    if dweights is None and dlogits_direct is None:
        return {}
    with without_autocast(tokens):
        dlogits = dlogits_direct
        if dweights is not None:
            logits = router_logits_op(tokens, w_router, logit_bias, ctx.batch_invariant)
            split_dtype = halves_dtype(tokens, w_router)
            dlogits = _backward_op(dweights, topk_experts, logits, dlogits_direct, split_dtype, ctx.settings)
        dlogit_bias = None
        needed = scored_linear_routing_op.needed(ctx)
        if "logit_bias" in needed:
            dlogit_bias = dlogits.sum(0, dtype=torch.float32).view(-1, len(w_router)).sum(0).to(logit_bias.dtype)
        needs = "tokens" in needed, "w_router" in needed
        dtokens, dw_router = router_gradients(dlogits, tokens, w_router, needs, ctx.batch_invariant)
        return {"tokens": dtokens, "w_router": dw_router, "logit_bias": dlogit_bias}


scored_linear_routing_op.register_autograd(_linear_backward, setup_context=_linear_setup)

_backward_op = registered_op("scored_routing_backward")(launch_backward)


@_backward_op.register_fake
def _(dweights, topk_experts, logits, dlogits_direct, split_dtype, settings):
    num_columns = logits.shape[1] if split_dtype is None else 2 * logits.shape[1]
    return dweights.new_empty(logits.shape[0], num_columns, dtype=split_dtype)
