"""Mixture-of-Experts layers: `nn.Module`s composed of the functions of `moe_kernels`."""

import importlib
from typing import TYPE_CHECKING, Any

from moe_kernels import __version__ as __version__

from .balance.balancing import (
    BalanceLosses,
    carry_expert_counts,
    global_expert_counts,
    reset_expert_counts,
    update_selection_bias,
)
from .balance.losses import (
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from .config import MoEConfig
from .experts.lora.adapters import LoRA
from .feed_forward import MoEFeedForward
from .parallel.collectives import save_communication
from .routing.activation_checkpointing import save_routing
from .routing.assignment import CustomAssignment, RoundRobinAssignment, TokenExpertPairs
from .routing.capacity import CapacityFactor
from .routing.expert_choice import ExpertChoice, TokenRounding
from .routing.noise import RouterNoise
from .routing.replay import RoutingReplay
from .routing.result import LayerRouting
from .routing.router import TopKRouter
from .whole_models import aux_losses, observe, set_aux_loss_scale

if TYPE_CHECKING:
    from .parallel.expert_parallel import ExpertParallel
    from .parallel.gradient_clipping import clip_grad_norm_

__all__ = [
    "BalanceLosses",
    "CapacityFactor",
    "CustomAssignment",
    "ExpertChoice",
    "ExpertParallel",
    "LayerRouting",
    "LoRA",
    "MoEConfig",
    "MoEFeedForward",
    "RoundRobinAssignment",
    "RouterNoise",
    "RoutingReplay",
    "TokenExpertPairs",
    "TokenRounding",
    "TopKRouter",
    "aux_losses",
    "carry_expert_counts",
    "clip_grad_norm_",
    "global_expert_counts",
    "global_load_balancing_loss",
    "importance_loss",
    "load_balancing_loss",
    "observe",
    "reset_expert_counts",
    "router_z_loss",
    "save_communication",
    "save_routing",
    "sequence_load_balancing_loss",
    "set_aux_loss_scale",
    "update_selection_bias",
]

# Load on first use: these modules import torch.distributed.tensor, which takes half as long as importing PyTorch.
_ON_FIRST_USE = {"ExpertParallel": "parallel.expert_parallel", "clip_grad_norm_": "parallel.gradient_clipping"}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_ON_FIRST_USE[name]}", __name__), name)
