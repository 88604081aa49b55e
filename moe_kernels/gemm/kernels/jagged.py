"""GEMM of packed rows of several groups by one matrix B that all groups share.

Because the groups share B, a grouped GEMM kernel treats all rows as one group. A tile may hold rows of several groups.
Any grouped GEMM kernel without gather and epilogue can compute the product. The tile table must cover the rows from
the first to the last offset. The launch that makes the table also zeroes all rows of `out` outside these offsets.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...runtime.launch import Launch, launch_kernel, with_strides
from ...runtime.triton import cdiv, next_power_of_2, tl, triton
from ...types import TileTable
from ..arguments.jagged import JaggedGemmArguments
from ..kernel import Kernel, KernelMetadata, Status, WgradOperands
from ..tile_table import MAX_GROUPS, larger, table_blocks, tile_table_bytes, tile_table_in, write_tile_table
from .families import WrappedGroupedGemm, num_programs, padded, plain_products
from .hopper.grouped import WARP_SPECIALIZED_KERNELS
from .pointer import POINTER_KERNELS
from .tma import TMA_KERNELS
from .tma_wgrad import TMA_WGRAD_KERNELS


class JaggedGemm(WrappedGroupedGemm):
    """Computes the product of `JaggedGemmArguments` by a grouped GEMM kernel, with a tile table over packed rows."""

    arguments_class = JaggedGemmArguments
    form = "jagged_gemm"

    def supports_design(self, args: JaggedGemmArguments) -> Status:
        if args.group_offsets.dtype not in (torch.int32, torch.int64):
            return Status(f"Operand `group_offsets`: expected int32 or int64, got {args.group_offsets.dtype}")
        return self.grouped.supports_design(args.grouped())

    def _launch(self, args: JaggedGemmArguments) -> Launch:
        args = self.with_metadata(args, None)
        return self.grouped._launch(args.grouped())

    def scratch_bytes(self, args: JaggedGemmArguments) -> int:
        return self.grouped.scratch_bytes(args.grouped())

    def metadata_bytes(self, args: JaggedGemmArguments) -> int:
        if self._has_table(args):
            return 0
        return tile_table_bytes(len(args.A), 1, self.metadata.design.tile_shape[0])

    def with_metadata(self, args: JaggedGemmArguments, memory: Tensor | None) -> JaggedGemmArguments:
        if self._has_table(args):
            return args
        height = self.metadata.design.tile_shape[0]
        table = make_jagged_table(args.group_offsets, len(args.A), height, out=args.out, memory=memory)
        return dataclasses.replace(args, tile_table=table)

    def _has_table(self, args: JaggedGemmArguments) -> bool:
        table, height = args.tile_table, self.metadata.design.tile_shape[0]
        return table is not None and table.block_rows == height and len(table.order) == 1

    def estimate(self, args: JaggedGemmArguments) -> float:
        """Return the number of multiplications for one index along K, padding included."""
        return padded(len(args.A), args.B.shape[1], self.metadata.design)


def make_jagged_table(
    group_offsets: Tensor,  # [G + 1] int32 or int64
    num_rows: int,
    block_rows: int,
    *,
    parts: int = 1,  # number of equal parts into which the rows are cut; each part is a group of the table
    out: Tensor | None = None,  # [R, N]: rows before the first offset and from the last offset on are zeroed
    memory: Tensor | None = None,  # [tile_table_bytes] uint8 for the table; None allocates
) -> TileTable:
    """Return the tile table of a grouped GEMM over packed rows, made by one launch without a host synchronisation.
    Offsets that decrease or leave [0, num_rows] are clamped."""
    num_groups = len(group_offsets) - 1
    if num_groups > MAX_GROUPS:
        raise NotImplementedError(f"jagged table: at most {MAX_GROUPS} groups, got {num_groups}")
    table = tile_table_in(memory, group_offsets, num_rows, parts, block_rows)
    capacity = len(table.tiles)
    blocks = table_blocks(num_groups)
    programs = cdiv(max(capacity, parts), blocks["PROGRAM_ENTRIES"])
    launch_kernel(
        _jagged_table_kernel,
        (programs if out is None else max(programs, 2 * num_programs(out)),),
        group_offsets,
        group_offsets.stride(0),
        table.bounds,
        table.tiles,
        table.num_tiles,
        table.order,
        *with_strides(out),
        num_rows,
        capacity,
        num_groups,
        None if out is None else out.shape[1],
        PARTS=parts,
        G_P2=next_power_of_2(num_groups),
        PARTS_P2=next_power_of_2(parts),
        BLOCK_ROWS=table.block_rows,
        BLOCK_N=1024,
        **blocks,
    )
    return table


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _jagged_table_kernel(
    offsets_ptr,  # [G + 1]
    offsets_stride,
    bounds_ptr,
    tiles_ptr,
    num_tiles_ptr,
    order_ptr,
    out_ptr,  # [R, N], or None
    out_strides,
    num_rows,
    capacity,
    G,
    N,
    PARTS: tl.constexpr,
    G_P2: tl.constexpr,
    PARTS_P2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
    PROGRAM_ENTRIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each program writes at most PROGRAM_ENTRIES table entries. If `out_ptr` is given, each program also zeroes some
    rows of out outside the groups. Grid: (programs,)."""
    program = tl.program_id(0)
    group = tl.arange(0, G_P2)
    raw_ends = tl.load(offsets_ptr + (group + 1) * offsets_stride, mask=group < G, other=0)
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr), 0), num_rows)
    ends = tl.associative_scan(tl.minimum(tl.maximum(raw_ends, first), num_rows), 0, larger)
    last = tl.max(ends, 0)
    part = tl.arange(0, PARTS_P2)
    size = tl.cdiv((last - first).to(tl.int64), PARTS)
    write_tile_table(
        program,
        tl.minimum(first + part * size, last),
        tl.minimum(first + (part + 1) * size, last),
        bounds_ptr,
        tiles_ptr,
        num_tiles_ptr,
        order_ptr,
        num_rows,
        capacity,
        PARTS,
        PARTS_P2,
        BLOCK_ROWS,
        ENTRY_BLOCK,
        PROGRAM_ENTRIES,
    )
    if out_ptr is not None:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        num_outside = num_rows - (last - first)
        for outside in range(program, num_outside, tl.num_programs(0)):
            row = tl.where(outside < first, outside, outside + (last - first)).to(tl.int64)
            for first_column in range(0, N, BLOCK_N):
                column = (first_column + tl.arange(0, BLOCK_N)).to(tl.int64)
                out_ptrs = out_ptr + row * out_strides[0] + column * out_strides[1]
                tl.store(out_ptrs, tl.zeros((BLOCK_N,), dtype), mask=column < N)


JAGGED_KERNELS = tuple(map(JaggedGemm, plain_products(*WARP_SPECIALIZED_KERNELS, *TMA_KERNELS, *POINTER_KERNELS)))


def _float32_out(kernel: Kernel) -> Kernel:
    """Return a copy of `kernel` that writes float32. The backward of `jagged_gemm` computes a float32 gradient of B for
    each part of the rows, and rounds only the sum of these gradients."""
    operands = kernel.metadata.operands
    operands = WgradOperands(operands.A, operands.dout, dataclasses.replace(operands.out, dtype=torch.float32))
    name = f"{kernel.metadata.kernel_name}_out_float32"
    metadata: KernelMetadata = dataclasses.replace(kernel.metadata, kernel_name=name, operands=operands)
    return type(kernel)(metadata)


# Only TMA kernels need copies with float32 results, because every pointer kernel can write float32 results.
FLOAT32_WGRAD_KERNELS = tuple(
    _float32_out(kernel)
    for kernel in TMA_WGRAD_KERNELS
    if not kernel.metadata.design.gather and kernel.metadata.design.tile_shape[:2] == (128, 128)
)
