"""Arguments of a grouped GEMM of e4m3 operands with a scale per block: 1 x 128 of rows, 128 x 128 of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...reference_fp8 import BLOCK
from ...runtime.triton import cdiv
from ...types import TileTable
from .base import Arguments, index_form, rows_bucket, sized_key

# Least number of columns of the product for which rows are copied before the GEMM. The copy saves about a tenth of the
# GEMM's time. Its own time does not depend on the number of columns: on an H200 it equalled the saving at 2048 columns.
COLUMNS_WORTH_A_COPY = 4096


@dataclass(eq=False)
class BlockScaledGemmArguments(Arguments):
    """out[start:end] = (A * scale_a)[start:end] @ (B * scale_b)[g] for every group g, summed in float32.

    A[r, k] has the scale scale_a[r, k // 128]. B[g, k, n] has the scale scale_b[g, k // 128, n // 128].
    """

    operand_names = ("A", "B", "out")
    tensors = ("A", "B", "out", "scale_a", "scale_b", "offsets", "row_to_token")

    A: Tensor  # [R, K] e4m3; [T, K] with row_to_token
    B: Tensor  # [G, K, N] e4m3
    out: Tensor  # [R, N]
    scale_a: Tensor  # [R, ceil(K / 128)] float32; [T, ceil(K / 128)] with row_to_token
    scale_b: Tensor  # [G, ceil(K / 128), ceil(N / 128)] float32
    accumulator_type: torch.dtype = torch.float32
    offsets: Tensor | None = None  # [G] int32; not read when tile_table is given
    row_to_token: Tensor | None = None  # [R] int32: row r reads A[row_to_token[r]]
    tile_table: TileTable | None = None
    epilogue: str | None = None  # always None: no kernel applies one
    zero_tail: bool = True  # write zeros to the rows past the last offset; False leaves them unwritten
    reserved_sms: int = 0  # SMs that a persistent kernel leaves unused
    assumed_rows: int | None = None  # rows per group for which the kernel is chosen; None uses the actual rows

    @property
    def num_rows(self) -> int:
        """Return the number of rows for which the kernel is chosen."""
        return self.out.shape[0] if self.assumed_rows is None else self.assumed_rows * self.B.shape[0]

    def selection_key(self) -> tuple[Any, ...]:
        sizes = self.B.shape
        return (
            sizes,
            rows_bucket(self.num_rows, sizes[0]),
            index_form(self.row_to_token),
            self.assumed_rows,
            self.out.shape[0] == 0,
            are_stored_as_read(self),
            self._layouts(),
        )

    def table_key(self) -> str:
        num_groups, size_k, size_n = self.B.shape
        layout = "row" if self.B.stride(2) == 1 else "column"
        gather = "A" if self.row_to_token is not None else "none"
        form = f"block_scaled_gemm B={layout} gather={gather}"
        return sized_key(form, self.A.dtype, num_groups, size_k, size_n, self.num_rows)

    def shape_error(self) -> str | None:
        if error := self._expect_rank("A", 2) or self._expect_rank("B", 3) or self._expect_rank("out", 2):
            return error
        (num_a_rows, depth), (num_groups, _, num_columns) = self.A.shape, self.B.shape
        num_rows, blocks_k, blocks_n = self.out.shape[0], cdiv(depth, BLOCK), cdiv(num_columns, BLOCK)
        return (
            self._expect("B", num_groups, depth, num_columns)
            or (num_a_rows != num_rows and self.row_to_token is None and self._expect("A", num_rows, depth))
            or self._expect("out", num_rows, num_columns)
            or self._expect("scale_a", num_a_rows, blocks_k, dtype=torch.float32)
            or self._expect("scale_b", num_groups, blocks_k, blocks_n, dtype=torch.float32)
            or self._expect("offsets", num_groups, dtype=torch.int32)
            or self._expect("row_to_token", num_rows, dtype=torch.int32)
            or self._expect_contiguous("row_to_token")
            or self._expect_one_of("offsets", "tile_table")
        )


def are_stored_as_read(args: BlockScaledGemmArguments) -> bool:
    """Return whether scales are stored in the order in which the fastest kernels read them: scales of A by columns,
    scales of B as [G, N / 128, K / 128]."""
    return args.scale_a.stride(0) == 1 and args.scale_b.mT.is_contiguous()
