"""Adds the option value `--experts_impl moe_layers` to ms-swift.

    echo "import moe_layers.integrations.ms_swift" > plugin.py
    swift sft --experts_impl moe_layers --external_plugins plugin.py ...

transformers then loads the model with this package's experts. transformers refuses models without an experts interface.
"""

from __future__ import annotations

from .transformers.experts.experts_forward import NAME
from .versions import ENABLE, check_version

__all__ = ["NAME"]

check_version("ms-swift", "4.6", ENABLE)
