"""The experts of a layer, their low-rank adapters, and the dispatcher of one process."""

from .lora import LoRA

__all__ = ["LoRA"]
