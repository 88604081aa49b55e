"""The specification of products of e4m3 operands that have a scale per block.

A block's scale is its largest size divided by 448, the largest number of e4m3. Rows that are multiplied have blocks of
1 x 128 along the reduction, weights blocks of 128 x 128, as in https://arxiv.org/abs/2412.19437, 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
LARGEST = 448.0  # of e4m3
SMALLEST = 1e-30  # smaller blocks are scaled as if they reached this size, so that the inverse of a scale is finite


def quantize_blocks(
    matrix: Tensor,  # [..., M, N]
    rows: int,
    columns: int,
) -> tuple[Tensor, Tensor]:  # values [..., M, N] e4m3, scales [..., ceil(M / rows), ceil(N / columns)] float32
    """Return the nearest e4m3 numbers to the values divided by their block's scale, computed in float32.

    The largest value of a block becomes 448 exactly. A block of zeros has the scale 1. A block that holds NaN or an
    infinity becomes NaN as a whole, or in parts with an infinite scale.
    """
    size_m, size_n = matrix.shape[-2:]
    padded = functional.pad(matrix.float(), (0, -size_n % columns, 0, -size_m % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(
        -3, (-1, rows)
    )  # [..., M / rows, rows, N / columns, columns]
    largest = blocks.abs().amax((-3, -1), keepdim=True)
    inverse = torch.where(largest == 0, 1.0, LARGEST / largest.clamp(min=SMALLEST))
    values = (blocks * inverse).flatten(-4, -3).flatten(-2)[..., :size_m, :size_n]
    return values.contiguous().to(torch.float8_e4m3fn), (1.0 / inverse).squeeze((-3, -1))


def dequantize_blocks(
    values: Tensor,  # [..., M, N] e4m3
    scales: Tensor,  # [..., ceil(M / rows), ceil(N / columns)] float32
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:  # [..., M, N]
    """Return value times scale, computed in `dtype`."""
    size_m, size_n = values.shape[-2:]
    spread = scales.to(dtype).repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return values.to(dtype) * spread[..., :size_m, :size_n]
