"""Quantisation of rows to e4m3 with a scale for each 128 columns of a row. Results equal those of `reference_fp8` bit
for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference_fp8 import BLOCK
from ..runtime.launch import launch_kernel, with_strides
from ..runtime.triton import cdiv, tl, triton
from ..types import ScaledRows
from .fp8_device import quantize_tile, store_scales
from .kernels import decode_e4m3

_BLOCK_ROWS = 16
_MOST_BLOCKS = 8  # maximum number of 128-column blocks of a row that one program quantises


def empty_scaled_rows(like: Tensor, num_rows: int, num_columns: int) -> ScaledRows:
    """Return uninitialised rows and scales on the device of `like`."""
    values = like.new_empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    return ScaledRows(values, like.new_empty(cdiv(num_columns, BLOCK), num_rows, dtype=torch.float32).t())


def launch_quantize_rows(rows: Tensor) -> ScaledRows:  # rows: [R, K], any strides
    out = empty_scaled_rows(rows, *rows.shape)
    _launch(rows, out.values.view(torch.uint8), out.scales)
    return out


def packed_width(num_columns: int) -> int:
    """Return the number of bytes of a packed row: e4m3 numbers, then float32 scales padded to a multiple of 8 bytes."""
    return num_columns + 8 * cdiv(num_columns, 2 * BLOCK)


def launch_pack_rows(rows: Tensor) -> Tensor:  # [R, K] -> [R, packed_width / itemsize] in the dtype of rows
    """Return quantised rows as bytes, viewed in the dtype of `rows`. The scales of a row follow its numbers."""
    num_rows, num_columns = rows.shape
    packed = rows.new_empty(num_rows, packed_width(num_columns), dtype=torch.uint8)
    _launch(rows, packed, packed[:, num_columns:].view(torch.float32))
    return packed.view(rows.dtype)


def launch_unpack_rows(packed: Tensor, num_columns: int) -> Tensor:  # [R, num_columns]
    """Dequantise the rows that `launch_pack_rows` returns: number times scale, rounded once."""
    stored = packed.view(torch.uint8)
    scales = stored[:, num_columns:].view(torch.float32)
    return _launch_dequantize(stored[:, :num_columns], scales, packed.dtype)


def launch_dequantize_rows(rows: ScaledRows, dtype: torch.dtype) -> Tensor:  # [R, K]
    """Dequantise rows: number times scale, rounded once."""
    return _launch_dequantize(rows.values.view(torch.uint8), rows.scales, dtype)


def _launch_dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    num_rows, num_columns = values.shape
    out = values.new_empty(num_rows, num_columns, dtype=dtype)
    if out.numel():
        launch_kernel(
            _dequantize_rows_kernel,
            (cdiv(num_rows, _BLOCK_ROWS), cdiv(num_columns, BLOCK)),
            values,
            values.stride(0),
            scales,
            *scales.stride(),
            out,
            num_rows,
            K=num_columns,
            BLOCK_R=_BLOCK_ROWS,
        )
    return out


def _launch(rows: Tensor, values: Tensor, scales: Tensor) -> None:
    num_rows, num_columns = rows.shape
    if rows.numel():
        blocks = _MOST_BLOCKS
        while blocks > 1 and num_columns % (blocks * BLOCK):
            blocks //= 2
        launch_kernel(
            _quantize_rows_kernel,
            (cdiv(num_rows, _BLOCK_ROWS), cdiv(num_columns, blocks * BLOCK)),
            *with_strides(rows),
            values,
            values.stride(0),
            scales,
            *scales.stride(),
            num_rows,
            K=num_columns,
            BLOCK_R=_BLOCK_ROWS,
            BLOCKS=blocks,
            num_warps=8 if blocks > 2 else 4,
        )


@triton.jit(do_not_specialize=["block_stride", "num_rows"])
def _quantize_rows_kernel(
    rows_ptr,
    rows_strides,  # [R, K]
    values_ptr,  # [R, K] bytes
    values_stride,  # distance between rows
    scales_ptr,  # [R, cdiv(K, 128)]
    scales_stride,  # distance between rows
    block_stride,  # distance between scales of a row
    num_rows,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program quantises BLOCKS * 128 columns of BLOCK_R rows. Grid: (cdiv(R, BLOCK_R), cdiv(K, BLOCKS * 128))."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.program_id(1) * (BLOCKS * 128) + tl.arange(0, BLOCKS * 128)
    mask = (row < num_rows)[:, None] & (k < K)[None, :]
    rows_ptrs = rows_ptr + row[:, None] * rows_strides[0] + k.to(tl.int64)[None, :] * rows_strides[1]
    values, scales = quantize_tile(tl.load(rows_ptrs, mask=mask, other=0.0).to(tl.float32), BLOCKS)
    tl.store(values_ptr + row[:, None] * values_stride + k[None, :], values, mask=mask)
    first = tl.program_id(1) * BLOCKS
    store_scales(scales_ptr, scales_stride, block_stride, scales, row, row < num_rows, first, K, BLOCKS)


@triton.jit(do_not_specialize=["block_stride", "num_rows"])
def _dequantize_rows_kernel(
    values_ptr,  # [R, K] bytes
    values_stride,  # distance between rows
    scales_ptr,  # [R, cdiv(K, 128)]
    scales_stride,  # distance between rows
    block_stride,  # distance between scales of a row
    out_ptr,  # [R, K] contiguous
    num_rows,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program dequantises 128 columns of BLOCK_R rows. Grid: (cdiv(R, BLOCK_R), cdiv(K, 128))."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (row < num_rows)[:, None] & (k < K)[None, :]
    values = decode_e4m3(tl.load(values_ptr + row[:, None] * values_stride + k[None, :], mask=mask, other=0))
    scale_ptrs = scales_ptr + row * scales_stride + tl.program_id(1).to(tl.int64) * block_stride
    scale = tl.load(scale_ptrs, mask=row < num_rows, other=0.0)
    out = (values * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * K + k[None, :], out, mask=mask)
