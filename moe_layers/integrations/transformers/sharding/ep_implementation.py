"""Runs transformers' own expert parallelism with the dispatchers and kernels of this package.

    DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="moe_layers")

transformers shards the experts, loads on each rank only that rank's experts, wraps the model in FSDP2 and saves the
model. FSDP2 divides the gradients of experts by the total number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from ....parallel.collectives import Ranks
from ....parallel.expert_parallel import ExpertParallel
from ..experts.discovery import has_interface
from ..experts.expert_classes import swap_of
from ..experts.experts_forward import DISPATCHED, NAME, ExpertsSpec, experts_forward, interface_spec, recognise_once
from .experts_of_rank import Sharing


class DispatchedExperts(EPImplementation):
    """Computes one experts module for transformers' `EPImplementationInterface`. Each module has its own instance.
    Raises ValueError if tensor parallelism is enabled (tp_size > 1), or if this package cannot compute the experts."""

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise ValueError(
                f'ep_implementation="moe_layers": each rank must have its own tokens, got tp_size={tp_mesh.size()}, '
                "with which ranks would send the same tokens; use fsdp_size instead"
            )
        self._experts, self._make_spec = experts, _spec_maker(experts)
        recognise_once(experts, self._make_spec)
        ranks = Ranks.of(ep_mesh.get_group())
        name = f"{NAME}: {type(experts).__name__}"
        style = ExpertParallel(average_gradients=False)  # FSDP2 already divides the gradients by the number of ranks
        num_local: int = experts.num_experts
        self._sharing = Sharing(name, num_local * ranks.size, ranks, style)
        setattr(experts, DISPATCHED, name)

    def __call__(
        self,
        hidden_states: Tensor,  # [T, D]
        top_k_index: Tensor,  # [T, K]
        top_k_weights: Tensor,  # [T, K]
    ) -> Tensor:  # [T, D]
        # During this call, transformers replaces the experts' DTensors by local tensors.
        recognise_once(self._experts, self._make_spec)
        weights = top_k_weights.to(torch.promote_types(top_k_weights.dtype, torch.float32))
        return self._sharing.forward(self._experts, hidden_states, top_k_index.int(), weights)


def _spec_maker(experts: nn.Module) -> Callable[[Any, str | None], ExpertsSpec]:
    if has_interface(experts):
        return interface_spec
    kind, swap = type_before_parametrizations(experts).__name__, swap_of(experts)
    if swap is None or swap.forward is not experts_forward or swap.caller:
        raise ValueError(
            f'ep_implementation="moe_layers": experts must get tokens, choice and weights from their block, got '
            f"{kind}; load the model without distributed_config, and call enable and shard_experts"
        )
    return swap.spec


EPImplementationInterface.register(NAME, DispatchedExperts)
