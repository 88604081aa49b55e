"""Arguments of out = A @ B, where the rows of A are packed groups and all groups share B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...runtime.triton import next_power_of_2
from ...types import TileTable
from .base import Arguments
from .grouped import GroupedGemmArguments


@dataclass(frozen=True, eq=False)
class JaggedGemmArguments(Arguments):
    """out = A @ B for rows group_offsets[0] to group_offsets[-1], zeros for all other rows.

    Shapes: A [R, K], B [K, N], out [R, N], group_offsets [G + 1] int32 or int64.
    """

    tensors = ("A", "B", "out", "group_offsets")

    A: Tensor  # [R, K]
    B: Tensor  # [K, N]
    out: Tensor  # [R, N]
    group_offsets: Tensor  # [G + 1] int32 or int64
    accumulator_type: torch.dtype = torch.float32
    tile_table: TileTable | None = None  # from `make_jagged_table(..., out=out)`, which zeroes rows outside all groups
    epilogue: str | None = None  # always None: no kernel applies an epilogue

    def shape_error(self) -> str | None:
        if error := self._expect_rank("A", 2) or self._expect_rank("B", 2) or self._expect_rank("out", 2):
            return error
        if self.group_offsets.dim() != 1 or len(self.group_offsets) < 2:
            return f"Operand `group_offsets`: expected shape [G + 1], got {list(self.group_offsets.shape)}"
        num_rows, depth = self.A.shape
        num_columns = self.B.shape[1]
        return self._expect("B", depth, num_columns) or self._expect("out", num_rows, num_columns)

    @property
    def num_groups(self) -> int:
        return len(self.group_offsets) - 1

    def grouped(self) -> GroupedGemmArguments:
        """Return the arguments of a grouped GEMM that computes the same product as the jagged GEMM, with one group."""
        (size_k, size_n), (stride_k, stride_n) = self.B.shape, self.B.stride()
        # With one group, no kernel uses the group stride, but TMA rejects some strides. Use the stride that
        # adjacent matrices would have.
        group_stride = max(size_k * stride_k, size_n * stride_n)
        b = self.B.as_strided((1, size_k, size_n), (group_stride, stride_k, stride_n))
        return GroupedGemmArguments(
            self.A, b, self.out, self.accumulator_type, tile_table=self.tile_table, zero_tail=False
        )

    def selection_key(self) -> tuple[Any, ...]:
        return self.B.shape, self._rows(), self.epilogue, self._layouts()

    def table_key(self) -> str:
        layout = "row" if self.B.stride(1) == 1 else "column"
        size_k, size_n = self.B.shape
        return f"jagged_gemm B={layout} {str(self.A.dtype)[6:]} K={size_k} N={size_n} rows={self._rows()}"

    def _rows(self) -> int:
        return next_power_of_2(max(len(self.A), 1))
