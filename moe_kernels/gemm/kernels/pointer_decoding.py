"""Grouped GEMM for few rows per expert. The kernels decode quantised weights while loading the weights.

With few rows per expert, reading the weights takes most of the time. The kernels read only the stored bytes of experts
that have rows. Decoded values equal the results of `dequantize` in A's dtype, bit for bit. Products are accumulated in
float32 and rounded once. For many rows, dequantising before the GEMM is faster, for two reasons. First, the kernels
decode the weight again for every tile of rows. Second, the fastest GEMM kernels load dequantised operands by TMA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantization.kernels import decode_tile, form_of, kernel_arguments
from ...runtime.launch import Launch, with_strides
from ...runtime.triton import cdiv, tl, triton
from ..arguments.decoding import DecodingGemmArguments
from ..kernel import SUPPORTED, Kernel, KernelMetadata, Operand, PointerDesign, Status
from .families import kernel_name
from .float32_products import add_product, dot_precision, zero_total
from .pointer import multiply_tile

# With at least this average number of rows per expert, weights are dequantised before the GEMM. By calculation, writing
# and reading the dequantised weight takes 0.4 of the GEMM's time with 512 rows, and less with more rows.
MAX_ROWS = 512

# Cost of decoding one value, in tensor-core multiplications: about 6 instructions, and an SM executes 128 per clock.
_DECODING = 40
_CACHE_LINE = 128  # number of 8-bit values in a cache line


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
    num_tiles_ptr,  # [4]
    OUT: tl.constexpr,  # number of rows of each stored matrix
    IN: tl.constexpr,
    FORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # whether B[g] is the transpose of the stored matrix [OUT, IN]
    EXTRA_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # number of rows of a tile in the table
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program writes BLOCK_N columns of A @ B[g] + bias[g] for one tile of the table, BLOCK_M rows at a time.
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


@dataclass(frozen=True)
class DecodingGemmOperands:
    """Requirements on A and out in out[start:end] = A[start:end] @ B[g]. B is quantised and has no `Operand`."""

    A: Operand
    out: Operand


class DecodingGemm(Kernel):
    """Computes grouped GEMMs with a quantised B of any format, with or without a gather. A program computes a tile."""

    arguments_class = DecodingGemmArguments

    def supports_design(self, args: DecodingGemmArguments) -> Status:
        return SUPPORTED

    def estimate(self, args: DecodingGemmArguments) -> float:
        """Return the cost of one group for one index along K, in multiplications. Each tile of rows decodes the weight
        again. If a tile loads less than a cache line of each stored row, decoding costs 10 % more."""
        block_m, block_n, block_k = self.metadata.design.tile_shape
        row_tiles = max(cdiv(args.rows_per_group, block_m), 1)
        decoding = _DECODING if (block_k if args.transposed else block_n) >= _CACHE_LINE else 1.1 * _DECODING
        return row_tiles * (block_m + decoding) * cdiv(args.B.shape[2], block_n) * block_n

    def _launch(self, args: DecodingGemmArguments) -> Launch:
        table, design = args.tile_table, self.metadata.design
        assert table is not None
        weight, num_columns = args.B.weight, args.out.shape[1]
        return Launch(
            _decoding_gemm_kernel,
            (table.tiles.shape[0] * cdiv(num_columns, design.tile_shape[1]),),
            (
                *with_strides(args.A),
                args.row_to_token,
                *kernel_arguments(weight),
                *with_strides(args.out),
                *with_strides(args.bias),
                *with_strides(args.extra_a),
                *with_strides(args.extra_b),
                table.bounds,
                table.tiles,
                table.num_tiles,
            ),
            {
                "OUT": args.shape[1],
                "IN": args.shape[2],
                "FORM": form_of(weight),
                "TRANSPOSED": args.transposed,
                "EXTRA_K": 0 if args.extra_a is None else args.extra_a.shape[1],
                "PRECISION": _precision(args.A),
                "TILE_ROWS": table.block_rows,
                **design.tile_options(grouped=False),
            },
        )


def _precision(a: Tensor) -> str | None:
    """Return `dot_precision(a)`, with "float32" in place of "float64". Triton up to 3.8 cannot compile float64 products
    of operands that are decoded from bytes."""
    precision = dot_precision(a)
    return "float32" if precision == "float64" else precision


_HALF = [((16, 64, 64), 4, 4), ((16, 64, 128), 4, 4), ((64, 64, 64), 4, 3), ((128, 128, 64), 8, 3)]
_TILES = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: [((16, 32, 32), 4, 2)]}


def _kernel(dtype: torch.dtype, design: PointerDesign) -> DecodingGemm:
    operands = DecodingGemmOperands(Operand(dtype), Operand(dtype))
    name = kernel_name("decoding_gemm", "pointer", dtype, design)
    optional = ("bias", "extra_a", "extra_b")
    return DecodingGemm(KernelMetadata(name, DecodingGemm, 80, operands, design, optional_operands=optional))


DECODING_KERNELS = tuple(_kernel(dtype, PointerDesign(*tile)) for dtype, tiles in _TILES.items() for tile in tiles)
