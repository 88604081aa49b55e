"""Baselines of the layer: the same computation from PyTorch's own parts, and the dense GEMMs inside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_layers import MoEFeedForward

from .shapes import Shape


class TorchGroupedMM(nn.Module):
    """The layer from `torch.nn.functional.grouped_mm` and PyTorch's sorting and gathering, for `torch.compile`.

    It shares its parameters with an `MoEFeedForward`, so both compute the same function.
    """

    def __init__(self, layer: MoEFeedForward):
        super().__init__()
        self.w_router = layer.router.weight
        self.w_up = layer.experts.w_up
        self.w_down = layer.experts.w_down
        self.top_k = layer.router.top_k
        self.activation = layer.experts.activation

    def forward(
        self,
        tokens: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        weights, experts = choose_experts(tokens, self.w_router, self.top_k)
        return sum_of_experts(self._experts, tokens, weights, experts, len(self.w_up))

    def _experts(self, rows: Tensor, offsets: Tensor) -> Tensor:  # [R, D], [E] int32 -> [R, D]
        hidden = functional.grouped_mm(rows, self.w_up.transpose(1, 2), offs=offsets)
        return functional.grouped_mm(self._activated(hidden), self.w_down.transpose(1, 2), offs=offsets)

    def _activated(self, hidden: Tensor) -> Tensor:  # [R, 2F or F] -> [R, F]
        if self.activation.name == "relu_squared":
            return functional.relu(hidden).square()
        assert self.activation.name == "swiglu", self.activation
        gate, up = hidden.chunk(2, dim=-1)
        return functional.silu(gate) * up


def choose_experts(tokens: Tensor, w_router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the weights [T, K] float32 and the experts [T, K] int64 of a softmax over the largest logits."""
    chosen_logits, experts = functional.linear(tokens, w_router).float().topk(top_k)
    return chosen_logits.softmax(-1), experts


def sum_of_experts(
    compute: Callable[[Tensor, Tensor], Tensor],  # (rows [R, D], offsets [E] int32) -> [R, D]
    tokens: Tensor,  # [T, D]
    weights: Tensor,  # [T, K]
    experts: Tensor,  # [T, K]
    num_experts: int,
) -> Tensor:  # [T, D]
    """Sort the slots by expert, compute their rows, and sum each token's rows, all with PyTorch's ops."""
    sorted_experts, row_to_slot = experts.flatten().sort(stable=True)
    boundaries = torch.arange(num_experts, device=experts.device, dtype=sorted_experts.dtype)
    offsets = torch.searchsorted(sorted_experts, boundaries, right=True).int()
    slot_to_row = torch.empty_like(row_to_slot)
    slot_to_row[row_to_slot] = torch.arange(len(row_to_slot), device=experts.device)
    rows = compute(tokens[row_to_slot // experts.shape[1]], offsets)
    chosen = rows[slot_to_row].view(*experts.shape, -1)
    return (chosen * weights[..., None]).sum(1).to(tokens.dtype)


def grouped_mm_takes(shape: Shape, dtype: torch.dtype) -> bool:
    """Return whether `grouped_mm` can compute the layer: all rows must start at multiples of 16 bytes."""
    return all(width * dtype.itemsize % 16 == 0 for width in (shape.d_model, shape.d_ff))


def dense_gemms(shape: Shape, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Return the layer's GEMMs with all rows in one matrix and one expert's weights. Their time is a bound."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    widths = shape.d_model, shape.up_columns, shape.d_ff
    rows, hidden, activated = (normal(shape.num_rows, width) for width in widths)
    w_up, w_down = normal(shape.up_columns, shape.d_model), normal(shape.d_model, shape.d_ff)
    return {
        "up": partial(torch.mm, rows, w_up.t()),
        "down": partial(torch.mm, activated, w_down.t()),
        "down_dgrad": partial(torch.mm, rows, w_down),
        "up_dgrad": partial(torch.mm, hidden, w_up),
        "up_wgrad": partial(torch.mm, hidden.t(), rows),
        "down_wgrad": partial(torch.mm, rows.t(), activated),
    }


FORWARD_GEMMS = ("up", "down")
