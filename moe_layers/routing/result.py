"""The routing of one forward, with everything that an auxiliary loss needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerRouting(NamedTuple):
    """The router's decision in one forward of a layer; T counts the tokens over all leading axes.

    A token chooses experts. An expert gets the tokens that chose it, up to its capacity. Padding chooses no expert.

    Attributes:
        topk_experts: [T, K] int32; -1 for a slot beyond an expert's capacity or of a padding token.
        topk_weights: [T, K] float32.
        logits: [T, E] float32, from which the scores are computed: after the soft cap, if the router has one.
        tokens_per_expert: [E] int32, number of tokens that each expert got. E includes the zero experts.
        chosen_experts: [T, K] int32, `topk_experts` before the capacity; None without a capacity.
        chosen_per_expert: [E] int32, `tokens_per_expert` before the capacity; None without a capacity.
        token_mask: [T] bool, False for padding; None for no padding.
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
        """Return the number of tokens that are not padding; with a mask, counted on the device."""
        # `shape[0]` instead of `len`, because `len` would be a constant in an exported program.
        return self.logits.shape[0] if self.token_mask is None else self.token_mask.sum()


def spread_slots(
    choices: Tensor,  # [T, K] int32; negative means no expert
    values: Tensor | int,  # [T, K], or one for all
    num_experts: int,
) -> Tensor:  # [T, E]
    """Return [T, E] with the sum of each token's values for each expert, or zero. Differentiable in `values`."""
    # Slots without an expert go to an extra column, which is cut off.
    column = torch.where(choices < 0, num_experts, choices).long()
    dtype = values.dtype if isinstance(values, Tensor) else torch.int32
    empty = torch.zeros(choices.shape[0], num_experts + 1, dtype=dtype, device=choices.device)
    # An assignment may name an expert twice. A sum of two values is the same in any order. Sums of more values are
    # deterministic on a GPU only in PyTorch's deterministic mode.
    values = values if isinstance(values, Tensor) else empty.new_full(choices.shape, values)
    return empty.scatter_add(1, column, values)[:, :num_experts]
