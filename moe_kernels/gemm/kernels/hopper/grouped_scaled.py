"""Entries of the kernel catalog: the warp-specialised grouped GEMM of e4m3 operands with block scales."""

from __future__ import annotations

import torch

from ....reference_fp8 import BLOCK
from ....runtime.dispatch import FLOAT8
from ....runtime.gluon import OBSTACLE
from ....runtime.launch import Launch
from ....runtime.triton import cdiv
from ...arguments.block_scaled import BlockScaledGemmArguments, are_stored_as_read
from ...kernel import GemmOperands, KernelMetadata, Operand, Status, WarpSpecializedDesign
from ..families import kernel_name, num_programs
from ..pointer_block_scaled import BlockScaledKernel
from .descriptors import matrices_descriptor, ragged_descriptor, rows_descriptor
from .grouped import launch_options

if OBSTACLE is None:
    from .grouped_scaled_device import block_scaled_gemm_kernel


class WarpSpecializedBlockScaledGemm(BlockScaledKernel):
    """Computes the product described by `BlockScaledGemmArguments`, with contiguous or gathered rows of A."""

    obstacle = OBSTACLE

    def supports_design(self, args: BlockScaledGemmArguments) -> Status:
        if not (status := super().supports_design(args)):
            return status
        if not are_stored_as_read(args):
            return Status(
                "Operand `scale_a`: expected scales stored by columns, and those of B as [G, N / 128, K / 128], got "
                f"strides {args.scale_a.stride()} and {args.scale_b.stride()}"
            )
        return status

    def _launch(self, args: BlockScaledGemmArguments) -> Launch:
        design, table = self.metadata.design, self.tile_table(args)
        block_m, block_n, _ = design.tile_shape
        _, depth, num_columns = args.B.shape
        return Launch(
            block_scaled_gemm_kernel,
            (num_programs(args.A, args.reserved_sms),),
            (
                *rows_descriptor(args.A, args.row_to_token, (block_m, BLOCK)),
                matrices_descriptor(args.B, True, block_n, BLOCK),
                args.scale_a,
                args.scale_a.stride(1),
                args.scale_b,
                ragged_descriptor(args.out, (block_m // 2, BLOCK)),
                table.bounds,
                table.tiles,
                table.num_tiles,
                args.out.shape[0],
                cdiv(num_columns, BLOCK),
                cdiv(num_columns, block_n),
                cdiv(depth, BLOCK),
            ),
            {
                "ZERO_TAIL": int(args.zero_tail),
                **launch_options(design, "MN"),
                # With over 224 registers, ptxas computes a tile's halves at once and spills in every reduction step.
                "PRODUCER_REGISTERS": 64 if design.gather else 56,
                "CONSUMER_REGISTERS": 224,
            },
        )


def _kernel(design: WarpSpecializedDesign) -> WarpSpecializedBlockScaledGemm:
    a, b = Operand(FLOAT8, "row", 16), Operand(FLOAT8, "column", 16)
    operands = GemmOperands(a, b, Operand(torch.bfloat16, "row", 16, other_dtypes=(torch.float16,)))
    name, cls = kernel_name("block_scaled_gemm", "ws", FLOAT8, design), WarpSpecializedBlockScaledGemm
    return cls(KernelMetadata(name, cls, 90, operands, design, max_cc=90))


# Tiles of 256 columns read fewer bytes per product than tiles of 128. Each half of 128 columns has its own scale of B.
_TILES = (((128, 256, 128), 4), ((128, 128, 128), 6))

WARP_SPECIALIZED_SCALED_KERNELS = tuple(
    _kernel(WarpSpecializedDesign(tile, 12, stages, gather, persistent=True, tma=True))
    for tile, stages in _TILES
    for gather in (False, True)
)
