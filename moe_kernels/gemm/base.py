"""What the designs of a family share: the checks of arguments, and the metadata a kernel reads on the device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .._triton import INTERPRET
from ..catalog import Design, GroupedGemmArguments, Kernel, Status, WgradArguments
from ..reference import TileTable
from ..tiles import make_tile_table
from .ragged import MAX_ROWS


class GroupedGemmKernel(Kernel):
    """Kernels that compute `GroupedGemmArguments`."""

    arguments_class = GroupedGemmArguments

    def supports_design(self, args: GroupedGemmArguments) -> Status:
        if args.epilogue != self.metadata.epilogue:
            return Status(f"computes the epilogue {self.metadata.epilogue}, asked for {args.epilogue}")
        if (args.epilogue is None) != (args.preactivation is None):
            return Status("Operand `preactivation`: expected with an epilogue and only then")
        gather = self.metadata.design.gather
        if (args.row_to_token is not None) != gather:
            return Status(f"Operand `row_to_token`: this kernel {'needs' if gather else 'takes no'} index")
        return _tma_status(self.metadata.design, len(args.out), args.A, args.B)

    def with_epilogue(self, activation: str) -> GroupedGemmKernel:
        """This kernel, which has an epilogue, with another gated activation in it.

        The catalog lists the kernels with "swiglu" for all: what is fastest does not depend on the activation.
        """
        name = self.metadata.kernel_name.replace(self.metadata.epilogue, activation)
        return type(self)(dataclasses.replace(self.metadata, kernel_name=name, epilogue=activation))

    def tile_table(self, args: GroupedGemmArguments) -> TileTable:
        """The table of these arguments for this kernel's tile height; made here unless they hold it."""
        height = self.metadata.design.tile_shape[0]
        if args.tile_table is None:
            return make_tile_table(args.offsets, len(args.out), height)
        if args.tile_table.block_rows != height:
            return make_tile_table(args.tile_table.bounds[1:-1], len(args.out), height)
        return args.tile_table


class WgradKernel(Kernel):
    """Kernels that compute `WgradArguments`."""

    arguments_class = WgradArguments

    def supports_design(self, args: WgradArguments) -> Status:
        gather = self.metadata.design.gather
        if (args.a_row_to_token is not None or args.dout_row_to_token is not None) != gather:
            return Status(f"Operand `row_to_token`: this kernel {'needs' if gather else 'takes no'} index")
        return _tma_status(self.metadata.design, args.num_rows, args.A, args.dout)

    def tile_table(self, args: WgradArguments) -> TileTable:
        """The bounds and the order of the groups; made here unless the arguments hold them."""
        if args.tile_table is None:
            return make_tile_table(args.offsets, args.num_rows, 128)
        return args.tile_table


def _tma_status(design: Design, num_rows: int, *operands: Tensor) -> Status:
    """TMA counts rows up to 2**30 and describes no empty tensor; gathered rows are copied in pieces of 16 bytes."""
    if not design.tma:
        return Status()
    if num_rows > MAX_ROWS:
        return Status(f"takes at most {MAX_ROWS} rows, got {num_rows}")
    if not all(tensor.numel() for tensor in operands):
        return Status("takes no empty operands")
    if design.gather and any(tensor.shape[-1] * tensor.element_size() % 16 for tensor in operands if tensor.dim() == 2):
        return Status(f"gathers rows of whole 16 bytes, got {[tuple(tensor.shape) for tensor in operands]}")
    return Status()


def num_programs(tensor: Tensor) -> int:
    """One program per SM. Without a GPU a few, so that each walks several tiles."""
    if not tensor.is_cuda:
        return 3 if INTERPRET else 132
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def kernel_name(op: str, kind: str, dtype: torch.dtype, design: Design, *rest: str | None) -> str:
    """A unique name from what distinguishes kernels."""
    tile = "x".join(map(str, design.tile_shape))
    parts = [op, kind, str(dtype)[6:], tile, f"w{design.num_warps}", f"s{design.num_stages}"]
    return "_".join([*parts, *(part for part in rest if part), *(["gather"] if design.gather else [])])
