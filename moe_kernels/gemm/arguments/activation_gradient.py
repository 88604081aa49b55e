"""Arguments of a grouped GEMM with the gradient of a gated activation in its epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...types import TileTable
from .base import Arguments, index_form, layout_of, rows_bucket, sized_key

COLUMNS = 128  # columns whose products one number of `row_sums` sums


@dataclass(eq=False)
class ActivationGradientArguments(Arguments):
    """Arguments for the middle of the expert op's backward. With dA' = A[start:end] @ B[g] for every group g, rounded
    to A's dtype:

        out = row_weights * dA' * activation'(preactivation)       weighted = row_weights * activation(preactivation)
        row_sums = the sums of dA' * activation(preactivation) over blocks of `COLUMNS` columns

    Rows past the last group are not written. `out` may be `preactivation`.
    """

    operand_names = ("A", "B", "out")
    tensors = ("A", "B", "out", "preactivation", "weighted", "row_weights", "row_sums", "offsets", "row_to_token")

    A: Tensor  # [R, K]; [T, K] with row_to_token
    B: Tensor  # [G, K, F]
    out: Tensor  # [R, 2F]
    preactivation: Tensor  # [R, 2F]: gate columns, then up columns
    weighted: Tensor  # [R, F]
    row_weights: Tensor  # [R] float32
    row_sums: Tensor  # [R, ceil(F / COLUMNS)] float32
    epilogue: str  # the name of a gated activation
    accumulator_type: torch.dtype = torch.float32
    offsets: Tensor | None = None  # [G] int32; not read when tile_table is given
    row_to_token: Tensor | None = None  # [R] int32: row r reads A[row_to_token[r]]
    tile_table: TileTable | None = None
    reserved_sms: int = 0  # SMs that a persistent kernel leaves unused

    @property
    def num_rows(self) -> int:
        return self.out.shape[0]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out, self.weighted, self.row_sums]

    def selection_key(self) -> tuple[Any, ...]:
        sizes = self.B.shape
        return (
            sizes,
            rows_bucket(self.num_rows, sizes[0]),
            index_form(self.row_to_token),
            self.epilogue,
            self.num_rows == 0,
            layout_of(self.preactivation),
            layout_of(self.weighted),
            self._layouts(),
        )

    def table_key(self) -> str:
        num_groups, size_k, size_n = self.B.shape
        layout = "row" if self.B.stride(2) == 1 else "column"
        gather = "A" if self.row_to_token is not None else "none"
        form = f"activation_gradient B={layout} gather={gather} epilogue={self.epilogue}"
        return sized_key(form, self.A.dtype, num_groups, size_k, size_n, self.num_rows)

    def shape_error(self) -> str | None:
        if error := self._expect_rank("A", 2) or self._expect_rank("B", 3) or self._expect_rank("out", 2):
            return error
        (num_a_rows, depth), (num_groups, _, d_ff), num_rows = self.A.shape, self.B.shape, self.num_rows
        return (
            self._expect("B", num_groups, depth, d_ff)
            or (num_a_rows != num_rows and self.row_to_token is None and self._expect("A", num_rows, depth))
            or self._expect("out", num_rows, 2 * d_ff)
            or self._expect("preactivation", num_rows, 2 * d_ff, dtype=self.out.dtype)
            or self._expect("weighted", num_rows, d_ff, dtype=self.out.dtype)
            or self._expect("row_weights", num_rows, dtype=torch.float32)
            or self._expect("row_sums", num_rows, -(-d_ff // COLUMNS), dtype=torch.float32)
            or self._expect_contiguous("row_weights", "row_sums", "row_to_token")
            or self._expect("offsets", num_groups, dtype=torch.int32)
            or self._expect("row_to_token", num_rows, dtype=torch.int32)
            or self._expect_one_of("offsets", "tile_table")
        )
