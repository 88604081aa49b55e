"""The dispatcher brings tokens to the experts and their outputs back. Expert parallelism replaces only this part."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from moe_kernels import sort_by_expert

from ..routing.slots import Slots
from .grouped import ExpertRows, GroupedExperts


class Pending(Protocol):
    """The outputs of the experts, perhaps in flight."""

    @property
    def offsets(self) -> Tensor:  # [num_experts] int32
        """Exclusive end row of each expert, with the slots of this rank's tokens in expert order."""
        ...

    def wait(self) -> Tensor:  # [T, D]
        """The outputs. Does not wait for the GPU."""
        ...


class Finished(NamedTuple):
    """Outputs that are complete from the start."""

    out: Tensor  # [T, D]
    offsets: Tensor

    def wait(self) -> Tensor:
        return self.out


class LocalDispatcher:
    """Sort the slots by expert and call the experts once. Slots of experts that are not here add nothing.

    Args:
        first_expert: id of the first of the experts that are here.
    """

    def __init__(self, first_expert: int = 0):
        self.first_expert = first_expert

    def run(self, tokens: Tensor, slots: Slots, experts: GroupedExperts) -> Pending:  # tokens [T, D]
        """Dispatch, compute, and start to combine."""
        rows = self.dispatch(tokens, slots, experts)
        return self.combine(experts(rows), rows)

    def dispatch(self, tokens: Tensor, slots: Slots, experts: GroupedExperts) -> ExpertRows:
        """The rows of the experts of this rank."""
        local = slots.topk_experts - self.first_expert if self.first_expert else slots.topk_experts
        permutation = sort_by_expert(
            local, experts.num_experts, max_rows=slots.max_rows, implementation=experts.implementation
        )
        return ExpertRows(tokens, slots.topk_weights, permutation, permutation.offsets)

    def combine(self, out: Tensor, rows: ExpertRows) -> Pending:
        """Start to bring the experts' outputs back to their tokens."""
        assert rows.offsets is not None
        return Finished(out, rows.offsets)
