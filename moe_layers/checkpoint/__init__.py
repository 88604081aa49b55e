"""Reads and writes layers in safetensors files of this package or of published models."""

from .layer.load import load_layer, load_safetensors
from .layer.plan import CheckpointSource
from .layer.report import LoadedTensor, LoadReport
from .layer.save import save_layer, save_safetensors
from .model.repair import RepairReport, repair

__all__ = [
    "CheckpointSource",
    "LoadReport",
    "LoadedTensor",
    "RepairReport",
    "load_layer",
    "load_safetensors",
    "repair",
    "save_layer",
    "save_safetensors",
]
