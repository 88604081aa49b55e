"""Quantisation of weights to e4m3 with a scale per 128 x 128 block, in both orientations, and again once they changed.

A block's scale and numbers are the same in both orientations, because blocks are square. The bits are those of
`reference_fp8` on every device.

`launch_requantize` finds changes on the device, without host synchronisation: it compares one line of 128 values of
each block with the same line at the last quantisation, and quantises all blocks again if any line of the weight
differs. Optimizers, averages of weights and new values of one expert or block change such lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference_fp8 import BLOCK
from ..runtime.launch import launch_kernel
from ..runtime.triton import cdiv, next_power_of_2, tl, triton
from ..types import QuantizedWeight, ScaledForms
from .e4m3 import block_scales, encode_e4m3, largest_size
from .formats import FP8
from .kernels import INTERPRET

_PROGRAMS = 1024  # that look whether a weight changed; few, because most often it did not
_SAMPLED_BLOCKS = 32  # by one program


class Samples(NamedTuple):
    """Lines of a weight at its last quantisation."""

    lines: Tensor  # [blocks, 128] bits as integers
    differ: Tensor  # [programs] int32: whether the lines of a program differed in the last comparison


def launch_quantize_weight(
    weight: Tensor,  # [E, out, in], any strides
    *,
    as_is: bool = True,
    transposed: bool = True,
) -> tuple[QuantizedWeight | None, QuantizedWeight | None]:  # [E, out, in] and [E, in, out]
    """Return the weight and its transpose, the wanted ones, from one read."""
    _, size_out, size_in = weight.shape
    forms = (
        _empty_weight(weight, size_out, size_in) if as_is else None,
        _empty_weight(weight, size_in, size_out) if transposed else None,
    )
    _launch(weight, forms, None, _num_blocks(weight))
    return forms


def take_samples(weight: Tensor) -> Samples:
    """Return the lines of a weight that was just quantised."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.element_size()]
    num_blocks = _num_blocks(weight)
    lines = weight.new_empty(num_blocks, BLOCK, dtype=bits)
    samples = Samples(lines, weight.new_empty(cdiv(num_blocks, _SAMPLED_BLOCKS), dtype=torch.int32))
    _launch_samples(weight, samples, is_first=True)
    return samples


def launch_requantize(
    weight: Tensor, forms: tuple[QuantizedWeight | None, QuantizedWeight | None], samples: Samples
) -> None:
    """Write the forms of the weight again, in place, if its lines differ from the samples."""
    _launch_samples(weight, samples, is_first=False)
    _launch(weight, forms, samples.differ, min(_num_blocks(weight), _PROGRAMS))


def quantize_experts(w_up: Tensor, w_down: Tensor, *, turned: bool = True) -> ScaledForms:
    """Return the forms of the experts' weights in e4m3: as they are, and transposed unless not `turned`."""
    return scaled_forms(*(launch_quantize_weight(weight, transposed=turned) for weight in (w_up, w_down)))


def scaled_forms(*of_weights: tuple[QuantizedWeight | None, QuantizedWeight | None]) -> ScaledForms:
    """Return the forms of w_up and w_down together."""
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


def _launch(
    weight: Tensor,
    forms: tuple[QuantizedWeight | None, QuantizedWeight | None],
    differ: Tensor | None,
    num_programs: int,
) -> None:
    if weight.numel():
        pointers: list[Any] = []
        for form in forms:
            pointers += (None, None) if form is None else (form.values.view(torch.uint8), form.scales)
        launch_kernel(
            _quantize_weight_kernel,
            (num_programs,),
            weight,
            weight.stride(),
            *pointers,
            differ,
            _num_blocks(weight),
            OUT=weight.shape[1],
            IN=weight.shape[2],
            NUM_DIFFER=0 if differ is None else len(differ),
            DIFFER_P2=0 if differ is None else next_power_of_2(len(differ)),
            num_warps=8,
            num_stages=1,
        )


def _launch_samples(weight: Tensor, samples: Samples, *, is_first: bool) -> None:
    if weight.numel():
        launch_kernel(
            _sample_kernel,
            samples.differ.shape,
            weight.view(samples.lines.dtype),
            weight.stride(),
            samples.lines,
            samples.differ,
            len(samples.lines),
            OUT=weight.shape[1],
            IN=weight.shape[2],
            ALONG_IN=weight.stride(2) == 1,
            IS_FIRST=is_first,
            BLOCKS=_SAMPLED_BLOCKS,
        )


@triton.jit
def _sample_kernel(
    weight_ptr,  # as integers
    weight_strides,  # [E, OUT, IN]
    lines_ptr,  # [num_blocks, 128] contiguous
    differ_ptr,  # [programs]
    num_blocks,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ALONG_IN: tl.constexpr,  # lines are rows of a block, else columns: what is contiguous
    IS_FIRST: tl.constexpr,  # there is nothing to compare with
    BLOCKS: tl.constexpr,
):
    """One program compares and writes the lines of BLOCKS blocks. Grid: (cdiv(num_blocks, BLOCKS),)."""
    NUM_OUT: tl.constexpr = (OUT + 127) // 128
    NUM_IN: tl.constexpr = (IN + 127) // 128
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    first_out, first_in = block // NUM_IN % NUM_OUT * 128, block % NUM_IN * 128
    place = block * 37 % 128  # of the line in its block
    along = tl.arange(0, 128)[None, :]
    if ALONG_IN:
        o = tl.minimum(first_out + place, OUT - 1)[:, None]
        i = first_in[:, None] + along
    else:
        o = first_out[:, None] + along
        i = tl.minimum(first_in + place, IN - 1)[:, None]
    mask = (block < num_blocks)[:, None] & (o < OUT) & (i < IN)
    expert = (block // (NUM_IN * NUM_OUT)).to(tl.int64)[:, None]
    weight_ptrs = weight_ptr + expert * weight_strides[0]
    weight_ptrs += o.to(tl.int64) * weight_strides[1] + i.to(tl.int64) * weight_strides[2]
    now = tl.load(weight_ptrs, mask=mask, other=0)
    lines_ptrs = lines_ptr + block.to(tl.int64)[:, None] * 128 + along
    if not IS_FIRST:
        before = tl.load(lines_ptrs, mask=mask, other=0)
        tl.store(differ_ptr + tl.program_id(0), tl.max(tl.max((now != before).to(tl.int32), 1), 0))
    tl.store(lines_ptrs, now, mask=mask)


@triton.jit
def _widened(values):
    """Return values as float32. Triton 3.6 would move the turn of the bytes before an ordinary conversion, and quantise
    everything twice, in twice as many registers."""
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
    differ_ptr,  # [NUM_DIFFER], all zero where there is nothing to do; or None
    num_blocks,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NUM_DIFFER: tl.constexpr,
    DIFFER_P2: tl.constexpr,
):
    """One program writes one block of both results; with differ_ptr, every num_programs-th. Grid: (num_blocks,), or
    fewer."""
    forms = (values_ptr, scales_ptr, turned_values_ptr, turned_scales_ptr)
    if differ_ptr is None:
        _quantize_block(tl.program_id(0), weight_ptr, weight_strides, forms, OUT, IN)
    else:
        program = tl.arange(0, DIFFER_P2)
        differs = tl.max(tl.load(differ_ptr + program, mask=program < NUM_DIFFER, other=0), 0)
        for turn in range(0, tl.where(differs > 0, num_blocks - tl.program_id(0), 0), tl.num_programs(0)):
            _quantize_block(tl.program_id(0) + turn, weight_ptr, weight_strides, forms, OUT, IN)


@triton.jit
def _quantize_block(block, weight_ptr, weight_strides, forms, OUT: tl.constexpr, IN: tl.constexpr):
    NUM_OUT: tl.constexpr = (OUT + 127) // 128
    NUM_IN: tl.constexpr = (IN + 127) // 128
    block_in, block_out = block % NUM_IN, block // NUM_IN % NUM_OUT
    expert = (block // (NUM_IN * NUM_OUT)).to(tl.int64)
    o, i = tl.arange(0, 128), tl.arange(0, 128)  # inside the block, whose elements lie less than 2**31 apart
    first_out, first_in = (block_out * 128).to(tl.int64), (block_in * 128).to(tl.int64)
    is_out, is_in = first_out + o < OUT, first_in + i < IN
    weight_ptr += expert * weight_strides[0] + first_out * weight_strides[1] + first_in * weight_strides[2]
    weight_ptrs = weight_ptr + (o[:, None] * weight_strides[1] + i[None, :] * weight_strides[2])
    weight = _widened(tl.load(weight_ptrs, mask=is_out[:, None] & is_in[None, :], other=0.0))
    scale, inverse = block_scales(largest_size(weight, None))
    values = encode_e4m3(weight * inverse)
    if forms[0] is not None:
        values_ptr = forms[0] + (expert * (OUT * IN) + first_out * IN + first_in)
        tl.store(values_ptr + (o[:, None] * IN + i[None, :]), values, mask=is_out[:, None] & is_in[None, :])
        tl.store(forms[1] + (expert * NUM_OUT + block_out) * NUM_IN + block_in, scale)
    if forms[2] is not None:
        # As bytes, which Triton turns through shared memory.
        turned_ptr = forms[2] + (expert * (OUT * IN) + first_in * OUT + first_out)
        turned_ptrs = turned_ptr + (i[:, None] * OUT + o[None, :])
        tl.store(turned_ptrs, tl.trans(values), mask=is_in[:, None] & is_out[None, :])
        tl.store(forms[3] + (expert * NUM_IN + block_in) * NUM_OUT + block_out, scale)
