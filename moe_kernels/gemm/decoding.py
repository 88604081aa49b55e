"""Grouped GEMM of few rows that decodes quantised weights while it loads them.

With few rows per expert, reading the weights takes most of the time. This kernel reads only the stored bytes, and only
those of experts that have rows. A decoded value has the bits of `dequantize` in the dtype of the rows; products are
accumulated in float32 and rounded once. Many rows are faster with a dequantised weight: every tile of rows decodes the
weight again, and the fastest GEMMs need operands that the copy engine can load.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization.kernels import decode_tile, form_of, kernel_arguments
from ..runtime.launch import launch_kernel
from ..runtime.triton import cdiv, tl, triton
from ..types import QuantizedWeight, TileTable
from .kernels.pointer import multiply_tile
from .kernels.precision import add_product, dot_precision, zero_total

# Average rows per expert from which weights are dequantised. By arithmetic, writing a weight once and reading it takes
# 0.4 of the GEMM's time there, and less with more rows.
MAX_ROWS = 512


class QuantizedMatrices(NamedTuple):
    """A quantised weight [G, out, in] as the second operand of a GEMM: B[g] = weight[g], or its transpose."""

    weight: QuantizedWeight
    transposed: bool

    @property
    def shape(self) -> tuple[int, int, int]:  # [G, K, N]
        num_groups, size_out, size_in = self.weight.shape
        return (num_groups, size_in, size_out) if self.transposed else (num_groups, size_out, size_in)


def launch_decoding_gemm(
    a: Tensor,  # [R, K]; [T, K] with row_to_token
    b: QuantizedMatrices,  # [G, K, N]
    out: Tensor,  # [R, N]
    table: TileTable,
    *,
    row_to_token: Tensor | None = None,  # [R]
    bias: Tensor | None = None,  # [G, N]
    extra_a: Tensor | None = None,  # [R, r]
    extra_b: Tensor | None = None,  # [G, r, N]
) -> None:
    """Write out[start:end] = A[start:end] @ B[g] + extra_a[start:end] @ extra_b[g] + bias[g] for every group g.

    Rows past the last group stay unwritten.
    """
    if not out.numel():
        return
    num_columns = out.shape[1]
    blocks = _blocks(a.dtype, out.shape[0] // b.shape[0], b.transposed)
    launch_kernel(
        _decoding_gemm_kernel,
        (table.tiles.shape[0] * cdiv(num_columns, blocks["BLOCK_N"]),),
        a,
        a.stride(),
        row_to_token,
        *kernel_arguments(b.weight),
        out,
        out.stride(),
        bias,
        None if bias is None else bias.stride(),
        extra_a,
        None if extra_a is None else extra_a.stride(),
        extra_b,
        None if extra_b is None else extra_b.stride(),
        table.bounds,
        table.tiles,
        table.num_tiles,
        OUT=b.weight.shape[1],
        IN=b.weight.shape[2],
        FORM=form_of(b.weight),
        TRANSPOSED=b.transposed,
        EXTRA_K=0 if extra_a is None else extra_a.shape[1],
        PRECISION=_precision(a),
        TILE_ROWS=table.block_rows,
        **blocks,
    )


def _precision(a: Tensor) -> str | None:
    """Return how rows are multiplied. Triton up to 3.8 cannot compile float64 products of operands made from bytes."""
    precision = dot_precision(a)
    return "float32" if precision == "float64" else precision


def _blocks(dtype: torch.dtype, rows: int, transposed: bool) -> dict[str, Any]:
    """Return the tile sizes for this average number of rows per group. A tile of the stored matrix that is long along
    its rows loads whole cache lines."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if rows <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128 if transposed else 64, "num_warps": 4, "num_stages": 4}
    if rows <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit
def _decoding_gemm_kernel(
    a_ptr,
    a_strides,  # [R or T, K]
    row_to_token_ptr,  # [R], or None
    values_ptr,
    scales_ptr,
    codes_ptr,
    nested_codes_ptr,
    nested_scales_ptr,
    nested_offset_ptr,
    out_ptr,
    out_strides,  # [R, N]
    bias_ptr,  # [G, N], or None
    bias_strides,
    extra_a_ptr,  # [R, EXTRA_K], or None
    extra_a_strides,
    extra_b_ptr,  # [G, EXTRA_K, N], or None
    extra_b_strides,
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [2]
    OUT: tl.constexpr,  # of the stored matrices
    IN: tl.constexpr,
    FORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EXTRA_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # of the table
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program writes BLOCK_N columns of the rows of one tile of the table, BLOCK_M rows after another.
    Grid: (capacity * cdiv(N, BLOCK_N),)."""
    N: tl.constexpr = OUT if TRANSPOSED else IN
    K: tl.constexpr = IN if TRANSPOSED else OUT
    NUM_COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // NUM_COLUMN_TILES
    if tile >= tl.load(num_tiles_ptr):
        return
    first_column = tl.program_id(0) % NUM_COLUMN_TILES * BLOCK_N
    group = tl.load(tiles_ptr + tile * 2).to(tl.int64)
    start = tl.load(bounds_ptr + group) + tl.load(tiles_ptr + tile * 2 + 1) * TILE_ROWS
    end = tl.minimum(tl.load(bounds_ptr + group + 1), start + TILE_ROWS)
    column = first_column + tl.arange(0, BLOCK_N)
    column_mask = column < N
    k = tl.arange(0, BLOCK_K)
    for first_row in range(start, end, BLOCK_M):
        row = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
        row_mask = row < end
        a_row = row
        if row_to_token_ptr is not None:
            a_row = tl.load(row_to_token_ptr + row, mask=row_mask, other=0).to(tl.int64)
        a_ptrs = a_ptr + a_row[:, None] * a_strides[0] + k[None, :] * a_strides[1]
        total = zero_total(BLOCK_M, BLOCK_N, PRECISION)  # [BLOCK_M, BLOCK_N]
        for first_k in range(0, K, BLOCK_K):
            a = tl.load(a_ptrs, mask=row_mask[:, None] & (first_k + k < K)[None, :], other=0.0)
            b = decode_tile(
                values_ptr,
                scales_ptr,
                codes_ptr,
                nested_codes_ptr,
                nested_scales_ptr,
                nested_offset_ptr,
                group,
                first_column if TRANSPOSED else first_k,
                first_k if TRANSPOSED else first_column,
                OUT,
                IN,
                FORM,
                BLOCK_N if TRANSPOSED else BLOCK_K,
                BLOCK_K if TRANSPOSED else BLOCK_N,
                a.dtype,
            )
            total = add_product(a, tl.trans(b) if TRANSPOSED else b, total, end, PRECISION)
            a_ptrs += BLOCK_K * a_strides[1]
        total = total.to(tl.float32)
        if extra_a_ptr is not None:
            wide_k = k.to(tl.int64)
            wide_column = column.to(tl.int64)
            total += multiply_tile(
                extra_a_ptr + row[:, None] * extra_a_strides[0] + wide_k[None, :] * extra_a_strides[1],
                extra_a_strides[1],
                row_mask,
                extra_b_ptr
                + group * extra_b_strides[0]
                + wide_k[:, None] * extra_b_strides[1]
                + wide_column[None, :] * extra_b_strides[2],
                extra_b_strides[1],
                column_mask,
                EXTRA_K,
                EXTRA_K % BLOCK_K == 0,
                PRECISION,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + group * bias_strides[0] + column * bias_strides[1]
            total += tl.load(bias_ptrs, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + row[:, None] * out_strides[0] + column[None, :] * out_strides[1]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
