"""Exact dequantisation of a checkpoint's weights, whose scales must be finite.

`moe_kernels.quantization.decode` defines the arithmetic. float8 has a scale per block (DeepSeek-V3): the tensor on disk
is called `weight_scale_inv`, but it is the multiplier. MXFP4 (gpt-oss) has a power of two per 32 numbers. Packed float4
(DeepSeek-V4) holds the same numbers as int8, with one axis for the bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.quantization.decode import decode_mxfp4, decode_scales, multiply_blocks

MXFP4_GROUP = 32
_E8M0_NAN = 255


def dequantize_float8(
    weight: Tensor,  # [..., N, K] float8
    scale: Tensor,  # [..., ceil(N / block), ceil(K / block)] float32, float8_e8m0fnu, or uint8 as an e8m0 number
    block: tuple[int, int],
    name: str,
) -> Tensor:  # [..., N, K] float32
    """Multiply every block by its scale.

    Raises:
        ValueError: a scale is not finite; the message contains `name`.
    """
    scale = decode_scales(scale)
    if not scale.isfinite().all():
        raise ValueError(f"checkpoint: the scales of {name} must be finite, got {scale[~scale.isfinite()][0].item()}")
    return multiply_blocks(weight.float(), scale, block)


def dequantize_mxfp4(
    blocks: Tensor,  # [..., N, K / 32, 16] uint8
    scales: Tensor,  # [..., N, K / 32] uint8
    name: str,
) -> Tensor:  # [..., N, K] float32
    """Look up every number and multiply it by its group's power of two. The result is exact.

    Raises:
        ValueError: a scale is 255, the NaN of e8m0; the message contains `name`.
    """
    if (scales == _E8M0_NAN).any():
        raise ValueError(f"checkpoint: the scales of {name} must be finite, got the NaN of e8m0 (255)")
    return decode_mxfp4(blocks, scales)


def dequantize_float4(
    packed: Tensor,  # [..., N, K / 2] int8
    scales: Tensor,  # [..., N, K / 32] uint8 or float8_e8m0fnu
    name: str,
) -> Tensor:  # [..., N, K] float32
    """As `dequantize_mxfp4`."""
    blocks = packed.view(torch.uint8).unflatten(-1, (-1, MXFP4_GROUP // 2))
    return dequantize_mxfp4(blocks, scales.view(torch.uint8), name)
