"""The routing of one forward: `Slots` for use inside the layer, and `LayerRouting` for losses and for the caller."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels import combine, sort_by_expert

from ..input import TokenInfo


class LayerRouting(NamedTuple):
    """The router's decision in one forward of a layer. T counts the tokens over all leading axes of the input. A token
    chooses experts. An expert gets the tokens that chose it, up to its capacity. Padding chooses no expert.

    Attributes:
        topk_experts: [T, K] int32; -1 for a slot beyond an expert's capacity or of a padding token.
        topk_weights: [T, K] float32.
        logits: [T, E] float32, from which the scores are computed: after the soft cap, if the router has one.
        tokens_per_expert: [E] int32, number of tokens that each expert got. E includes the zero experts.
        chosen_experts: [T, K] int32, `topk_experts` before the capacity; None without a capacity.
        chosen_per_expert: [E] int32, `tokens_per_expert` before the capacity; None without a capacity.
        token_mask: [T] bool, False for padding; None without padding.
        sequence_lengths: [N] integers, or one length for all; None if unknown.
    """

    topk_experts: Tensor
    topk_weights: Tensor
    logits: Tensor
    tokens_per_expert: Tensor
    chosen_experts: Tensor | None = None
    chosen_per_expert: Tensor | None = None
    token_mask: Tensor | None = None
    sequence_lengths: Tensor | int | None = None

    @property
    def choices(self) -> Tensor:  # [T, K] int32
        """Return the router's choice before capacities, [T, K] int32."""
        return self.topk_experts if self.chosen_experts is None else self.chosen_experts

    @property
    def choices_per_expert(self) -> Tensor:  # [E] int32
        """Return each expert's number of slots before capacities, [E] int32."""
        return self.tokens_per_expert if self.chosen_per_expert is None else self.chosen_per_expert

    @property
    def num_tokens(self) -> int | Tensor:
        """Return the number of tokens that are not padding. With a mask, the number is a tensor on the device."""
        # Use `shape[0]` instead of `len`, because `len` would be a constant in an exported program.
        return self.logits.shape[0] if self.token_mask is None else self.token_mask.sum()


def spread_slots(
    choices: Tensor,  # [T, K] int32; negative means no expert
    values: Tensor | int,  # [T, K], or one number for all slots
    num_experts: int,
) -> Tensor:  # [T, E]
    """Sum, for each token and expert, the values of the token's slots with this expert. Gradients flow to `values`."""
    # Add slots without an expert to an extra column, which is cut off afterwards.
    column = torch.where(choices < 0, num_experts, choices).long()
    dtype = values.dtype if isinstance(values, Tensor) else torch.int32
    empty = torch.zeros(choices.shape[0], num_experts + 1, dtype=dtype, device=choices.device)
    # An assignment may name an expert several times for a token. A sum of two values is the same in any order. On a
    # GPU, sums of more values are deterministic only in PyTorch's deterministic mode.
    values = values if isinstance(values, Tensor) else empty.new_full(choices.shape, values)
    return empty.scatter_add(1, column, values)[:, :num_experts]


class Slots(NamedTuple):
    """The router's choice in one forward. Each token has K slots. A slot holds an expert id, or -1 for no expert."""

    topk_experts: Tensor  # [T, K] int32; -1 for a slot that reaches no expert
    topk_weights: Tensor  # [T, K] float32
    logits: Tensor  # [T, E]
    max_rows: int | None = None  # upper bound on the number of slots that are not -1; None means T * K
    chosen_experts: Tensor | None = None  # [T, K] int32: `topk_experts` before the capacity; None without a capacity

    @property
    def choices(self) -> Tensor:  # [T, K] int32
        """Return the choice before the capacity."""
        return self.topk_experts if self.chosen_experts is None else self.chosen_experts

    @property
    def kept(self) -> Tensor | None:  # [T, K] int32
        """Return the choice after the capacity, with -1 for slots that reach no expert; None without a capacity."""
        return None if self.chosen_experts is None else self.topk_experts


def layer_routing(
    slots: Slots,
    info: TokenInfo,
    offsets: Tensor | None,  # [E]: exclusive end row of each expert's slots
    num_experts: int,  # number of experts, including the zero experts
    implementation: str | None,
) -> LayerRouting:
    """Return the routing of a forward, with counts per expert. If `offsets` is given, counting needs one sort less."""

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
    """Return the number of rows of each expert, given the exclusive end rows."""
    return torch.diff(offsets, prepend=offsets.new_zeros(1))


def identity_output(
    tokens: Tensor,  # [T, D]
    slots: Slots,
    num_experts: int,
    implementation: str | None,
) -> Tensor:  # [T, D]
    """Return the output of the zero experts, which return their input: each token times the sum of the token's
    weights for zero experts. The ids of zero experts start at `num_experts`."""
    is_zero = slots.topk_experts >= num_experts
    weights = torch.where(is_zero, slots.topk_weights, 0.0).sum(1, keepdim=True)  # [T, 1]
    slot_to_row = torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int32)[:, None]
    return combine(tokens, weights, slot_to_row, implementation=implementation)
