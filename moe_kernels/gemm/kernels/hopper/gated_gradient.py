"""Entries of the kernel catalog: the warp-specialised grouped GEMM with a gated activation's gradient as epilogue."""

from __future__ import annotations

import torch

from ....runtime.gluon import OBSTACLE
from ....runtime.launch import Launch
from ....runtime.triton import cdiv
from ...arguments.activation_gradient import COLUMNS, ActivationGradientArguments
from ...kernel import GemmOperands, KernelMetadata, Operand, Status, WarpSpecializedDesign, operand_error
from ..families import RowTileKernel, kernel_name, num_programs, tma_status
from .descriptors import matrices_descriptor, ragged_descriptor, rows_descriptor
from .grouped import launch_options

if OBSTACLE is None:
    from .activations import BACKWARD
    from .gated_gradient_device import activation_gradient_kernel

_ACTIVATIONS = ("swiglu", "geglu_tanh", "clamped_swiglu", "gpt_oss")  # keys of `BACKWARD` in `hopper/activations.py`
_PIECES = 4  # number of pieces of a finished tile's gradient; one reduction step of the next tile computes one piece
_SPACING = 3  # number of reduction steps from one piece to the next
_LEAST_STEPS = _PIECES * _SPACING


class WarpSpecializedActivationGradient(RowTileKernel):
    """Computes the results of `ActivationGradientArguments`, with contiguous or gathered rows of A."""

    arguments_class = ActivationGradientArguments
    obstacle = OBSTACLE
    epilogues = _ACTIVATIONS

    def supports_design(self, args: ActivationGradientArguments) -> Status:
        for name in ("preactivation", "weighted"):
            if error := operand_error(self.metadata.operands.out, getattr(args, name)):
                return Status(f"Operand `{name}`: {error}")
        if error := self._index_error(args):
            return Status(f"Operand `row_to_token`: {error}")
        d_ff, depth = args.weighted.shape[1], args.A.shape[1]
        if d_ff % 8:
            return Status(f"Operand `preactivation`: expected halves of rows of whole 16 bytes, got {2 * d_ff} columns")
        block_k = self.metadata.design.tile_shape[2]
        if cdiv(depth, block_k) < _LEAST_STEPS:
            return Status(f"Operand `A`: expected at least {(_LEAST_STEPS - 1) * block_k + 1} columns, got {depth}")
        return tma_status(self.metadata.design, len(args.out), args.A, args.B)

    def _launch(self, args: ActivationGradientArguments) -> Launch:
        design, table = self.metadata.design, self.tile_table(args)
        block_m, block_n, block_k = design.tile_shape
        _, depth, d_ff = args.B.shape
        piece = block_m // 2, block_n // _PIECES
        return Launch(
            activation_gradient_kernel,
            (num_programs(args.A, args.reserved_sms),),
            (
                *rows_descriptor(args.A, args.row_to_token, (block_m, block_k)),
                matrices_descriptor(args.B, args.B.stride(1) == 1, block_n, block_k),
                ragged_descriptor(args.preactivation, piece, split=2),
                ragged_descriptor(args.out, piece, split=2),
                ragged_descriptor(args.weighted, piece),
                args.row_weights,
                args.row_sums,
                table.bounds,
                table.tiles,
                table.num_tiles,
                len(args.out),
                cdiv(d_ff, block_n),
                cdiv(depth, block_k),
            ),
            {
                "B_COLUMN": self.metadata.operands.B.layout == "column",
                "BACKWARD": BACKWARD[self.metadata.epilogue],
                "PIECES": _PIECES,
                "SPACING": _SPACING,
                **launch_options(design),
                "PRODUCER_REGISTERS": 72 if design.gather else 32,
                "CONSUMER_REGISTERS": 216 if design.gather else 240,
            },
        )


def _kernel(dtype: torch.dtype, b_layout: str, gather: bool) -> WarpSpecializedActivationGradient:
    # Tiles wider than COLUMNS leave too little shared memory for five buffers, and are not faster with fewer buffers.
    design = WarpSpecializedDesign((128, COLUMNS, 64), 12, 5, gather, persistent=True, tma=True)
    tma = Operand(dtype, "row", 16)
    operands = GemmOperands(tma, Operand(dtype, b_layout, 16), tma)
    epilogue, cls = _ACTIVATIONS[0], WarpSpecializedActivationGradient
    name = kernel_name("activation_gradient", "ws", dtype, design, f"b_{b_layout}", epilogue)
    return cls(KernelMetadata(name, cls, 90, operands, design, epilogue, max_cc=90))


WARP_SPECIALIZED_GRADIENT_KERNELS = tuple(
    _kernel(dtype, layout, gather)
    for dtype in (torch.bfloat16, torch.float16)
    for layout in ("row", "column")
    for gather in (False, True)
)
