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
        num_tokens = tokens.shape[0]
        logits = functional.linear(tokens, self.w_router).float()
        chosen_logits, experts = logits.topk(self.top_k)
        weights = chosen_logits.softmax(-1)
        row_to_slot, slot_to_row, offsets = sort_slots(experts, len(self.w_up))
        rows = tokens[row_to_slot // self.top_k]
        hidden = functional.grouped_mm(rows, self.w_up.transpose(1, 2), offs=offsets)
        rows = functional.grouped_mm(self._activated(hidden), self.w_down.transpose(1, 2), offs=offsets)
        chosen = rows[slot_to_row].view(num_tokens, self.top_k, -1)
        return (chosen * weights[..., None]).sum(1).to(tokens.dtype)

    def _activated(self, hidden: Tensor) -> Tensor:  # [R, 2F or F] -> [R, F]
        if self.activation.name == "relu_squared":
            return functional.relu(hidden).square()
        assert self.activation.name == "swiglu", self.activation
        gate, up = hidden.chunk(2, dim=-1)
        return functional.silu(gate) * up


def sort_slots(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort [T, K] choices by PyTorch's ops. Return row_to_slot [T * K], slot_to_row [T * K] and offsets [E] int32."""
    sorted_experts, row_to_slot = experts.flatten().sort(stable=True)
    boundaries = torch.arange(num_experts, device=experts.device, dtype=sorted_experts.dtype)
    offsets = torch.searchsorted(sorted_experts, boundaries, right=True).int()
    slot_to_row = torch.empty_like(row_to_slot)
    slot_to_row[row_to_slot] = torch.arange(len(row_to_slot), device=experts.device)
    return row_to_slot, slot_to_row, offsets


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
