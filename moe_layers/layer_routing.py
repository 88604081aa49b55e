"""What a layer's forward decided, and what the caller said of its tokens: all that an auxiliary loss needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerRouting(NamedTuple):
    """What the router decided in one forward of a layer; T counts the tokens over all leading axes.

    An expert is chosen by the router and gets what it was chosen for, up to its capacity. Padding tokens choose none.
    """

    topk_experts: Tensor  # [T, K] int32; -1 for a slot beyond an expert's capacity, or of a padding token
    topk_weights: Tensor  # [T, K] float32
    logits: Tensor  # [T, E] float32
    tokens_per_expert: Tensor  # [E] int32: what the experts got; E counts the zero experts too
    chosen_experts: Tensor | None = None  # [T, K] int32: `topk_experts` before capacity; None where there is none
    chosen_per_expert: Tensor | None = None  # [E] int32: `tokens_per_expert` before capacity; None likewise
    token_mask: Tensor | None = None  # [T] bool: False for padding; None for no padding
    sequence_lengths: Tensor | int | None = None  # [N] integers, or one length for all

    @property
    def choices(self) -> Tensor:  # [T, K] int32
        """What the router chose, whatever the capacity."""
        return self.topk_experts if self.chosen_experts is None else self.chosen_experts

    @property
    def choices_per_expert(self) -> Tensor:  # [E] int32
        return self.tokens_per_expert if self.chosen_per_expert is None else self.chosen_per_expert

    @property
    def num_tokens(self) -> int | Tensor:
        """Tokens that are not padding; counted on the device where there is a mask."""
        return len(self.logits) if self.token_mask is None else self.token_mask.sum()


def spread_slots(
    choices: Tensor,  # [T, K] int32; negative for none
    values: Tensor | int,  # [T, K], or one for all
    num_experts: int,
) -> Tensor:  # [T, E]
    """The value of each slot in the column of its expert, zero elsewhere. Differentiable in `values`."""
    # Slots of no expert go to one more column, which is cut off.
    column = torch.where(choices < 0, num_experts, choices).long()
    dtype = values.dtype if isinstance(values, Tensor) else torch.int32
    empty = torch.zeros(len(choices), num_experts + 1, dtype=dtype, device=choices.device)
    return empty.scatter(1, column, values)[:, :num_experts]
