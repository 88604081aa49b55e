"""Reads, removes and writes the quantisation in a checkpoint's `config.json`."""

from __future__ import annotations

import torch

from moe_kernels.types import WeightFormat

from ...architectures import NESTED, ModelConfig

_FLOAT8_BLOCK = [128, 128]


def float8_block(values: dict, config: ModelConfig) -> tuple[int, int]:
    """Return (rows, columns) of the blocks of float8 weights, by default (128, 128). Each block has one scale. Raise
    ValueError if the quantisation is neither float8 by blocks nor MXFP4, or if the block size is malformed."""
    quantization = values.get("quantization_config") or config.values.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise ValueError(f"checkpoint: quantization_config in config.json must hold an object, got {quantization!r}")
    method = quantization.get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise ValueError(f"checkpoint: quant_method must be 'fp8' or 'mxfp4', got {method!r}")
    block = quantization.get("weight_block_size") or _FLOAT8_BLOCK
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ValueError(f"checkpoint: weight_block_size must be two positive integers, got {block!r}")
    return block[0], block[1]


def without_quantization(values: dict) -> dict:
    """Return the configuration without its quantisation, also in the nested parts of a composite model."""
    return _without(values, ("quantization_config", "expert_dtype"))  # DeepSeek-V4 sets expert_dtype


def with_quantization(values: dict, format: WeightFormat, dtype: torch.dtype) -> dict:
    """Return the configuration of a model with experts in `format` and all other parameters in `dtype`."""
    kept = _without(without_quantization(values), ("dtype", "torch_dtype"))
    quantization: dict = {"quant_method": format.name}
    if format.name == "fp8":
        quantization["weight_block_size"] = list(format.block)
    return {**kept, "quantization_config": quantization, "dtype": str(dtype).removeprefix("torch.")}


def _without(values: dict, names: tuple[str, ...]) -> dict:
    return {
        name: _without(value, names) if name in NESTED and isinstance(value, dict) else value
        for name, value in values.items()
        if name not in names
    }
