"""Baseline of expert parallelism: grouped_mm and a plain all-to-all, as in training frameworks.

The baseline runs eagerly, like the layers that it is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor
from torch.nn import functional

from moe_layers import MoEFeedForward
from moe_layers.parallel.collectives import Ranks

from ..common.baselines import choose_experts


class TorchAllToAll(nn.Module):
    """The layer from `torch.nn.functional.grouped_mm`, PyTorch's sorting and gathering, and differentiable collectives.

    Tokens are sorted by expert, exchanged, sorted by local expert, computed, and moved back in reverse order. Counts
    are exchanged first and read by the host. The layer shares its parameters with an `MoEFeedForward`.
    """

    def __init__(self, layer: MoEFeedForward, ranks: Ranks):
        super().__init__()
        self.layer = layer
        self.ranks = ranks

    def forward(
        self,
        tokens: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        num_tokens, top_k, num_ranks = len(tokens), self.layer.router.top_k, self.ranks.size
        num_experts = self.layer.num_experts
        weights, choices = choose_experts(tokens, self.layer.router.weight, top_k)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=tokens.device)
        counts = counts.scatter_add(0, choices.flatten(), torch.ones_like(choices).flatten())
        with torch.no_grad():
            arriving = self._exchange(counts, None, None).view(num_ranks, -1)  # [P, E / P]
            sums = torch.stack([counts.view(num_ranks, -1).sum(1), arriving.sum(1)])
        sent, received = sums.tolist()
        row_to_slot = choices.flatten().argsort(stable=True)
        rows = self._exchange(tokens[row_to_slot // top_k], received, sent)  # [R, D] by rank, then expert
        experts = torch.arange(arriving.shape[1], device=tokens.device).repeat(num_ranks)
        experts = experts.repeat_interleave(arriving.flatten(), output_size=len(rows))
        order = experts.argsort(stable=True)
        outputs = self._experts(rows[order], arriving.sum(0).cumsum(0).int())
        outputs = self._exchange(_put(outputs, order), sent, received)
        by_slot = _put(outputs, row_to_slot).view(num_tokens, top_k, -1)
        return (by_slot * weights[..., None]).sum(1).to(tokens.dtype)

    def _experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
        experts = self.layer.experts
        w_up, w_down = (held(weight).transpose(1, 2) for weight in (experts.w_up, experts.w_down))
        gate, up = functional.grouped_mm(rows, w_up, offs=offsets).chunk(2, dim=-1)
        return functional.grouped_mm(functional.silu(gate) * up, w_down, offs=offsets)

    def _exchange(self, tensor: Tensor, received: list[int] | None, sent: list[int] | None) -> Tensor:
        exchanged = collectives.all_to_all_single(tensor.contiguous(), received, sent, self.ranks.name)
        return collectives.wait_tensor(exchanged)


def _put(rows: Tensor, places: Tensor) -> Tensor:
    """Write each row to its place. Each place occurs once, so every row of the new tensor is written."""
    return torch.empty_like(rows).index_copy_(0, places, rows)


def held(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
