"""Quantisation of rows and weights to e4m3 with a scale per block, as the products of FP8 read them.

Each kernel reads its input once and writes every element once, in a fixed order. The bits are those of `reference_fp8`
on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference_fp8 import BLOCK
from ..runtime.launch import launch_kernel
from ..runtime.triton import cdiv, tl, triton
from ..types import QuantizedWeight, ScaledForms, ScaledRows
from .e4m3 import block_scales, encode_e4m3, largest_size, quantize_tile, store_scales
from .formats import FP8
from .kernels import INTERPRET

_BLOCK_ROWS = 16
_MOST_BLOCKS = 8  # of one row, in one program


def empty_scaled_rows(like: Tensor, num_rows: int, num_columns: int) -> ScaledRows:
    """Return unwritten rows on the device of `like`."""
    values = like.new_empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    return ScaledRows(values, like.new_empty(cdiv(num_columns, BLOCK), num_rows, dtype=torch.float32).t())


def launch_quantize_rows(rows: Tensor) -> ScaledRows:  # [R, K], any strides
    num_rows, num_columns = rows.shape
    out = empty_scaled_rows(rows, num_rows, num_columns)
    if rows.numel():
        blocks = _MOST_BLOCKS
        while blocks > 1 and num_columns % (blocks * BLOCK):
            blocks //= 2
        launch_kernel(
            _quantize_rows_kernel,
            (cdiv(num_rows, _BLOCK_ROWS), cdiv(num_columns, blocks * BLOCK)),
            rows,
            rows.stride(),
            out.values.view(torch.uint8),
            out.scales,
            num_rows,
            K=num_columns,
            BLOCK_R=_BLOCK_ROWS,
            BLOCKS=blocks,
            num_warps=8 if blocks > 2 else 4,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    rows_ptr,
    rows_strides,  # [R, K]
    values_ptr,  # [R, K] contiguous
    scales_ptr,  # [cdiv(K, 128), R] contiguous
    num_rows,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program writes BLOCKS blocks of each of BLOCK_R rows. Grid: (cdiv(R, BLOCK_R), cdiv(K, BLOCKS * 128))."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    mask = (row < num_rows)[:, None] & (k < K)[None, :]
    rows_ptrs = rows_ptr + row[:, None] * rows_strides[0] + k.to(tl.int64)[None, :] * rows_strides[1]
    values, scales = quantize_tile(tl.load(rows_ptrs, mask=mask, other=0.0).to(tl.float32), BLOCKS)
    tl.store(values_ptr + row[:, None] * K + k[None, :], values, mask=mask)
    store_scales(scales_ptr, scales, row, row < num_rows, tl.program_id(1) * BLOCKS, num_rows, K, BLOCKS)


def launch_quantize_weight(
    weight: Tensor,  # [E, out, in], any strides
    *,
    as_is: bool = True,
    transposed: bool = True,
) -> tuple[QuantizedWeight | None, QuantizedWeight | None]:  # [E, out, in] and [E, in, out]
    """Return the weight and its transpose, the wanted ones, from one read. Blocks are square, so that both hold the
    same numbers."""
    num_experts, size_out, size_in = weight.shape
    here = _empty_weight(weight, size_out, size_in) if as_is else None
    turned = _empty_weight(weight, size_in, size_out) if transposed else None
    if weight.numel():
        launch_kernel(
            _quantize_weight_kernel,
            (cdiv(size_in, BLOCK), cdiv(size_out, BLOCK), num_experts),
            weight,
            weight.stride(),
            *_pointers(here),
            *_pointers(turned),
            OUT=size_out,
            IN=size_in,
            num_warps=8,
        )
    return here, turned


def _empty_weight(weight: Tensor, size_out: int, size_in: int) -> QuantizedWeight:
    shape = torch.Size((weight.shape[0], size_out, size_in))
    scales = weight.new_empty(shape[0], cdiv(size_out, BLOCK), cdiv(size_in, BLOCK), dtype=torch.float32)
    return QuantizedWeight(weight.new_empty(shape, dtype=torch.float8_e4m3fn), scales, FP8, shape)


def _pointers(weight: QuantizedWeight | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if weight is None else (weight.values.view(torch.uint8), weight.scales)


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
    OUT: tl.constexpr,
    IN: tl.constexpr,
):
    """One program writes one block of both results. Grid: (cdiv(IN, 128), cdiv(OUT, 128), E)."""
    block_in, block_out, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o, i = tl.arange(0, 128), tl.arange(0, 128)  # inside the block, whose elements lie less than 2**31 apart
    first_out, first_in = (block_out * 128).to(tl.int64), (block_in * 128).to(tl.int64)
    is_out, is_in = first_out + o < OUT, first_in + i < IN
    weight_ptr += expert * weight_strides[0] + first_out * weight_strides[1] + first_in * weight_strides[2]
    weight_ptrs = weight_ptr + (o[:, None] * weight_strides[1] + i[None, :] * weight_strides[2])
    weight = _widened(tl.load(weight_ptrs, mask=is_out[:, None] & is_in[None, :], other=0.0))
    scale, inverse = block_scales(largest_size(weight, None))
    values = encode_e4m3(weight * inverse)
    NUM_OUT: tl.constexpr = (OUT + 127) // 128
    NUM_IN: tl.constexpr = (IN + 127) // 128
    if values_ptr is not None:
        values_ptr += expert * (OUT * IN) + first_out * IN + first_in
        tl.store(values_ptr + (o[:, None] * IN + i[None, :]), values, mask=is_out[:, None] & is_in[None, :])
        tl.store(scales_ptr + (expert * NUM_OUT + block_out) * NUM_IN + block_in, scale)
    if turned_values_ptr is not None:
        # As bytes, which Triton turns through shared memory.
        turned_values_ptr += expert * (OUT * IN) + first_in * OUT + first_out
        turned_ptrs = turned_values_ptr + (i[:, None] * OUT + o[None, :])
        tl.store(turned_ptrs, tl.trans(values), mask=is_in[:, None] & is_out[None, :])
        tl.store(turned_scales_ptr + (expert * NUM_IN + block_in) * NUM_OUT + block_out, scale)


def quantize_experts(w_up: Tensor, w_down: Tensor, *, turned: bool = True) -> ScaledForms:
    """Return the forms of the experts' weights in e4m3: as they are, and transposed unless not `turned`."""
    up, up_turned = _forms(w_up, turned)
    down, down_turned = _forms(w_down, turned)
    return ScaledForms(*up, *up_turned, *down, *down_turned)


def _forms(weight: Tensor, turned: bool) -> list[tuple[Tensor | None, Tensor | None]]:
    made = launch_quantize_weight(weight, transposed=turned)
    return [(None, None) if form is None else (form.values, form.scales) for form in made]
