"""Compiles the kernels of several configurations in parallel. One rank of the host compiles each configuration.

A compiled kernel is stored in Triton's cache on disk, where the other ranks find it.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.distributed import DeviceMesh

from moe_layers import MoEFeedForward
from moe_layers.parallel.collectives import Ranks
from moe_layers.parallel.overlapped import OverlappedDispatcher
from moe_layers.parallel.symmetric_memory import CollectiveTransport

from ..common.layers import make_tokens
from ..common.shapes import Shape
from .implementations import BASELINE, local_layer, make_implementation, make_layer, results


class StandIn(Ranks):
    """One rank without its group. Collectives return tensors of the right shapes with this rank's data."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.size)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor[: len(tensor) // self.size].clone()

    def all_to_all(self, tensor: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return tensor.clone()


def stand_in(module: MoEFeedForward) -> MoEFeedForward:
    """Replace the layer's communication by `StandIn`, and return the layer."""
    ranks = module.dispatcher.ranks
    module.dispatcher.ranks = StandIn(ranks.name, ranks.size, ranks.rank)
    if isinstance(module.dispatcher, OverlappedDispatcher):
        module.dispatcher.transport = lambda ranks, _: CollectiveTransport(ranks)
    return module


def compile_kernels(
    configurations: list[tuple[Shape, DeviceMesh]], routings: list[str], names: list[str], dtype: torch.dtype
) -> None:
    """Run every implementation but the baseline once per configuration, on one rank. Wait for the other ranks."""
    for shape, mesh in configurations[distributed.get_rank() :: distributed.get_world_size()]:
        layer = make_layer(shape, mesh, dtype)
        for routing in routings:
            tokens = make_tokens(layer, shape, routing)
            for name in names:
                if name != BASELINE:
                    results(stand_in(make_implementation(name, layer, mesh)), tokens, torch.randn_like(tokens))
        local = local_layer(layer)
        tokens = make_tokens(local, shape.of_one_process(mesh.size()), "even")
        results(local, tokens, torch.randn_like(tokens))
        del layer, local
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    distributed.barrier()
