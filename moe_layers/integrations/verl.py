"""Registers the experts implementation "moe_layers" for verl's FSDP engine, with this configuration of verl:

actor_rollout_ref:
  model:
    external_lib: moe_layers.integrations.verl
    override_config:
      _experts_implementation: moe_layers

transformers then loads the model with this package's experts. transformers refuses models without an experts interface.
"""

from __future__ import annotations

from .transformers.experts.experts_forward import NAME
from .versions import ENABLE, check_version

__all__ = ["NAME"]

check_version("verl", "0.9", ENABLE)
