"""What the dispatchers of expert parallelism have in common: chunks, waiting for outputs, the scale of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from ..experts.dispatcher import Dispatched
from ..experts.grouped import GroupedExperts
from ..precision import autocast
from ..routing.capacity import Slots
from .collectives import Ranks

Chunk = tuple[Tensor, Slots]  # some neighbouring tokens [T, D], in the dtype in which they travel, and their slots


class RankDispatcher(ABC):
    """Brings tokens to the processes of their experts, and outputs back.

    Args:
        ranks: that share the experts, as many for each.
        max_rows_factor: see each dispatcher; None where as much is sent and computed as there is.
        chunks: parts of the tokens, of which one travels while another is computed.
        gradient_scale: of the experts' parameters. It multiplies what travels in backward, which is smaller than they
            are, and is divided out of the gradients of tokens and weights: exactly, if it is a power of two.
    """

    def __init__(
        self, ranks: Ranks, *, max_rows_factor: float | None = None, chunks: int = 1, gradient_scale: float = 1.0
    ):
        self.ranks = ranks
        self.max_rows_factor = max_rows_factor
        self.chunks = chunks
        self.gradient_scale = gradient_scale

    @torch.compiler.disable
    def __call__(
        self,
        tokens: Tensor,  # [T, D]
        slots: Slots,
        experts: GroupedExperts,
    ) -> Dispatched:
        tokens = _scale_gradient(tokens, 1 / self.gradient_scale)
        slots = slots._replace(topk_weights=_scale_gradient(slots.topk_weights, 1 / self.gradient_scale))
        returning, offsets = self.start(tokens, slots, experts)
        return Dispatched(_Arrival(returning, self.gradient_scale), reduce(torch.add, offsets))

    def start(
        self, tokens: Tensor, slots: Slots, experts: GroupedExperts
    ) -> tuple[list[Callable[[], Tensor]], list[Tensor]]:
        """What waits for the outputs, part after part, which are under way, and offsets [E] that add up."""
        return self.dispatch(split(tokens, slots, self.lengths(len(tokens))), experts)

    def lengths(self, num_tokens: int) -> list[int]:
        """Of the chunks, which differ by one token at most."""
        return [(num_tokens + self.chunks - 1 - chunk) // self.chunks for chunk in range(self.chunks)]

    @abstractmethod
    def dispatch(self, chunks: list[Chunk], experts: GroupedExperts) -> tuple[list[Callable[[], Tensor]], list[Tensor]]:
        """Of each chunk what waits for its outputs, which are under way, and the offsets [E] of its sorted slots."""

    def num_slots(self, slots: Slots) -> int:
        """That reach an expert at most."""
        return slots.topk_experts.numel() if slots.max_rows is None else slots.max_rows


def row_bytes(tokens: Tensor) -> int:
    """What every process must have alike, whatever its number of tokens: a collective would mix them up, or hang."""
    return tokens.shape[1] * tokens.element_size()


def split(tokens: Tensor, slots: Slots, lengths: list[int]) -> list[Chunk]:
    device_type = tokens.device.type
    if torch.is_autocast_enabled(device_type):  # as the experts would
        tokens = autocast(tokens, device_type)
    if len(lengths) == 1:
        return [(tokens, slots)]
    num_rows = slots.topk_experts.numel() if slots.max_rows is None else slots.max_rows
    parts = zip(*(tensor.split(lengths) for tensor in (tokens, *slots[:3])), strict=True)
    num_tokens = max(len(tokens), 1)
    return [(part, Slots(*rest, max_rows=-(-num_rows * len(part) // num_tokens))) for part, *rest in parts]


class _Arrival:
    """Waits for the outputs of all chunks, and is nothing that a compiler looks into."""

    def __init__(self, returning: list[Callable[[], Tensor]], gradient_scale: float):
        self.returning = returning
        self.gradient_scale = gradient_scale

    @torch.compiler.disable
    def __call__(self) -> Tensor:  # [T, D]
        parts = [part() for part in self.returning]
        return _scale_gradient(parts[0] if len(parts) == 1 else torch.cat(parts), self.gradient_scale)


def _scale_gradient(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else _ScaledGradient.apply(tensor, scale)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.scale, None
