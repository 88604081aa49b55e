"""Quantise weights and their transposes to e4m3 with a scale per 128 x 128 block, and quantise changed blocks again.

A block has equal numbers and an equal scale in the weight and in the transpose, because blocks are square. On every
device, results equal those of `reference_fp8` bit for bit.

`launch_requantize` finds changed blocks on the device, without host synchronisation. The kernel reads the whole weight,
compares a 64-bit checksum of each block with the stored checksum, and quantises the blocks that differ. A change of one
element always changes the checksum. A change of several elements is missed with a probability of about 2**-32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..reference_fp8 import BLOCK
from ..runtime.launch import launch_kernel, with_strides
from ..runtime.triton import cdiv, tl, triton
from .fp8_device import block_scales, encode_e4m3, largest_size
from .kernels import INTERPRET


class Forms(NamedTuple):
    """A quantised weight and its transpose, in the field order of `ScaledForms`. Fields not requested are None."""

    values: Tensor | None = None  # [E, out, in] e4m3
    scales: Tensor | None = None  # [E, out / 128, in / 128] float32; quotients here and below are rounded up
    turned: Tensor | None = None  # [E, in, out]
    turned_scales: Tensor | None = None  # [E, in / 128, out / 128]


def launch_quantize_weight(
    weight: Tensor,  # [E, out, in], any strides
    *,
    as_is: bool = True,
    transposed: bool = True,
    checksums: Tensor | None = None,  # [blocks] int64, filled with each block's checksum; None: no checksums
) -> Forms:
    """Return the quantised weight if `as_is`, and its transpose if `transposed`. One launch reads the weight once."""
    _, size_out, size_in = weight.shape
    here = _empty_weight(weight, size_out, size_in) if as_is else (None, None)
    turned = _empty_weight(weight, size_in, size_out) if transposed else (None, None)
    forms = Forms(*here, *turned)
    _launch(weight, forms, checksums, is_first=True)
    return forms


def empty_checksums(weight: Tensor) -> Tensor:  # [blocks] int64
    """Return an uninitialised tensor for the checksums of a weight."""
    return weight.new_empty(_num_blocks(weight), dtype=torch.int64)


def launch_requantize(weight: Tensor, forms: Forms, checksums: Tensor) -> None:
    """Quantise again, in place, the blocks of the weight whose checksums have changed. Store the new checksums."""
    _launch(weight, forms, checksums, is_first=False)


def _num_blocks(weight: Tensor) -> int:
    num_experts, size_out, size_in = weight.shape
    return num_experts * cdiv(size_out, BLOCK) * cdiv(size_in, BLOCK)


def _empty_weight(weight: Tensor, size_out: int, size_in: int) -> tuple[Tensor, Tensor]:
    scales = weight.new_empty(len(weight), cdiv(size_out, BLOCK), cdiv(size_in, BLOCK), dtype=torch.float32)
    return weight.new_empty(len(weight), size_out, size_in, dtype=torch.float8_e4m3fn), scales


def _launch(weight: Tensor, forms: Forms, checksums: Tensor | None, *, is_first: bool) -> None:
    if weight.numel():
        launch_kernel(
            _quantize_weight_kernel,
            (_num_blocks(weight),),
            *with_strides(weight),
            None if forms.values is None else forms.values.view(torch.uint8),
            forms.scales,
            None if forms.turned is None else forms.turned.view(torch.uint8),
            forms.turned_scales,
            checksums,
            OUT=weight.shape[1],
            IN=weight.shape[2],
            IS_FIRST=is_first,
            num_warps=8,
            num_stages=1,
        )


@triton.jit
def _odd_numbers(first: tl.constexpr):
    """Return elements `first` to `first + 127` of a sequence of pseudo-random odd uint32 numbers."""
    mixed = (tl.arange(first, first + 128) + 1).to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    return (mixed ^ (mixed >> 13)) | 1


@triton.jit
def _checksum(weight):  # [128, 128]
    """Multiply each element's bits by an odd number specific to its position. Return the products' sum modulo 2**64."""
    bits = weight.to(tl.uint16 if weight.dtype.primitive_bitwidth == 16 else tl.uint32, bitcast=True)
    factors = _odd_numbers(0)[:, None] * _odd_numbers(128)[None, :]
    return tl.sum(bits.to(tl.uint64) * factors.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def _widened(values):
    """Return values as float32.

    Inline assembly keeps Triton 3.6 from moving the kernel's `tl.trans(values)` before this conversion. After such a
    move, the kernel would quantise the weight and its transpose separately, in twice as many registers.
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
    IS_FIRST: tl.constexpr,  # whether to quantise all blocks, not only those whose checksums changed
):
    """One program quantises one block, and writes the block, its transpose and its checksum. Grid: (num_blocks,)."""
    NUM_OUT: tl.constexpr = (OUT + 127) // 128
    NUM_IN: tl.constexpr = (IN + 127) // 128
    block = tl.program_id(0)
    block_in, block_out = block % NUM_IN, block // NUM_IN % NUM_OUT
    expert = (block // (NUM_IN * NUM_OUT)).to(tl.int64)
    o, i = tl.arange(0, 128), tl.arange(0, 128)  # int32 suffices for offsets inside a block
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
            # Transpose the values after quantisation, because bytes take less shared memory in `tl.trans`.
            turned_values_ptr += expert * (OUT * IN) + first_in * OUT + first_out
            turned_ptrs = turned_values_ptr + (i[:, None] * OUT + o[None, :])
            tl.store(turned_ptrs, tl.trans(values), mask=is_in[:, None] & is_out[None, :])
            tl.store(turned_scales_ptr + (expert * NUM_IN + block_in) * NUM_OUT + block_out, scale)
        if checksums_ptr is not None:
            # The barrier in `largest_size` separates all reads of the old checksum from this write of the new checksum.
            tl.store(checksums_ptr + block, checksum)
