"""Collectives that autograd differentiates and checkpointed regions can save: the functional ones of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Registers the collectives and their gradients.
import torch.distributed._functional_collectives
from torch import Tensor
from torch.distributed import ProcessGroup

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

    Each collective starts at once and returns a tensor to be given to `wait` before anything else reads it. Every
    process must call the same ones in the same order. The gradient of each is its dual: a reduce-scatter for an
    all-gather, and the other way round, and the all-to-all back.
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


def wait(tensor: Tensor) -> Tensor:
    """The result of a collective, for use on the current stream. Does not wait for the GPU."""
    return _OPS.wait_tensor(tensor)


def check_on_device(condition: Tensor, message: str) -> None:
    """Raises ValueError unless the condition holds. On a GPU an assertion fails there instead: nothing waits for it,
    no later kernel runs, and PyTorch raises RuntimeError at the next occasion."""
    if condition.device.type == "cpu":
        if not condition:
            raise ValueError(message)
    else:
        torch._assert_async(condition, message)
