"""Mixture-of-Experts layers: `nn.Module`s composed of the functions of `moe_kernels`."""

from .assignment import Assignment, ForcedBalance
from .balancing import (
    BalanceLosses,
    carry_expert_counts,
    global_expert_counts,
    reset_expert_counts,
    update_selection_bias,
)
from .checkpoint import LoadReport
from .custom_assignment import CustomAssignment, TokenExpertPairs, slots_of_pairs
from .dispatcher import LocalDispatcher
from .dropping import CapacityFactor, Slots
from .expert_choice import ExpertChoice, TokenRounding
from .expert_parallel import ExpertParallel
from .experts import GroupedExperts
from .feed_forward import MoEFeedForward
from .gradient_clipping import clip_grad_norm_
from .layer_routing import LayerRouting
from .losses import (
    global_load_balancing_loss,
    importance_loss,
    load_balancing_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from .memory import saved_bytes
from .noise import RouterNoise
from .observation import RoutingObserver, RoutingStatistics
from .recomputation import save_communication, save_routing
from .router import TopKRouter
from .routing_record import RoutingRecord
from .shared_expert import SharedExpert
from .whole_models import observe, set_aux_loss_scale

__all__ = [
    "Assignment",
    "BalanceLosses",
    "CapacityFactor",
    "CustomAssignment",
    "ExpertChoice",
    "ExpertParallel",
    "ForcedBalance",
    "GroupedExperts",
    "LayerRouting",
    "LoadReport",
    "LocalDispatcher",
    "MoEFeedForward",
    "RouterNoise",
    "RoutingObserver",
    "RoutingRecord",
    "RoutingStatistics",
    "SharedExpert",
    "Slots",
    "TokenExpertPairs",
    "TokenRounding",
    "TopKRouter",
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
    "saved_bytes",
    "sequence_load_balancing_loss",
    "set_aux_loss_scale",
    "slots_of_pairs",
    "update_selection_bias",
]
