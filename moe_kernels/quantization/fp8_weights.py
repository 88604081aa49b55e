"""Quantise weights to e4m3 with a scale per 128 x 128 block, in both orientations, and quantise changed blocks again.

A block's scale and numbers are the same in both orientations, because blocks are square. The bits are those of
`reference_fp8` on every device.

`launch_requantize` finds changes on the device, without host synchronisation. It reads the whole weight, compares a
64-bit checksum of each block, and quantises the blocks that differ. A change of one element always changes the
checksum. A change of several elements is missed with a probability of about 2**-32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference_fp8 import BLOCK
from ..runtime.launch import launch_kernel
from ..runtime.triton import cdiv, tl, triton
from ..types import QuantizedWeight, ScaledForms
from .formats import FP8
from .fp8_device import block_scales, encode_e4m3, largest_size
from .kernels import INTERPRET

Forms = tuple[QuantizedWeight | None, QuantizedWeight | None]  # a weight and its transpose; None: not requested


def launch_quantize_weight(
    weight: Tensor,  # [E, out, in], any strides
    *,
    as_is: bool = True,
    transposed: bool = True,
    checksums: Tensor | None = None,  # [blocks] int64
) -> Forms:  # [E, out, in] and [E, in, out]
    """Return the quantised weight and its transpose. Reads the weight once.

    Args:
        checksums: memory that the same launch fills with the blocks' checksums.
    """
    _, size_out, size_in = weight.shape
    forms = (
        _empty_weight(weight, size_out, size_in) if as_is else None,
        _empty_weight(weight, size_in, size_out) if transposed else None,
    )
    _launch(weight, forms, checksums, is_first=True)
    return forms


def empty_checksums(weight: Tensor) -> Tensor:  # [blocks] int64
    """Return memory for the checksums of a weight."""
    return weight.new_empty(_num_blocks(weight), dtype=torch.int64)


def launch_requantize(weight: Tensor, forms: Forms, checksums: Tensor) -> None:
    """Quantise again, in place, the blocks of the weight whose checksums have changed. Write their checksums."""
    _launch(weight, forms, checksums, is_first=False)


def scaled_forms(*of_weights: Forms) -> ScaledForms:
    """Collect the results of `launch_quantize_weight` for w_up and for w_down."""
    fields: dict[str, Tensor] = {}
    for name, (here, turned) in zip(("up", "down"), of_weights, strict=True):
        for suffix, form in (("", here), ("_turned", turned)):
            if form is not None:
                fields |= {f"{name}{suffix}": form.values, f"{name}{suffix}_scales": form.scales}
    return ScaledForms(**fields)


def _num_blocks(weight: Tensor) -> int:
    num_experts, size_out, size_in = weight.shape
    return num_experts * cdiv(size_out, BLOCK) * cdiv(size_in, BLOCK)


def _empty_weight(weight: Tensor, size_out: int, size_in: int) -> QuantizedWeight:
    shape = torch.Size((weight.shape[0], size_out, size_in))
    scales = weight.new_empty(shape[0], cdiv(size_out, BLOCK), cdiv(size_in, BLOCK), dtype=torch.float32)
    return QuantizedWeight(weight.new_empty(shape, dtype=torch.float8_e4m3fn), scales, FP8, shape)


def _launch(weight: Tensor, forms: Forms, checksums: Tensor | None, *, is_first: bool) -> None:
    if weight.numel():
        pointers: list[Any] = []
        for form in forms:
            pointers += (None, None) if form is None else (form.values.view(torch.uint8), form.scales)
        launch_kernel(
            _quantize_weight_kernel,
            (_num_blocks(weight),),
            weight,
            weight.stride(),
            *pointers,
            checksums,
            OUT=weight.shape[1],
            IN=weight.shape[2],
            IS_FIRST=is_first,
            num_warps=8,
            num_stages=1,
        )


@triton.jit
def _odd_numbers(first: tl.constexpr):
    """Return 128 pseudo-random odd numbers, as uint32."""
    mixed = (tl.arange(first, first + 128) + 1).to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    return (mixed ^ (mixed >> 13)) | 1


@triton.jit
def _checksum(weight):  # [128, 128]
    """Return the sum over all elements of their bits times an odd number per position, modulo 2**64."""
    bits = weight.to(tl.uint16 if weight.dtype.primitive_bitwidth == 16 else tl.uint32, bitcast=True)
    factors = _odd_numbers(0)[:, None] * _odd_numbers(128)[None, :]
    return tl.sum(bits.to(tl.uint64) * factors.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def _widened(values):
    """Return values as float32.

    Triton 3.6 would move the later transposition of the quantised values before an ordinary conversion. It would then
    quantise both orders, in twice as many registers.
    """
    if INTERPRET or values.dtype != tl.bfloat16:
        return values.to(tl.float32)
    else:
        bits = values.to(tl.int16, bitcast=True)
        code: tl.constexpr = "{ .reg .b16 zero; mov.u16 zero, 0; mov.b32 $0, {zero, $1}; }"
        return tl.inline_asm_elementwise(code, "=f,h", [bits], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _quantize_weight_kernel(
    weight_ptr,
    weight_strides,  # [E, OUT, IN]
    values_ptr,  # [E, OUT, IN] contiguous, or None
    scales_ptr,  # [E, cdiv(OUT, 128), cdiv(IN, 128)] contiguous, or None
    turned_values_ptr,  # [E, IN, OUT] contiguous, or None
    turned_scales_ptr,  # [E, cdiv(IN, 128), cdiv(OUT, 128)] contiguous, or None
    checksums_ptr,  # [num_blocks], or None
    OUT: tl.constexpr,
    IN: tl.constexpr,
    IS_FIRST: tl.constexpr,  # whether to quantise all blocks; else only those with another checksum
):
    """One program quantises one block, and writes both results and the checksum. Grid: (num_blocks,)."""
    NUM_OUT: tl.constexpr = (OUT + 127) // 128
    NUM_IN: tl.constexpr = (IN + 127) // 128
    block = tl.program_id(0)
    block_in, block_out = block % NUM_IN, block // NUM_IN % NUM_OUT
    expert = (block // (NUM_IN * NUM_OUT)).to(tl.int64)
    o, i = tl.arange(0, 128), tl.arange(0, 128)  # offsets inside the block fit int32
    first_out, first_in = (block_out * 128).to(tl.int64), (block_in * 128).to(tl.int64)
    is_out, is_in = first_out + o < OUT, first_in + i < IN
    weight_ptr += expert * weight_strides[0] + first_out * weight_strides[1] + first_in * weight_strides[2]
    weight_ptrs = weight_ptr + (o[:, None] * weight_strides[1] + i[None, :] * weight_strides[2])
    weight = tl.load(weight_ptrs, mask=is_out[:, None] & is_in[None, :], other=0.0)
    differs = True
    if checksums_ptr is not None:
        checksum = _checksum(weight)
        if not IS_FIRST:
            differs = tl.load(checksums_ptr + block) != checksum
    if differs:
        wide = _widened(weight)
        scale, inverse = block_scales(largest_size(wide, None))
        values = encode_e4m3(wide * inverse)
        if values_ptr is not None:
            values_ptr += expert * (OUT * IN) + first_out * IN + first_in
            tl.store(values_ptr + (o[:, None] * IN + i[None, :]), values, mask=is_out[:, None] & is_in[None, :])
            tl.store(scales_ptr + block, scale)
        if turned_values_ptr is not None:
            # Triton transposes through shared memory, where bytes take the least space.
            turned_values_ptr += expert * (OUT * IN) + first_in * OUT + first_out
            turned_ptrs = turned_values_ptr + (i[:, None] * OUT + o[None, :])
            tl.store(turned_ptrs, tl.trans(values), mask=is_in[:, None] & is_out[None, :])
            tl.store(turned_scales_ptr + (expert * NUM_IN + block_in) * NUM_OUT + block_out, scale)
        if checksums_ptr is not None:
            # The checksum is written last: each warp reads the old one before the barrier in `largest_size`.
            tl.store(checksums_ptr + block, checksum)
