"""The routing of one forward and the settings of its tokens: everything that an auxiliary loss needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..checks import check_kind

# Positive scores, before they are normalised to a sum of one per token.
SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: functional.softplus(logits).sqrt(),
}


class LayerRouting(NamedTuple):
    """The router's decision in one forward of a layer; T counts the tokens over all leading axes.

    The router chooses an expert; the expert gets the tokens that chose it, up to its capacity. Padding chooses none.
    """

    topk_experts: Tensor  # [T, K] int32; -1 for a slot beyond an expert's capacity or of a padding token
    topk_weights: Tensor  # [T, K] float32
    logits: Tensor  # [T, E] float32
    tokens_per_expert: Tensor  # [E] int32: tokens that the experts got; E includes the zero experts
    chosen_experts: Tensor | None = None  # [T, K] int32: `topk_experts` before capacity; None without one
    chosen_per_expert: Tensor | None = None  # [E] int32: `tokens_per_expert` before capacity; None likewise
    token_mask: Tensor | None = None  # [T] bool: False for padding; None for no padding
    sequence_lengths: Tensor | int | None = None  # [N] integers, or one length for all

    @property
    def choices(self) -> Tensor:  # [T, K] int32
        """The router's choice before capacities."""
        return self.topk_experts if self.chosen_experts is None else self.chosen_experts

    @property
    def choices_per_expert(self) -> Tensor:  # [E] int32
        return self.tokens_per_expert if self.chosen_per_expert is None else self.chosen_per_expert

    @property
    def num_tokens(self) -> int | Tensor:
        """The number of tokens that are not padding; with a mask, counted on the device."""
        return len(self.logits) if self.token_mask is None else self.token_mask.sum()


def spread_slots(
    choices: Tensor,  # [T, K] int32; negative for none
    values: Tensor | int,  # [T, K], or one for all
    num_experts: int,
) -> Tensor:  # [T, E]
    """Return the sum of each expert's slots in its column, zero without slots. Differentiable in `values`."""
    # Slots without an expert go to an extra column, which is cut off.
    column = torch.where(choices < 0, num_experts, choices).long()
    dtype = values.dtype if isinstance(values, Tensor) else torch.int32
    empty = torch.zeros(len(choices), num_experts + 1, dtype=dtype, device=choices.device)
    # An assignment may name an expert twice. Sums of two values are the same in any order; sums of more need PyTorch's
    # deterministic mode on a GPU.
    values = values if isinstance(values, Tensor) else empty.new_full(choices.shape, values)
    return empty.scatter_add(1, column, values)[:, :num_experts]


class TokenInfo(NamedTuple):
    """Settings of the tokens of one forward."""

    all_tokens: Tensor  # [T, D], padding included
    shape: torch.Size  # of the layer's input, [..., D]
    token_mask: Tensor | None  # [T] bool: False for padding; None for no padding
    sequence_lengths: Tensor | int | None  # [N] integers, or one length for all
    num_tokens: int | Tensor | None  # divisor of the auxiliary losses; None for the tokens of this call

    @property
    def sequence_length(self) -> int:
        """Length of the last axis but one, 1 without it. A capacity holds for so many tokens."""
        return self.shape[-2] if len(self.shape) > 1 else 1


def token_info(
    x: Tensor,  # [..., D]
    token_mask: Tensor | None,  # [...]
    sequence_lengths: Tensor | None,  # [N]
    num_tokens: int | Tensor | None,
) -> TokenInfo:
    """Check and flatten the arguments of `MoEFeedForward.forward` that describe tokens.

    Raises:
        ValueError: one of them does not fit the input.
    """
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
    return TokenInfo(x.reshape(-1, x.shape[-1]), x.shape, token_mask, sequence_lengths, num_tokens)


def check_num_tokens(op: str, num_tokens: int | Tensor) -> None:
    """Raise ValueError unless this is a number of tokens, on the host or on the device."""
    if isinstance(num_tokens, Tensor):
        if num_tokens.numel() != 1:
            raise ValueError(f"{op}: num_tokens must be a scalar, got {list(num_tokens.shape)}")
    elif isinstance(num_tokens, bool) or num_tokens < 0:
        raise ValueError(f"{op}: num_tokens must not be negative, got {num_tokens!r}")


def check_sequence_lengths(op: str, lengths: Tensor, device: torch.device) -> None:
    """Raise ValueError unless these are lengths of sequences. Their values are not read."""
    is_integer = lengths.dtype in (torch.int32, torch.int64)
    if lengths.dim() != 1 or not len(lengths) or not is_integer or lengths.device != device:
        raise ValueError(
            f"{op}: sequence_lengths must be [N] int32 or int64 on {device} with N > 0, "
            f"got {list(lengths.shape)} {lengths.dtype} on {lengths.device}"
        )
