"""Weight gradients that are added to `main_grad`, an attribute of Megatron's parameters, instead of to `grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.checks import overlaps_itself
from ..runtime.pytorch import will_run


def is_accumulated(name: str, node: Any) -> bool:
    """Return whether the current backward pass executes the node that accumulates a weight's gradient.

    Raises:
        ValueError: `torch.autograd.grad` runs the backward and returns this gradient instead of accumulating it.
    """
    try:
        return will_run(node)
    except RuntimeError as error:
        raise ValueError(
            f"fused_experts: with adds_to_main_grad torch.autograd.grad must not ask for {name}, whose gradient goes "
            "to main_grad; call backward"
        ) from error


def main_grad_of(name: str, weight: Any) -> Tensor:
    """Return the float32 tensor that a weight's gradient is added to.

    Raises:
        ValueError: `main_grad` is missing, has another dtype, shape or device than required, or its elements share
            memory.
    """
    given = getattr(weight, "main_grad", None)
    is_tensor = isinstance(given, Tensor)
    if not is_tensor or (given.dtype, given.shape, given.device) != (torch.float32, weight.shape, weight.device):
        got = f"{given.dtype} {list(given.shape)} on {given.device}" if is_tensor else given
        raise ValueError(
            f"fused_experts: main_grad of {name} must be float32 {list(weight.shape)} on {weight.device}, got {got}; "
            "set it before backward, or turn adds_to_main_grad off"
        )
    if overlaps_itself(given):
        raise ValueError(f"fused_experts: main_grad of {name} must not overlap itself, got strides {given.stride()}")
    return given


def mark_added(weight: Any) -> Tensor | None:
    """Mark a weight's gradient as added to `main_grad`, and return the gradient that autograd gets instead.

    Parameters of Megatron's DistributedDataParallel have the attribute `grad_added_to_main_grad`. For such a weight,
    set the attribute to True and return a tensor, which Megatron's hooks need: zeros if the weight sets
    `zero_out_wgrad`, else an uninitialised tensor. For any other weight, return None.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    empty = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return empty(weight, requires_grad=False)
