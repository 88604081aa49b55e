"""Grouped GEMM of e4m3 operands with block scales through pointers.

The kernels support all sizes and strides, and all GPUs that multiply e4m3. Tensor cores sum e4m3 products with about
14 bits (section 3.3.2 of https://arxiv.org/abs/2412.19437). The sum of every 128 products is therefore scaled and added
to a float32 total.
"""

from __future__ import annotations

import torch

from ...reference_fp8 import BLOCK
from ...runtime.dispatch import FLOAT8, FLOAT8_CC
from ...runtime.launch import Launch, with_strides
from ...runtime.triton import INTERPRET as _INTERPRET
from ...runtime.triton import cdiv, tl, triton
from ..arguments.block_scaled import BlockScaledGemmArguments
from ..kernel import GemmOperands, KernelMetadata, Operand, PointerDesign, Status
from .families import RowTileKernel, kernel_name, tma_status
from .pointer import tile_in_bands

INTERPRET = tl.constexpr(_INTERPRET)  # pyright: ignore[reportCallIssue]  # pyright takes tl.constexpr for Any


@triton.jit(do_not_specialize=["num_row_tiles"])
def _block_scaled_kernel(
    a_ptr,
    a_strides,  # [R or T, K]
    scale_a_ptr,
    scale_a_strides,  # [R or T, cdiv(K, 128)]
    row_to_token_ptr,  # [R], or None
    b_ptr,
    b_strides,  # [G, K, N]
    scale_b_ptr,
    scale_b_strides,  # [G, cdiv(K, 128), cdiv(N, 128)]
    out_ptr,
    out_strides,  # [R, N]
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [4]
    num_row_tiles,  # capacity: maximum number of row tiles
    G,
    K,
    N,
    EVEN_K: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a divisor of 128
    BLOCK_K: tl.constexpr,  # 128
):
    """One program writes one tile of (A * scale_a) @ (B * scale_b)[g]. Programs past the last tile return at once.
    Grid: (num_row_tiles * cdiv(N, BLOCK_N),)."""
    tile, column_tile = tile_in_bands(tl.program_id(0), num_row_tiles, tl.cdiv(N, BLOCK_N), GROUP_TILES)
    if tile >= tl.load(num_tiles_ptr + ZERO_TAIL):
        return
    group = tl.load(tiles_ptr + tile * 2).to(tl.int64)
    row = tl.load(bounds_ptr + group) + tl.load(tiles_ptr + tile * 2 + 1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row < tl.load(bounds_ptr + group + 1)
    row = row.to(tl.int64)
    first_column = column_tile * BLOCK_N
    column = (first_column + tl.arange(0, BLOCK_N)).to(tl.int64)
    column_mask = column < N
    a_row = row
    if row_to_token_ptr is not None:
        a_row = tl.load(row_to_token_ptr + row, mask=row_mask, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + a_row[:, None] * a_strides[0] + k[None, :] * a_strides[1]
    b_ptrs = b_ptr + group * b_strides[0] + k[:, None] * b_strides[1] + column[None, :] * b_strides[2]
    scale_a_ptrs = scale_a_ptr + a_row * scale_a_strides[0]
    scale_b_ptr += group * scale_b_strides[0] + (first_column // 128).to(tl.int64) * scale_b_strides[2]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    # The tail (rows past the last group) has no matrix, so its rows become zeros.
    for first in range(0, tl.where(group < G, K, 0), BLOCK_K):
        a_mask, b_mask = row_mask[:, None], column_mask[None, :]
        if not EVEN_K:
            a_mask &= (first + k < K)[None, :]
            b_mask &= (first + k < K)[:, None]
        product = _product(tl.load(a_ptrs, mask=a_mask, other=0.0), tl.load(b_ptrs, mask=b_mask, other=0.0))
        scale = tl.load(scale_a_ptrs, mask=row_mask, other=0.0) * tl.load(scale_b_ptr)
        total += product * scale[:, None]
        a_ptrs += BLOCK_K * a_strides[1]
        b_ptrs += BLOCK_K * b_strides[1]
        scale_a_ptrs += scale_a_strides[1]
        scale_b_ptr += scale_b_strides[1]
    out_ptrs = out_ptr + row[:, None] * out_strides[0] + column[None, :] * out_strides[1]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _product(a, b):
    if INTERPRET:  # the interpreter cannot multiply e4m3
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


class BlockScaledKernel(RowTileKernel):
    """Base of kernels that compute the product described by `BlockScaledGemmArguments`."""

    arguments_class = BlockScaledGemmArguments

    def supports_design(self, args: BlockScaledGemmArguments) -> Status:
        if error := self._index_error(args):
            return Status(f"Operand `row_to_token`: {error}")
        return tma_status(self.metadata.design, len(args.out), args.A, args.B)


class PointerBlockScaledGemm(BlockScaledKernel):
    """Computes the product of `BlockScaledGemmArguments` through pointers. One program computes one tile of out."""

    def _launch(self, args: BlockScaledGemmArguments) -> Launch:
        design = self.metadata.design
        table = self.tile_table(args)
        num_groups, depth, num_columns = args.B.shape
        capacity = table.tiles.shape[0]
        return Launch(
            _block_scaled_kernel,
            (capacity * cdiv(num_columns, design.tile_shape[1]),),
            (
                *with_strides(args.A),
                *with_strides(args.scale_a),
                args.row_to_token,
                *with_strides(args.B),
                *with_strides(args.scale_b),
                *with_strides(args.out),
                table.bounds,
                table.tiles,
                table.num_tiles,
                capacity,
                num_groups,
                depth,
                num_columns,
            ),
            {"EVEN_K": depth % BLOCK == 0, "ZERO_TAIL": int(args.zero_tail), **design.tile_options()},
        )


def _kernel(design: PointerDesign) -> PointerBlockScaledGemm:
    out = Operand(torch.bfloat16, other_dtypes=(torch.float16, torch.float32))
    operands = GemmOperands(Operand(FLOAT8), Operand(FLOAT8), out)
    name = kernel_name("block_scaled_gemm", "pointer", FLOAT8, design)
    return PointerBlockScaledGemm(KernelMetadata(name, PointerBlockScaledGemm, FLOAT8_CC, operands, design))


# The buffers of each tile fit into 99 KiB, the smallest shared memory of a GPU that multiplies e4m3.
_TILES = [((128, 128, 128), 8, 3), ((64, 128, 128), 4, 3)]

BLOCK_SCALED_KERNELS = tuple(
    _kernel(PointerDesign(*tile, gather=gather)) for tile in _TILES for gather in (False, True)
)
