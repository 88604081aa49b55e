"""Helpers for the biases of experts: the expert of each row, and sums over the rows of each expert."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.launch import launch_kernel, with_strides
from ..runtime.triton import cdiv, next_power_of_2, tl, triton


def row_to_expert(
    bounds: Tensor,  # [E + 2] int32: expert e has the rows bounds[e]:bounds[e + 1]; the last two bound the padding rows
    num_rows: int,
) -> Tensor:  # [R] int32
    """Return the expert of each row. Padding rows get the last expert, so that kernels can load every row's bias."""
    rows = torch.arange(num_rows, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds[1:-1], rows, right=True, out_int32=True).clamp_(max=len(bounds) - 3)


def launch_segment_sum(
    rows: Tensor,  # [R, N]; [T, N] with row_to_token
    bounds: Tensor,  # [G + 2] int32: group g has the rows bounds[g]:bounds[g + 1]; group G, the padding, is not summed
    row_to_token: Tensor | None = None,  # [R] int32
    row_weights: Tensor | None = None,  # [R] float32 contiguous
) -> Tensor:  # [G, N] float32
    """Sum each group's rows, weighted by `row_weights` if given, in a fixed order. An empty group gets zeros."""
    num_groups, num_columns = len(bounds) - 2, rows.shape[1]
    out = rows.new_empty(num_groups, num_columns, dtype=torch.float32)
    if out.numel():
        block_n = min(next_power_of_2(num_columns), 64)
        launch_kernel(
            _segment_sum_kernel,
            (num_groups, cdiv(num_columns, block_n)),
            *with_strides(rows),
            row_to_token,
            row_weights,
            bounds,
            out,
            num_columns,
            BLOCK_R=64,
            BLOCK_N=block_n,
        )
    return out


@triton.jit
def _segment_sum_kernel(
    rows_ptr,
    rows_strides,  # [R, N]; [T, N] with row_to_token
    row_to_token_ptr,  # [R], or None
    row_weights_ptr,  # [R], or None
    bounds_ptr,  # [G + 2]
    out_ptr,  # [G, N] contiguous
    N,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program writes out[g, n:n + BLOCK_N], the weighted sum of the group's rows. Grid: (G, cdiv(N, BLOCK_N))."""
    group = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(bounds_ptr + group + 1)
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)  # [BLOCK_R, BLOCK_N]
    for first in range(tl.load(bounds_ptr + group), end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        if row_to_token_ptr is None:
            source = row.to(tl.int64)
        else:
            source = tl.load(row_to_token_ptr + row, mask=row < end, other=0).to(tl.int64)
        pointer = rows_ptr + source[:, None] * rows_strides[0] + n[None, :] * rows_strides[1]
        value = tl.load(pointer, mask=(row < end)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if row_weights_ptr is not None:
            value *= tl.load(row_weights_ptr + row, mask=row < end, other=0.0)[:, None]
        total += value
    tl.store(out_ptr + group.to(tl.int64) * N + n, tl.sum(total, 0), mask=n < N)
