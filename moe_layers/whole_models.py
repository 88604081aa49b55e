"""Functions that apply to every MoE layer of a model."""

from __future__ import annotations

from torch import Tensor, nn

from .balance.routing_statistics import RoutingObserver
from .feed_forward import MoEFeedForward


def set_aux_loss_scale(model: nn.Module, scale: Tensor | None) -> None:
    """Call `MoEFeedForward.set_aux_loss_scale` on every such layer of a model."""
    for module in model.modules():
        if isinstance(module, MoEFeedForward):
            module.set_aux_loss_scale(scale)


def observe(model: nn.Module) -> dict[str, RoutingObserver]:
    """Collect routing statistics in every layer of a model from now on. Return the observers by layer name.

    Set a layer's `observer` to None to stop.

    Raises:
        ValueError: the model has no such layer.
    """
    observers = {}
    for name, module in model.named_modules():
        if isinstance(module, MoEFeedForward):
            module.observer = observers[name] = RoutingObserver(module.router, module.num_experts)
    if not observers:
        raise ValueError("observe: the model must have a MoEFeedForward, got none")
    return observers
