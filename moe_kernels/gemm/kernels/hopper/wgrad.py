"""Kernel catalog entries of the warp-specialised weight gradient, and their checks of the arguments."""

from __future__ import annotations

from typing import Any

import torch

from ....runtime.gluon import OBSTACLE, registers
from ....runtime.launch import Launch
from ....runtime.triton import cdiv
from ...arguments.grouped import WgradArguments
from ...kernel import KernelMetadata, Operand, Status, WarpSpecializedDesign, WgradOperands
from ..families import WgradKernel, kernel_name, num_programs
from .descriptors import plain_descriptor, ragged_descriptor
from .grouped import DTYPES, launch_options, warp_specialized_design

if OBSTACLE is None:
    from .wgrad_device import wgrad_kernel


class WarpSpecializedWgrad(WgradKernel):
    """Computes `out[g] = A[start:end].T @ dout[start:end]`. Only the operand on a tile's short side may be gathered."""

    obstacle = OBSTACLE

    def supports_design(self, args: WgradArguments) -> Status:
        if not (status := super().supports_design(args)) or not self.metadata.design.gather:
            return status
        block_k, block_n, _ = self.metadata.design.tile_shape
        gathers_a = block_k < block_n
        if (args.a_row_to_token is None) == gathers_a or (args.dout_row_to_token is None) != gathers_a:
            return Status(f"Operand `{'A' if gathers_a else 'dout'}`: expected gathered, and only this one")
        return status

    def _launch(self, args: WgradArguments) -> Launch:
        design = self.metadata.design
        block_k, block_n, block_r = design.tile_shape
        num_groups, size_k, size_n = args.out.shape
        table = self.tile_table(args)
        a_desc = dout_desc = None
        gathered: tuple[Any, ...] = (None,) * 4
        if args.a_row_to_token is None:
            a_desc = ragged_descriptor(args.A, (block_r, block_k))
        else:
            gathered = args.A, args.A.stride(0), args.a_row_to_token, size_k
        if args.dout_row_to_token is None:
            dout_desc = ragged_descriptor(args.dout, (block_r, block_n))
        else:
            gathered = args.dout, args.dout.stride(0), args.dout_row_to_token, size_n
        return Launch(
            wgrad_kernel,
            (num_programs(args.A, args.reserved_sms),),
            (
                a_desc,
                dout_desc,
                *gathered,
                plain_descriptor(args.out, 1, block_k // 2, block_n // 2),
                table.bounds,
                table.num_tiles,
                table.order,
                num_groups,
                size_n,
                cdiv(size_k, block_k),
                cdiv(size_n, block_n),
            ),
            {**launch_options(design, "KNR"), **registers(design.gather, 0)},
        )


def _wgrad(dtype: torch.dtype, design: WarpSpecializedDesign):
    tma = Operand(dtype, "row", 16)
    name = kernel_name("wgrad", "ws", dtype, design)
    cls = WarpSpecializedWgrad
    return cls(KernelMetadata(name, cls, 90, WgradOperands(tma, tma, tma), design, max_cc=90))


_WGRAD = (
    warp_specialized_design((128, 256, 64), 4, 4),
    warp_specialized_design((128, 256, 64), 4, 4, gather=True),
    warp_specialized_design((256, 128, 64), 4, 4, gather=True),
)

WARP_SPECIALIZED_WGRAD_KERNELS = tuple(_wgrad(dtype, design) for dtype in DTYPES for design in _WGRAD)
