"""Slots that reach no expert: those of padding, those beyond an expert's capacity, and those of zero experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels import combine

from ..checks import check_choice, check_positive


class Slots(NamedTuple):
    """What a router decided, less the slots that reach no expert."""

    topk_experts: Tensor  # [T, K] int32; -1 for a slot that reaches none
    topk_weights: Tensor  # [T, K] float32
    logits: Tensor  # [T, E]
    max_rows: int | None = None  # no more slots than these reach an expert; None for T * K
    w_router: Tensor | None = None  # [E, D], where the experts are to pass its gradient on: see `router_gradient.py`


@dataclass(frozen=True)
class CapacityFactor:
    """An expert takes so many times its even share of the slots of a sequence: ceil(factor * S * top_k / num_experts).

    The slots beyond add nothing, and the other weights of the token stay as they are: the residual connection carries
    what is missing. A sequence is the last axis but one of x, so that other sequences of a batch change nothing; S
    counts its padding, which takes no capacity. The capacity depends on S, and with it each token's result.

    Source: section 2.2 of https://arxiv.org/abs/2101.03961; for weights, section 4 of https://arxiv.org/abs/2106.05974.

    Args:
        factor: below 1, fewer rows are computed and kept for backward.
        by: who is taken: "position", the first slots in token order, which no later token can change; or "weight",
            those of the largest routing weights, the first on ties: this looks at later tokens, and is not causal.

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
        """The slots that an expert takes of a sequence."""
        return even_share(self._ratio, sequence_length * top_k, num_experts)


def positive_ratio(owner: str, factor: float) -> tuple[int, int]:
    """The factor as a fraction of integers, as it is written: 1.1 is 11 / 10. Raises ValueError unless positive."""
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise ValueError(f"{owner}: factor must be a positive number, got {factor!r}")
    return Fraction(str(factor)).as_integer_ratio()


def even_share(ratio: tuple[int, int], num_slots: int, num_experts: int) -> int:
    """`ratio` times the slots of each expert if all had equally many, rounded up. Exact, in integers."""
    numerator, denominator = ratio
    return -(-num_slots * numerator // (denominator * num_experts))


def check_capacity(capacity: int | CapacityFactor | None) -> None:
    """Raises ValueError unless this is a capacity, or none."""
    if capacity is not None and not isinstance(capacity, CapacityFactor):
        check_positive("MoEFeedForward", capacity=capacity)


def drop_beyond_capacity(
    slots: Slots,
    sequence_length: int,
    top_k: int,
    capacity: int | CapacityFactor | None,
) -> Slots:
    """The slots with -1 wherever an expert already has `capacity` slots of the same sequence.

    Slots that are -1 already count for no expert.
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
    return Slots(torch.where(within, slots.topk_experts, -1), *slots[1:3], max_rows)


def _rank_among_equals(
    keys: Tensor,  # [N] integers
    priority: Tensor | None,  # [N]; None for none
) -> Tensor:  # [N] int64
    """How many elements with the same key come before each: of higher priority, or of the same and earlier."""
    # The values of a stable sort are its keys in order, and its indices are what `save_routing` keeps.
    first = None if priority is None else priority.sort(descending=True, stable=True).indices
    ordered, order = (keys if first is None else keys[first]).sort(stable=True)
    order = order if first is None else first[order]
    start = torch.searchsorted(ordered, ordered)
    position = torch.arange(len(keys), device=keys.device)
    return torch.empty_like(order).scatter(0, order, position - start)


def identity_output(
    tokens: Tensor,  # [T, D]
    slots: Slots,
    num_experts: int,
    implementation: str | None,
) -> Tensor:  # [T, D]
    """Each token times the weights of its zero experts: those with an id from `num_experts` on."""
    is_zero = slots.topk_experts >= num_experts
    weights = torch.where(is_zero, slots.topk_weights, 0.0).sum(1, keepdim=True)  # [T, 1]
    slot_to_row = torch.arange(len(tokens), device=tokens.device, dtype=torch.int32)[:, None]
    return combine(tokens, weights, slot_to_row, implementation=implementation)
