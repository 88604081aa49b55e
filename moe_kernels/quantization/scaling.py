"""Quantisation of rows to e4m3 with a scale for each row and 128 columns. The bits are those of `reference_fp8`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference_fp8 import BLOCK
from ..runtime.launch import launch_kernel
from ..runtime.triton import cdiv, tl, triton
from ..types import ScaledRows
from .e4m3 import quantize_tile, store_scales

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
