"""Grouped GEMM for few rows per group, from compute capability 8.0. Reading the weights takes most of the time.

Tiles of 16 to 64 rows and few columns give many programs. Several programs share an SM, so that many bytes of the
weights are in flight. Each step of the reduction reads long pieces of the weight's rows.
"""

from __future__ import annotations

import math

import torch

from ...activation.functions import EPILOGUES
from ...runtime.launch import Launch, with_strides
from ...runtime.row_layout import alignment
from ...runtime.triton import cdiv, tl, triton
from ..arguments.base import rows_bucket
from ..arguments.grouped import GroupedGemmArguments
from ..kernel import SUPPORTED, GemmOperands, KernelMetadata, Operand, Status, StreamingDesign
from .families import GroupedGemmKernel, kernel_name
from .tma import load_bias

_TABLE_ROWS = 128  # number of rows per tile in tables made for these kernels; tables with other tile sizes also work
# Largest average number of rows per group that the kernels accept. With more rows, warp-specialised kernels are faster.
# The number must be a power of two, because selection rounds the average up to a power of two (`rows_bucket`).
_MOST_ROWS = 32
_READING = 100  # cost of reading one value of a weight, in multiplications
_SHORT_REDUCTION = 1024  # up to this K, `estimate` prefers reduction steps of 128 values to steps of 256


@triton.jit
def _multiply(
    a_ptrs,  # [BLOCK_M, BLOCK_K] of the first step
    row_mask,  # [BLOCK_M]
    b_ptrs,  # [BLOCK_K, BLOCK]
    up_offset,  # number of elements from the gate half of B to the up half
    column_mask,  # [BLOCK]
    depth,  # K, or 0 to return zeros
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the float32 product of A and BLOCK columns of B. If GATED, also return the product of A and the same
    columns of B's up half. Otherwise the second result is zeros."""
    k = tl.arange(0, BLOCK_K)
    product = tl.zeros((BLOCK_M, BLOCK), tl.float32)  # [BLOCK_M, BLOCK]
    up = product
    for first in range(0, depth, BLOCK_K):
        a_mask = row_mask[:, None]
        b_mask = column_mask[None, :]
        if not EVEN_K:
            a_mask &= (first + k < depth)[None, :]
            b_mask &= (first + k < depth)[:, None]
        a = tl.load(a_ptrs + first, mask=a_mask, other=0.0)
        product = tl.dot(a, tl.load(b_ptrs + first, mask=b_mask, other=0.0), product)
        if GATED:
            up = tl.dot(a, tl.load(b_ptrs + up_offset + first, mask=b_mask, other=0.0), up)
    return product, up


@triton.jit
def _streaming_kernel(
    a_ptr,  # [R or T, K], contiguous along K
    a_stride,
    row_to_token_ptr,  # [R], or None
    b_ptr,  # [G, K, N], contiguous along K
    b_group_stride,
    b_stride,
    bias_ptr,  # [G, N], or None
    bias_strides,
    product_ptr,  # [R, N]: out, or the preactivation if there is an activation
    product_stride,
    activated_ptr,  # [R, N / 2], or None
    activated_stride,
    bounds_ptr,  # [G + 2]
    tiles_ptr,  # [capacity, 2]
    num_tiles_ptr,  # [4]
    G,
    K,
    N,
    ALIGNED: tl.constexpr,  # a divisor of K and of the strides of A and B
    EVEN_K: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    FORWARD: tl.constexpr,  # activation, or None
    TABLE_ROWS: tl.constexpr,  # number of rows per tile in the tile table
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program writes BLOCK_N columns of A @ B[g] for the rows of one table tile, BLOCK_M rows at a time. With
    FORWARD, the activation is written, too. Grid: (capacity * cdiv(columns of out, columns of out per program),)."""
    GATED: tl.constexpr = FORWARD is not None
    BLOCK: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # number of columns of out in a tile
    columns = N // 2 if GATED else N  # number of columns of out
    column_tiles = tl.cdiv(columns, BLOCK)
    tile = tl.program_id(0) // column_tiles
    first = tl.program_id(0) % column_tiles * BLOCK
    # Load the table entry before checking the number of tiles, so that both loads overlap. Programs past the last tile
    # do not use their entry.
    group = tl.load(tiles_ptr + 2 * tile)
    place = tl.load(tiles_ptr + 2 * tile + 1)
    if tile >= tl.load(num_tiles_ptr + ZERO_TAIL):
        return
    start = tl.load(bounds_ptr + group) + place * TABLE_ROWS
    end = tl.minimum(tl.load(bounds_ptr + group + 1), start + TABLE_ROWS)
    # The tail (rows past the last group) has no matrix and no bias, so its rows become zeros.
    depth = tl.where(group < G, K // ALIGNED * ALIGNED, 0)
    matrix = tl.minimum(group, G - 1).to(tl.int64)
    column = first + tl.arange(0, BLOCK)
    column_mask = column < columns
    bias_mask = column < tl.where(group < G, columns, 0)
    k = tl.arange(0, BLOCK_K)
    b_stride = b_stride.to(tl.int64) // ALIGNED * ALIGNED
    b_ptr += matrix * (b_group_stride // ALIGNED * ALIGNED)
    b_ptrs = b_ptr + k[:, None] + column[None, :] * b_stride
    for first_row in range(start, end, BLOCK_M):
        row = first_row + tl.arange(0, BLOCK_M)
        row_mask = row < end
        token = row
        if row_to_token_ptr is not None:
            token = tl.load(row_to_token_ptr + row, mask=row_mask, other=0)
        a_ptrs = a_ptr + token.to(tl.int64)[:, None] * (a_stride // ALIGNED * ALIGNED) + k[None, :]
        product, up = _multiply(
            a_ptrs, row_mask, b_ptrs, columns * b_stride, column_mask, depth, GATED, EVEN_K, BLOCK_M, BLOCK, BLOCK_K
        )  # [BLOCK_M, BLOCK]
        if bias_ptr is not None and not GATED:
            product += load_bias(bias_ptr, bias_strides, matrix, column, bias_mask)
        row = row.to(tl.int64)[:, None]
        mask = row_mask[:, None] & column_mask[None, :]
        product_ptrs = product_ptr + row * product_stride + column[None, :]
        if GATED:
            gate, up = product.to(product_ptr.dtype.element_ty), up.to(product_ptr.dtype.element_ty)
            tl.store(product_ptrs, gate, mask=mask)
            tl.store(product_ptrs + columns, up, mask=mask)
            gate, up = gate.to(tl.float32), up.to(tl.float32)
            if bias_ptr is not None:
                gate += load_bias(bias_ptr, bias_strides, matrix, column, bias_mask)
                up += load_bias(bias_ptr, bias_strides, matrix, columns + column, bias_mask)
            activated = FORWARD(gate, up)
            activated_ptrs = activated_ptr + row * activated_stride + column[None, :]
            tl.store(activated_ptrs, activated.to(activated_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(product_ptrs, product.to(product_ptr.dtype.element_ty), mask=mask)


class StreamingGroupedGemm(GroupedGemmKernel):
    """Computes grouped GEMMs with B stored as [G, N, K]. A may be gathered. An epilogue must be a gated activation."""

    @property
    def epilogues(self) -> tuple[str, ...]:
        return () if self.metadata.epilogue is None else tuple(EPILOGUES)

    def _index_error(self, args: GroupedGemmArguments) -> str | None:
        return None

    def supports_design(self, args: GroupedGemmArguments) -> Status:
        if not (status := super().supports_design(args)):
            return status
        if (rows := cdiv(args.num_rows, args.B.shape[0])) > _MOST_ROWS:
            return Status(f"expected at most {_MOST_ROWS} rows per group on average, got {rows}")
        return SUPPORTED

    def estimate(self, args: GroupedGemmArguments) -> float:
        """Return the cost of one group for one index along K, in multiplications. Each row tile reads the weight again.
        Tiles are counted for the average number of rows plus two standard deviations: most groups have fewer rows."""
        num_groups, depth, num_columns = args.B.shape
        rows, _, block_k = self.metadata.design.tile_shape
        average = rows_bucket(args.num_rows, num_groups)
        passes = cdiv(math.ceil(average + 2 * math.sqrt(average)), rows)
        misfit = rows == 16 and (block_k == 128) != (depth <= _SHORT_REDUCTION)
        return passes * (_READING + rows / 16 + misfit) * num_columns

    @property
    def _table_rows(self) -> int:
        return _TABLE_ROWS

    def _has_table(self, args: GroupedGemmArguments) -> bool:
        return args.tile_table is not None

    def _launch(self, args: GroupedGemmArguments) -> Launch:
        design, epilogue = self.metadata.design, self.metadata.epilogue
        _, block_n, block_k = design.tile_shape
        table = self.tile_table(args)
        num_groups, depth, num_columns = args.B.shape
        product = args.product
        activated = None if epilogue is None else args.out
        block = block_n if epilogue is None else block_n // 2
        return Launch(
            _streaming_kernel,
            (table.tiles.shape[0] * cdiv(args.out.shape[1], block),),
            (
                args.A,
                args.A.stride(0),
                args.row_to_token,
                args.B,
                args.B.stride(0),
                args.B.stride(2),
                *with_strides(args.bias),
                product,
                product.stride(0),
                activated,
                0 if activated is None else activated.stride(0),
                table.bounds,
                table.tiles,
                table.num_tiles,
                num_groups,
                depth,
                num_columns,
            ),
            {
                "ALIGNED": alignment(depth, args.A.stride(0), args.B.stride(0), args.B.stride(2)),
                "EVEN_K": depth % block_k == 0,
                "ZERO_TAIL": int(args.zero_tail),
                "FORWARD": None if epilogue is None else EPILOGUES[epilogue].forward,
                "TABLE_ROWS": table.block_rows,
                **design.tile_options(grouped=False),
            },
        )


def _kernel(dtype: torch.dtype, design: StreamingDesign, epilogue: str | None) -> StreamingGroupedGemm:
    result = Operand(dtype, "row", other_dtypes=() if epilogue else (torch.float32,))
    operands = GemmOperands(Operand(dtype, "row", 16), Operand(dtype, "column", 16), result)
    name = kernel_name("grouped_gemm", "streaming", dtype, design, epilogue)
    cls = StreamingGroupedGemm
    return cls(KernelMetadata(name, cls, 80, operands, design, epilogue, optional_operands=("bias",)))


# The designs below were the fastest of 17 configurations on an H100 (`benchmarks/results/LOG.md`). `_PLAIN[0]` is for
# short reductions. The gate and up halves of a gated tile must be wider than 16 columns. With 16 columns, Triton stores
# by `stmatrix.trans`, which Triton up to 3.7.0 miscompiles (`tests/machine_code/compiled.py`).
_PLAIN = (StreamingDesign((16, 32, 128), 2, 4), StreamingDesign((16, 32, 256), 2, 3))
_GATED = (StreamingDesign((16, 64, 256), 4, 3),)
_MORE_ROWS = (StreamingDesign((32, 64, 128), 4, 3), StreamingDesign((64, 64, 64), 4, 5))

STREAMING_KERNELS = tuple(
    _kernel(dtype, design, epilogue)
    for dtype in (torch.bfloat16, torch.float16)
    for epilogue, designs in ((None, _PLAIN), ("swiglu", _GATED))
    for design in (*designs, *_MORE_ROWS)
)
