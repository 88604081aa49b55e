"""Independent products in one launch: their arguments, and the table of problems that the kernels walk.

Every problem has its own sizes, addresses and leading dimensions. The table holds them on the device, and for every
tile of the output the problem that it belongs to; a fixed number of programs takes the tiles in turn. Tiles of long
reductions come first, so that the last ones to finish are short.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._triton import tl, triton
from .._upload import upload
from ..catalog import Kernel, Operand, PointerDesign, Status, TmaDesign
from .base import num_programs

# A row of the table: addresses, sizes and leading dimensions as below, 1 or 0 for A and for B stored by columns, and
# the first tile and the one behind the last.
NUM_FIELDS = 13


class Problem(NamedTuple):
    """One product. An operand is stored by rows, or by columns; the leading dimension is the other axis's stride."""

    addresses: tuple[int, int, int]  # A, B, out
    sizes: tuple[int, int, int]  # M, N, K
    leading_dimensions: tuple[int, int, int]
    by_columns: tuple[bool, bool, bool]


class ProblemTable(NamedTuple):
    """What the kernels read. Valid as long as the tensors that it points to."""

    problems: Tensor  # [G, NUM_FIELDS] int64
    tile_to_problem: Tensor  # [tiles] int32
    tile_shape: tuple[int, int]  # rows and columns of out

    @property
    def pointers(self) -> Tensor:  # [G, 3] int64: A, B, out
        return self.problems[:, 0:3]

    @property
    def sizes(self) -> Tensor:  # [G, 3] int64: M, N, K
        return self.problems[:, 3:6]

    @property
    def leading_dimensions(self) -> Tensor:  # [G, 3] int64: A, B, out
        return self.problems[:, 6:9]


def leading_dimension(matrix: Tensor) -> tuple[int, bool] | None:
    """The leading dimension and whether the matrix is stored by columns; None if neither axis is contiguous."""
    (num_rows, num_columns), (row_stride, column_stride) = matrix.shape, matrix.stride()
    if column_stride == 1 or num_columns <= 1:
        return row_stride, False
    if row_stride == 1 or num_rows <= 1:
        return column_stride, True
    return None


@dataclass(frozen=True, eq=False)
class GroupedGemmListArguments:
    """out_list[g] = A_list[g] @ B_list[g] for every g. All sizes may differ; an empty reduction gives zeros."""

    A_list: tuple[Tensor, ...]  # [M, K] each
    B_list: tuple[Tensor, ...]  # [K, N] each
    out_list: tuple[Tensor, ...]  # [M, N] each
    accumulator_type: torch.dtype = torch.float32
    table: ProblemTable | None = None  # of these tensors; made by the kernel when it is not given

    @property
    def A(self) -> Tensor:
        """The first A: its device is that of all operands."""
        return self.A_list[0]

    @property
    def operands(self) -> dict[str, Tensor]:
        """Those of the first problem that has an output; the others are like them but for their sizes."""
        shapes = (out.numel() for out in self.out_list)
        first = next((g for g, size in enumerate(shapes) if size), 0)
        return {"A": self.A_list[first], "B": self.B_list[first], "out": self.out_list[first]}

    @functools.cached_property
    def obstacle(self) -> str | None:
        """What no kernel takes."""
        if not len(self.A_list) == len(self.B_list) == len(self.out_list):
            return f"as many A as B and out, got {len(self.A_list)}, {len(self.B_list)} and {len(self.out_list)}"
        dtype = self.A_list[0].dtype
        for g, (a, b, out) in enumerate(zip(self.A_list, self.B_list, self.out_list, strict=True)):
            if not a.dim() == b.dim() == out.dim() == 2 or (*a.shape, *b.shape) != (
                out.shape[0],
                b.shape[0],
                a.shape[1],
                out.shape[1],
            ):
                return f"problem {g}: expected [M, K] @ [K, N], got {list(a.shape)} @ {list(b.shape)}"
            for name, matrix in (("A", a), ("B", b), ("out", out)):
                if matrix.dtype != dtype:
                    return f"Operand `{name}` of problem {g}: expected {dtype}, got {matrix.dtype}"
                if leading_dimension(matrix) is None:
                    return f"Operand `{name}` of problem {g}: expected one contiguous axis, got {matrix.stride()}"
            if leading_dimension(out)[1]:
                return f"Operand `out` of problem {g}: expected rows contiguous, got strides {out.stride()}"
        return None

    @functools.cached_property
    def problems(self) -> list[Problem]:
        described = []
        for matrices in zip(self.A_list, self.B_list, self.out_list, strict=True):
            leading, by_columns = zip(*map(leading_dimension, matrices), strict=True)
            (num_rows, depth), num_columns = matrices[0].shape, matrices[1].shape[1]
            addresses = tuple(matrix.data_ptr() for matrix in matrices)
            described.append(Problem(addresses, (num_rows, num_columns, depth), leading, by_columns))
        return described

    @functools.cached_property
    def filled(self) -> list[Problem]:
        """The problems that have an output."""
        return [problem for problem in self.problems if problem.sizes[0] and problem.sizes[1]]

    def layout(self, operand: int) -> str:
        """ "row", "column", or "mixed" of A (0) or B (1)."""
        kinds = {problem.by_columns[operand] for problem in self.filled}
        return "mixed" if len(kinds) > 1 else "column" if kinds == {True} else "row"

    @functools.cached_property
    def aligned(self) -> bool:
        """Whether all addresses and leading dimensions are multiples of 16 bytes."""
        size = self.A.element_size()
        return not any(
            any(address % 16 for address in problem.addresses)
            or any(leading * size % 16 for leading in problem.leading_dimensions)
            for problem in self.filled
        )

    @functools.cached_property
    def whole(self) -> bool:
        """Whether the contiguous axes, too, are multiples of 16 bytes."""
        pieces = 16 // self.A.element_size()
        return not any(
            size % pieces
            for (m, n, k), (a_column, b_column, _) in ((p.sizes, p.by_columns) for p in self.filled)
            for size in (m if a_column else k, k if b_column else n, n)
        )

    @functools.cached_property
    def dense_strides(self) -> bool:
        """Whether no row of an operand overlaps the next."""
        return not any(
            leading < (m if a_column else k) or leading_b < (k if b_column else n)
            for (m, n, k), (leading, leading_b, _), (a_column, b_column, _) in (p[1:] for p in self.filled)
        )

    @functools.cached_property
    def depths(self) -> frozenset[int]:
        return frozenset(problem.sizes[2] for problem in self.filled)

    def num_tiles(self, block_m: int, block_n: int) -> int:
        return sum(triton.cdiv(m, block_m) * triton.cdiv(n, block_n) for m, n, _ in (p.sizes for p in self.filled))

    def selection_key(self) -> tuple[Any, ...]:
        """What support and speed depend on; sizes only by their powers of two."""
        if self.obstacle:
            return self.A.dtype, self.A.device, self.obstacle
        layouts = (self.layout(0), self.layout(1), self.aligned, self.whole, self.dense_strides, 0 in self.depths)
        return self.A.dtype, self.A.device, layouts, self._size_class()

    def table_key(self) -> str:
        """The key of a table of measured kernels."""
        groups, m, n, k = self._size_class()
        layouts = f"A={self.layout(0)} B={self.layout(1)}"
        return f"grouped_gemm_list {layouts} {str(self.A.dtype)[6:]} G={groups} M={m} N={n} K={k}"

    def _size_class(self) -> tuple[int, ...]:
        """Number of problems and largest M, N and K, each rounded up to a power of two."""
        largest = [max(column, default=1) for column in zip(*(p.sizes for p in self.filled), strict=True)] or [1, 1, 1]
        return tuple(triton.next_power_of_2(max(size, 1)) for size in (len(self.filled), *largest))


def make_problem_table(args: GroupedGemmListArguments, block_m: int, block_n: int) -> ProblemTable:
    """The table of these arguments for tiles of one shape: one upload, no wait."""
    rows, num_tiles = {}, 0
    tile_to_problem = []
    order = sorted(range(len(args.problems)), key=lambda g: -args.problems[g].sizes[2])
    for g in order:
        addresses, sizes, leading, by_columns = args.problems[g]
        tiles = triton.cdiv(sizes[0], block_m) * triton.cdiv(sizes[1], block_n)
        rows[g] = [*addresses, *sizes, *leading, *by_columns[:2], num_tiles, num_tiles + tiles]
        tile_to_problem.append(torch.full((tiles,), g, dtype=torch.int32))
        num_tiles += tiles
    problems = torch.tensor([rows[g] for g in range(len(order))], dtype=torch.int64)
    # One copy: the problems, then the tiles behind them, in pairs.
    tile_part = torch.cat([*tile_to_problem, torch.zeros(num_tiles % 2, dtype=torch.int32)]).view(torch.int64)
    both = upload("grouped_gemm_list", torch.cat([problems.flatten(), tile_part]), args.A.device)
    tiles = both[problems.numel() :].view(torch.int32)[:num_tiles]
    return ProblemTable(both[: problems.numel()].view_as(problems), tiles, (block_m, block_n))


@dataclass(frozen=True)
class GroupedGemmListOperands:
    """out_list[g] = A_list[g] @ B_list[g]; each A and B stored by rows or by columns, each out by rows."""

    A: Operand
    B: Operand
    out: Operand


@dataclass(frozen=True)
class PointerArrayDesign(PointerDesign):
    """Addresses from a table; `programs_per_sm` programs for each SM, or one per tile where tiles are fewer."""

    programs_per_sm: int = 1


@dataclass(frozen=True)
class TmaArrayDesign(TmaDesign):
    """Descriptors made on the device from a table, once for the tiles of a problem that a program walks."""

    programs_per_sm: int = 1


class GroupedGemmListKernel(Kernel):
    """Kernels that compute `GroupedGemmListArguments`."""

    arguments_class = GroupedGemmListArguments

    def supports_design(self, args: GroupedGemmListArguments) -> Status:
        if args.obstacle:
            return Status(args.obstacle)
        if self.metadata.operands.A.alignment_bytes == 1:
            return Status()
        for name, layout in (("A", args.layout(0)), ("B", args.layout(1))):
            if layout == "mixed":
                return Status(f"Operand `{name}`: expected one layout for all problems, got both")
        if not args.aligned:
            return Status("expected addresses and leading dimensions of whole 16 bytes for all problems")
        return self.supports_aligned(args)

    @abc.abstractmethod
    def supports_aligned(self, args: GroupedGemmListArguments) -> Status:
        """What a kernel that asks for alignment asks beyond it."""

    def table(self, args: GroupedGemmListArguments) -> ProblemTable:
        """The table for this kernel's tiles; made here unless the arguments hold it."""
        tile_shape = self.metadata.design.tile_shape[:2]
        if args.table is None or args.table.tile_shape != tile_shape:
            return make_problem_table(args, *tile_shape)
        return args.table

    def grid(self, args: GroupedGemmListArguments, table: ProblemTable) -> tuple[int]:
        return (min(len(table.tile_to_problem), self.metadata.design.programs_per_sm * num_programs(args.A)),)

    def estimate(self, args: GroupedGemmListArguments) -> float:
        """Time in multiplications of one SM: rounds of tiles, and for each tile what precedes its reduction."""
        block_m, block_n, _ = self.metadata.design.tile_shape
        per_sm = self.metadata.design.programs_per_sm
        rounds = triton.cdiv(args.num_tiles(block_m, block_n), per_sm * num_programs(args.A))
        area = sum(m * n for m, n, _ in (p.sizes for p in args.filled))
        depth = sum(m * n * k for m, n, k in (p.sizes for p in args.filled)) / max(area, 1)
        before = 512 if self.metadata.design.tma else 256
        return rounds * per_sm * block_m * block_n * (depth + before / per_sm)


@triton.jit
def tile_origin(local, M, N, GROUP_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and column of a problem's tile. GROUP_TILES rows of tiles walk the columns together."""
    num_row_tiles = tl.cdiv(M, BLOCK_M)
    band = GROUP_TILES * tl.cdiv(N, BLOCK_N)
    first = local // band * GROUP_TILES
    height = tl.minimum(num_row_tiles - first, GROUP_TILES)
    return (first + local % band % height) * BLOCK_M, local % band // height * BLOCK_N
