"""Parameters of a layer in safetensors files."""

from .module_file import load_safetensors, save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
