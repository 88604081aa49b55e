"""Run the experts of Hugging Face models: `from moe_layers.integrations.transformers import disable, enable`."""

from .enabling import EnableReport, disable, enable

__all__ = ["EnableReport", "disable", "enable"]
