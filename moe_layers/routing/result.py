"""What a layer's forward decided, and what the caller said of its tokens: all that an auxiliary loss needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..checks import check_kind

# The positive scores, up to the factor that makes those of a token sum to one.
SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: functional.softplus(logits).sqrt(),
}


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
    """The sum of an expert's slots in its column, zero where there are none. Differentiable in `values`."""
    # Slots of no expert go to one more column, which is cut off.
    column = torch.where(choices < 0, num_experts, choices).long()
    dtype = values.dtype if isinstance(values, Tensor) else torch.int32
    empty = torch.zeros(len(choices), num_experts + 1, dtype=dtype, device=choices.device)
    # An assignment may name an expert twice. Sums of two are the same in any order; those of more need PyTorch's
    # deterministic mode on a GPU.
    values = values if isinstance(values, Tensor) else empty.new_full(choices.shape, values)
    return empty.scatter_add(1, column, values)[:, :num_experts]


def facts_of_tokens(
    x: Tensor,  # [..., D]
    token_mask: Tensor | None,  # [...]
    sequence_lengths: Tensor | None,  # [N]
    num_tokens: int | Tensor | None,
) -> dict[str, Any]:
    """What the caller said of the tokens, for LayerRouting. Raises ValueError unless it fits."""
    if num_tokens is not None:
        check_num_tokens("MoEFeedForward", num_tokens)
    if sequence_lengths is not None:
        check_kind("MoEFeedForward", "sequence_lengths", sequence_lengths, Tensor)
        check_sequence_lengths("MoEFeedForward", sequence_lengths, x.device)
    if token_mask is not None:
        check_kind("MoEFeedForward", "token_mask", token_mask, Tensor)
        if token_mask.shape != x.shape[:-1] or token_mask.dtype != torch.bool or token_mask.device != x.device:
            raise ValueError(
                f"MoEFeedForward: token_mask must be {list(x.shape[:-1])} torch.bool on {x.device}, "
                f"got {list(token_mask.shape)} {token_mask.dtype} on {token_mask.device}"
            )
        token_mask = token_mask.reshape(-1)
    if sequence_lengths is None and x.dim() > 2:
        sequence_lengths = x.shape[-2]
    return {"token_mask": token_mask, "sequence_lengths": sequence_lengths}


def check_num_tokens(op: str, num_tokens: int | Tensor) -> None:
    """Raises ValueError unless this is a number of tokens, here or on the device."""
    if isinstance(num_tokens, Tensor):
        if num_tokens.numel() != 1:
            raise ValueError(f"{op}: num_tokens must be a scalar, got {list(num_tokens.shape)}")
    elif isinstance(num_tokens, bool) or num_tokens < 0:
        raise ValueError(f"{op}: num_tokens must not be negative, got {num_tokens!r}")


def check_sequence_lengths(op: str, lengths: Tensor, device: torch.device) -> None:
    """Raises ValueError unless these are lengths of sequences; their values are not read."""
    is_integer = lengths.dtype in (torch.int32, torch.int64)
    if lengths.dim() != 1 or not len(lengths) or not is_integer or lengths.device != device:
        raise ValueError(
            f"{op}: sequence_lengths must be [N] int32 or int64 on {device} with N > 0, "
            f"got {list(lengths.shape)} {lengths.dtype} on {lengths.device}"
        )
