"""Exact dequantisation of weights to floating point, as their formats define it.

float8 with block scales (DeepSeek-V3): `value = float(q) * scale[i // 128, j // 128]` in float32. The tensor on disk is
called `weight_scale_inv`, but it is the multiplier.

MXFP4 (gpt-oss; https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf): one byte holds
two e2m1 numbers, the low nibble first; 32 numbers share one power of two, stored with a bias of 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

MXFP4_GROUP = 32
_SUBNORMAL = 1 << 22  # the bits of 2 ** -127
_E8M0_NAN = 255
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
    scale = _e8m0_to_float32(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()
    if not scale.isfinite().all():
        raise ValueError(f"checkpoint: the scales of {name} must be finite, got {_first_bad(scale)}")
    num_rows, num_columns = weight.shape[-2:]
    rows = scale.repeat_interleave(block[0], dim=-2)[..., :num_rows, :]
    return weight.float().mul_(rows.repeat_interleave(block[1], dim=-1)[..., :num_columns])


def dequantize_mxfp4(
    blocks: Tensor,  # [..., N, K / 32, 16] uint8
    scales: Tensor,  # [..., N, K / 32] uint8
    name: str,
) -> Tensor:  # [..., N, K] float32
    """Look up every number and multiply it by its group's power of two. Exact.

    Raises:
        ValueError: a scale is the NaN of e8m0 (255); the message contains `name`.
    """
    if (scales == _E8M0_NAN).any():
        raise ValueError(f"checkpoint: the scales of {name} must be finite, got the NaN of e8m0 (255)")
    table = torch.tensor(_E2M1, device=blocks.device)
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # [..., N, K / 32, 32]
    return (table[nibbles.int()] * _e8m0_to_float32(scales).unsqueeze(-1)).flatten(-2)


def _e8m0_to_float32(scales: Tensor) -> Tensor:
    """Return 2 ** (stored - 127), computed by bits, as some devices cannot convert e8m0. NaN (255) becomes infinity."""
    exponent = scales.view(torch.uint8).int() << 23
    return torch.where(exponent == 0, _SUBNORMAL, exponent).view(torch.float32)


def _first_bad(scale: Tensor) -> float:
    return scale[~scale.isfinite()][0].item()
