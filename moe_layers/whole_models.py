"""What is asked of every layer of a model."""

from __future__ import annotations

from torch import Tensor, nn

from .balance.routing_statistics import RoutingObserver
from .feed_forward import MoEFeedForward


def set_aux_loss_scale(model: nn.Module, scale: Tensor | None) -> None:
    """`MoEFeedForward.set_aux_loss_scale` on every such layer of a model."""
    for module in model.modules():
        if isinstance(module, MoEFeedForward):
            module.set_aux_loss_scale(scale)


def observe(model: nn.Module) -> dict[str, RoutingObserver]:
    """Let every layer of a model collect statistics of its routing from now on, and return what they collect in.

    The names are those of the layers in the model. Setting a layer's `observer` to None ends it.

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
