"""Arguments of dense and batched GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...types import TileTable
from .base import Arguments, epilogue_key, is_one_behind_another, sized_key


@dataclass(eq=False)
class GemmArguments(Arguments):
    """out = epilogue(A @ B), for one product or for each product of a batch of L.

    Shapes: A [M, K] or [L, M, K], B [K, N] or [L, K, N], out [M, N] or [L, M, N].
    """

    tensors = ("A", "B", "out")

    A: Tensor  # [M, K] or [L, M, K]
    B: Tensor  # [K, N] or [L, K, N]
    out: Tensor  # [M, N]; [L, M, N] if A or B is batched
    accumulator_type: torch.dtype = torch.float32
    tile_table: TileTable | None = None  # one group per matrix; None: kernels that need a tile table make one
    epilogue: str | None = None  # a plain activation, applied to the product before it is rounded
    assumed_rows: int | None = None  # number of rows per matrix for which the kernel is chosen; None: the actual one

    @property
    def num_batches(self) -> int:
        return self.out.shape[0] if self.out.dim() == 3 else 1

    @property
    def rows_per_matrix(self) -> int:
        """Return the number of rows per matrix that decides the kernel: `assumed_rows`, or else the actual number."""
        return self.out.shape[-2] if self.assumed_rows is None else self.assumed_rows

    def _num_table_groups(self) -> int:
        return self.num_batches

    def selection_key(self) -> tuple[Any, ...]:
        rows = (self.num_batches, self.A.dim(), self.rows_per_matrix, self.assumed_rows, self.out.shape[-2] == 0)
        one_behind_another = tuple(x.dim() == 2 or is_one_behind_another(x) for x in (self.A, self.out))
        return rows, self.B.shape, self.epilogue, one_behind_another, self._layouts()

    def table_key(self) -> str:
        form = f"gemm B={'row' if self.B.stride(-1) == 1 else 'column'}{epilogue_key(self.epilogue)}"
        num_rows = self.num_batches * self.rows_per_matrix
        return sized_key(form, self.A.dtype, self.num_batches, *self.B.shape[-2:], num_rows=num_rows)

    def shape_error(self) -> str | None:
        if error := self._expect_rank("A", 2, 3) or self._expect_rank("B", 2, 3):
            return error
        batch = {len(tensor) for tensor in (self.A, self.B) if tensor.dim() == 3}
        if len(batch) > 1:
            return f"Operand `B`: expected a batch of {len(self.A)} as A, got {list(self.B.shape)}"
        return self._expect("B", *self.B.shape[:-2], self.A.shape[-1], self.B.shape[-1]) or self._expect(
            "out", *batch, self.A.shape[-2], self.B.shape[-1]
        )
