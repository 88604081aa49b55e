"""Checks that tokens fit the parameters of a layer. Its errors name the layer's own argument."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..autocast import autocast_is_enabled
from .grouped import GroupedExperts
from .whole_op import is_called_as_written


def check_tokens(
    layer: Any,  # a MoEFeedForward
    x: Tensor,  # [..., D]
) -> None:
    """Raise ValueError, with the cure, if x has another dtype or device than the parameters of the experts.

    Modules with hooks are not checked, because hooks may convert parameters or tokens, as those of FSDP do. The ops
    then check their operands.
    """
    experts = layer._modules["experts"]
    weight = experts._parameters.get("w_up")
    weight = experts.w_up if weight is None else weight
    if x.dtype == weight.dtype and x.device == weight.device:
        return
    if type(experts) is not GroupedExperts or not is_called_as_written(experts):
        return
    device_type = weight.device.type
    if x.device != weight.device:
        raise ValueError(
            f"MoEFeedForward: x must be on {weight.device} as the parameters, got {x.device}; "
            f"pass x.to({str(weight.device)!r})"
        )
    if not autocast_is_enabled(device_type):
        raise ValueError(
            f"MoEFeedForward: x must have the parameters' dtype {weight.dtype}, got {x.dtype}; "
            f"pass x.to({weight.dtype}), or call the layer under torch.autocast({device_type!r})"
        )
