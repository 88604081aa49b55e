"""Slots that reach no expert: those of padding, those beyond an expert's capacity, and those of zero experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import Routing, combine


def drop_beyond_capacity(
    topk_experts: Tensor,  # [T, K] int32
    sequence_length: int,
    num_experts: int,
    capacity: int,
) -> Tensor:  # [T, K] int32
    """The choice with -1 wherever an expert already has `capacity` slots of the same sequence, in token order.

    Slots that are -1 already count for no expert.
    """
    if not topk_experts.numel():
        return topk_experts
    experts = torch.where(topk_experts < 0, num_experts, topk_experts).long()
    experts = experts.view(-1, sequence_length * topk_experts.shape[1], 1)
    chosen = torch.zeros(*experts.shape[:2], num_experts + 1, dtype=torch.int32, device=experts.device)
    rank = chosen.scatter_(2, experts, 1).cumsum(1, dtype=torch.int32).gather(2, experts)
    return torch.where(rank.view(topk_experts.shape) <= capacity, topk_experts, -1)


def identity_output(
    tokens: Tensor,  # [T, D]
    routing: Routing,
    num_experts: int,
    implementation: str | None,
) -> Tensor:  # [T, D]
    """Each token times the weights of its zero experts: those with an id from `num_experts` on."""
    is_zero = routing.topk_experts >= num_experts
    weights = torch.where(is_zero, routing.topk_weights, 0.0).sum(1, keepdim=True)  # [T, 1]
    slot_to_row = torch.arange(len(tokens), device=tokens.device, dtype=torch.int32)[:, None]
    return combine(tokens, weights, slot_to_row, implementation=implementation)
