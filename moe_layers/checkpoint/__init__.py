"""Layer parameters in safetensors files, of this package or of published models."""

from .load import load_layer
from .module_file import load_safetensors, save_safetensors
from .report import LoadedTensor, LoadReport
from .save import save_layer
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
