"""Calls `enable` on the models of training frameworks. Refuses a model if other code computes some experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checks import first_three
from .transformers import EnableReport, disable, enable
from .transformers.experts.experts_forward import ATTRIBUTE
from .transformers.experts.replaced_forwards import has_other_forward


def enable_whole(owner: str, model: nn.Module) -> EnableReport:
    """Call `enable` for a model, and return the report. `owner` starts the messages of errors.

    Raises:
        ValueError: other code replaced a forward of the experts, or of a block around the experts. The model is then
            not enabled.
    """
    report = enable(model)
    replaced = [
        name
        for name, module in model.named_modules()
        if any(ATTRIBUTE in vars(part) for part in (module, *module.children())) and _is_replaced(module)
    ]
    if replaced:
        disable(model)
        raise ValueError(
            f"{owner}: no other kernel may compute the experts, got replaced forwards of {first_three(replaced)}; "
            "switch the framework's own MoE kernels off"
        )
    return report


def _is_replaced(module: Any) -> bool:
    forward = vars(module).get("forward")
    while hasattr(forward, "__wrapped__"):  # unwrap, because accelerate's hooks wrap the forward
        forward = forward.__wrapped__
    return getattr(forward, "__func__", None) is not type(module).forward and has_other_forward(module)
