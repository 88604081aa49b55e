"""The experts of a layer, their low-rank adapters, and the dispatcher that keeps tokens on their rank."""

from .lora.adapters import LoRA
from .quantization import dequantize_experts_, quantize_experts_

__all__ = ["LoRA", "dequantize_experts_", "quantize_experts_"]
