"""Persistent, software-pipelined grouped GEMM. TMA loads B and contiguous rows of A. Gathered rows of A need pointers.

The output is written through ragged descriptors, so a tile that is only partly in a group writes only the group's rows.
With an activation, a tile multiplies A by the same columns of B's gate half and up half. Both products are rounded and
stored in `preactivation`. The kernel adds the bias to the rounded products and writes the activation of the sums to
`out`. Without an activation, the bias is added before the product is rounded.
"""

from __future__ import annotations

import torch

from ...activation.functions import EPILOGUES
from ...runtime.launch import DESCRIPTOR_BYTES, Launch, with_strides
from ...runtime.triton import tl, triton
from ..arguments.grouped import GroupedGemmArguments
from ..kernel import GemmOperands, KernelMetadata, Operand, TmaDesign
from .families import GroupedGemmKernel, kernel_name, num_programs
from .pointer import tile_in_bands
from .ragged import ragged_descriptor, store_ragged


@triton.jit(do_not_specialize=["num_a_rows"])
def _tma_kernel(
    a_ptr,  # [R or T, K], contiguous along K
    a_stride,
    num_a_rows,
    row_to_token_ptr,  # [R], or None
    b_ptr,  # [G, K, N], contiguous along K if B_COLUMN, else along N
    b_group_stride,
    b_stride,  # stride of the axis that is not contiguous
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
    EVEN_K: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    B_COLUMN: tl.constexpr,
    FORWARD: tl.constexpr,  # function of the activation, or None
    FLATTEN: tl.constexpr,  # whether one software pipeline spans all tiles of a program
    GROUP_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each program writes every num_programs-th tile of FORWARD(A @ B[g] + bias[g]). Grid: (number of SMs,)."""
    HALF_N: tl.constexpr = BLOCK_N // 2
    GATED: tl.constexpr = FORWARD is not None
    if row_to_token_ptr is None:
        a_desc = tl.make_tensor_descriptor(a_ptr, [num_a_rows, K], [a_stride, 1], [BLOCK_M, BLOCK_K])
    else:
        # Rounding changes nothing, but tells the compiler that 8 divides a_stride and K, as 16-byte copies require.
        a_stride = a_stride // 8 * 8
        K = K // 8 * 8
    if GATED:
        # One load fetches the same columns of the gate half and the up half.
        columns = N // 2
        up_offset = columns * b_stride.to(tl.int64)
        b_desc = tl.make_tensor_descriptor(
            b_ptr, [G, 2, columns, K], [b_group_stride, up_offset, b_stride, 1], [1, 2, HALF_N, BLOCK_K]
        )
        up_ptr = product_ptr + columns
        left_desc = ragged_descriptor(product_ptr, product_stride, columns, BLOCK_M, HALF_N)
        right_desc = ragged_descriptor(up_ptr, product_stride, columns, BLOCK_M, HALF_N)
        activated_desc = ragged_descriptor(activated_ptr, activated_stride, columns, BLOCK_M, HALF_N)
        num_column_tiles = tl.cdiv(columns, HALF_N)
    else:
        if B_COLUMN:
            b_desc = tl.make_tensor_descriptor(b_ptr, [G, N, K], [b_group_stride, b_stride, 1], [1, BLOCK_N, BLOCK_K])
        else:
            b_desc = tl.make_tensor_descriptor(b_ptr, [G, K, N], [b_group_stride, b_stride, 1], [1, BLOCK_K, BLOCK_N])
        left_desc = ragged_descriptor(product_ptr, product_stride, N, BLOCK_M, HALF_N)
        num_column_tiles = tl.cdiv(N, BLOCK_N)
    dtype: tl.constexpr = product_ptr.dtype.element_ty
    num_row_tiles = tl.load(num_tiles_ptr)
    k_range = tl.arange(0, BLOCK_K)
    num_tiles = num_row_tiles * num_column_tiles
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        row_tile, column_tile = tile_in_bands(tile, num_row_tiles, num_column_tiles, GROUP_TILES)
        group = tl.load(tiles_ptr + 2 * row_tile)
        end = tl.load(bounds_ptr + group + 1)
        row = tl.load(bounds_ptr + group) + tl.load(tiles_ptr + 2 * row_tile + 1) * BLOCK_M
        if row_to_token_ptr is not None:
            rows = row + tl.arange(0, BLOCK_M)
            # Rows past the end of the group read token 0. Products of these rows are not written.
            token = tl.load(row_to_token_ptr + rows, mask=rows < end, other=0).to(tl.int64)
            a_ptrs = a_ptr + token[:, None] * a_stride + k_range[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
        for k in range(0, K, BLOCK_K):
            if row_to_token_ptr is None:
                a = a_desc.load([row, k])
            elif EVEN_K:
                a = tl.load(a_ptrs + k)
            else:
                a = tl.load(a_ptrs + k, mask=(k + k_range < K)[None, :], other=0.0)
            if GATED:
                b = b_desc.load([group, 0, column_tile * HALF_N, k]).reshape(BLOCK_N, BLOCK_K)
                total = tl.dot(a, b.T, total)
            elif B_COLUMN:
                b = b_desc.load([group, column_tile * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K)
                total = tl.dot(a, b.T, total)
            else:
                b = b_desc.load([group, k, column_tile * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
                total = tl.dot(a, b, total)
        if bias_ptr is not None and not GATED:
            n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
            total += load_bias(bias_ptr, bias_strides, group, n, n < N)
        left, right = total.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1).split()
        left, right = left.to(dtype), right.to(dtype)
        if GATED:
            column = column_tile * HALF_N
            store_ragged(left_desc, row, end, column, left, BLOCK_M, HALF_N)
            store_ragged(right_desc, row, end, column, right, BLOCK_M, HALF_N)
            gate, up = left.to(tl.float32), right.to(tl.float32)
            if bias_ptr is not None:
                f = column + tl.arange(0, HALF_N)
                gate += load_bias(bias_ptr, bias_strides, group, f, f < columns)
                up += load_bias(bias_ptr, bias_strides, group, columns + f, f < columns)
            store_ragged(activated_desc, row, end, column, FORWARD(gate, up).to(dtype), BLOCK_M, HALF_N)
        else:
            store_ragged(left_desc, row, end, column_tile * BLOCK_N, left, BLOCK_M, HALF_N)
            store_ragged(left_desc, row, end, column_tile * BLOCK_N + HALF_N, right, BLOCK_M, HALF_N)
    if ZERO_TAIL:
        zeros = tl.zeros((BLOCK_M, HALF_N), dtype)
        all_tiles = tl.load(num_tiles_ptr + 1) * num_column_tiles
        for tile in range(num_tiles + tl.program_id(0), all_tiles, tl.num_programs(0)):
            row_tile = tile // num_column_tiles
            column_tile = tile % num_column_tiles
            end = tl.load(bounds_ptr + G + 1)
            row = tl.load(bounds_ptr + G) + tl.load(tiles_ptr + 2 * row_tile + 1) * BLOCK_M
            if GATED:
                store_ragged(left_desc, row, end, column_tile * HALF_N, zeros, BLOCK_M, HALF_N)
                store_ragged(right_desc, row, end, column_tile * HALF_N, zeros, BLOCK_M, HALF_N)
                store_ragged(activated_desc, row, end, column_tile * HALF_N, zeros, BLOCK_M, HALF_N)
            else:
                store_ragged(left_desc, row, end, column_tile * BLOCK_N, zeros, BLOCK_M, HALF_N)
                store_ragged(left_desc, row, end, column_tile * BLOCK_N + HALF_N, zeros, BLOCK_M, HALF_N)


@triton.jit
def load_bias(bias_ptr, bias_strides, group, column, mask):
    """Return the group's biases of these columns, [1, number of columns] float32."""
    pointers = bias_ptr + group.to(tl.int64) * bias_strides[0] + column.to(tl.int64) * bias_strides[1]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)[None, :]


class TmaGroupedGemm(GroupedGemmKernel):
    """Computes `out[start:end] = A[start:end] @ B[g]`, optionally with gathered A, a bias and an activation."""

    def scratch_bytes(self, args: GroupedGemmArguments) -> int:
        num_descriptors = 2 + (not self.metadata.design.gather) + 2 * (self.metadata.epilogue is not None)
        return DESCRIPTOR_BYTES * num_descriptors * num_programs(args.A)

    def _launch(self, args: GroupedGemmArguments) -> Launch:
        design = self.metadata.design
        _, _, block_k = design.tile_shape
        table = self.tile_table(args)
        num_groups, depth, num_columns = args.B.shape
        stride_g, stride_k, stride_n = args.B.stride()
        b_column = self.metadata.operands.B.layout == "column"
        gated = self.metadata.epilogue is not None
        product = args.product
        return Launch(
            _tma_kernel,
            (num_programs(args.A, args.reserved_sms),),
            (
                args.A,
                args.A.stride(0),
                args.A.shape[0],
                args.row_to_token,
                args.B,
                stride_g,
                stride_n if b_column else stride_k,
                *with_strides(args.bias),
                product,
                product.stride(0),
                args.out if gated else None,
                args.out.stride(0),
                table.bounds,
                table.tiles,
                table.num_tiles,
                num_groups,
                depth,
                num_columns,
            ),
            {
                "EVEN_K": depth % block_k == 0,
                "ZERO_TAIL": args.zero_tail,
                "B_COLUMN": b_column,
                "FORWARD": EPILOGUES[self.metadata.epilogue].forward if gated else None,
                "FLATTEN": design.flatten,
                **design.tile_options(),
            },
        )


def _design(tile: tuple[int, int, int], num_warps: int, num_stages: int, **options: bool) -> TmaDesign:
    return TmaDesign(tile, num_warps, num_stages, persistent=True, tma=True, **options)


def _kernel(
    dtype: torch.dtype, design: TmaDesign, b_layout: str, epilogue: str | None, min_cc: int, max_cc: int
) -> TmaGroupedGemm:
    tma = Operand(dtype, "row", 16)
    operands = GemmOperands(tma, Operand(dtype, b_layout, 16), tma)
    flat = "flat" if design.flatten else None
    name = kernel_name("grouped_gemm", "tma", dtype, design, flat, f"b_{b_layout}", epilogue)
    # A gather together with an activation leaves no registers for a bias.
    optional = () if design.gather and epilogue is not None else ("bias",)
    cls = TmaGroupedGemm
    return cls(KernelMetadata(name, cls, min_cc, operands, design, epilogue, max_cc, optional_operands=optional))


# On Hopper, `flatten` made only kernels without a gather faster. Tiles below 128 x 256 were never the fastest.
_FLAT = _design((128, 256, 64), 8, 4, flatten=True)
_GATHER = _design((128, 256, 64), 8, 4, gather=True)
# Blackwell was not measured. With three stages instead of four, a kernel with `flatten` and a bias fits into shared
# memory. Kernels with an activation are left out on Blackwell, because they spill registers.
_FLAT_BLACKWELL = _design((128, 256, 64), 8, 3, flatten=True)
_PLAIN, _FUSED = (("column", None), ("row", None)), (("column", "swiglu"),)

TMA_KERNELS = tuple(
    _kernel(dtype, design, layout, epilogue, min_cc, max_cc)
    for dtype in (torch.bfloat16, torch.float16)
    for design, forms, min_cc, max_cc in (
        (_FLAT, (*_PLAIN, *_FUSED), 90, 90),
        (_GATHER, _PLAIN, 90, 103),
        (_GATHER, _FUSED, 90, 90),
        (_FLAT_BLACKWELL, _PLAIN, 100, 103),
    )
    for layout, epilogue in forms
)
