"""The capacity of experts. Slots beyond the capacity reach no expert."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from ..checks import check_choice
from .result import Slots


@dataclass(frozen=True)
class CapacityFactor:
    """Limits an expert's slots in each sequence to ceil(factor * S * top_k / num_experts).

    S, the sequence length, is the size of the second-last axis of x. Sequences of a batch do not influence one another.
    S includes padding, but padding uses no capacity. Capacity and results depend on S. Slots beyond the capacity add
    nothing, and the token's other weights do not change. A token without any slot passes only through the residual
    connection.

    Sources: section 2.2 of https://arxiv.org/abs/2101.03961; "weight": section 4 of https://arxiv.org/abs/2106.05974.

    Args:
        factor: capacity as a multiple of an even share. With a factor below 1, fewer rows are computed, and saved for
            backward, than without a capacity.
        by: selects the slots that an expert keeps. "position" (default) keeps the first slots in token order, whatever
            tokens follow. "weight" keeps the slots with the largest routing weights, and on ties the first slots.
            "weight" reads later tokens, and is therefore not causal.

    Raises:
        ValueError: `factor` is not a positive number, or `by` is unknown.
    """

    factor: float
    by: str = "position"
    _ratio: tuple[int, int] = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "_ratio", positive_ratio("CapacityFactor", self.factor))
        check_choice("CapacityFactor", "by", self.by, ("position", "weight"))

    def of(self, sequence_length: int, num_experts: int, top_k: int) -> int:
        """Return the capacity: the maximum number of slots that one expert takes in a sequence."""
        return even_share(self._ratio, sequence_length * top_k, num_experts)


def positive_ratio(owner: str, factor: float) -> tuple[int, int]:
    """Return the factor's decimal digits as an integer ratio: (11, 10) for 1.1. Raise ValueError unless positive."""
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise ValueError(f"{owner}: factor must be a positive number, got {factor!r}")
    return Fraction(str(factor)).as_integer_ratio()


def even_share(ratio: tuple[int, int], num_slots: int, num_experts: int) -> int:
    """Return ceil(ratio * num_slots / num_experts), computed exactly in integers."""
    numerator, denominator = ratio
    return -(-num_slots * numerator // (denominator * num_experts))


def drop_beyond_capacity(
    slots: Slots, sequence_length: int, top_k: int, capacity: int | CapacityFactor | None
) -> Slots:
    """Return the slots, with -1 wherever an expert already has `capacity` slots in the same sequence. Slots that are -1
    in the input use no capacity."""
    num_slots, num_experts = slots.topk_experts.numel(), slots.logits.shape[1]
    if capacity is None or not num_slots:
        return slots
    by_weight = False
    if isinstance(capacity, CapacityFactor):
        by_weight = capacity.by == "weight"
        capacity = capacity.of(sequence_length, num_experts, top_k)
    experts = slots.topk_experts.flatten().long()
    sequence = torch.arange(num_slots, device=experts.device) // (sequence_length * slots.topk_experts.shape[1])
    keys = torch.where(experts < 0, -1, sequence * num_experts + experts)  # [T * K]
    priority = slots.topk_weights.detach().flatten() if by_weight else None
    within = (_rank_among_equals(keys, priority) < capacity).view(slots.topk_experts.shape)
    num_sequences = slots.topk_experts.shape[0] // sequence_length
    max_rows = min(num_sequences * num_experts * capacity, num_slots if slots.max_rows is None else slots.max_rows)
    kept = torch.where(within, slots.topk_experts, -1)
    return Slots(kept, slots.topk_weights, slots.logits, max_rows, chosen_experts=slots.topk_experts)


def _rank_among_equals(
    keys: Tensor,  # [N] integers
    priority: Tensor | None,  # [N]; None without priorities
) -> Tensor:  # [N] int64
    """Return each element's rank, from 0, among the elements of equal key. Elements of higher priority come first. On
    ties, or without priorities, earlier elements come first."""
    # Rank by stable sorts only, because `save_routing` keeps sorts for recomputations. `ordered` holds the sorted keys.
    first = None if priority is None else priority.sort(descending=True, stable=True).indices
    ordered, order = (keys if first is None else keys[first]).sort(stable=True)
    order = order if first is None else first[order]
    start = torch.searchsorted(ordered, ordered)
    position = torch.arange(keys.shape[0], device=keys.device)
    return torch.empty_like(order).scatter(0, order, position - start)
