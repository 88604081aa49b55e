"""Layer parameters in safetensors files, of this package or of published models."""

from .load import load_layer, load_safetensors
from .report import LoadedTensor, LoadReport
from .save import save_layer, save_safetensors
from .source import CheckpointSource

__all__ = [
    "CheckpointSource",
    "LoadReport",
    "LoadedTensor",
    "load_layer",
    "load_safetensors",
    "save_layer",
    "save_safetensors",
]
