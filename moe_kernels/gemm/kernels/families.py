"""Base classes, which check a kernel's arguments and make the tile tables that kernels read on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import torch
from torch import Tensor

from ...activation.functions import EPILOGUES, GATHERING_EPILOGUES, PLAIN_EPILOGUES
from ...runtime.triton import INTERPRET, cdiv
from ...specs import is_gated
from ...types import TileTable
from ..arguments.base import Arguments, RowArguments
from ..arguments.grouped import GroupedGemmArguments, WgradArguments
from ..kernel import SUPPORTED, Design, Kernel, Status, operand_error
from ..tile_table import tile_table_bytes, tile_table_in, write_table
from .ragged import MAX_ROWS

# Assumed cost of reading one byte of B, in multiplications: half of the roughly 100 multiplications that the tensor
# cores of a GPU (A100 to B200) can do while the GPU reads one byte from memory.
_MULTIPLICATIONS_PER_BYTE = 50
_BOUNDS_BLOCK = 128  # number of rows per tile in tables for weight-gradient kernels, which do not read the tiles


class RowTileKernel(Kernel):
    """Base of kernels in which a tile covers rows of only one group. Estimates the cost and makes the tile table."""

    def estimate(self, args: RowArguments) -> float:
        """Return the cost of one group for one index along K, in multiplications. The cost is that of multiplying, or
        that of reading B if reading takes longer than multiplying."""
        num_groups, _, num_columns = args.B.shape
        rows_per_group = max(cdiv(args.num_rows, num_groups), 1)
        memory_bound = _MULTIPLICATIONS_PER_BYTE * num_columns * args.B.element_size()
        return max(padded(rows_per_group, num_columns, self.metadata.design), memory_bound)

    def tile_table(self, args: RowArguments, memory: Tensor | None = None) -> TileTable:
        """Return the tile table in `args` if its tiles have this kernel's height. Otherwise return a new table."""
        if self._has_table(args):
            return args.tile_table
        offsets = args.offsets
        if args.tile_table is not None:
            bounds = args.tile_table.bounds
            offsets = bounds.narrow(0, 1, bounds.shape[0] - 2)  # narrow is faster than a slice
        return _table(offsets, args.out.shape[0], self._table_rows, memory)

    @property
    def _table_rows(self) -> int:
        """Return the number of rows per tile in the tables that this kernel makes."""
        return self.metadata.design.tile_shape[0]

    def _has_table(self, args: RowArguments) -> bool:
        return args.tile_table is not None and args.tile_table.block_rows == self._table_rows

    def metadata_bytes(self, args: RowArguments) -> int:
        if self._has_table(args):
            return 0
        return tile_table_bytes(len(args.out), len(args.B), self._table_rows)

    def with_metadata(self, args: Arguments, memory: Tensor | None) -> Arguments:
        return dataclasses.replace(args, tile_table=self.tile_table(args, memory))

    def _index_error(self, args: RowArguments) -> str | None:
        gather = self.metadata.design.gather
        if (args.row_to_token is not None) == gather:
            return None
        return f"this kernel {'needs an' if gather else 'takes no'} index"


class GroupedGemmKernel(RowTileKernel):
    """Base of kernels that compute the product described by `GroupedGemmArguments`."""

    arguments_class = GroupedGemmArguments

    @property
    def epilogues(self) -> tuple[str, ...]:
        if self.metadata.epilogue in PLAIN_EPILOGUES:
            return tuple(PLAIN_EPILOGUES)
        return GATHERING_EPILOGUES if self.metadata.design.gather else tuple(EPILOGUES)

    def supports_design(self, args: GroupedGemmArguments) -> Status:
        if (args.epilogue is None) != (args.preactivation is None):
            return Status("Operand `preactivation`: expected with an epilogue and only then")
        if error := self._preactivation_error(args):
            return Status(f"Operand `preactivation`: {error}")
        if error := self._index_error(args):
            return Status(f"Operand `row_to_token`: {error}")
        for name in args.optional_operands:
            if getattr(args, name) is not None and name not in self.metadata.optional_operands:
                return Status(f"Operand `{name}`: this kernel takes none")
        if args.extra_a is not None:
            operands = self.metadata.operands
            for name, operand in (("extra_a", operands.A), ("extra_b", operands.B)):
                if error := operand_error(operand, getattr(args, name)):
                    return Status(f"Operand `{name}`: {error}")
        return tma_status(self.metadata.design, len(args.out), args.A, args.B)

    def _preactivation_error(self, args: GroupedGemmArguments) -> str | None:
        """Return an error text if `preactivation` does not meet the requirements on `out`, else None. With a gated
        activation, the up half must also be aligned like a separate matrix."""
        product, operand = args.preactivation, self.metadata.operands.out
        if product is None:
            return None
        if error := operand_error(operand, product):
            return error
        half_bytes = product.shape[-1] // 2 * product.element_size()
        if is_gated(args.epilogue) and half_bytes % operand.alignment_bytes:
            rule = f"expected halves of rows of whole {operand.alignment_bytes} bytes"
            return f"{rule}, got {product.shape[-1]} columns of {product.dtype}"
        return None


class WrappedGroupedGemm(Kernel):
    """Base of kernels for other products, which a grouped GEMM kernel computes with a suitable tile table."""

    form: str  # name of the product, such as "jagged_gemm"; replaces "grouped_gemm" in the kernel's name

    def __init__(self, grouped: GroupedGemmKernel):
        name = grouped.metadata.kernel_name.replace("grouped_gemm", self.form)
        changes = {"kernel_name": name, "kernel_class": type(self), "optional_operands": ()}
        super().__init__(dataclasses.replace(grouped.metadata, **changes))
        self.grouped = self.compiled_as = grouped
        self.obstacle = grouped.obstacle


def plain_products(*kernels: Kernel) -> list[GroupedGemmKernel]:
    """Return the grouped GEMM kernels among `kernels` that neither gather rows nor apply an epilogue."""
    grouped = [kernel for kernel in kernels if isinstance(kernel, GroupedGemmKernel)]
    return [kernel for kernel in grouped if kernel.metadata.epilogue is None and not kernel.metadata.design.gather]


class WgradKernel(Kernel):
    """Base of kernels that compute the weight gradient described by `WgradArguments`."""

    arguments_class = WgradArguments
    accumulates: ClassVar[bool] = False  # whether the kernels can add to `out` instead of overwriting it

    def supports_design(self, args: WgradArguments) -> Status:
        if args.accumulate and not self.accumulates:
            return Status("accumulate: this kernel overwrites out")
        gather = self.metadata.design.gather
        if (args.a_row_to_token is not None or args.dout_row_to_token is not None) != gather:
            return Status(f"Operand `row_to_token`: this kernel {'needs an' if gather else 'takes no'} index")
        return tma_status(self.metadata.design, args.num_rows, args.A, args.dout)

    def estimate(self, args: WgradArguments) -> float:
        """Return the number of multiplications per row of a group, with the sizes of `out` padded to whole tiles."""
        return padded(*args.out.shape[1:], self.metadata.design)

    def tile_table(self, args: WgradArguments, memory: Tensor | None = None) -> TileTable:
        """Return `args.tile_table`, or else a new table. Kernels use only `bounds`, `order` and the pace counters."""
        if args.tile_table is None:
            return _table(args.offsets, args.num_rows, _BOUNDS_BLOCK, memory)
        return args.tile_table

    def metadata_bytes(self, args: WgradArguments) -> int:
        return 0 if args.tile_table is not None else tile_table_bytes(args.num_rows, len(args.out), _BOUNDS_BLOCK)

    def with_metadata(self, args: Arguments, memory: Tensor | None) -> Arguments:
        return dataclasses.replace(args, tile_table=self.tile_table(args, memory))


def padded(rows: int, columns: int, design: Design) -> int:
    """Return the number of elements in the tiles that cover a matrix."""
    block_m, block_n, _ = design.tile_shape
    return cdiv(rows, block_m) * block_m * cdiv(columns, block_n) * block_n


def _table(offsets: Tensor, num_rows: int, height: int, memory: Tensor | None) -> TileTable:
    table = tile_table_in(memory, offsets, num_rows, offsets.shape[0], height)
    write_table(table, offsets, num_rows)
    return table


def tma_status(design: Design, num_rows: int, *operands: Tensor) -> Status:
    """Return whether the operands meet TMA's limits: fewer than 2**30 rows, no empty operand, and gathered rows whose
    length is a multiple of 16 bytes. Designs without TMA have no limits."""
    if not design.tma:
        return SUPPORTED
    if num_rows > MAX_ROWS:
        return Status(f"takes at most {MAX_ROWS} rows, got {num_rows}")
    if not all(tensor.numel() for tensor in operands):
        return Status("takes no empty operands")
    if design.gather and any(tensor.shape[-1] * tensor.element_size() % 16 for tensor in operands if tensor.dim() == 2):
        return Status(f"gathers rows of whole 16 bytes, got {[tuple(tensor.shape) for tensor in operands]}")
    return SUPPORTED


def num_programs(tensor: Tensor, reserved_sms: int = 0) -> int:
    """Return the number of programs: one for each SM that is not reserved, and at least one. If `tensor` is not on a
    GPU, assume the 132 SMs of an H100, or 3 SMs in the interpreter, so that each program computes several tiles."""
    num_sms = _num_sms(tensor.device) if tensor.is_cuda else 3 if INTERPRET else 132
    return max(num_sms - reserved_sms, 1)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def kernel_name(op: str, kind: str, dtype: torch.dtype, design: Design, *rest: str | None) -> str:
    """Return a unique kernel name, built from all properties that distinguish kernels."""
    tile = "x".join(map(str, design.tile_shape))
    parts = [op, kind, str(dtype)[6:], tile, f"w{design.num_warps}", f"s{design.num_stages}"]
    return "_".join([*parts, *(part for part in rest if part), *(["gather"] if design.gather else [])])
