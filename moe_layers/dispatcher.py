"""The dispatcher brings tokens to the experts and their outputs back. Expert parallelism replaces only this part."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moe_kernels import Routing, sort_by_expert

from .experts import GroupedExperts


class Dispatched(NamedTuple):
    """What comes back from the experts."""

    tokens: Tensor  # [T, D]
    offsets: Tensor  # [E] int32: exclusive end row of each expert


class LocalDispatcher:
    """All experts are here: sort the slots by expert and call the experts once."""

    def __call__(
        self,
        tokens: Tensor,  # [T, D]
        routing: Routing,
        experts: GroupedExperts,
    ) -> Dispatched:
        permutation = sort_by_expert(routing.topk_experts, experts.num_experts, implementation=experts.implementation)
        return Dispatched(experts(tokens, routing.topk_weights, permutation), permutation.offsets)
