"""Auxiliary losses as plain functions of a layer's routing.

Every loss leaves padding tokens out, is the same when experts or tokens change places (with their sequences, where it
has them), and is 0 for no tokens. Where they differ is what splitting a batch does to them:

| loss | at perfect balance | a batch in several calls |
|---|---|---|
| `load_balancing_loss` | 1 | depends on the split: shares and mean probabilities are those of one call |
| `sequence_load_balancing_loss` | 1 | given `num_tokens`, the calls add up to the whole, if no sequence is cut |
| `global_load_balancing_loss` | 1 | given the counts of all calls and `num_tokens`, the calls add up to the whole |
| `importance_loss` | 0 | depends on the split: the variation is that of one call |
| `router_z_loss` | (ln E + c) ** 2 where all logits are c | given `num_tokens`, the calls add up to the whole |

`num_tokens` is the number of tokens, without padding, of all the calls whose losses are added: over micro-batches, and
over processes if their gradients are added. A loss is then weighted by the share of its call in them. Without it a loss
stands for its own call, and belongs into a mean over calls.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..routing.result import SCORES, LayerRouting, check_num_tokens, check_sequence_lengths, spread_slots


def load_balancing_loss(
    routing: LayerRouting,
    *,
    num_tokens: int | Tensor | None = None,
    score: str = "softmax",
) -> Tensor:  # scalar
    """The Switch Transformer's loss: num_experts * sum_e f_e * P_e, over the tokens of this call.

    f_e is the share of slots that chose expert e, whatever its capacity (no gradient), P_e its mean probability. 1 at
    perfect balance, whatever top_k. Invariant to a permutation of experts or tokens, and to padding; it depends on how
    a batch is split into calls, since f and P are means over one call.

    Source: equations 4 to 6 of https://arxiv.org/abs/2101.03961, with top_k slots per token.

    Args:
        num_tokens: see above.
        score: "softmax", "sigmoid" or "sqrt_softplus": probabilities are these scores over their sum.

    Raises:
        ValueError: an unknown score, or `num_tokens` is neither a positive number nor a scalar tensor.
    """
    return _switch("load_balancing_loss", routing, routing.choices_per_expert, num_tokens, score)


def global_load_balancing_loss(
    routing: LayerRouting,
    expert_counts: Tensor,  # [E] integers
    *,
    num_tokens: int | Tensor | None = None,
    score: str = "softmax",
) -> Tensor:  # scalar
    """`load_balancing_loss` with the shares f_e of a larger batch, to which the tokens of this call belong.

    It is linear in the probabilities, so with `num_tokens` of the larger batch the losses of its parts add up to the
    loss of the whole, however it is split; without, their mean is that where parts have equally many tokens. 1 at
    perfect balance. Invariant to a permutation of experts or tokens, and to padding.

    Source: https://arxiv.org/abs/2501.11873.

    Args:
        expert_counts: how many slots of the larger batch chose each expert, from `global_expert_counts`.

    Raises:
        ValueError: as `load_balancing_loss`, or `expert_counts` has another shape or is not of integers.
    """
    num_experts = routing.logits.shape[1]
    if expert_counts.shape != (num_experts,) or expert_counts.is_floating_point():
        raise ValueError(
            f"global_load_balancing_loss: expert_counts must be [E={num_experts}] integers, "
            f"got {list(expert_counts.shape)} {expert_counts.dtype}"
        )
    return _switch("global_load_balancing_loss", routing, expert_counts, num_tokens, score)


def sequence_load_balancing_loss(
    routing: LayerRouting,
    *,
    num_tokens: int | Tensor | None = None,
    score: str = "softmax",
) -> Tensor:  # scalar
    """`load_balancing_loss` of each sequence, weighted by its share of the tokens.

    1 where every sequence is in perfect balance. Invariant to a permutation of experts, of the tokens of a sequence or
    of sequences, and to padding; given `num_tokens`, calls that cut no sequence add up to the whole. Tokens behind the
    last sequence count as padding.

    Source: equations 17 to 20 of https://arxiv.org/abs/2412.19437 (there score="sigmoid").

    Raises:
        ValueError: as `load_balancing_loss`, or the routing has no fitting `sequence_lengths`.
    """
    op = "sequence_load_balancing_loss"
    probabilities, ends = _probabilities(op, routing, score), _sequence_ends(op, routing)
    length, num_experts = routing.logits.shape
    # Counts of sequences are differences of running counts: integers, so exact in any order.
    running = spread_slots(routing.choices, 1, num_experts).cumsum(0, dtype=torch.int32)  # [T, E]
    running = functional.pad(running, (0, 0, 1, 0))
    counts = torch.diff(running[ends], dim=0, prepend=running[:1])  # [N, E]
    shares = counts.to(probabilities.dtype) / counts.sum(1, keepdim=True).clamp(min=1)
    sequence = torch.searchsorted(ends, torch.arange(length, device=ends.device), right=True)  # [T]
    inside = (sequence < len(ends))[:, None]
    shares = torch.where(inside, shares[sequence.clamp(max=len(ends) - 1)], 0.0)  # [T, E]
    if num_tokens is None:
        num_tokens = (inside if routing.token_mask is None else inside & routing.token_mask[:, None]).sum()
    return num_experts * _over((shares * probabilities).sum(), op, num_tokens)


def importance_loss(
    routing: LayerRouting,
    *,
    num_tokens: int | Tensor | None = None,
) -> Tensor:  # scalar
    """The squared coefficient of variation of the experts' importance: of the sum of their routing weights.

    0 at perfect balance. Invariant to a permutation of experts or tokens, to padding, and to a factor on all weights;
    it depends on how a batch is split into calls, since the variation is that of one call. Slots beyond a capacity
    count.

    Source: equations 6 and 7 of https://arxiv.org/abs/1701.06538.
    """
    gates = spread_slots(routing.choices, routing.topk_weights, routing.logits.shape[1])
    importance = gates.sum(0)  # [E]
    mean = importance.mean()
    smallest = torch.finfo(mean.dtype).tiny
    variation = (importance - mean).square().mean() / mean.square().clamp(min=smallest)
    if num_tokens is None:
        return variation
    return _over(variation * routing.num_tokens, "importance_loss", num_tokens)


def router_z_loss(
    routing: LayerRouting,
    *,
    num_tokens: int | Tensor | None = None,
) -> Tensor:  # scalar
    """Mean over tokens of the square of logsumexp(logits). Keeps logits small; (ln E) ** 2 for logits of zero.

    Invariant to a permutation of experts or tokens, and to padding; given `num_tokens`, calls add up to the whole, and
    without, a mean over calls with equally many tokens equals the whole.

    Source: equation 5 of https://arxiv.org/abs/2202.08906.
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


def _probabilities(op: str, routing: LayerRouting, score: str) -> Tensor:  # [T, E]
    """Scores over their sum; zero for padding, whatever its logits."""
    if score not in SCORES:
        raise ValueError(f"{op}: score must be one of {tuple(SCORES)}, got {score!r}")
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
    """The exclusive end of each sequence among the tokens."""
    lengths, total, device = routing.sequence_lengths, len(routing.logits), routing.logits.device
    if lengths is None:
        raise ValueError(f"{op}: the routing must have sequence_lengths, got None")
    if isinstance(lengths, Tensor):
        check_sequence_lengths(op, lengths, device)
        return lengths.cumsum(0, dtype=torch.int64).clamp(max=total)
    length = max(lengths, 1)
    if total % length:
        raise ValueError(f"{op}: tokens must form sequences of sequence_lengths={lengths}, got {total} tokens")
    return torch.arange(1, total // length + 1, device=device) * length


class _AttachLoss(torch.autograd.Function):
    """The identity on `tokens`, whose backward also starts the gradient of `loss`, with `scale` as its gradient."""

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
        (scale,) = ctx.saved_tensors
        dloss = torch.ones((), dtype=ctx.loss_dtype, device=ctx.loss_device)
        return dtokens, dloss if scale is None else dloss * scale, None


# `apply` as it is without functorch's transforms, for which it inspects its arguments in four times the time.
_attach = super(torch.autograd.Function, _AttachLoss).apply


def attach_loss(
    tokens: Tensor,  # [T, D]
    loss: Tensor,  # scalar
    scale: Tensor | None,  # scalar; None is 1
) -> Tensor:  # [T, D]
    """`tokens`, such that a backward through them adds the gradient of `scale * loss`."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _AttachLoss.apply(tokens, loss, scale)
    return _attach(tokens, loss, scale)
