"""Attach the auxiliary loss of a forward to its output: backward through the output adds the loss's gradient."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from moe_kernels.runtime.pytorch import functorch_is_active

from ..autocast import autocast_is_enabled
from ..routing.result import LayerRouting
from .losses import attach_loss


def attach_aux_loss(
    layer: Any,  # a MoEFeedForward
    tokens: Tensor,  # [T, D]
    routing: LayerRouting,
    num_tokens: int | Tensor | None,
) -> tuple[Tensor, Tensor]:  # [T, D]; scalar
    """Return the tokens with the layer's auxiliary loss attached, and the loss. Store the loss for `aux_losses`."""
    warn_without_scale("MoEFeedForward", layer, tokens.device.type)
    counts = layer.router.accumulated_counts
    loss = layer.balance_losses.total(routing, num_tokens=num_tokens, accumulated_counts=counts)
    # Do not store the loss under a functorch transform outside `torch.compile`: a transform's tensors must not outlive
    # the transform. Do not store the loss in an exported program either: the program cannot change attributes.
    if not torch.compiler.is_exporting() and (torch.compiler.is_compiling() or not functorch_is_active()):
        layer.aux_loss = loss.detach()
    return attach_loss(tokens, loss, layer.aux_loss_scale), loss


def warn_without_scale(
    op: str,
    layer: Any,  # a MoEFeedForward or an AttachedRouter
    device_type: str,
) -> None:
    """Warn once under float16 autocast if no `aux_loss_scale` is set. A layer cannot read the main loss's scale."""
    if not layer.training or layer.aux_loss_scale is not None or torch.compiler.is_compiling():
        return
    if autocast_is_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.float16:
        _warn_once(op)


@functools.cache
def _warn_once(op: str) -> None:
    warnings.warn(
        f"{op}: auxiliary losses under float16 autocast without set_aux_loss_scale. A GradScaler scales the "
        "main loss alone: call set_aux_loss_scale(model, scaler.scale(torch.ones((), device=device))) before each "
        "forward, or once with torch.ones((), device=device) if the loss is not scaled",
        RuntimeWarning,
        stacklevel=2,
    )
