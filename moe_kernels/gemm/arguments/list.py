"""Arguments of independent products in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.triton import cdiv
from .base import Arguments, epilogue_key

# Number of int64 fields of each problem in a `ProblemTable`. The fields are the nine addresses, sizes and leading
# dimensions of a `Problem`, a bit mask of the operands stored by columns (1: A, 2: B), the first tile, and the end tile
# (exclusive). The number is even, so that the list of tiles after the last problem is aligned to 16 bytes.
NUM_FIELDS = 12


class Problem(NamedTuple):
    """One product. Each operand is stored by rows or by columns. The leading dimension of an operand is the stride of
    the axis that is not contiguous."""

    pointers: tuple[int, int, int]  # A, B, out
    sizes: tuple[int, int, int]  # M, N, K
    leading_dimensions: tuple[int, int, int]  # A, B, out
    by_columns: tuple[bool, bool]  # whether A and B are stored by columns

    def num_tiles(self, block_m: int, block_n: int) -> int:
        return cdiv(self.sizes[0], block_m) * cdiv(self.sizes[1], block_n)


class ProblemTable(NamedTuple):
    """Problems and tiles, as kernels read them. The table holds the matrices' addresses, so keep the matrices alive."""

    problems: Tensor  # [G, NUM_FIELDS] int64: row g holds the fields of problem g, listed at NUM_FIELDS
    tile_to_problem: Tensor  # [tiles] int32: index of each tile's problem
    tile_shape: tuple[int, int]  # number of rows and number of columns of a tile of out


class Survey(NamedTuple):
    """Properties of all problems together, for selection and kernels. Problems with an empty output are in `problems`
    but affect no other field."""

    problems: list[Problem]
    num_filled: int  # number of problems with a nonempty output
    layouts: tuple[str, str]  # "row", "column" or "mixed", for A and B
    aligned: bool  # whether all addresses and leading dimensions are multiples of 16 bytes
    whole: bool  # whether the length of every contiguous axis is a multiple of 16 bytes
    separate: bool  # whether the stored rows or columns of each A and each B do not overlap
    largest: tuple[int, int, int]  # the largest M, the largest N and the largest K
    depths: frozenset[int]  # all different values of K
    area: int  # sum of M * N
    work: int  # sum of M * N * K

    def num_tiles(self, block_m: int, block_n: int) -> int:
        return sum(problem.num_tiles(block_m, block_n) for problem in self.problems)


def leading_dimension(matrix: Tensor) -> tuple[int, bool] | None:
    """Return (leading dimension, whether the matrix is stored by columns), or None if neither axis is contiguous."""
    row_stride, column_stride = matrix.stride()
    if column_stride == 1 or matrix.shape[1] <= 1:
        return row_stride, False
    if row_stride == 1 or matrix.shape[0] <= 1:
        return column_stride, True
    return None


def _matrix_error(matrix: Tensor, dtype: torch.dtype, device: torch.device) -> str | None:
    if matrix.dtype != dtype:
        return f"expected {dtype}, got {matrix.dtype}"
    if matrix.device != device:
        return f"expected device {device}, got {matrix.device}"
    if leading_dimension(matrix) is None:
        return f"expected one contiguous axis, got {matrix.stride()}"
    return None


@dataclass(frozen=True, eq=False)
class GroupedGemmListArguments(Arguments):
    """out_list[g] = epilogue(A_list[g] @ B_list[g]) for every g. All sizes may differ. K = 0 gives zeros.

    Shapes: A_list [M, K] each, B_list [K, N] each, out_list [M, N] each.
    """

    tensors = ()

    A_list: Sequence[Tensor]  # [M, K] each
    B_list: Sequence[Tensor]  # [K, N] each
    out_list: Sequence[Tensor]  # [M, N] each
    accumulator_type: torch.dtype = torch.float32
    table: ProblemTable | None = None  # table of these tensors; None (default): the kernel makes the table
    epilogue: str | None = None  # a plain activation, applied to the products before they are rounded

    def __post_init__(self) -> None:
        for name in ("A_list", "B_list", "out_list"):
            matrices = getattr(self, name)
            if not all(isinstance(matrix, Tensor) for matrix in matrices):
                taken = [m if isinstance(m, Tensor) else torch.from_dlpack(m) for m in matrices]
                object.__setattr__(self, name, taken)

    @property
    def A(self) -> Tensor:
        """Return the first matrix A. All operands are on the device of this matrix."""
        return self.A_list[0]

    @property
    def operands(self) -> dict[str, Tensor]:
        """Return the operands of the first problem with a nonempty output, or of problem 0 if all outputs are empty.
        All valid problems have the same dtypes and the same device."""
        lists = self.A_list, self.B_list, self.out_list
        # Do not raise here for lists of different lengths, because `shape_error` reports them.
        filled = (problem for problem in zip(*lists, strict=False) if problem[2].numel())
        shown = next(filled, None) or next(zip(*lists, strict=False), ())
        return dict(zip(self.operand_names, shown, strict=False))

    @property
    def outputs(self) -> list[Tensor]:
        return list(self.out_list)

    def shape_error(self) -> str | None:
        return self._error

    @functools.cached_property
    def _error(self) -> str | None:
        if not len(self.A_list) == len(self.B_list) == len(self.out_list):
            return f"as many A as B and out, got {len(self.A_list)}, {len(self.B_list)} and {len(self.out_list)}"
        if not self.A_list:
            return "expected at least one problem, got none"
        dtypes = self.A_list[0].dtype, self.A_list[0].dtype, self.out_list[0].dtype
        for g, matrices in enumerate(zip(self.A_list, self.B_list, self.out_list, strict=True)):
            a, b, out = (tuple(matrix.shape) for matrix in matrices)
            if not len(a) == len(b) == 2 or a[1] != b[0] or out != (a[0], b[1]):
                return f"problem {g}: expected [M, K] @ [K, N] and [M, N], got {a} @ {b} and {out}"
            for name, matrix, dtype in zip(("A", "B", "out"), matrices, dtypes, strict=True):
                if error := _matrix_error(matrix, dtype, self.A.device):
                    return f"Operand `{name}` of problem {g}: {error}"
            if matrices[2].shape[1] > 1 and matrices[2].stride(1) != 1:
                return f"Operand `out` of problem {g}: expected rows contiguous, got strides {matrices[2].stride()}"
            if out[0] > 1 and matrices[2].stride(0) < out[1]:
                return f"Operand `out` of problem {g}: expected rows that do not overlap, got {matrices[2].stride()}"
        return None

    @functools.cached_property
    def survey(self) -> Survey:
        """Return the properties of all problems. Collecting these properties is the main CPU cost of a call. Read
        `survey` only if `error` returns None."""
        problems, num_filled, by_columns, depths = [], 0, set(), set()
        address_bits = size_bits = area = work = largest_m = largest_n = largest_k = 0
        separate, item, out_item = True, self.A.element_size(), self.out_list[0].element_size()
        for a, b, out in zip(self.A_list, self.B_list, self.out_list, strict=True):
            m, k = a.shape
            n = b.shape[1]
            (lda, a_columns), (ldb, b_columns) = leading_dimension(a), leading_dimension(b)  # pyright: ignore[reportGeneralTypeIssues]  # `error` excludes None
            ldo = out.stride(0)
            pointers = a.data_ptr(), b.data_ptr(), out.data_ptr()
            problems.append(Problem(pointers, (m, n, k), (lda, ldb, ldo), (a_columns, b_columns)))
            if not (m and n):
                continue
            num_filled += 1
            by_columns.add((a_columns, b_columns))
            depths.add(k)
            a_line, b_line = m if a_columns else k, k if b_columns else n  # lengths of the contiguous axes
            address_bits |= pointers[0] | pointers[1] | pointers[2] | (lda | ldb) * item | ldo * out_item
            size_bits |= (a_line | b_line) * item | n * out_item
            separate = separate and lda >= a_line and ldb >= b_line
            largest_m, largest_n, largest_k = max(m, largest_m), max(n, largest_n), max(k, largest_k)
            area += m * n
            work += m * n * k
        a_layout, b_layout = (_layout({columns[operand] for columns in by_columns}) for operand in (0, 1))
        largest = largest_m, largest_n, largest_k
        aligned, whole = address_bits % 16 == 0, size_bits % 16 == 0
        return Survey(
            problems, num_filled, (a_layout, b_layout), aligned, whole, separate, largest, frozenset(depths), area, work
        )

    def selection_key(self) -> tuple[Any, ...]:
        """Return the selection key, with sizes rounded up to powers of two. Call only if `error` returns None."""
        s = self.survey
        static = s.layouts, s.aligned, s.whole, s.separate, 0 in s.depths
        return self.A.dtype, self.out_list[0].dtype, self.A.device, self.epilogue, static, self._size_class()

    def table_key(self) -> str:
        groups, m, n, k, area = self._size_class()
        layouts = "A={} B={}".format(*self.survey.layouts)
        form = f"grouped_gemm_list {layouts}{epilogue_key(self.epilogue)} {str(self.A.dtype)[6:]}"
        return f"{form} G={groups} M={m} N={n} K={k} area={area}"

    def _size_class(self) -> tuple[int, ...]:
        """Return the number of problems, the largest M, N and K, and the sum of M * N, each rounded up to a power of
        two."""
        s = self.survey
        return tuple(1 << max(size - 1, 0).bit_length() for size in (s.num_filled, *s.largest, s.area))


def _layout(by_columns: set[bool]) -> str:
    return "mixed" if len(by_columns) > 1 else "column" if by_columns == {True} else "row"
