"""The slots of one forward, their counts by expert, and the output of zero experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels import combine, sort_by_expert

from ..input import TokenInfo
from .result import LayerRouting


class Slots(NamedTuple):
    """The router's choice in one forward. A slot that reaches no expert is -1."""

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
        """Return the choice within the capacity, or None without a capacity."""
        return None if self.chosen_experts is None else self.topk_experts


def layer_routing(
    slots: Slots,
    info: TokenInfo,
    offsets: Tensor | None,  # [E]: exclusive end row of each expert's slots
    num_experts: int,  # zero experts included
    implementation: str | None,
) -> LayerRouting:
    """Return the routing of a forward, with counts by expert. `offsets`, if given, saves one sort for the counts."""

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
    """Return each token times the sum of the weights of its zero experts, whose ids start at `num_experts`."""
    is_zero = slots.topk_experts >= num_experts
    weights = torch.where(is_zero, slots.topk_weights, 0.0).sum(1, keepdim=True)  # [T, 1]
    slot_to_row = torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int32)[:, None]
    return combine(tokens, weights, slot_to_row, implementation=implementation)
