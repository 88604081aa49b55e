"""Functions that apply to every MoE layer of a model."""

from __future__ import annotations

from torch import Tensor, nn

from .balance.routing_statistics import RoutingObserver
from .checks import check_kind
from .feed_forward import MoEFeedForward
from .routing.model_routers import AttachedRouter, attached_routers, check_found
from .routing.router import TopKRouter


def set_aux_loss_scale(model: nn.Module, scale: Tensor | None) -> None:
    """Multiply the gradients of every layer's auxiliary losses by `scale`. None means 1, the initial scale.

    With loss scaling, pass the loss scale. With gradient accumulation, pass 1 / (number of accumulated calls). The
    layers keep the tensor without a copy, so a change in place takes effect from the next forward on.

    Args:
        model: a `MoEFeedForward`, or a model with `MoEFeedForward` layers or with MoE blocks of transformers.
        scale: a scalar on the layers' device.

    Raises:
        ValueError: the model has no MoE layer, or `scale` is not a scalar tensor on the device of the parameters.
    """
    layers = _layers(model).values()
    check_found("set_aux_loss_scale", layers)
    if scale is not None:
        check_kind("set_aux_loss_scale", "scale", scale, Tensor)
        for layer in layers:
            device = _router_of(layer).weight.device
            if scale.numel() != 1 or scale.device != device:
                raise ValueError(
                    f"set_aux_loss_scale: scale must be a scalar tensor on {device}, "
                    f"got {list(scale.shape)} on {scale.device}"
                )
        scale = scale.view(())
    for layer in layers:
        layer.aux_loss_scale = scale


def aux_losses(model: nn.Module) -> dict[str, Tensor]:
    """Return each layer's auxiliary loss by layer name, for printing or logging.

    The loss is that of the layer's last call with gradients enabled. Each value is a scalar on the device: the sum of
    the layer's losses, weighted by `balance_losses`, without the factor of `set_aux_loss_scale`. The values carry no
    gradient, because backward already adds the gradient. Layers without an auxiliary loss are left out, so the result
    is empty if only a selection bias balances the model. To differentiate a loss by hand, build the layer without
    `balance_losses`, and apply a loss function to the routing that the forward returns with `return_routing=True`.

    Raises:
        ValueError: no layer has had a forward with an auxiliary loss. If only a selection bias balances the model, this
            function does not raise.
    """
    layers = _layers(model)
    losses = {name: layer.aux_loss for name, layer in layers.items() if layer.aux_loss is not None}
    has_bias = any(_router_of(layer).selection_bias is not None for layer in layers.values())
    if not losses and (not has_bias or any(layer.balance_losses.any for layer in layers.values())):
        raise ValueError(
            f"aux_losses: a layer must have balance_losses and a forward with gradients, got {len(layers)} layers "
            "without; `observe` collects statistics of any layer"
        )
    return losses


def observe(model: nn.Module) -> dict[str, RoutingObserver]:
    """Collect routing statistics in every layer of a model from now on. Return the observers by layer name.

    The model holds `MoEFeedForward` layers, or MoE blocks of transformers. To stop, set a layer's `observer` to None.
    In a transformers model, set `observer.router.observer` to None instead. Blocks of transformers read padding from
    their model's attention mask, so pass the whole model. In these blocks, a margin (see `RoutingStatistics`) is a
    difference of the scores from which the router chooses the top-k.

    Raises:
        ValueError: the model has no MoE layer, or a layer has an unsupported router.
    """
    observers = {}
    for name, layer in _layers(model).items():
        router = _router_of(layer)
        layer.observer = observers[name] = RoutingObserver(router, router.num_experts - layer.num_zero_experts)
    check_found("observe", observers)
    return observers


def _layers(model: nn.Module) -> dict[str, MoEFeedForward | AttachedRouter]:
    own = {name: module for name, module in model.named_modules() if isinstance(module, MoEFeedForward)}
    return own | attached_routers(model)


def _router_of(layer: MoEFeedForward | AttachedRouter) -> TopKRouter | AttachedRouter:
    return layer.router if isinstance(layer, MoEFeedForward) else layer
