"""Quantisation in plain PyTorch: each value, divided by its block's scale, is rounded to the nearest code."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from .. import reference_fp8
from ..types import QuantizedWeight, WeightFormat
from .formats import as_format

__all__ = ["quantize"]

# NF4's codes, quantiles of a normal distribution: https://arxiv.org/abs/2305.14314, appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_E2M1_LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbouring absolute values of e2m1


def quantize(
    weight: Tensor,  # [E, out, in]
    format: str | WeightFormat,
) -> QuantizedWeight:
    """Quantise a weight. The scale of a block follows from its largest absolute value.

    Computes in float32, in plain PyTorch. Results equal those of transformers for fp8 and of bitsandbytes for nf4 and
    int8, except for values halfway between two codes. An infinity or NaN decodes to a number that is not finite. An
    infinity or NaN may also make its whole block non-finite, and with nf4_nested the whole weight. Not differentiable.

    Shapes: weight [E, out, in].

    Args:
        format: "fp8", "mxfp4", "nf4", "nf4_nested", "int8", or a `WeightFormat` with other block sizes.

    Raises:
        NotImplementedError: a format of another project that is not supported, such as AWQ, GPTQ or NVFP4.
        ValueError: the weight is not a floating-point tensor [E, out, in], the name or block size of the format is not
            allowed, or `in` is not a multiple of 32 for mxfp4.
    """
    format = as_format("quantize", format)
    if weight.dim() != 3 or not weight.is_floating_point():
        raise ValueError(
            f"quantize: weight must be [E, out, in] of floating point, got {list(weight.shape)} of {weight.dtype}"
        )
    if format.name == "mxfp4" and weight.shape[2] % format.block[1]:
        raise ValueError(f"quantize: mxfp4 needs rows of whole blocks of 32, got {list(weight.shape)}")
    with torch.no_grad():
        return _QUANTIZERS[format.name](weight.detach().float(), format)


def _fp8(weight: Tensor, format: WeightFormat) -> QuantizedWeight:
    values, scales = reference_fp8.quantize_blocks(weight, *format.block)
    return QuantizedWeight(values, scales.contiguous(), format, weight.shape)


def _mxfp4(weight: Tensor, format: WeightFormat) -> QuantizedWeight:
    """Quantise blocks. A block's scale is p / 4, where p is the largest power of two up to the block's largest absolute
    value. The divisor 4 is the largest power of two that e2m1 represents.

    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, 6.3.
    """
    blocks = weight.unflatten(2, (-1, format.block[1]))
    largest = blocks.abs().amax(3)
    exponent = largest.frexp().exponent - 1 - 2  # - 1: frexp's mantissa lies in [0.5, 1); - 2: divide by 4
    # All values of a block with an infinity or NaN decode to infinities: the largest code times 2 ** 128.
    stored = (exponent + 127).clamp(0, 254).masked_fill(~largest.isfinite(), 255)
    sizes = torch.ldexp(blocks.abs(), 127 - stored.unsqueeze(3)).masked_fill(stored.unsqueeze(3) == 255, torch.inf)
    # Ties go to the even code, so an even code includes both of its limits.
    limits = torch.tensor(_E2M1_LIMITS, device=weight.device)
    below = torch.bucketize(sizes, limits)  # a value equal to a limit gets the code below
    above = torch.bucketize(sizes, limits, right=True)
    nibbles = torch.where(below % 2 == 0, below, above).to(torch.uint8) | (blocks.signbit().to(torch.uint8) << 3)
    values = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return QuantizedWeight(values, stored.to(torch.uint8), format, weight.shape)


def _nf4(weight: Tensor, format: WeightFormat) -> QuantizedWeight:
    codes = torch.tensor(_NF4, device=weight.device)
    nibbles, scales = _nearest(weight.flatten(), codes, format.block[1])
    nibbles = functional.pad(nibbles, (0, len(nibbles) % 2), value=7)  # pads with code 7, the number 0.0
    values = (nibbles[0::2] << 4) | nibbles[1::2]
    if format.nested_block is None:
        return QuantizedWeight(values, scales, format, weight.shape, codes)
    nested_codes, offset = _dynamic_codes().to(weight.device), scales.mean()
    stored, nested_scales = _nearest(scales - offset, nested_codes, format.nested_block)
    return QuantizedWeight(values, stored, format, weight.shape, codes, nested_codes, nested_scales, offset)


def _nearest(flat: Tensor, codes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Divide each block by its largest absolute value. Return the uint8 index of each value's nearest code,
    and the divisors."""
    size = len(flat)
    blocks = functional.pad(flat, (0, -size % block)).view(-1, block)
    largest = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(1)).clamp(-1.0, 1.0)
    limits = (codes[:-1] + codes[1:]) / 2
    return torch.bucketize(scaled.flatten()[:size], limits).to(torch.uint8), largest


@functools.cache
def _dynamic_codes() -> Tensor:  # [256]
    """Return the sorted values of the 8-bit codes with a variable number of exponent bits:
    https://arxiv.org/abs/1511.04561."""
    codes = [0.0, 1.0]
    for exponent in range(7):
        limits = torch.linspace(0.1, 1.0, 2**exponent + 1, dtype=torch.float32)
        sizes = 10 ** (exponent - 6) * ((limits[:-1] + limits[1:]) / 2.0)
        codes += sizes.tolist() + (-sizes).tolist()
    return torch.tensor(sorted(codes), dtype=torch.float32)


def _int8(weight: Tensor, format: WeightFormat) -> QuantizedWeight:
    largest = weight.abs().amax(2, keepdim=True)
    values = torch.round(weight * torch.where(largest > 0, 127.0 / largest, 0.0)).to(torch.int8)
    return QuantizedWeight(values, largest, format, weight.shape)


_QUANTIZERS = {"fp8": _fp8, "mxfp4": _mxfp4, "nf4": _nf4, "int8": _int8}
