"""Grouped GEMM through pointers: any size, any stride and any supported GPU, optionally with gathered rows of A."""

from __future__ import annotations

from typing import Any

import torch

from ...activation.functions import PLAIN_EPILOGUES
from ...runtime.dispatch import FLOAT8, FLOAT8_CC
from ...runtime.launch import Launch, with_strides
from ...runtime.triton import cdiv, tl, triton
from ..arguments.grouped import GroupedGemmArguments
from ..kernel import GemmOperands, KernelMetadata, Operand, PointerDesign
from .families import GroupedGemmKernel, kernel_name
from .float32_products import add_product, dot_precision, zero_total


@triton.jit
def tile_in_bands(number, num_row_tiles, num_column_tiles, GROUP_TILES: tl.constexpr):
    """Return the row tile and the column tile of a tile's number. Tiles are numbered in bands of GROUP_TILES row tiles.
    Within a band, the tiles are numbered column by column."""
    band = GROUP_TILES * num_column_tiles
    first = number // band * GROUP_TILES
    height = tl.minimum(num_row_tiles - first, GROUP_TILES)
    return first + number % band % height, number % band // height


@triton.jit
def multiply_tile(
    a_ptrs,  # [BLOCK_M, BLOCK_K] of the first step
    a_stride,  # along K
    row_mask,  # [BLOCK_M]
    b_ptrs,  # [BLOCK_K, BLOCK_N] of the first step
    b_stride,  # along K
    column_mask,  # [BLOCK_N]
    depth,  # K, or 0 to return zeros
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the float32 product a @ b. The reduction covers `depth` values."""
    k = tl.arange(0, BLOCK_K)
    total = zero_total(BLOCK_M, BLOCK_N, PRECISION)  # [BLOCK_M, BLOCK_N]
    for first in range(0, depth, BLOCK_K):
        a_mask = row_mask[:, None]
        b_mask = column_mask[None, :]
        if not EVEN_K:
            a_mask &= (first + k < depth)[None, :]
            b_mask &= (first + k < depth)[:, None]
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        total = add_product(a, b, total, depth, PRECISION)
        a_ptrs += BLOCK_K * a_stride
        b_ptrs += BLOCK_K * b_stride
    return total.to(tl.float32)


@triton.jit
def activate(product, FORWARD: tl.constexpr):
    """Return the activated product, or the product itself if FORWARD is None."""
    if FORWARD is None:
        return product
    else:
        return FORWARD(product, product)


@triton.jit(do_not_specialize=["num_row_tiles"])
def _grouped_gemm_kernel(
    a_ptr,
    a_strides,  # [R or T, K]
    row_to_token_ptr,  # [R], or None
    b_ptr,
    b_strides,  # [G, K, N]
    out_ptr,
    out_strides,  # [R, N]
    bias_ptr,  # [G, N], or None
    bias_strides,
    row_scale_ptr,  # [R], or None
    row_scale_strides,
    scale_a_ptr,  # [R or T], or None
    scale_a_strides,
    scale_b_ptr,  # [G, N], or None
    scale_b_strides,
    extra_a_ptr,  # [R, EXTRA_K], or None
    extra_a_strides,
    extra_b_ptr,  # [G, EXTRA_K, N], or None
    extra_b_strides,
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [4]
    num_row_tiles,  # capacity: number of entries of the tile table
    G,
    K,
    N,
    EVEN_K: tl.constexpr,
    EXTRA_K: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program writes one tile of `GroupedGemmArguments.out`. Grid: (capacity * cdiv(N, BLOCK_N),)."""
    tile, column_tile = tile_in_bands(tl.program_id(0), num_row_tiles, tl.cdiv(N, BLOCK_N), GROUP_TILES)
    if tile >= tl.load(num_tiles_ptr + ZERO_TAIL):
        return
    group = tl.load(tiles_ptr + tile * 2).to(tl.int64)
    row = tl.load(bounds_ptr + group) + tl.load(tiles_ptr + tile * 2 + 1) * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.load(bounds_ptr + group + 1)
    row_mask = row < end
    # The tail (rows past the last group) has no matrix, bias or scales, so its rows become zeros.
    row_inside = row < tl.where(group < G, end, 0)
    row = row.to(tl.int64)
    column = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column_mask = column < N
    column_inside = column < tl.where(group < G, N, 0)
    a_row = row
    if row_to_token_ptr is not None:
        a_row = tl.load(row_to_token_ptr + row, mask=row_mask, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    total = multiply_tile(
        a_ptr + a_row[:, None] * a_strides[0] + k[None, :] * a_strides[1],
        a_strides[1],
        row_mask,
        b_ptr + group * b_strides[0] + k[:, None] * b_strides[1] + column[None, :] * b_strides[2],
        b_strides[1],
        column_mask,
        tl.where(group < G, K, 0),
        EVEN_K,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if extra_a_ptr is not None:
        total += multiply_tile(
            extra_a_ptr + row[:, None] * extra_a_strides[0] + k[None, :] * extra_a_strides[1],
            extra_a_strides[1],
            row_mask,
            extra_b_ptr + group * extra_b_strides[0] + k[:, None] * extra_b_strides[1] + column * extra_b_strides[2],
            extra_b_strides[1],
            column_mask,
            tl.where(group < G, EXTRA_K, 0),
            EXTRA_K % BLOCK_K == 0,
            PRECISION,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    if scale_a_ptr is not None:
        total *= tl.load(scale_a_ptr + a_row * scale_a_strides[0], mask=row_inside, other=0.0)[:, None]
    if scale_b_ptr is not None:
        scale_b_ptrs = scale_b_ptr + group * scale_b_strides[0] + column * scale_b_strides[1]
        total *= tl.load(scale_b_ptrs, mask=column_inside, other=0.0)[None, :]
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + group * bias_strides[0] + column * bias_strides[1]
        total += tl.load(bias_ptrs, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    if row_scale_ptr is not None:
        total *= tl.load(row_scale_ptr + row * row_scale_strides[0], mask=row_inside, other=0.0)[:, None]
    out_ptrs = out_ptr + row[:, None] * out_strides[0] + column[None, :] * out_strides[1]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


class PointerGroupedGemm(GroupedGemmKernel):
    """Computes the product of `GroupedGemmArguments`, without an epilogue. One program computes one tile of out."""

    def _launch(self, args: GroupedGemmArguments) -> Launch:
        num_columns = args.out.shape[1]
        design = self.metadata.design
        _, block_n, block_k = design.tile_shape
        table = self.tile_table(args)
        num_groups, depth, _ = args.B.shape
        capacity = table.tiles.shape[0]
        return Launch(
            _grouped_gemm_kernel,
            (capacity * cdiv(num_columns, block_n),),
            (
                *with_strides(args.A),
                args.row_to_token,
                *with_strides(args.B),
                *with_strides(args.out),
                *with_strides(args.bias),
                *with_strides(args.row_scale),
                *with_strides(args.scale_a),
                *with_strides(args.scale_b),
                *with_strides(args.extra_a),
                *with_strides(args.extra_b),
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
                "EXTRA_K": 0 if args.extra_a is None else args.extra_a.shape[1],
                "ZERO_TAIL": int(args.zero_tail),
                "PRECISION": dot_precision(args.A),
                **design.tile_options(),
            },
        )


EXTRA = ("extra_a", "extra_b")

# (tile shape, num_warps, num_stages). A tile's buffers fit into 99 KiB, the smallest shared memory of a supported GPU.
_HALF = [((128, 128, 64), 8, 3), ((64, 128, 64), 4, 3), ((16, 128, 64), 4, 3)]
_TILES = {
    # The last two tiles are narrow, because the matrices of adapters have few columns.
    torch.bfloat16: [*_HALF, ((128, 16, 64), 4, 4), ((128, 64, 64), 4, 4)],
    torch.float16: _HALF,
    torch.float32: [((64, 64, 16), 4, 3), ((16, 64, 16), 4, 2)],
    FLOAT8: [((128, 128, 128), 8, 3), ((16, 128, 128), 4, 3)],
}


def plain_forward(metadata: KernelMetadata) -> Any:
    """Return the device function of a kernel's plain (not gated) activation, or None without an activation."""
    return None if metadata.epilogue is None else PLAIN_EPILOGUES[metadata.epilogue].forward


def out_operand(dtype: torch.dtype) -> Operand:
    """Return the requirements on `out` for operands of `dtype`: the same dtype or float32. Results of float8 operands
    are 16-bit or float32, because float8 results would need a scale."""
    if dtype == FLOAT8:
        return Operand(torch.bfloat16, other_dtypes=(torch.float16, torch.float32))
    return Operand(dtype, other_dtypes=() if dtype == torch.float32 else (torch.float32,))


def _kernel(dtype: torch.dtype, design: PointerDesign) -> PointerGroupedGemm:
    operands = GemmOperands(Operand(dtype), Operand(dtype), out_operand(dtype))
    return PointerGroupedGemm(
        KernelMetadata(
            kernel_name("grouped_gemm", "pointer", dtype, design),
            PointerGroupedGemm,
            FLOAT8_CC if dtype == FLOAT8 else 80,
            operands,
            design,
            optional_operands=("bias", "row_scale", *(("scale_a", "scale_b") if dtype == FLOAT8 else EXTRA)),
        )
    )


POINTER_KERNELS = tuple(
    _kernel(dtype, PointerDesign(*tile, gather=gather))
    for dtype, tiles in _TILES.items()
    for tile in tiles
    for gather in ((False,) if dtype == FLOAT8 else (False, True))
)
