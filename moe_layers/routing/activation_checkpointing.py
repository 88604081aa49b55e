"""Support for activation checkpointing: a recomputation reuses the forward's experts, and does not count them again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS, create_selective_checkpoint_contexts

from moe_kernels.runtime.pytorch import is_in_backward

# FSDP2 labels its work for profilers. A recomputation may have more labels than the forward, for instance if experts
# are a separate FSDP2 group before a shared expert. Selective checkpointing raises if a recomputation runs more ops
# than the forward. The ops that set labels are therefore exempt from this check.
_profiler = torch.ops.profiler
SAC_IGNORED_OPS.update((_profiler._record_function_enter_new.default, _profiler._record_function_exit._RecordFunction))


def save_routing() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return two contexts for a checkpointed region: the recomputation then reuses the experts that the forward chose.

        checkpoint(block, x, use_reentrant=False, context_fn=save_routing)

    A recomputed logit may differ in its last bit, for instance if another kernel runs. A token with nearly tied experts
    could then change its expert, and send its gradient to an expert that did not compute the token. The region
    therefore keeps the results of the routing ops from forward to backward: [T, K] experts and weights, and [T, E]
    logits. Counts of a global batch are also kept. Everything else is recomputed. Several regions in flight keep
    separate results.
    """
    return create_selective_checkpoint_contexts(routing_ops())


def routing_ops() -> list[Any]:
    kernels, layers = torch.ops.moe_kernels, torch.ops.moe_layers
    return [
        kernels.linear_routing.default,
        kernels.topk_routing.default,
        kernels.scored_routing.default,
        torch.ops.aten.sort.stable,  # the reference implementation chooses experts by this op
        layers.global_expert_counts.default,
        layers.kept_choice.default,
    ]


# A registered op lets compiled code check `is_in_backward` at each run instead of once during tracing.
@torch.library.custom_op("moe_layers::add_once", mutates_args=("total",))
def add_once(total: Tensor, amount: Tensor) -> None:
    """Compute `total += amount`, except in a recomputation."""
    if not is_in_backward():
        total.add_(amount)


@torch.library.custom_op("moe_layers::kept_choice", mutates_args=())
def kept_choice(
    topk_experts: Tensor,  # [T, K] int32
    is_replayed: bool = False,
) -> Tensor:  # [T, K] int32
    """Return a copy of the experts that a forward uses. `save_routing` keeps this op's result until backward, so that
    a recomputation gets the same experts.

    Raises:
        ValueError: `is_replayed` is True, and a checkpointed region without `save_routing` is recomputed.
    """
    if is_replayed and is_in_backward():
        raise ValueError(
            "RoutingReplay.replay: a checkpointed region must have context_fn=save_routing, got a recomputation without"
        )
    return topk_experts.clone()


@kept_choice.register_fake
def _(topk_experts, is_replayed=False):
    return torch.empty_like(topk_experts)
