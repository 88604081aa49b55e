"""verl: makes the experts "moe_layers" known to its FSDP engine.

actor_rollout_ref:
  model:
    external_lib: moe_layers.integrations.verl
    override_config:
      _experts_implementation: moe_layers

transformers then loads the model with these experts. It refuses models whose experts have no interface.
"""

from __future__ import annotations

from .transformers.experts.experts_forward import NAME
from .versions import ENABLE, check_version

__all__ = ["NAME"]

check_version("verl", "0.9", ENABLE)
