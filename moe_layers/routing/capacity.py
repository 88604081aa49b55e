"""Slots that reach no expert: padding, slots beyond an expert's capacity, and slots of zero experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels import combine, sort_by_expert

from ..checks import check_choice
from .result import LayerRouting
from .token_info import TokenInfo


class Slots(NamedTuple):
    """The slots of one forward: the router's choice without the slots that reach no expert."""

    topk_experts: Tensor  # [T, K] int32; -1 for a slot that reaches no expert
    topk_weights: Tensor  # [T, K] float32
    logits: Tensor  # [T, E]
    max_rows: int | None = None  # upper bound on the slots that reach an expert; None for T * K
    chosen_experts: Tensor | None = None  # [T, K] int32: `topk_experts` before the capacity; None without a capacity

    @property
    def choices(self) -> Tensor:  # [T, K] int32
        """Return the choice before the capacity."""
        return self.topk_experts if self.chosen_experts is None else self.chosen_experts

    @property
    def kept(self) -> Tensor | None:  # [T, K] int32
        """Return the choice within the capacity; None without one."""
        return None if self.chosen_experts is None else self.topk_experts


@dataclass(frozen=True)
class CapacityFactor:
    """Capacity as a multiple of an expert's even share of a sequence's slots: ceil(factor * S * top_k / num_experts).

    Slots beyond the capacity add nothing, and the token's other weights do not change; the residual connection carries
    the token. A sequence is the last axis but one of x, so other sequences of a batch have no influence. S includes
    padding, which takes no capacity. The capacity depends on S, and so does each token's result.

    Source: section 2.2 of https://arxiv.org/abs/2101.03961; for weights, section 4 of https://arxiv.org/abs/2106.05974.

    Args:
        factor: below 1, fewer rows are computed and saved for backward.
        by: which slots an expert keeps. "position" (default): the first in token order, independent of later tokens.
            "weight": those with the largest routing weights, the first on ties. This reads later tokens and is not
            causal.

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
        """Return an expert's capacity in slots of a sequence."""
        return even_share(self._ratio, sequence_length * top_k, num_experts)


def positive_ratio(owner: str, factor: float) -> tuple[int, int]:
    """Return the factor as written, as an integer ratio: 1.1 is 11 / 10. Raise ValueError unless it is positive."""
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise ValueError(f"{owner}: factor must be a positive number, got {factor!r}")
    return Fraction(str(factor)).as_integer_ratio()


def even_share(ratio: tuple[int, int], num_slots: int, num_experts: int) -> int:
    """Return `ratio` times an expert's even share of the slots, rounded up. Exact, in integers."""
    numerator, denominator = ratio
    return -(-num_slots * numerator // (denominator * num_experts))


def drop_beyond_capacity(
    slots: Slots,
    sequence_length: int,
    top_k: int,
    capacity: int | CapacityFactor | None,
) -> Slots:
    """Return the slots with -1 wherever an expert already has `capacity` slots of the same sequence.

    Slots that are already -1 count for no expert.
    """
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
    priority: Tensor | None,  # [N]; None for none
) -> Tensor:  # [N] int64
    """Return, per element, how many with the same key precede it: higher priority first, then the earlier position."""
    # Uses values and indices of stable sorts alone: the values are the keys in order, and `save_routing` keeps the
    # indices.
    first = None if priority is None else priority.sort(descending=True, stable=True).indices
    ordered, order = (keys if first is None else keys[first]).sort(stable=True)
    order = order if first is None else first[order]
    start = torch.searchsorted(ordered, ordered)
    position = torch.arange(keys.shape[0], device=keys.device)
    return torch.empty_like(order).scatter(0, order, position - start)


def layer_routing(
    slots: Slots,
    info: TokenInfo,
    offsets: Tensor | None,  # [E] of the rows that all slots reach
    num_experts: int,  # zero experts included
    implementation: str | None,
) -> LayerRouting:
    """Return the routing of a forward with its counts, which come from `offsets` where they are given."""

    def count(experts: Tensor) -> Tensor:  # [E] int32
        return differences(sort_by_expert(experts, num_experts, implementation=implementation).offsets)

    return LayerRouting(
        slots.topk_experts,
        slots.topk_weights,
        slots.logits,
        tokens_per_expert=count(slots.topk_experts) if offsets is None else differences(offsets),
        chosen_experts=slots.chosen_experts,
        chosen_per_expert=None if slots.chosen_experts is None else count(slots.chosen_experts),
        token_mask=info.token_mask,
        sequence_lengths=info.sequence_lengths,
    )


def differences(
    offsets: Tensor,  # [E]
) -> Tensor:  # [E]
    """Return the number of rows of each expert."""
    return torch.diff(offsets, prepend=offsets.new_zeros(1))


def identity_output(
    tokens: Tensor,  # [T, D]
    slots: Slots,
    num_experts: int,
    implementation: str | None,
) -> Tensor:  # [T, D]
    """Return each token times the weights of its zero experts, whose ids start at `num_experts`."""
    is_zero = slots.topk_experts >= num_experts
    weights = torch.where(is_zero, slots.topk_weights, 0.0).sum(1, keepdim=True)  # [T, 1]
    slot_to_row = torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int32)[:, None]
    return combine(tokens, weights, slot_to_row, implementation=implementation)
