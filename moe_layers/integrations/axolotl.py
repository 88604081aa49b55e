"""Provides an axolotl plugin that computes the model's experts with this package. This configuration loads the plugin:

plugins:
  - moe_layers.integrations.axolotl.MoELayersPlugin
"""

from __future__ import annotations

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]  # optional

from .frameworks import enable_whole
from .transformers.experts.experts_forward import NAME
from .versions import ENABLE, check_version

__all__ = ["MoELayersPlugin"]

check_version("axolotl", "0.19", ENABLE)
_LOG = logging.getLogger(__name__)
_KERNELS = ("use_scattermoe", "use_sonicmoe", "expert_backend")  # options of axolotl's own KernelsPlugin


class MoELayersPlugin(BasePlugin):
    """Calls `enable` for the model once axolotl has loaded the model and its adapters."""

    def pre_model_load(self, cfg: Any) -> None:
        """Check the configuration.

        Raises:
            ValueError: the configuration selects other kernels, another experts implementation or expert parallelism.
        """
        others = {name: cfg.get(name) for name in _KERNELS if cfg.get(name)}
        if cfg.get("experts_implementation") not in (None, NAME):
            others["experts_implementation"] = cfg.get("experts_implementation")
        if (cfg.get("expert_parallel_size") or 1) > 1:
            others["expert_parallel_size"] = cfg.get("expert_parallel_size")
        if others:
            raise ValueError(f"MoELayersPlugin: it must compute the experts alone, got {others}; remove these settings")

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Enable the model. Raise ValueError if experts are unsupported, or if other code replaced their forwards."""
        _LOG.info("%s", enable_whole("MoELayersPlugin", model))
