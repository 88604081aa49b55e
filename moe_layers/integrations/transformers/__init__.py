"""Run the experts of Hugging Face models: `from moe_layers.integrations.transformers import disable, enable`."""

import importlib
from typing import TYPE_CHECKING, Any

from .balancing import balance_routing
from .enabling import EnableReport, disable, enable

if TYPE_CHECKING:
    from .trainer_callback import RoutingCallback

__all__ = ["EnableReport", "RoutingCallback", "balance_routing", "disable", "enable"]


def __getattr__(name: str) -> Any:
    """Import the Trainer's part of transformers on first use."""
    if name != "RoutingCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".trainer_callback", __name__), name)
