"""Arguments of a grouped GEMM with the gradient of a gated activation in its epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...types import TileTable
from .base import RowArguments, layout_of

COLUMNS = 128  # number of columns that each element of `row_sums` sums


@dataclass(eq=False)
class ActivationGradientArguments(RowArguments):
    """Arguments of a GEMM whose epilogue computes the activation's gradient in the expert op's backward. For every
    group g with the rows start:end, dA' is A[start:end] @ B[g], rounded to A's dtype. The results are:

        out = row_weights * dA' * activation'(preactivation)       weighted = row_weights * activation(preactivation)
        row_sums = the sums of dA' * activation(preactivation) over blocks of `COLUMNS` columns

    Rows past the last group are not written. `out` may be the tensor `preactivation`.
    """

    tensors = ("A", "B", "out", "preactivation", "weighted", "row_weights", "row_sums", "offsets", "row_to_token")

    A: Tensor  # [R, K]; [T, K] with row_to_token
    B: Tensor  # [G, K, F]
    out: Tensor  # [R, 2F]
    preactivation: Tensor  # [R, 2F]: gate columns, then up columns
    weighted: Tensor  # [R, F]
    row_weights: Tensor  # [R] float32
    row_sums: Tensor  # [R, ceil(F / COLUMNS)] float32
    epilogue: str  # name of the gated activation
    accumulator_type: torch.dtype = torch.float32
    offsets: Tensor | None = None  # [G] int32; not read when tile_table is given
    row_to_token: Tensor | None = None  # [R] int32: row r reads A[row_to_token[r]]
    tile_table: TileTable | None = None
    reserved_sms: int = 0  # number of SMs that a persistent kernel leaves unused

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out, self.weighted, self.row_sums]

    def selection_key(self) -> tuple[Any, ...]:
        return *self._row_key(), layout_of(self.preactivation), layout_of(self.weighted)

    def table_key(self) -> str:
        return self._row_table_key("activation_gradient", f" epilogue={self.epilogue}")

    def shape_error(self) -> str | None:
        if error := self._row_error():
            return error
        num_rows, d_ff = self.out.shape[0], self.B.shape[2]
        return (
            self._expect("out", num_rows, 2 * d_ff)
            or self._expect("preactivation", num_rows, 2 * d_ff, dtype=self.out.dtype)
            or self._expect("weighted", num_rows, d_ff, dtype=self.out.dtype)
            or self._expect("row_weights", num_rows, dtype=torch.float32)
            or self._expect("row_sums", num_rows, -(-d_ff // COLUMNS), dtype=torch.float32)
            or self._expect_contiguous("row_weights", "row_sums")
        )
