"""Collectives between the ranks that hold one layer's experts. The collectives are functional ops, whose results a
checkpointed region can save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

# This import registers the collectives as ops of PyTorch.
import torch.distributed._functional_collectives
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from moe_kernels.runtime.pytorch import assert_on_device

from ..routing.activation_checkpointing import routing_ops

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # only for types: the import takes half as long as `import torch`

_OPS = torch.ops._c10d_functional

# `save_communication` keeps the results of these ops, so that a recomputation need not communicate.
COLLECTIVES = [_OPS.all_gather_into_tensor.default, _OPS.reduce_scatter_tensor.default, _OPS.all_to_all_single.default]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group. The object stores the group's name instead of the group, which cannot be copied.

    Each collective starts immediately. Every rank must start the same collectives in the same order. Results of
    `all_gather`, `reduce_scatter` and `all_to_all` must pass through `wait` before anything reads them. `gathering`,
    `scattering` and `exchanging` return an `AsyncCollective`.
    """

    name: str
    size: int
    rank: int  # this process's rank in the group

    @classmethod
    def of(cls, group: ProcessGroup) -> Ranks:
        return cls(group.group_name, group.size(), group.rank())

    def all_gather(self, tensor: Tensor) -> Tensor:  # [N, ...] -> [P * N, ...]
        """Return all ranks' tensors, concatenated. The tensors must have the same shape."""
        return _OPS.all_gather_into_tensor(tensor.contiguous(), self.size, self.name)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:  # [P * N, ...] -> [N, ...]
        """Return this rank's part of the sum over all ranks."""
        return _OPS.reduce_scatter_tensor(tensor.contiguous(), "sum", self.size, self.name)

    def all_to_all(self, tensor: Tensor, received: list[int], sent: list[int]) -> Tensor:  # [sum(received), ...]
        """Send pieces of `sent[p]` rows to each rank p, in order, and receive pieces of `received[p]` rows."""
        return _OPS.all_to_all_single(tensor.contiguous(), received, sent, self.name)

    def gathering(self, tensor: Tensor, packing: Packing | None = None) -> AsyncCollective:
        return AsyncCollective(tensor, self.all_gather, self.reduce_scatter, packing)

    def scattering(self, tensor: Tensor) -> AsyncCollective:
        return AsyncCollective(tensor, self.reduce_scatter, self.all_gather)

    def exchanging(
        self, tensor: Tensor, received: list[int], sent: list[int], packing: Packing | None = None
    ) -> AsyncCollective:
        there = partial(self.all_to_all, received=received, sent=sent)
        return AsyncCollective(tensor, there, partial(self.all_to_all, received=sent, sent=received), packing)


def wait(tensor: Tensor) -> Tensor:
    """Return the result of a collective for use on the current stream, without host synchronisation."""
    return _OPS.wait_tensor(tensor)


def full_tensor(tensor: DTensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks. Float8 numbers are sent as bytes, because some collectives do
    not support float8."""
    if not (tensor.is_floating_point() and tensor.element_size() == 1):
        return tensor.full_tensor()
    held = tensor.to_local().view(torch.uint8)
    sizes = {"shape": tensor.shape, "stride": tensor.stride()}
    sent = type(tensor).from_local(held, tensor.device_mesh, tensor.placements, run_check=False, **sizes)
    return sent.full_tensor().view(tensor.dtype)


class Packing(NamedTuple):
    """Conversions of a tensor before it is sent and after it has arrived. Gradients are sent unconverted."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


class AsyncCollective:
    """A tensor in flight. In backward, the dual collective (reduce-scatter for all-gather) sends the gradient back.

    The constructor starts the transfer. Work between the start and `wait` overlaps with the transfer. In backward, the
    transfer of the gradient overlaps with the gradient computation of that work. PyTorch's own collectives do not
    overlap with computation in backward.

    Args:
        there: starts a collective on the tensor.
        back: starts the dual collective on the gradient.
        packing: conversions before the tensor is sent and after it has arrived. Default: None, no conversion.
    """

    def __init__(
        self,
        tensor: Tensor,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
        packing: Packing | None = None,
    ):
        self._way_back = _GradientHandoff(back)
        self._packing = packing
        self._under_way = _StartCollective.apply(tensor, self._way_back, there, packing)

    def wait(self) -> Tensor:
        return _WaitCollective.apply(self._under_way, self._way_back, self._packing)


class _GradientHandoff:
    """Passes the gradient in flight from `_WaitCollective` to `_StartCollective`. Autograd cannot pass this gradient,
    because the gradient's shape differs from the forward tensor's shape. In forward, the object holds no tensor."""

    def __init__(self, start: Callable[[Tensor], Tensor]):
        self.start = start
        self.under_way: Tensor | None = None

    def finish(self) -> Tensor:
        assert self.under_way is not None
        gradient, self.under_way = wait(self.under_way), None
        return gradient


class _StartCollective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, tensor: Tensor, handoff: _GradientHandoff, there: Callable[[Tensor], Tensor], packing: Packing | None
    ) -> Tensor:
        ctx.handoff = handoff
        return there(tensor if packing is None else packing.pack(tensor))

    @staticmethod
    def backward(ctx, _):
        return ctx.handoff.finish(), None, None, None


class _WaitCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, under_way: Tensor, handoff: _GradientHandoff, packing: Packing | None) -> Tensor:
        ctx.handoff, ctx.shape = handoff, under_way.shape
        return wait(under_way) if packing is None else packing.unpack(wait(under_way))

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.handoff.under_way = ctx.handoff.start(gradient)
        empty = 0 in ctx.shape
        return gradient.new_empty(ctx.shape) if empty else gradient.new_zeros(1).expand(ctx.shape), None, None


def check_on_device(condition: Tensor, message: str) -> None:
    """Raise ValueError unless the condition holds. On a GPU, a device-side assertion fails instead, without host
    synchronisation. No later kernel then runs, and PyTorch raises RuntimeError at a later call."""
    if condition.device.type == "cpu":
        if not condition:
            raise ValueError(message)
    else:
        assert_on_device(condition, message)


def save_communication() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return contexts for a checkpointed region, which save the routing and the results of all collectives.

    The recomputation then communicates nothing, except for the "overlapped" dispatcher's copies between GPUs. With
    `save_routing` alone the recomputation sends everything again, with the same choice and therefore the same sizes.
    """
    return create_selective_checkpoint_contexts([*routing_ops(), *COLLECTIVES])
