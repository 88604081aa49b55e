"""Reads the settings of an MoE block from the configuration of a published model."""

from .fields import NESTED, ModelConfig, read_config
from .table import ARCHITECTURES, OWN_MODEL_TYPE, RECORD, REFUSED, find_architecture

__all__ = [
    "ARCHITECTURES",
    "NESTED",
    "OWN_MODEL_TYPE",
    "RECORD",
    "REFUSED",
    "ModelConfig",
    "find_architecture",
    "read_config",
]
