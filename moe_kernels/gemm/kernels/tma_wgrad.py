"""Weight gradient through TMA. Loads return zeros past a group's end. One operand or both may be gathered."""

from __future__ import annotations

import torch

from ...runtime.launch import DESCRIPTOR_BYTES, Launch
from ...runtime.triton import tl, triton
from ..arguments.grouped import WgradArguments
from ..kernel import KernelMetadata, Operand, TmaDesign, WgradOperands
from .families import WgradKernel, kernel_name, num_programs
from .pointer import tile_in_bands
from .ragged import load_ragged, ragged_descriptor


@triton.jit
def _gathered(ptr, stride, row_to_token_ptr, rows, columns, end, num_columns):
    """Load `columns` of the tokens row_to_token[rows], with zeros from row `end` on."""
    # Rounding changes nothing, but tells the compiler that 8 divides row length and stride, as 16-byte copies require.
    stride = stride // 8 * 8
    num_columns = num_columns // 8 * 8
    inside = rows < end
    token = tl.load(row_to_token_ptr + rows, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (columns < num_columns)[None, :]
    return tl.load(ptr + token[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _tma_wgrad_kernel(
    a_ptr,  # [R or T, K], contiguous along K
    a_stride,
    a_row_to_token_ptr,  # [R], or None
    dout_ptr,  # [R or T, N], contiguous along N
    dout_stride,
    dout_row_to_token_ptr,  # [R], or None
    out_ptr,  # [G, K, N], contiguous along N
    out_group_stride,
    out_stride,
    bounds_ptr,  # [G + 2]
    G,
    K,
    N,
    GROUP_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Each program writes every num_programs-th [BLOCK_K, BLOCK_N] tile of A.T @ dout. Grid: (number of SMs,)."""
    num_k_tiles = tl.cdiv(K, BLOCK_K)
    num_n_tiles = tl.cdiv(N, BLOCK_N)
    if a_row_to_token_ptr is None:
        a_desc = ragged_descriptor(a_ptr, a_stride, K, BLOCK_R, BLOCK_K)
    if dout_row_to_token_ptr is None:
        dout_desc = ragged_descriptor(dout_ptr, dout_stride, N, BLOCK_R, BLOCK_N)
    out_desc = tl.make_tensor_descriptor(out_ptr, [G, K, N], [out_group_stride, out_stride, 1], [1, BLOCK_K, BLOCK_N])
    for tile in range(tl.program_id(0), G * num_k_tiles * num_n_tiles, tl.num_programs(0)):
        group = tile // (num_k_tiles * num_n_tiles)
        local = tile % (num_k_tiles * num_n_tiles)
        k_tile, n_tile = tile_in_bands(local, num_k_tiles, num_n_tiles, GROUP_TILES)
        k, n = k_tile * BLOCK_K, n_tile * BLOCK_N
        start = tl.load(bounds_ptr + group)
        end = tl.load(bounds_ptr + group + 1)
        total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)  # [BLOCK_K, BLOCK_N]
        for row in range(start, end, BLOCK_R):
            rows = row + tl.arange(0, BLOCK_R)
            if a_row_to_token_ptr is None:
                a = load_ragged(a_desc, row, end, k, BLOCK_R, BLOCK_K)
            else:
                a = _gathered(a_ptr, a_stride, a_row_to_token_ptr, rows, k + tl.arange(0, BLOCK_K), end, K)
            if dout_row_to_token_ptr is None:
                dout = load_ragged(dout_desc, row, end, n, BLOCK_R, BLOCK_N)
            else:
                columns = n + tl.arange(0, BLOCK_N)
                dout = _gathered(dout_ptr, dout_stride, dout_row_to_token_ptr, rows, columns, end, N)
            total = tl.dot(a.T, dout, total)
        out_desc.store([group, k, n], total.to(out_ptr.dtype.element_ty).reshape(1, BLOCK_K, BLOCK_N))


class TmaWgrad(WgradKernel):
    """Computes `out[g] = A[start:end].T @ dout[start:end]`. One operand or both may be gathered."""

    def scratch_bytes(self, args: WgradArguments) -> int:
        num_descriptors = 1 + (args.a_row_to_token is None) + (args.dout_row_to_token is None)
        return DESCRIPTOR_BYTES * num_descriptors * num_programs(args.A)

    def _launch(self, args: WgradArguments) -> Launch:
        num_groups, size_k, size_n = args.out.shape
        return Launch(
            _tma_wgrad_kernel,
            (num_programs(args.A, args.reserved_sms),),
            (
                args.A,
                args.A.stride(0),
                args.a_row_to_token,
                args.dout,
                args.dout.stride(0),
                args.dout_row_to_token,
                args.out,
                args.out.stride(0),
                args.out.stride(1),
                self.tile_table(args).bounds,
                num_groups,
                size_k,
                size_n,
            ),
            self.metadata.design.tile_options("KNR"),
        )


def _kernel(dtype: torch.dtype, design: TmaDesign) -> TmaWgrad:
    tma = Operand(dtype, "row", 16)
    name = kernel_name("wgrad", "tma", dtype, design)
    return TmaWgrad(KernelMetadata(name, TmaWgrad, 90, WgradOperands(tma, tma, tma), design, max_cc=103))


def _design(tile: tuple[int, int, int], num_stages: int, gather: bool) -> TmaDesign:
    return TmaDesign(tile, 8, num_stages, gather=gather, persistent=True, tma=True, group_tiles=4)


# The design with a gather has two more stages than the same tile without a gather, to load row indices before rows.
_DESIGNS = (
    _design((128, 256, 64), 3, False),
    _design((128, 128, 64), 4, False),
    _design((128, 256, 64), 5, True),
)

TMA_WGRAD_KERNELS = tuple(_kernel(dtype, design) for dtype in (torch.bfloat16, torch.float16) for design in _DESIGNS)
