"""Auxiliary losses as plain functions of a layer's routing, and their attachment to a layer's output.

Every loss ignores padding tokens and is 0 if there are no tokens. The losses differ in how they react to splitting a
batch:

| loss | at perfect balance | sum of the losses of a batch's calls |
|---|---|---|
| `load_balancing_loss` | 1 | depends on the split: shares and mean probabilities are those of one call |
| `sequence_load_balancing_loss` | 1 | given `num_tokens`, the loss of the batch, if no sequence is cut |
| `global_load_balancing_loss` | 1 | given the counts of all calls and `num_tokens`, the loss of the batch |
| `importance_loss` | 0 | depends on the split: the variation is that of one call |
| `router_z_loss` | (ln E + c) ** 2 where all logits are c | given `num_tokens`, the loss of the batch |

`num_tokens` is the number of tokens, without padding, of all calls whose losses are added. Count all micro-batches, and
all ranks if gradients are summed over ranks. With `num_tokens`, each loss is weighted by its call's share of tokens.
By default (`num_tokens=None`), a loss covers only its own call, and losses must be averaged over the calls.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_kernels import RouterSpec, topk_routing
from moe_kernels.reference import SCORES
from moe_kernels.runtime.pytorch import functorch_is_active, num_differentiations

from ..autocast import autocast_is_enabled
from ..checks import check_choice
from ..input import check_num_tokens, check_sequence_lengths
from ..routing.result import LayerRouting, spread_slots

# Values of `count` in `sequence_load_balancing_loss`.
COUNTS = ("scores", "choices")
# Build this spec once: torch.compile with dynamic shapes cannot trace the checks of RouterSpec's constructor.
_SOFTMAX = RouterSpec.softmax(normalize=False)


def load_balancing_loss(
    routing: LayerRouting, *, num_tokens: int | Tensor | None = None, score: str = "softmax"
) -> Tensor:  # scalar
    """Return the Switch Transformer's loss: num_experts * sum_e f_e * P_e, over the tokens of this call.

    f_e is the share of slots that chose expert e, before capacities and without gradient. P_e is expert e's mean
    probability. The loss is 1 at perfect balance, for every top_k. Permutations of experts or tokens, and padding, do
    not change the loss. The loss depends on how a batch is split into calls, because f and P are means over one call.

    Shapes: result scalar.

    Source: equations 4 to 6 of https://arxiv.org/abs/2101.03961, with top_k slots per token.

    Args:
        num_tokens: number of tokens, without padding, of all calls whose losses are added. Default None: the
            number of tokens of this call.
        score: "softmax", "sigmoid" or "sqrt_softplus". Probabilities are these scores divided by their sum.

    Raises:
        ValueError: the score is unknown, or `num_tokens` is negative, or a tensor that is no scalar.
    """
    return _switch("load_balancing_loss", routing, routing.choices_per_expert, num_tokens, score)


def global_load_balancing_loss(
    routing: LayerRouting,
    expert_counts: Tensor,  # [E] integers
    *,
    num_tokens: int | Tensor | None = None,
    score: str = "softmax",
) -> Tensor:  # scalar
    """Return `load_balancing_loss` with the shares of slots (f_e) of a larger batch that includes this call.

    The loss is linear in the probabilities. With `num_tokens` of the larger batch, the losses of its calls add up to
    the loss of the larger batch. Without `num_tokens`, the mean over calls of equally many tokens equals the loss of
    the larger batch. The loss is 1 at perfect balance. Padding and the order of experts and tokens do not change the
    loss.

    Shapes: expert_counts [E] integers; result scalar.

    Source: https://arxiv.org/abs/2501.11873.

    Args:
        expert_counts: each expert's number of slots in the larger batch, from `global_expert_counts`.

    Raises:
        ValueError: the score is unknown; `num_tokens` is negative, or a tensor that is no scalar; or `expert_counts`
            has another shape or does not hold integers.
    """
    num_experts = routing.logits.shape[1]
    if expert_counts.shape != (num_experts,) or expert_counts.is_floating_point():
        raise ValueError(
            f"global_load_balancing_loss: expert_counts must be [E={num_experts}] integers, "
            f"got {list(expert_counts.shape)} {expert_counts.dtype}"
        )
    return _switch("global_load_balancing_loss", routing, expert_counts, num_tokens, score)


def sequence_load_balancing_loss(
    routing: LayerRouting, *, num_tokens: int | Tensor | None = None, score: str = "softmax", count: str = "scores"
) -> Tensor:  # scalar
    """Return the mean over sequences of `load_balancing_loss`, weighted by each sequence's share of the tokens.

    By default, a token for which the router chose n experts counts for its n highest-scoring experts. Selection bias,
    groups, Gumbel noise and assignments do not change these scores. Megatron-Core counts the same experts.

    The loss is 1 if every sequence is perfectly balanced. The loss does not change with permutations of experts, of
    sequences or of tokens within a sequence, nor with padding. Tokens after the last sequence count as padding. If no
    sequence is cut and each call gets the batch's `num_tokens`, the losses of a batch's calls add up to the loss of
    the batch.

    Shapes: result scalar.

    Source: equations 17 to 20 of https://arxiv.org/abs/2412.19437 with score="sigmoid". Equation 18 defines
    count="scores".

    Args:
        count: "scores" (default) counts the experts with the highest scores, "choices" the experts that were chosen.

    Raises:
        ValueError: the score or count is unknown; `num_tokens` is negative, or a tensor that is no scalar; or
            `sequence_lengths` are missing or do not fit.
    """
    op = "sequence_load_balancing_loss"
    counted = _counted_experts(op, routing, count)
    probabilities, ends = _probabilities(op, routing, score), _sequence_ends(op, routing)
    length, num_experts = routing.logits.shape
    # Each sequence's counts are differences of cumulative counts. Counts are integers, so the differences are exact.
    running = spread_slots(counted, 1, num_experts).cumsum(0, dtype=torch.int32)  # [T, E]
    running = functional.pad(running, (0, 0, 1, 0))
    counts = torch.diff(running[ends], dim=0, prepend=running[:1])  # [N, E]
    shares = counts.to(probabilities.dtype) / counts.sum(1, keepdim=True).clamp(min=1)
    sequence = torch.searchsorted(ends, torch.arange(length, device=ends.device), right=True)  # [T]
    inside = (sequence < ends.shape[0])[:, None]
    shares = torch.where(inside, shares[sequence.clamp(max=ends.shape[0] - 1)], 0.0)  # [T, E]
    if num_tokens is None:
        num_tokens = (inside if routing.token_mask is None else inside & routing.token_mask[:, None]).sum()
    return num_experts * _over((shares * probabilities).sum(), op, num_tokens)


def importance_loss(routing: LayerRouting, *, num_tokens: int | Tensor | None = None) -> Tensor:  # scalar
    """Return the squared coefficient of variation of the experts' importance.

    An expert's importance is the sum of its routing weights, including slots beyond a capacity. The loss is 0 at
    perfect balance. The loss does not change with permutations of experts or tokens, padding, or a factor on all
    weights. The loss depends on the split of a batch into calls, because the variation is that of one call.

    Shapes: result scalar.

    Source: equations 6 and 7 of https://arxiv.org/abs/1701.06538.

    Raises:
        ValueError: `num_tokens` is negative, or a tensor that is no scalar.
    """
    gates = spread_slots(routing.choices, routing.topk_weights, routing.logits.shape[1])
    importance = gates.sum(0)  # [E]
    mean = importance.mean()
    smallest = torch.finfo(mean.dtype).tiny
    variation = (importance - mean).square().mean() / mean.square().clamp(min=smallest)
    if num_tokens is None:
        return variation
    return _over(variation * routing.num_tokens, "importance_loss", num_tokens)


def router_z_loss(routing: LayerRouting, *, num_tokens: int | Tensor | None = None) -> Tensor:  # scalar
    """Return the mean over tokens of logsumexp(logits) ** 2, which keeps logits small. Zero logits give (ln E) ** 2.

    Permutations of experts or tokens, and padding, do not change the loss. With a batch's `num_tokens`, the losses of
    its calls add up to the loss of the batch. By default, the batch's loss is the mean of its calls' losses, if calls
    have equally many tokens.

    Shapes: result scalar.

    Source: equation 5 of https://arxiv.org/abs/2202.08906.

    Raises:
        ValueError: `num_tokens` is negative, or a tensor that is no scalar.
    """
    squares = _masked(routing.logits, routing.token_mask).logsumexp(-1).square()  # [T]
    if routing.token_mask is not None:
        squares = torch.where(routing.token_mask, squares, 0.0)
    return _over(squares.sum(), "router_z_loss", routing.num_tokens if num_tokens is None else num_tokens)


def _switch(
    op: str,
    routing: LayerRouting,
    expert_counts: Tensor,  # [E]
    num_tokens: int | Tensor | None,
    score: str,
) -> Tensor:
    probabilities = _probabilities(op, routing, score).sum(0)  # [E]
    shares = expert_counts.to(probabilities.dtype) / expert_counts.sum().clamp(min=1)
    num_tokens = routing.num_tokens if num_tokens is None else num_tokens
    return len(shares) * _over((shares * probabilities).sum(), op, num_tokens)


def _counted_experts(op: str, routing: LayerRouting, count: str) -> Tensor:  # [T, K] int32
    """Return the experts for which the loss counts each token; -1 means no expert. With count="choices", return the
    router's choices. With count="scores", return the same number of experts, but those with the highest scores."""
    check_choice(op, "count", count, COUNTS)
    chosen = routing.choices
    if count == "choices":
        return chosen
    # An expert's score increases with its logit. The highest logits therefore give the experts with the highest scores.
    top_k = min(chosen.shape[1], routing.logits.shape[1])
    highest = topk_routing(routing.logits.detach(), top_k, _SOFTMAX).topk_experts
    num_chosen = (chosen >= 0).sum(1, keepdim=True)
    return torch.where(torch.arange(top_k, device=chosen.device) < num_chosen, highest, -1)


def _probabilities(op: str, routing: LayerRouting, score: str) -> Tensor:  # [T, E]
    """Return scores divided by their sum, and zeros for padding tokens, even if their logits are NaN."""
    check_choice(op, "score", score, tuple(SCORES))
    scores = SCORES[score](_masked(routing.logits, routing.token_mask))
    if score != "softmax":
        scores = scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return _masked(scores, routing.token_mask)


def _masked(values: Tensor, token_mask: Tensor | None) -> Tensor:  # [T, E]
    return values if token_mask is None else torch.where(token_mask[:, None], values, 0.0)


def _over(total: Tensor, op: str, num_tokens: int | Tensor) -> Tensor:
    check_num_tokens(op, num_tokens)
    return total / (num_tokens.clamp(min=1).view(()) if isinstance(num_tokens, Tensor) else max(num_tokens, 1))


def _sequence_ends(op: str, routing: LayerRouting) -> Tensor:  # [N] int64
    """Return the exclusive end of each sequence in token order."""
    lengths, total, device = routing.sequence_lengths, routing.logits.shape[0], routing.logits.device
    if lengths is None:
        raise ValueError(
            f"{op}: the routing must have sequence_lengths, got None; pass sequence_lengths or x [..., S, d_model] to "
            "the layer"
        )
    if isinstance(lengths, Tensor):
        check_sequence_lengths(op, lengths, device)
        return lengths.cumsum(0, dtype=torch.int64).clamp(max=total)
    length = max(lengths, 1)
    if total % length:
        raise ValueError(f"{op}: tokens must form sequences of sequence_lengths={lengths}, got {total} tokens")
    return torch.arange(1, total // length + 1, device=device) * length


_ONE_ORDER = (
    "balance_losses: only first-order gradients pass through an attached loss; for gradients of gradients give the "
    "layer no balance_losses and add a loss of return_routing=True to your own"
)


class _AttachLoss(torch.autograd.Function):
    """Return `tokens` unchanged. Backward also returns `scale` as the gradient of `loss`. A second differentiation
    raises NotImplementedError, because this backward would run again and give wrong gradients."""

    @staticmethod
    def forward(tokens: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        return tokens.view_as(tokens)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, loss, scale = inputs
        ctx.save_for_backward(scale)
        ctx.loss_dtype, ctx.loss_device = loss.dtype, loss.device

    @staticmethod
    def backward(ctx, dtokens: Tensor):
        if getattr(ctx, "is_differentiated", False):
            raise NotImplementedError(_ONE_ORDER)
        ctx.is_differentiated = torch.is_grad_enabled()  # true if backward runs with create_graph=True
        (scale,) = ctx.saved_tensors
        dloss = torch.ones((), dtype=ctx.loss_dtype, device=ctx.loss_device)
        return dtokens, dloss if scale is None else dloss * scale, None


# Call the C++ base class. `Function.apply` takes four times as long, because it looks for functorch transforms.
_attach = super(torch.autograd.Function, _AttachLoss).apply  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs


def attach_loss(
    tokens: Tensor,  # [T, D]
    loss: Tensor,  # scalar
    scale: Tensor | None,  # scalar; None means 1
) -> Tensor:  # [T, D]
    """Return `tokens`. A backward through the result adds the gradient of `scale * loss`."""
    if torch.compiler.is_compiling() or functorch_is_active():
        if not torch.compiler.is_compiling() and num_differentiations() > 1:
            raise NotImplementedError(_ONE_ORDER)
        return _AttachLoss.apply(tokens, loss, scale)
    return _attach(tokens, loss, scale)


def attach_aux_loss(
    layer: Any,  # a MoEFeedForward
    tokens: Tensor,  # [T, D]
    routing: LayerRouting,
    num_tokens: int | Tensor | None,
) -> tuple[Tensor, Tensor]:  # [T, D]; scalar
    """Return the tokens with the layer's auxiliary loss attached, and the loss. Store the loss in the layer."""
    warn_without_scale("MoEFeedForward", layer, tokens.device.type)
    counts = layer.router.accumulated_counts
    loss = layer.balance_losses.total(routing, num_tokens=num_tokens, accumulated_counts=counts)
    # Do not store the loss in two cases. An exported program cannot set attributes. Outside `torch.compile`, tensors of
    # a functorch transform must not outlive the transform.
    if not torch.compiler.is_exporting() and (torch.compiler.is_compiling() or not functorch_is_active()):
        layer.aux_loss = loss.detach()
    return attach_loss(tokens, loss, layer.aux_loss_scale), loss


def warn_without_scale(
    op: str,
    layer: Any,  # a MoEFeedForward or an AttachedRouter
    device_type: str,
) -> None:
    """Warn once under float16 autocast if no `aux_loss_scale` is set. A layer cannot read the main loss's scale."""
    if not layer.training or layer.aux_loss_scale is not None or torch.compiler.is_compiling():
        return
    if autocast_is_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.float16:
        _warn_once(op)


@functools.cache
def _warn_once(op: str) -> None:
    warnings.warn(
        f"{op}: auxiliary losses under float16 autocast without set_aux_loss_scale. A GradScaler scales the "
        "main loss alone: call set_aux_loss_scale(model, scaler.scale(torch.ones((), device=device))) before each "
        "forward, or once with torch.ones((), device=device) if the loss is not scaled",
        RuntimeWarning,
        stacklevel=2,
    )
