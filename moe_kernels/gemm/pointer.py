"""Grouped GEMM through pointers: any size, stride and GPU, optionally gathering the rows of A."""

from __future__ import annotations

import torch

from .._triton import tl, triton
from ..catalog import (
    GroupedGemmArguments,
    GroupedGemmOperands,
    KernelMetadata,
    Launch,
    Operand,
    PointerDesign,
)
from .base import GroupedGemmKernel, kernel_name
from .precision import input_precision


@triton.jit(do_not_specialize=["num_row_tiles"])
def _grouped_gemm_kernel(
    a_ptr,
    a_strides,  # [R or T, K]
    row_to_token_ptr,  # [R], or None
    b_ptr,
    b_strides,  # [G, K, N]
    out_ptr,
    out_strides,  # [R, N]
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [2]
    num_row_tiles,  # capacity
    G,
    K,
    N,
    EVEN_K: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program writes one [BLOCK_M, BLOCK_N] tile of out. Grid: (capacity * cdiv(N, BLOCK_N),)."""
    num_column_tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first_tile = program // (GROUP_TILES * num_column_tiles) * GROUP_TILES
    tiles_here = tl.minimum(num_row_tiles - first_tile, GROUP_TILES)
    local = program % (GROUP_TILES * num_column_tiles)
    tile = first_tile + local % tiles_here
    if tile >= tl.load(num_tiles_ptr + ZERO_TAIL):
        return
    group = tl.load(tiles_ptr + tile * 2)
    row = tl.load(bounds_ptr + group) + tl.load(tiles_ptr + tile * 2 + 1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < tl.load(bounds_ptr + group + 1)
    column = (local // tiles_here) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < N
    a_row = row
    if row_to_token_ptr is not None:
        a_row = tl.load(row_to_token_ptr + row, mask=row_mask, other=0)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + a_row.to(tl.int64)[:, None] * a_strides[0] + k.to(tl.int64)[None, :] * a_strides[1]
    b_ptrs = (
        b_ptr
        + group.to(tl.int64) * b_strides[0]
        + k.to(tl.int64)[:, None] * b_strides[1]
        + column.to(tl.int64)[None, :] * b_strides[2]
    )
    # The tail has no matrix: its rows become zeros.
    depth = tl.where(group < G, K, 0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    for first in range(0, depth, BLOCK_K):
        a_mask = row_mask[:, None]
        b_mask = column_mask[None, :]
        if not EVEN_K:
            a_mask &= (first + k < K)[None, :]
            b_mask &= (first + k < K)[:, None]
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision=INPUT_PRECISION)
        a_ptrs += BLOCK_K * a_strides[1]
        b_ptrs += BLOCK_K * b_strides[1]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * out_strides[0] + column.to(tl.int64)[None, :] * out_strides[1]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


class PointerGroupedGemm(GroupedGemmKernel):
    """`out[start:end] = A[start:end] @ B[g]`, one program per tile."""

    def launch(self, args: GroupedGemmArguments) -> Launch | None:
        num_columns = args.out.shape[1]
        if not args.out.numel():
            return None
        design = self.metadata.design
        block_m, block_n, block_k = design.tile_shape
        table = self.tile_table(args)
        num_groups, depth, _ = args.B.shape
        capacity = len(table.tiles)
        return Launch(
            _grouped_gemm_kernel,
            (capacity * triton.cdiv(num_columns, block_n),),
            (
                args.A,
                args.A.stride(),
                args.row_to_token,
                args.B,
                args.B.stride(),
                args.out,
                args.out.stride(),
                table.bounds,
                table.tiles,
                table.num_tiles,
                capacity,
                num_groups,
                depth,
                num_columns,
            ),
            {
                "EVEN_K": depth % block_k == 0,
                "ZERO_TAIL": int(args.zero_tail),
                "INPUT_PRECISION": input_precision(args.A.dtype),
                "GROUP_TILES": design.group_tiles,
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
                "BLOCK_K": block_k,
                "num_warps": design.num_warps,
                "num_stages": design.num_stages,
            },
        )


# Every tile fits the shared memory of the smallest GPU of its generation (99 KiB). Float32 is computed without
# tensor cores unless TF32 was asked for.
_TILES = {
    torch.bfloat16: [((128, 128, 64), 8, 3), ((64, 128, 64), 4, 3), ((16, 128, 64), 4, 3)],
    torch.float16: [((128, 128, 64), 8, 3), ((64, 128, 64), 4, 3), ((16, 128, 64), 4, 3)],
    torch.float32: [((64, 64, 32), 4, 3), ((16, 64, 32), 4, 3)],
}


def _kernel(dtype: torch.dtype, design: PointerDesign) -> PointerGroupedGemm:
    any_layout = Operand(dtype)
    operands = GroupedGemmOperands(any_layout, any_layout, any_layout)
    name = kernel_name("grouped_gemm", "pointer", dtype, design)
    return PointerGroupedGemm(KernelMetadata(name, PointerGroupedGemm, 80, operands, design))


POINTER_KERNELS = tuple(
    _kernel(dtype, PointerDesign(*tile, gather=gather))
    for dtype, tiles in _TILES.items()
    for tile in tiles
    for gather in (False, True)
)
