"""What activation checkpointing must not change: a forward is counted once, and chooses its experts once."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def save_routing() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` of a checkpointed region whose recomputation reuses the experts that its forward chose.

        checkpoint(block, x, use_reentrant=False, context_fn=save_routing)

    A recomputed logit may differ in its last bit, for instance where another kernel runs, and with it the choice of a
    token at the cut: its gradient would then go to experts that it never passed. So what the routing ops return is kept
    from forward to backward: [T, K] experts and weights, and [T, E] logits. All else is recomputed. Each region keeps
    its own, however many are in flight. Counts of a global batch are kept, too.
    """
    return create_selective_checkpoint_contexts(routing_ops())


def routing_ops() -> list[OpOverload]:
    kernels, layers = torch.ops.moe_kernels, torch.ops.moe_layers
    return [
        kernels.linear_routing.default,
        kernels.scored_linear_routing.default,
        kernels.topk_routing.default,
        kernels.scored_routing.default,
        torch.ops.aten.sort.stable,  # the choice of the reference
        layers.global_expert_counts.default,
        layers.replayed_choice.default,
    ]


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward, as the recomputation of a checkpointed region does."""
    return torch._C._current_graph_task_id() != -1


# Registered ops, so that what they ask is asked whenever compiled code runs, and not while it is traced.
@torch.library.custom_op("moe_layers::add_once", mutates_args=("total",))
def add_once(total: Tensor, amount: Tensor) -> None:
    """`total += amount`, but not in a recomputation."""
    if not is_recomputing():
        total.add_(amount)


@add_once.register_fake
def _(total, amount):
    return None


@torch.library.custom_op("moe_layers::minimum_once", mutates_args=("total",))
def minimum_once(total: Tensor, amount: Tensor) -> None:
    """`total = min(total, amount)`, but not in a recomputation."""
    if not is_recomputing():
        torch.minimum(total, amount, out=total)


@minimum_once.register_fake
def _(total, amount):
    return None


@torch.library.custom_op("moe_layers::replayed_choice", mutates_args=())
def replayed_choice(
    topk_experts: Tensor,  # [T, K] int32
) -> Tensor:  # [T, K] int32
    """The choice as it is: an op whose result `save_routing` keeps, so that a recomputation need not know it."""
    if is_recomputing():
        raise ValueError(
            "RoutingReplay.replay: a checkpointed region must have context_fn=save_routing, got a recomputation without"
        )
    return topk_experts.clone()


@replayed_choice.register_fake
def _(topk_experts):
    return torch.empty_like(topk_experts)
