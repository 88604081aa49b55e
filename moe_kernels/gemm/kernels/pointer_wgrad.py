"""Weight gradient of a grouped GEMM, with operands loaded through pointers. Each reduction is over a group's rows."""

from __future__ import annotations

import torch

from ...runtime.launch import Launch, with_strides
from ...runtime.triton import cdiv, tl, triton
from ..arguments.grouped import WgradArguments
from ..kernel import KernelMetadata, Operand, PointerDesign, WgradOperands
from .families import WgradKernel, kernel_name
from .float32_products import add_product, dot_precision, zero_total
from .pointer import out_operand


@triton.jit
def _wgrad_kernel(
    a_ptr,
    a_strides,  # [R or T, K]
    a_row_to_token_ptr,  # [R], or None
    dout_ptr,
    dout_strides,  # [R or T, N]
    dout_row_to_token_ptr,  # [R], or None
    out_ptr,
    out_strides,  # [G, K, N]
    bounds_ptr,  # [G + 2]
    K,
    N,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program writes one [BLOCK_K, BLOCK_N] tile of A[start:end].T @ dout[start:end] to out[g]. With ACCUMULATE,
    the program adds the tile to out[g]. Grid: (G * cdiv(K, BLOCK_K) * cdiv(N, BLOCK_N),)."""
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    num_n_tiles = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (num_k_tiles * num_n_tiles)
    tile = tl.program_id(0) % (num_k_tiles * num_n_tiles)
    k = (tile % num_k_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = (tile // num_k_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(bounds_ptr + group)
    end = tl.load(bounds_ptr + group + 1)
    a_columns = k.to(tl.int64) * a_strides[1]
    dout_columns = n.to(tl.int64) * dout_strides[1]
    total = zero_total(BLOCK_K, BLOCK_N, PRECISION)  # [BLOCK_K, BLOCK_N]
    for first in range(start, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        row_mask = row < end
        a_row = row
        if a_row_to_token_ptr is not None:
            a_row = tl.load(a_row_to_token_ptr + row, mask=row_mask, other=0)
        dout_row = row
        if dout_row_to_token_ptr is not None:
            dout_row = tl.load(dout_row_to_token_ptr + row, mask=row_mask, other=0)
        a_ptrs = a_ptr + a_row.to(tl.int64)[:, None] * a_strides[0] + a_columns[None, :]
        dout_ptrs = dout_ptr + dout_row.to(tl.int64)[:, None] * dout_strides[0] + dout_columns[None, :]
        a = tl.load(a_ptrs, mask=row_mask[:, None] & (k < K)[None, :], other=0.0)
        dout = tl.load(dout_ptrs, mask=row_mask[:, None] & (n < N)[None, :], other=0.0)
        total = add_product(tl.trans(a), dout, total, end, PRECISION)
    out_ptrs = (
        out_ptr
        + group.to(tl.int64) * out_strides[0]
        + k.to(tl.int64)[:, None] * out_strides[1]
        + n.to(tl.int64)[None, :] * out_strides[2]
    )
    mask = (k < K)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        total += tl.load(out_ptrs, mask=mask, other=0.0).to(total.dtype)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


class PointerWgrad(WgradKernel):
    """Computes `out[g] = A[start:end].T @ dout[start:end]` (`+=` if `accumulate`), one tile per program."""

    accumulates = True

    def _launch(self, args: WgradArguments) -> Launch:
        design = self.metadata.design
        block_k, block_n, _ = design.tile_shape
        num_groups, size_k, size_n = args.out.shape
        return Launch(
            _wgrad_kernel,
            (num_groups * cdiv(size_k, block_k) * cdiv(size_n, block_n),),
            (
                *with_strides(args.A),
                args.a_row_to_token,
                *with_strides(args.dout),
                args.dout_row_to_token,
                *with_strides(args.out),
                self.tile_table(args).bounds,
                size_k,
                size_n,
            ),
            {
                "ACCUMULATE": args.accumulate,
                "PRECISION": dot_precision(args.A),
                **design.tile_options("KNR", grouped=False),
            },
        )


_HALF = [((128, 128, 64), 8, 3), ((64, 64, 32), 4, 3)]
_TILES = {
    torch.bfloat16: [*_HALF, ((16, 128, 64), 4, 4)],  # the last tile suits gradients of low-rank adapters
    torch.float16: _HALF,
    torch.float32: [((64, 64, 16), 4, 2)],
}


def _kernel(dtype: torch.dtype, design: PointerDesign) -> PointerWgrad:
    operands = WgradOperands(Operand(dtype), Operand(dtype), out_operand(dtype))
    name = kernel_name("wgrad", "pointer", dtype, design)
    return PointerWgrad(KernelMetadata(name, PointerWgrad, 80, operands, design))


POINTER_WGRAD_KERNELS = tuple(
    _kernel(dtype, PointerDesign(*tile, gather=gather))
    for dtype, tiles in _TILES.items()
    for tile in tiles
    for gather in (False, True)
)
