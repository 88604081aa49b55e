"""Autocast rules for the parts of the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from moe_kernels.runtime.pytorch import any_autocast_is_enabled
from moe_kernels.types import Weight

Result = TypeVar("Result")


def call_with_autocast_rules(
    function: Callable[..., Result], tokens: Tensor, weight: Weight, *others: Weight | None
) -> Result:
    """Call `function` as autocast calls a matrix product: with operands in autocast's dtype, and autocast disabled.

    As in autocast, float64 stays float64. Quantised weights are not converted, because the experts' op computes in
    the dtype of the tokens. Outside autocast the operands are unchanged, and mixed dtypes raise PyTorch's usual error.
    """
    # Check first whether any device has autocast enabled, because reading a device's type takes longer.
    if not any_autocast_is_enabled() or not autocast_is_enabled(device_type := weight.device.type):
        return function(tokens, weight, *others)
    with torch.autocast(device_type, enabled=False):
        operands = (tokens, weight, *others)
        return function(*(autocast(op, device_type) if isinstance(op, Tensor) else op for op in operands))


def autocast_is_enabled(device_type: str) -> bool:
    """Return whether autocast is enabled for the device type; False for meta, where `is_autocast_enabled` raises."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast(operand: Tensor, device_type: str) -> Tensor:
    """Convert the operand to autocast's dtype for the device type. float64 stays float64, as under autocast."""
    if operand.dtype == torch.float64:
        return operand
    return operand.to(torch.get_autocast_dtype(device_type))
