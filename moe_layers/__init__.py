"""Mixture-of-Experts layers: `nn.Module`s composed of the functions of `moe_kernels`."""

from .checkpoint import LoadReport
from .dispatcher import LocalDispatcher
from .experts import GroupedExperts
from .feed_forward import LayerRouting, MoEFeedForward, set_aux_loss_scale
from .losses import load_balancing_loss, router_z_loss
from .memory import saved_bytes
from .router import TopKRouter
from .shared_expert import SharedExpert

__all__ = [
    "GroupedExperts",
    "LayerRouting",
    "LoadReport",
    "LocalDispatcher",
    "MoEFeedForward",
    "SharedExpert",
    "TopKRouter",
    "load_balancing_loss",
    "router_z_loss",
    "saved_bytes",
    "set_aux_loss_scale",
]
