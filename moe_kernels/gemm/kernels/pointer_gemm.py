"""Dense and batched GEMM through pointers: any size, any stride and any supported GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...activation.functions import PLAIN_EPILOGUES
from ...runtime.launch import Launch
from ...runtime.triton import cdiv, tl, triton
from ..arguments.dense import GemmArguments
from ..kernel import SUPPORTED, GemmOperands, Kernel, KernelMetadata, Operand, PointerDesign, Status
from .families import kernel_name, padded
from .float32_products import dot_precision
from .pointer import activate, multiply_tile, out_operand, plain_forward, tile_in_bands


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    a_ptr,
    a_strides,  # [L, M, K]
    b_ptr,
    b_strides,  # [L, K, N]
    out_ptr,
    out_strides,  # [L, M, N]
    M,
    K,
    N,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    FORWARD: tl.constexpr,  # function of the activation, or None
    GROUP_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program writes one tile of FORWARD(A[l] @ B[l]). Grid: (L * cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),)."""
    num_row_tiles = tl.cdiv(M, BLOCK_M)
    num_column_tiles = tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (num_row_tiles * num_column_tiles)).to(tl.int64)
    tile = tl.program_id(0) % (num_row_tiles * num_column_tiles)
    row_tile, column_tile = tile_in_bands(tile, num_row_tiles, num_column_tiles, GROUP_TILES)
    row = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    total = multiply_tile(
        a_ptr + batch * a_strides[0] + row[:, None] * a_strides[1] + k[None, :] * a_strides[2],
        a_strides[2],
        row < M,
        b_ptr + batch * b_strides[0] + k[:, None] * b_strides[1] + column[None, :] * b_strides[2],
        b_strides[1],
        column < N,
        K,
        EVEN_K,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    out_ptrs = out_ptr + batch * out_strides[0] + row[:, None] * out_strides[1] + column[None, :] * out_strides[2]
    total = activate(total, FORWARD)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


class PointerGemm(Kernel):
    """Computes `out[l] = epilogue(A[l] @ B[l])`, one tile per program. All l share an operand without a batch axis."""

    arguments_class = GemmArguments
    epilogues = tuple(PLAIN_EPILOGUES)

    def supports_design(self, args: GemmArguments) -> Status:
        return SUPPORTED

    def estimate(self, args: GemmArguments) -> float:
        elements = args.num_batches * padded(args.rows_per_matrix, args.out.shape[-1], self.metadata.design)
        return elements * args.A.shape[-1]

    def _launch(self, args: GemmArguments) -> Launch:
        design = self.metadata.design
        block_m, block_n, block_k = design.tile_shape
        num_rows, num_columns = args.out.shape[-2:]
        depth = args.A.shape[-1]
        return Launch(
            _gemm_kernel,
            (args.num_batches * cdiv(num_rows, block_m) * cdiv(num_columns, block_n),),
            (
                args.A,
                _batch_strides(args.A),
                args.B,
                _batch_strides(args.B),
                args.out,
                _batch_strides(args.out),
                num_rows,
                depth,
                num_columns,
            ),
            {
                "EVEN_K": depth % block_k == 0,
                "PRECISION": dot_precision(args.A),
                "FORWARD": plain_forward(self.metadata),
                **design.tile_options(),
            },
        )


def _batch_strides(tensor: Tensor) -> tuple[int, int, int]:
    return (0, *tensor.stride())[-3:]


_TILES = {
    torch.bfloat16: [((128, 128, 64), 8, 3), ((16, 128, 64), 4, 3)],
    torch.float16: [((128, 128, 64), 8, 3), ((16, 128, 64), 4, 3)],
    torch.float32: [((64, 64, 16), 8, 3)],
}


def _kernel(dtype: torch.dtype, design: PointerDesign, epilogue: str | None = None) -> PointerGemm:
    operands = GemmOperands(Operand(dtype), Operand(dtype), out_operand(dtype))
    name = kernel_name("gemm", "pointer", dtype, design, epilogue)
    return PointerGemm(KernelMetadata(name, PointerGemm, 80, operands, design, epilogue))


POINTER_GEMM_KERNELS = (
    *(_kernel(dtype, PointerDesign(*tile)) for dtype, tiles in _TILES.items() for tile in tiles),
    *(_kernel(dtype, PointerDesign(*tiles[0]), "relu") for dtype, tiles in _TILES.items()),
)
