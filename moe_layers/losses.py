"""Auxiliary losses as plain functions of a layer's routing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .feed_forward import LayerRouting


def load_balancing_loss(routing: LayerRouting) -> Tensor:
    """The Switch Transformer's loss: num_experts * sum_e f_e * P_e, over the tokens of this call.

    f_e is the share of slots that expert e got (no gradient), P_e its mean probability under the softmax over all
    experts. 1 at perfect balance, whatever top_k. Invariant to a permutation of experts or tokens; it depends on how
    a batch is split into calls, since f and P are means over one call. 0 for no tokens.

    Source: equations 4 to 6 of https://arxiv.org/abs/2101.03961, with top_k slots per token.
    """
    num_tokens, num_experts = routing.logits.shape
    shares = routing.tokens_per_expert.float() / max(routing.topk_experts.numel(), 1)  # [E]
    probabilities = routing.logits.softmax(-1).sum(0) / max(num_tokens, 1)  # [E]
    return num_experts * (shares * probabilities).sum()


def router_z_loss(routing: LayerRouting) -> Tensor:
    """Mean over tokens of the square of logsumexp(logits). Keeps logits small. 0 for no tokens.

    Invariant to a permutation of experts or tokens; a mean over calls of equal size equals the whole.

    Source: equation 5 of https://arxiv.org/abs/2202.08906.
    """
    return routing.logits.logsumexp(-1).square().sum() / max(len(routing.logits), 1)


class _AttachLoss(torch.autograd.Function):
    """The identity on `tokens`, whose backward also starts the gradient of `loss`, with `scale` as its gradient."""

    @staticmethod
    def forward(ctx, tokens: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.loss_dtype, ctx.loss_device = loss.dtype, loss.device
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx, dtokens: Tensor):
        (scale,) = ctx.saved_tensors
        dloss = torch.ones((), dtype=ctx.loss_dtype, device=ctx.loss_device)
        return dtokens, dloss if scale is None else dloss * scale, None


def attach_loss(
    tokens: Tensor,  # [T, D]
    loss: Tensor,  # scalar
    scale: Tensor | None,  # scalar; None is 1
) -> Tensor:  # [T, D]
    """`tokens`, such that a backward through them adds the gradient of `scale * loss`."""
    return _AttachLoss.apply(tokens, loss, scale)
