"""Routers beyond the plain softmax as an op on logits.

    scores = f(logits)     chosen = top-k of scores [+ bias] in the best groups     w = scale * s / (sum of s + epsilon)

One kernel computes the forward and another the backward.
"""

from __future__ import annotations

import torch

from ..runtime.registered_ops import registered_op
from ..specs import RouterSpec
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


scored_routing_op = registered_op("scored_routing")(launch_forward)


@scored_routing_op.register_fake
def _(logits, selection_bias, top_k, settings):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _setup(ctx, call, output):
    logits, _, _, ctx.settings = call.args
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1])


def _backward(ctx, dweights, _):
    logits, topk_experts = ctx.saved_tensors
    if dweights is None:
        return {}
    dlogits = scored_backward_op(dweights, topk_experts, logits, None, None, ctx.settings)
    return {"logits": dlogits.to(logits.dtype)}


scored_routing_op.register_autograd(_backward, setup_context=_setup)


scored_backward_op = registered_op("scored_routing_backward")(launch_backward)


@scored_backward_op.register_fake
def _(dweights, topk_experts, logits, dlogits_direct, split_dtype, settings):
    num_columns = logits.shape[1] if split_dtype is None else 2 * logits.shape[1]
    return dweights.new_empty(logits.shape[0], num_columns, dtype=split_dtype)
