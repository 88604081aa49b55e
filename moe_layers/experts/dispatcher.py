"""Dispatchers send tokens to experts and return the outputs. Expert parallelism replaces only the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moe_kernels import sort_by_expert

from ..routing.result import Slots
from .grouped import ExpertRows, GroupedExperts


class Pending(NamedTuple):
    """The outputs of the experts, which may not be complete yet."""

    offsets: Tensor  # [E] int32: exclusive end row of each expert, for all slots of this rank's tokens
    wait: Callable[[], Tensor]  # returns the outputs [T, D] for the current stream, without host synchronisation


class LocalDispatcher:
    """Sorts the slots by expert and calls the experts once. Slots of experts outside the layer add nothing."""

    def __init__(self, first_expert: int = 0):
        self.first_expert = first_expert  # id of the first expert that the layer holds

    def run(self, tokens: Tensor, slots: Slots, experts: GroupedExperts) -> Pending:  # tokens [T, D]
        """Dispatch the tokens, compute the experts, and start to combine their outputs."""
        rows = self.dispatch(tokens, slots, experts)
        return self.combine(experts(rows), rows)

    def dispatch(self, tokens: Tensor, slots: Slots, experts: GroupedExperts) -> ExpertRows:
        """Sort the slots by expert, and return the input of this rank's experts."""
        local = slots.topk_experts - self.first_expert if self.first_expert else slots.topk_experts
        permutation = sort_by_expert(
            local, experts.num_experts, max_rows=slots.max_rows, implementation=experts.implementation
        )
        return ExpertRows(tokens, slots.topk_weights, permutation, permutation.offsets)

    def combine(self, out: Tensor, rows: ExpertRows) -> Pending:
        """Return the complete outputs [T, D] as `Pending`. The experts have already summed each token's outputs."""
        assert rows.offsets is not None
        return Pending(rows.offsets, lambda: out)
