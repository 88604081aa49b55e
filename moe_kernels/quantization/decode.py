"""Exact dequantisation in plain PyTorch, to read checkpoints and to specify the bits of the kernels' results.

In every format, a value is `code * scale`, multiplied in float32 and rounded once to the wanted dtype.

    fp8     Codes are e4m3 numbers. DeepSeek-V3's checkpoints name the scale `weight_scale_inv`.
    mxfp4   Codes are e2m1 numbers, two per byte, low bits first. Scales are powers of two (e8m0, with bias 127).
            https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
    nf4     Codes are from a table of 16, two per byte, high bits first. A nested scale is c * s + offset: c is a code
            from a table of 256, and a block of scales shares s (https://arxiv.org/abs/2305.14314).
    int8    A value is code * largest * (1 / 127), in this order. `largest` is the row's largest absolute value.

The scale byte 255 is the NaN of e8m0, and decodes to NaN only if the dtype of scales is e8m0. In scales of dtype uint8,
the byte 255 is infinity for fp8 and 2 ** 128 for mxfp4, as in transformers. For fp8, transformers' loader
(`Fp8Dequantize`) gives the same bits as this module. In the backward pass, transformers' fp8 GEMMs dequantise to
bfloat16 with other bits, because they round the scales first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ..types import QuantizedWeight

_TWICE_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
_SUBNORMAL = 1 << 22  # the bits of the subnormal float32 number 2 ** -127
ONE_127TH = 0.00787401574803149  # 1 / 127 with the digits that bitsandbytes writes


def decode_scales(scales: Tensor, *, halved: bool = False) -> Tensor:  # float32
    """Return scales of any dtype as float32. Scales of dtype uint8 are e8m0 exponents.

    Args:
        halved: return half of each e8m0 number. Default: False. The uint8 byte 255 gives 2 ** 127 if halved, else
            infinity.
    """
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales.float()
    # Assemble float32 from bits, because some devices cannot convert e8m0.
    stored = scales.view(torch.uint8)
    exponent = stored.int() - int(halved)
    # 2 ** -127 and 2 ** -128 are subnormal, so a mantissa bit represents each of the two powers.
    powers = torch.where(exponent < 1, _SUBNORMAL >> -exponent.clamp(max=0), exponent << 23).view(torch.float32)
    return powers if scales.dtype == torch.uint8 else powers.where(stored != 255, math.nan)


def multiply_blocks(
    codes: Tensor,  # [..., out, in] float32, overwritten
    scales: Tensor,  # [..., ceil(out / block[0]), ceil(in / block[1])] float32
    block: tuple[int, int],
) -> Tensor:  # [..., out, in] float32
    """Multiply every block by its scale."""
    size_out, size_in = codes.shape[-2:]
    rows = scales.repeat_interleave(block[0], dim=-2)[..., :size_out, :]
    return codes.mul_(rows.repeat_interleave(block[1], dim=-1)[..., :size_in])


def decode_mxfp4(
    blocks: Tensor,  # [..., in / 32, 16] uint8
    scales: Tensor,  # [..., in / 32] uint8 or float8_e8m0fnu
) -> Tensor:  # [..., in] float32
    """Return each number times its group's power of two. Compute (2 * number) * (power / 2), because the largest
    power, 2 ** 128, does not fit float32."""
    codes, byte = torch.tensor(_TWICE_E2M1, device=blocks.device), torch.arange(256, device=blocks.device)
    table = torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1)  # [256, 2]
    numbers = functional.embedding(blocks.int(), table).flatten(-2)  # indexing would convert to int64
    return numbers.mul_(decode_scales(scales, halved=True).unsqueeze(-1)).flatten(-2)


def decode_weight(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:  # [E, out, in]
    """Return the dequantised weight, rounded once."""
    return _DECODERS[weight.format.name](weight).to(dtype)


def _fp8(weight: QuantizedWeight) -> Tensor:
    return multiply_blocks(weight.values.float(), decode_scales(weight.scales), weight.format.block)


def _mxfp4(weight: QuantizedWeight) -> Tensor:
    return decode_mxfp4(weight.values.view(*weight.scales.shape, 16), weight.scales)


def _int8(weight: QuantizedWeight) -> Tensor:
    # PyTorch rounds the Python number `ONE_127TH` to float32 before the multiplication.
    return weight.values.float() * weight.scales.view(*weight.shape[:2], 1) * ONE_127TH


def _nf4(weight: QuantizedWeight) -> Tensor:
    assert weight.codes is not None
    scales, size = weight.scales.flatten(), math.prod(weight.shape)
    if weight.nested_scales is not None:
        assert weight.nested_codes is not None and weight.nested_offset is not None
        scales = _times_block(weight.nested_codes[scales.int()], weight.nested_scales, weight.format.nested_block or 1)
        scales += weight.nested_offset
    packed = weight.values.flatten().view(torch.uint8)
    nibbles = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[:size]
    return _times_block(weight.codes[nibbles.int()], scales, weight.format.block[1]).view(weight.shape)


def _times_block(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    return codes.mul_(scales.flatten().repeat_interleave(block)[: len(codes)])


_DECODERS = {"fp8": _fp8, "mxfp4": _mxfp4, "nf4": _nf4, "int8": _int8}
