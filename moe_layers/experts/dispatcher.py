"""The dispatcher brings tokens to the experts and their outputs back. Expert parallelism replaces only this part."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moe_kernels import sort_by_expert

from ..routing.capacity import Slots
from .grouped import GroupedExperts


class Dispatched(NamedTuple):
    """What comes back from the experts, perhaps later."""

    tokens: Tensor | Callable[[], Tensor]  # [T, D], or what waits for them while they are under way
    offsets: Tensor  # [experts.num_experts] int32: exclusive end row of each, with this call's slots in expert order

    def arrived(self) -> Tensor:  # [T, D]
        return self.tokens if isinstance(self.tokens, Tensor) else self.tokens()


class LocalDispatcher:
    """Sort the slots by expert and call the experts once. Slots of experts that are not here add nothing.

    Args:
        first_expert: id of the first of the experts that are here.
    """

    def __init__(self, first_expert: int = 0):
        self.first_expert = first_expert

    def __call__(
        self,
        tokens: Tensor,  # [T, D]
        slots: Slots,
        experts: GroupedExperts,
    ) -> Dispatched:
        local = slots.topk_experts - self.first_expert if self.first_expert else slots.topk_experts
        permutation = sort_by_expert(
            local, experts.num_experts, max_rows=slots.max_rows, implementation=experts.implementation
        )
        given = {} if slots.w_router is None else {"w_router": slots.w_router}
        out = experts(tokens, slots.topk_weights, permutation, **given)
        return Dispatched(out, permutation.offsets)
