"""Registers the plugin "moe_layers" for LLaMA-Factory's v1 trainers (USE_V1=1). This configuration selects the plugin:

kernel_config:
  name: moe_layers

The process that trains must import this module before LLaMA-Factory starts.
"""

from __future__ import annotations

import logging
from typing import Any

from llamafactory.v1.plugins.model_plugins.kernels.interface import (  # pyright: ignore[reportMissingImports]  # optional
    KernelPlugin,
)

from .frameworks import enable_whole
from .versions import ENABLE, check_version

__all__ = ["enable_experts"]

check_version("llamafactory", "0.9.5", ENABLE)
_LOG = logging.getLogger(__name__)


@KernelPlugin("moe_layers").register()
def enable_experts(model: Any, include_kernels: Any = None) -> Any:
    """Make this package compute the experts of the model, and return the model.

    Args:
        include_kernels: must be None or False. LLaMA-Factory passes this argument to every kernel plugin.

    Raises:
        ValueError: `include_kernels` is set, experts are unsupported, or a LLaMA-Factory kernel replaced their forward.
    """
    if include_kernels not in (None, False):
        raise ValueError(f"moe_layers: kernel_config must have no include_kernels, got {include_kernels!r}")
    _LOG.info("%s", enable_whole("moe_layers", model))
    return model
