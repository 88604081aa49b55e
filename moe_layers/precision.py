"""How the parts of the layer behave under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def call_with_autocast_rules(function: Callable[..., Result], tokens: Tensor, *weights: Tensor) -> Result:
    """Call `function` as autocast calls a matrix product: operands in autocast's dtype, autocast off inside.

    As there, float64 stays. Outside autocast the operands go in as they are, and mixed dtypes are the error that they
    are in PyTorch.
    """
    device_type = weights[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return function(tokens, *weights)
    with torch.autocast(device_type, enabled=False):
        return function(*(autocast(operand, device_type) for operand in (tokens, *weights)))


def autocast(operand: Tensor, device_type: str) -> Tensor:
    """In the dtype that autocast gives an operand of a matrix product."""
    return operand if operand.dtype == torch.float64 else operand.to(torch.get_autocast_dtype(device_type))
