"""Arguments of a grouped GEMM that decodes quantised weights while it loads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...runtime.triton import cdiv
from ...types import QuantizedWeight, TileTable, WeightFormat
from .base import Arguments, index_form, layout_of, rows_bucket, sized_key


class QuantizedMatrices(NamedTuple):
    """A quantised weight [G, out, in] as a GEMM's second operand: B[g] = weight[g], or weight[g].T if `transposed`."""

    weight: QuantizedWeight
    transposed: bool

    @property
    def shape(self) -> tuple[int, int, int]:  # [G, K, N]
        num_groups, size_out, size_in = self.weight.shape
        return (num_groups, size_in, size_out) if self.transposed else (num_groups, size_out, size_in)


@dataclass(eq=False)
class DecodingGemmArguments(Arguments):
    """out[start:end] = A[start:end] @ B[g] + extra_a[start:end] @ extra_b[g] + bias[g] for every group g.

    B[g] is the quantised matrix g, transposed if `transposed`. `extra_a` and `extra_b` lengthen the reduction by r.
    Rows past the last group are not written. Construct with `of`.
    """

    operand_names = ("A", "out")
    weight_tensors: ClassVar[tuple[str, ...]] = tuple(
        name for name in QuantizedWeight._fields if name not in ("format", "shape")
    )
    tensors = ("A", "out", *weight_tensors, "row_to_token", "bias", "extra_a", "extra_b")

    A: Tensor  # [R, K]; [T, K] with row_to_token
    out: Tensor  # [R, N]
    values: Tensor  # the fields `values` to `nested_offset` are those of `QuantizedWeight`
    scales: Tensor
    format: WeightFormat
    shape: torch.Size  # [G, out, in]
    codes: Tensor | None = None
    nested_codes: Tensor | None = None
    nested_scales: Tensor | None = None
    nested_offset: Tensor | None = None
    transposed: bool = False
    accumulator_type: torch.dtype = torch.float32
    row_to_token: Tensor | None = None  # [R] int32: row r reads A[row_to_token[r]]
    tile_table: TileTable | None = None
    epilogue: str | None = None  # always None, because no kernel that decodes weights applies an epilogue
    bias: Tensor | None = None  # [G, N]
    extra_a: Tensor | None = None  # [R, r]; row_to_token does not apply
    extra_b: Tensor | None = None  # [G, r, N]

    @classmethod
    def of(cls, a: Tensor, b: QuantizedMatrices, out: Tensor, **options: Any) -> DecodingGemmArguments:
        return cls(A=a, out=out, transposed=b.transposed, **b.weight._asdict(), **options)

    @property
    def B(self) -> QuantizedMatrices:  # [G, K, N]
        fields = {name: getattr(self, name) for name in QuantizedWeight._fields}
        return QuantizedMatrices(QuantizedWeight(**fields), self.transposed)

    @property
    def rows_per_group(self) -> int:
        return cdiv(self.out.shape[0], self.shape[0])

    def _num_table_groups(self) -> int:
        return self.B.shape[0]

    def selection_key(self) -> tuple[Any, ...]:
        return (
            self.shape,
            self.transposed,
            self.format,
            rows_bucket(self.out.shape[0], self.shape[0]),
            self.out.shape[0] == 0,
            index_form(self.row_to_token),
            *(None if t is None else (t.shape[-1], layout_of(t)) for t in (self.bias, self.extra_a, self.extra_b)),
            self._layouts(),
        )

    def table_key(self) -> str:
        nested = "" if self.format.nested_block is None else "_nested"
        layout = "column" if self.transposed else "row"
        gather = "A" if self.row_to_token is not None else "none"
        form = f"decoding_gemm weight={self.format.name}{nested} B={layout} gather={gather}"
        return sized_key(form, self.A.dtype, *self.B.shape, self.out.shape[0])

    def shape_error(self) -> str | None:
        if error := self._expect_rank("A", 2) or self._expect_rank("out", 2):
            return error
        num_groups, depth, num_columns = self.B.shape
        num_rows = self.out.shape[0]
        rank = 0 if self.extra_a is None else self.extra_a.shape[-1]
        return (
            self._expect("A", num_rows if self.row_to_token is None else self.A.shape[0], depth)
            or self._expect("out", num_rows, num_columns)
            or self._expect("row_to_token", num_rows, dtype=torch.int32)
            or self._expect_contiguous("row_to_token")
            or self._expect("bias", num_groups, num_columns)
            or self._expect("extra_a", num_rows, rank, dtype=self.A.dtype)
            or self._expect("extra_b", num_groups, rank, num_columns, dtype=self.A.dtype)
            or ("Operand `tile_table`: expected one, got None" if self.tile_table is None else None)
        )
