"""The table of independent products (problems) that a kernel computes in one launch.

The table holds the sizes, addresses and leading dimensions of every problem on the device, and the problem index of
every output tile. A fixed number of programs computes all tiles. Program p computes the tiles p, p + num_programs, and
so on. Tiles of long reductions come first, so that the tiles computed last take little time.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...runtime.dispatch import FLOAT8
from ...runtime.launch import Launch
from ...runtime.triton import cdiv, tl, triton
from ...runtime.upload import upload
from ..arguments.list import NUM_FIELDS, GroupedGemmListArguments, ProblemTable
from ..kernel import Kernel, KernelMetadata, Status
from .families import num_programs
from .pointer import tile_in_bands


def make_problem_table(
    args: GroupedGemmListArguments, block_m: int, block_n: int, memory: Tensor | None = None
) -> ProblemTable:
    """Return the problem table for output tiles of [block_m, block_n], after one upload without a host synchronisation.
    The table is written to `memory` [problem_table_bytes] uint8 on the device. None, the default, allocates memory."""
    problems = args.survey.problems
    order = sorted(range(len(problems)), key=lambda g: -problems[g].sizes[2])
    counts = [problems[g].num_tiles(block_m, block_n) for g in order]
    ends = list(accumulate(counts))
    rows = [()] * len(problems)
    for g, count, end in zip(order, counts, ends, strict=True):
        pointers, sizes, leading, by_columns = problems[g]
        rows[g] = *pointers, *sizes, *leading, by_columns[0] + 2 * by_columns[1], end - count, end
    on_host = functools.partial(torch.tensor, device="cpu")
    described = on_host([field for row in rows for field in row], dtype=torch.int64)
    tile_to_problem = torch.repeat_interleave(on_host(order, dtype=torch.int32), on_host(counts))
    # Pairs of int32 problem indices are viewed as int64, so that one copy uploads the problems and the indices.
    paired = functional.pad(tile_to_problem, (0, ends[-1] % 2)).view(torch.int64)
    values = torch.cat([described, paired])
    if memory is None:
        memory = torch.empty(values.nbytes, dtype=torch.uint8, device=args.A.device)
    both = upload("grouped_gemm_list", values, memory[: values.nbytes].view(torch.int64))
    tiles = both[len(described) :].view(torch.int32)[: ends[-1]]
    return ProblemTable(both[: len(described)].view(-1, NUM_FIELDS), tiles, (block_m, block_n))


def problem_table_bytes(args: GroupedGemmListArguments, block_m: int, block_n: int) -> int:
    return 8 * (len(args.A_list) * NUM_FIELDS + cdiv(args.survey.num_tiles(block_m, block_n), 2))


class GroupedGemmListKernel(Kernel):
    """Base of the kernels that compute a list of independent products, out_list[g] = A_list[g] @ B_list[g]."""

    arguments_class = GroupedGemmListArguments

    def __init__(self, metadata: KernelMetadata, compiled_as: Kernel | None = None):
        super().__init__(metadata)
        # Kernels that differ only in the number of programs share the first kernel's compiled code.
        self.compiled_as = compiled_as or self

    def supports_design(self, args: GroupedGemmListArguments) -> Status:
        if self.metadata.operands.A.alignment_bytes == 1:
            return Status()
        for name, layout in zip(("A", "B"), args.survey.layouts, strict=True):
            if layout == "mixed":
                return Status(f"Operand `{name}`: expected one layout for all problems, got both")
        if not args.survey.aligned:
            return Status("expected addresses and leading dimensions of whole 16 bytes for all problems")
        return self.supports_aligned(args)

    @abc.abstractmethod
    def supports_aligned(self, args: GroupedGemmListArguments) -> Status:
        """Check the kernel's own requirements. The caller has checked that problems share layouts and are aligned."""

    def launch(self, args: GroupedGemmListArguments) -> Launch | None:
        return self._launch(args) if any(out.numel() for out in args.out_list) else None

    def table(self, args: GroupedGemmListArguments, memory: Tensor | None = None) -> ProblemTable:
        """Return the table in `args` if its tiles have this kernel's shape. Otherwise return a new table."""
        if self._has_table(args):
            return args.table
        return make_problem_table(args, *self.metadata.design.tile_shape[:2], memory)

    def _has_table(self, args: GroupedGemmListArguments) -> bool:
        return args.table is not None and args.table.tile_shape == self.metadata.design.tile_shape[:2]

    def metadata_bytes(self, args: GroupedGemmListArguments) -> int:
        return 0 if self._has_table(args) else problem_table_bytes(args, *self.metadata.design.tile_shape[:2])

    def with_metadata(self, args: GroupedGemmListArguments, memory: Tensor | None) -> GroupedGemmListArguments:
        return dataclasses.replace(args, table=self.table(args, memory))

    def num_programs(self, args: GroupedGemmListArguments) -> int:
        """Return the number of programs: one per tile, at most `programs_per_sm` for each SM."""
        num_tiles = args.survey.num_tiles(*self.metadata.design.tile_shape[:2])
        return min(num_tiles, self.metadata.design.programs_per_sm * num_programs(args.A))

    def estimate(self, args: GroupedGemmListArguments) -> float:
        """Return the cost of the SM with the most tiles, in multiplications. Each tile has a start-up cost. Programs
        that share an SM hide part of the start-up cost, because one program starts while another program reduces."""
        block_m, block_n, _ = self.metadata.design.tile_shape
        num_tiles = args.survey.num_tiles(block_m, block_n)
        num_sms, programs = num_programs(args.A), max(self.num_programs(args), 1)
        programs_here = cdiv(programs, num_sms)
        tiles_here = programs_here * cdiv(num_tiles, programs)
        resident = 12 // self.metadata.design.num_warps
        before = (512 if self.metadata.design.tma else 256) / min(programs_here, resident)
        return tiles_here * block_m * block_n * (args.survey.work / max(args.survey.area, 1) + before)


@triton.jit
def tile_origin(local, M, N, GROUP_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first row and the first column of tile number `local` of a problem."""
    row_tile, column_tile = tile_in_bands(local, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_TILES)
    return row_tile * BLOCK_M, column_tile * BLOCK_N


def triton_dtype(dtype: torch.dtype) -> Any:
    return tl.float8e4nv if dtype == FLOAT8 else getattr(tl, str(dtype)[6:])
