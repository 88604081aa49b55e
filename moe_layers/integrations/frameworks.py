"""What the modules of training frameworks share: versions, and models whose experts are all computed here."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from torch import nn

from ..checks import first_three
from .transformers import EnableReport, disable, enable
from .transformers.experts_forward import ATTRIBUTE
from .transformers.replaced_forwards import has_other_forward


def check_version(package: str, *tested: str) -> None:
    """Raise ImportError unless the installed version begins with a tested one, such as "0.19"."""
    got = version(package)
    if not any(got == known or got.startswith(f"{known}.") for known in tested):
        raise ImportError(
            f"moe_layers: {package} must be {' or '.join(tested)}, which its tests know, got {got}; with another one "
            "call moe_layers.integrations.transformers.enable(model) after the model is loaded"
        )


def enable_whole(owner: str, model: nn.Module) -> EnableReport:
    """Enable a model whose experts no other kernel computes.

    Raises:
        ValueError: a forward of the experts, or of a block around them, was replaced. The model is then not enabled.
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
    while hasattr(forward, "__wrapped__"):  # hooks of accelerate
        forward = forward.__wrapped__
    return getattr(forward, "__func__", None) is not type(module).forward and has_other_forward(module)
