"""Collectives of the processes that share experts: PyTorch's functional ones, which checkpointed regions can save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

# Registers the collectives.
import torch.distributed._functional_collectives
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..routing.activation_checkpointing import routing_ops

_OPS = torch.ops._c10d_functional

# What a checkpointed region saves, so that its recomputation need not communicate.
COLLECTIVES = [
    _OPS.all_gather_into_tensor.default,
    _OPS.reduce_scatter_tensor.default,
    _OPS.all_to_all_single.default,
]


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, by the group's name, so that what holds them can be copied.

    Each collective starts at once; every process must start the same ones in the same order. `all_gather` and its like
    return what must go through `wait` before anything reads it; `gathering` and its like return a `AsyncCollective`.
    """

    name: str
    size: int
    rank: int  # of this process in the group

    @classmethod
    def of(cls, group: ProcessGroup) -> Ranks:
        return cls(group.group_name, group.size(), group.rank())

    def all_gather(self, tensor: Tensor) -> Tensor:  # [N, ...] -> [P * N, ...]
        """The tensors of all, one after another; all must have the same shape."""
        return _OPS.all_gather_into_tensor(tensor.contiguous(), self.size, self.name)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:  # [P * N, ...] -> [N, ...]
        """This process's part of the sum over all."""
        return _OPS.reduce_scatter_tensor(tensor.contiguous(), "sum", self.size, self.name)

    def all_to_all(self, tensor: Tensor, received: list[int], sent: list[int]) -> Tensor:  # [sum(sent), ...]
        """`sent[p]` of the rows, in turn, go to process p; `received[p]` of the result, in turn, came from it."""
        return _OPS.all_to_all_single(tensor.contiguous(), received, sent, self.name)

    def gathering(self, tensor: Tensor) -> AsyncCollective:
        return AsyncCollective(tensor, self.all_gather, self.reduce_scatter)

    def scattering(self, tensor: Tensor) -> AsyncCollective:
        return AsyncCollective(tensor, self.reduce_scatter, self.all_gather)

    def exchanging(self, tensor: Tensor, received: list[int], sent: list[int]) -> AsyncCollective:
        there = partial(self.all_to_all, received=received, sent=sent)
        return AsyncCollective(tensor, there, partial(self.all_to_all, received=sent, sent=received))


def wait(tensor: Tensor) -> Tensor:
    """The result of a collective, for use on the current stream. Does not wait for the GPU."""
    return _OPS.wait_tensor(tensor)


class AsyncCollective:
    """A tensor under way, whose gradient travels the way back.

    What runs between the departure and `wait` does so while the tensor travels. In backward, where autograd runs what
    forward ran last first, its gradient does so while the gradient travels; PyTorch's own gradients of collectives wait
    for each other.

    Args:
        there: starts a collective on the tensor.
        back: starts its dual on the gradient.
    """

    def __init__(self, tensor: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]):
        self._way_back = _GradientHandoff(back)
        self._under_way = _StartCollective.apply(tensor, self._way_back, there)

    def wait(self) -> Tensor:
        return _WaitCollective.apply(self._under_way, self._way_back)


class _GradientHandoff:
    """Hands the gradient under way from one end of the trip to the other: its shape may be another than autograd wants
    between them. Holds no tensor in forward."""

    def __init__(self, start: Callable[[Tensor], Tensor]):
        self.start = start
        self.under_way: Tensor | None = None

    def finish(self) -> Tensor:
        gradient, self.under_way = wait(self.under_way), None
        return gradient


class _StartCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, handoff: _GradientHandoff, there: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.handoff = handoff
        return there(tensor)

    @staticmethod
    def backward(ctx, _):
        return ctx.handoff.finish(), None, None


class _WaitCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, under_way: Tensor, handoff: _GradientHandoff) -> Tensor:
        ctx.handoff, ctx.shape = handoff, under_way.shape
        return wait(under_way)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.handoff.under_way = ctx.handoff.start(gradient)
        return gradient.new_zeros(1).expand(ctx.shape) if 0 not in ctx.shape else gradient.new_empty(ctx.shape), None


def check_on_device(condition: Tensor, message: str) -> None:
    """Raises ValueError unless the condition holds. On a GPU an assertion fails there instead: nothing waits for it,
    no later kernel runs, and PyTorch raises RuntimeError at the next occasion."""
    if condition.device.type == "cpu":
        if not condition:
            raise ValueError(message)
    else:
        torch._assert_async(condition, message)


def save_communication() -> tuple[AbstractContextManager, AbstractContextManager]:
    """`save_routing` for a region with `ExpertParallel` layers that also keeps what they received.

    The recomputation then communicates nothing, but for what the "overlapped" dispatcher copies from GPU to GPU. With
    `save_routing` alone it sends everything again, with the same choice and so the same sizes.
    """
    return create_selective_checkpoint_contexts([*routing_ops(), *COLLECTIVES])
