"""Arguments of a grouped GEMM of e4m3 operands, with a scale per 1 x 128 block of A and per 128 x 128 block of B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...reference_fp8 import BLOCK
from ...runtime.triton import cdiv
from ...types import TileTable
from .base import RowArguments

# If `out` has at least this many columns, the GEMM reads a copy of the rows instead of gathering rows. Reading a copy
# saves about a tenth of the GEMM's time. The time to make the copy does not depend on the number of columns, and equals
# the saving at 2048 columns on an H200.
COLUMNS_WORTH_A_COPY = 4096


@dataclass(eq=False)
class BlockScaledGemmArguments(RowArguments):
    """out[start:end] = (A * scale_a)[start:end] @ (B * scale_b)[g] for every group g, summed in float32.

    A[r, k] has the scale scale_a[r, k // 128]. B[g, k, n] has the scale scale_b[g, k // 128, n // 128].
    """

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
    epilogue: str | None = None  # always None: no kernel applies an epilogue
    zero_tail: bool = True  # whether to write zeros to the rows past the last offset
    reserved_sms: int = 0  # number of SMs that a persistent kernel leaves unused
    assumed_rows: int | None = None  # number of rows per group for which the kernel is chosen; None: the actual number

    def selection_key(self) -> tuple[Any, ...]:
        return *self._row_key(), are_stored_as_read(self)

    def table_key(self) -> str:
        return self._row_table_key("block_scaled_gemm")

    def shape_error(self) -> str | None:
        if error := self._row_error():
            return error
        num_groups, depth, num_columns = self.B.shape
        blocks_k, blocks_n = cdiv(depth, BLOCK), cdiv(num_columns, BLOCK)
        return (
            self._expect("out", self.out.shape[0], num_columns)
            or self._expect("scale_a", self.A.shape[0], blocks_k, dtype=torch.float32)
            or self._expect("scale_b", num_groups, blocks_k, blocks_n, dtype=torch.float32)
        )


def are_stored_as_read(args: BlockScaledGemmArguments) -> bool:
    """Return whether scales are stored in the order in which the fastest kernels read them: scales of A by columns,
    scales of B as [G, N / 128, K / 128]."""
    return args.scale_a.stride(0) == 1 and args.scale_b.mT.is_contiguous()
