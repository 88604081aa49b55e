"""Check and flatten the inputs of one forward, and restore the shape of the output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_kind, is_dtensor

_unsafe_view = torch.ops.aten._unsafe_view.default  # an op's overload takes half as long to call as its overload packet


class TokenInfo(NamedTuple):
    """The tokens of one forward, and the arguments that describe them."""

    all_tokens: Tensor  # [T, D], padding included
    shape: torch.Size  # shape of the layer's input, [..., D]
    token_mask: Tensor | None  # [T] bool: False for padding; None for no padding
    sequence_lengths: Tensor | int | None  # [N] integers, or one length for all sequences; None if unknown
    num_tokens: int | Tensor | None  # divisor of the auxiliary losses; None for the number of tokens of this call

    @property
    def sequence_length(self) -> int:
        """Return how many tokens share one capacity: the length of the last axis but one of x, or 1 for x [D]."""
        return self.shape[-2] if len(self.shape) > 1 else 1


def flatten_tokens(
    x: Tensor,  # [..., D]
    d_model: int,
    token_mask: Tensor | None,  # [...]
    sequence_lengths: Tensor | None,  # [N]
    num_tokens: int | Tensor | None,
) -> tuple[Tensor, TokenInfo]:  # [T, D]
    """Check and flatten the arguments of `MoEFeedForward.forward`. Padding tokens become zero.

    Raises:
        ValueError: x is a DTensor or its last axis is not `d_model`, or another argument does not fit x.
    """
    if type(x) is not Tensor:
        if is_dtensor(x):
            raise ValueError(
                "MoEFeedForward: x must be a plain tensor, got a DTensor; pass the tokens of this rank, as "
                "PrepareModuleInput does with use_local_output=True"
            )
        check_kind("MoEFeedForward", "x", x, Tensor)
    if x.dim() < 1 or x.shape[-1] != d_model:
        raise ValueError(f"MoEFeedForward: x must be [..., d_model={d_model}], got {list(x.shape)}")
    if num_tokens is not None:
        check_num_tokens("MoEFeedForward", num_tokens)
    lengths: Tensor | int | None = x.shape[-2] if x.dim() > 2 else None
    if sequence_lengths is not None:
        check_kind("MoEFeedForward", "sequence_lengths", sequence_lengths, Tensor)
        check_sequence_lengths("MoEFeedForward", sequence_lengths, x.device)
        lengths = sequence_lengths
    all_tokens = x if x.dim() == 2 else x.reshape(-1, d_model)  # even a view of the same shape costs time in autograd
    if token_mask is None:
        return all_tokens, TokenInfo(all_tokens, x.shape, None, lengths, num_tokens)
    check_kind("MoEFeedForward", "token_mask", token_mask, Tensor)
    if token_mask.shape != x.shape[:-1] or token_mask.dtype != torch.bool or token_mask.device != x.device:
        raise ValueError(
            f"MoEFeedForward: token_mask must be {list(x.shape[:-1])} torch.bool on {x.device}, "
            f"got {list(token_mask.shape)} {token_mask.dtype} on {token_mask.device}"
        )
    token_mask = token_mask.reshape(-1)
    # NaN in padding would reach the gradients of the router, because 0 * NaN is NaN.
    tokens = torch.where(token_mask[:, None], all_tokens, 0.0)
    return tokens, TokenInfo(all_tokens, x.shape, token_mask, lengths, num_tokens)


def flatten_router_input(
    tokens: Tensor,  # [T, D]
    info: TokenInfo,
    router_input: Tensor | None,  # [..., D]
    *,
    separate: bool,
) -> Tensor:  # [T, D]
    """Return the tokens that the router reads: the layer's tokens, or with `separate` the tokens of `router_input`.

    Raises:
        ValueError: `router_input` is missing, is given without `separate`, or differs from x in shape or device.
    """
    if separate != (router_input is not None):
        rule = "must be given" if separate else "must not be given"
        got = "a tensor" if router_input is not None else "none"
        raise ValueError(f"MoEFeedForward: router_input {rule} with config.separate_router_input={separate}, got {got}")
    if router_input is None:
        return tokens
    check_kind("MoEFeedForward", "router_input", router_input, Tensor)
    if router_input.shape != info.shape or router_input.device != tokens.device:
        raise ValueError(
            f"MoEFeedForward: router_input must be {list(info.shape)} on {tokens.device}, as x is, "
            f"got {list(router_input.shape)} on {router_input.device}"
        )
    flat = router_input.reshape(tokens.shape)
    return flat if info.token_mask is None else torch.where(info.token_mask[:, None], flat, 0.0)


def restore_shape(
    out: Tensor,  # [T, D]
    info: TokenInfo,
) -> Tensor:  # [..., D]
    """Return the output in the shape of the layer's input. The result shares the memory of `out`, but autograd does not
    treat it as a view: FSDP2's hook on the output gathers parameters before backward, and an in-place change of a view
    would lose this hook. If a hook of the experts keeps `out`, PyTorch does not notice in-place changes of the result.
    """
    return _unsafe_view(out, info.shape)


def check_num_tokens(op: str, num_tokens: int | Tensor) -> None:
    """Raise ValueError unless `num_tokens` is a scalar tensor or a non-negative number."""
    if isinstance(num_tokens, Tensor):
        if num_tokens.numel() != 1:
            raise ValueError(f"{op}: num_tokens must be a scalar, got {list(num_tokens.shape)}")
    elif isinstance(num_tokens, bool) or num_tokens < 0:
        raise ValueError(f"{op}: num_tokens must not be negative, got {num_tokens!r}")


def check_sequence_lengths(op: str, lengths: Tensor, device: torch.device) -> None:
    """Raise ValueError unless `lengths` is [N] int32 or int64 on `device` with N > 0. The values are not read."""
    is_integer = lengths.dtype in (torch.int32, torch.int64)
    if lengths.dim() != 1 or not len(lengths) or not is_integer or lengths.device != device:
        raise ValueError(
            f"{op}: sequence_lengths must be [N] int32 or int64 on {device} with N > 0, "
            f"got {list(lengths.shape)} {lengths.dtype} on {lengths.device}"
        )
