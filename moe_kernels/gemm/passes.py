"""Separate launches for bias and row scale after a grouped GEMM, and for the gradients of a row scale."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.launch import launch_kernel, with_strides
from ..runtime.triton import cdiv, next_power_of_2, tl, triton
from ..types import TileTable

_BLOCK_ROWS = 16


def launch_bias_and_scale(
    rows: Tensor,  # [R, N]
    bias: Tensor | None,  # [G, N]
    row_scale: Tensor | None,  # [R] float32
    table: TileTable,
) -> None:
    """Compute rows[r] = row_scale[r] * (rows[r] + bias[g]) in place for each row r of each group g. Rows past the last
    group do not change."""
    if not rows.numel():
        return
    block_n = min(next_power_of_2(rows.shape[1]), 256)
    launch_kernel(
        _bias_and_scale_kernel,
        (len(table.tiles), cdiv(rows.shape[1], block_n)),
        *with_strides(rows),
        *with_strides(bias),
        *with_strides(row_scale),
        table.bounds,
        table.tiles,
        table.num_tiles,
        rows.shape[1],
        TILE_ROWS=table.block_rows,
        BLOCK_R=min(_BLOCK_ROWS, table.block_rows),
        BLOCK_N=block_n,
    )


@triton.jit
def _bias_and_scale_kernel(
    rows_ptr,
    rows_strides,  # [R, N]
    bias_ptr,  # [G, N], or None
    bias_strides,
    row_scale_ptr,  # [R], or None
    row_scale_strides,
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [4]
    N,
    TILE_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program writes BLOCK_N columns of a tile of row_scale * (rows + bias). Grid: (capacity, cdiv(N, BLOCK_N))."""
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    group = tl.load(tiles_ptr + tile * 2).to(tl.int64)
    first = tl.load(bounds_ptr + group) + tl.load(tiles_ptr + tile * 2 + 1) * TILE_ROWS
    end = tl.load(bounds_ptr + group + 1)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    for start in range(0, TILE_ROWS, BLOCK_R):
        row = (first + start + tl.arange(0, BLOCK_R)).to(tl.int64)
        ptrs = rows_ptr + row[:, None] * rows_strides[0] + column[None, :] * rows_strides[1]
        mask = (row < end)[:, None] & (column < N)[None, :]
        value = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + group * bias_strides[0] + column * bias_strides[1]
            value += tl.load(bias_ptrs, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if row_scale_ptr is not None:
            value *= tl.load(row_scale_ptr + row * row_scale_strides[0], mask=row < end, other=0.0)[:, None]
        tl.store(ptrs, value.to(rows_ptr.dtype.element_ty), mask=mask)


def launch_row_scale_backward(
    dout: Tensor,  # [R, N]
    row_scale: Tensor,  # [R] float32
    rows: Tensor | None,  # [R, N] float32 contiguous, before scaling; None if drow_scale is not needed
    dtype: torch.dtype,
    offsets: Tensor,  # [G]
) -> tuple[Tensor, Tensor | None]:  # drows [R, N] in `dtype`, drow_scale [R] float32
    """Return the gradients of both factors of `row_scale[:, None] * rows`. Rows past the last offset get zeros."""
    num_rows, num_columns = dout.shape
    drows = dout.new_empty(dout.shape, dtype=dtype)
    drow_scale = None if rows is None else row_scale.new_empty(num_rows)
    if num_rows:
        launch_kernel(
            _row_scale_backward_kernel,
            (cdiv(num_rows, _BLOCK_ROWS),),
            *with_strides(dout),
            *with_strides(row_scale),
            rows,
            drows,
            drow_scale,
            offsets,
            offsets.stride(0),
            len(offsets),
            num_rows,
            num_columns,
            G_P2=next_power_of_2(len(offsets)),
            BLOCK_R=_BLOCK_ROWS,
            BLOCK_N=128,
        )
    return drows, drow_scale


@triton.jit(do_not_specialize=["R"])
def _row_scale_backward_kernel(
    dout_ptr,
    dout_strides,  # [R, N]
    row_scale_ptr,
    row_scale_strides,  # [R]
    rows_ptr,  # [R, N] contiguous, or None
    drows_ptr,  # [R, N] contiguous
    drow_scale_ptr,  # [R], or None
    offsets_ptr,
    offsets_stride,
    G,
    R,
    N,
    G_P2: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program writes BLOCK_R rows of row_scale * dout and of sum(dout * rows, 1). Grid: (cdiv(R, BLOCK_R),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    exists = row < R
    group = tl.arange(0, G_P2)
    ends = tl.load(offsets_ptr + group * offsets_stride, mask=group < G, other=0)
    inside = row < tl.minimum(tl.max(ends, 0), R)
    scale = tl.load(row_scale_ptr + row * row_scale_strides[0], mask=inside, other=0.0)[:, None]
    products = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for first in range(0, N, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N).to(tl.int64)
        mask = inside[:, None] & (column < N)[None, :]
        dout_ptrs = dout_ptr + row[:, None] * dout_strides[0] + column[None, :] * dout_strides[1]
        dout = tl.load(dout_ptrs, mask=mask, other=0.0).to(tl.float32)
        place = row[:, None] * N + column[None, :]
        if rows_ptr is not None:
            products += dout * tl.load(rows_ptr + place, mask=mask, other=0.0)
        drows = (scale * dout).to(drows_ptr.dtype.element_ty)
        tl.store(drows_ptr + place, drows, mask=exists[:, None] & (column < N)[None, :])
    if drow_scale_ptr is not None:
        tl.store(drow_scale_ptr + row, tl.sum(products, 1), mask=exists)
