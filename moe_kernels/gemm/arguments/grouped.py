"""Arguments of grouped GEMMs over contiguous row ranges: the product, and the gradient of its matrices B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...specs import is_gated
from ...types import TileTable
from .base import Arguments, RowArguments, index_form, layout_of, rows_bucket, sized_key


@dataclass(eq=False)
class GroupedGemmArguments(RowArguments):
    """out[start:end] = row_scale * (scale_a * scale_b[g] * (A[start:end] @ B[g]) + bias[g]) for every group g.

    `extra_a` and `extra_b` lengthen the reduction by r: A[start:end] @ B[g] + extra_a[start:end] @ extra_b[g] is
    rounded once.

    With an epilogue, the product without the bias is rounded and stored in `preactivation`. `out` gets the activation
    of (stored preactivation + bias). The sum is not rounded before the activation, because rounding could move a value
    across a clamp's limit. N is 2F if the activation is gated, else F.

    Shapes: A [R, K] or [T, K], B [G, K, N], out [R, N] or [R, F], offsets [G] int32, row_to_token [R] int32,
    preactivation [R, N], bias [G, N], row_scale [R] float32, scale_a [R] float32 or [T], scale_b [G, N] float32,
    extra_a [R, r], extra_b [G, r, N].
    """

    optional_operands: ClassVar[tuple[str, ...]] = ("bias", "row_scale", "scale_a", "scale_b", "extra_a", "extra_b")
    tensors = ("A", "B", "out", "offsets", "row_to_token", "preactivation", *optional_operands)

    A: Tensor  # [R, K]; [T, K] with row_to_token
    B: Tensor  # [G, K, N]
    out: Tensor  # [R, N]; [R, F] with an epilogue
    accumulator_type: torch.dtype = torch.float32
    offsets: Tensor | None = None  # [G] int32; not read when tile_table is given
    row_to_token: Tensor | None = None  # [R] int32: row r reads A[row_to_token[r]]
    tile_table: TileTable | None = None
    epilogue: str | None = None  # name of the activation; None: no activation
    preactivation: Tensor | None = None  # [R, N], with an epilogue
    zero_tail: bool = True  # whether to write zeros to the rows past the last offset
    bias: Tensor | None = None  # [G, N]
    row_scale: Tensor | None = None  # [R] float32
    scale_a: Tensor | None = None  # [R] float32; [T] with row_to_token
    scale_b: Tensor | None = None  # [G, N] float32
    extra_a: Tensor | None = None  # [R, r], in expert order even if A is [T, K]
    extra_b: Tensor | None = None  # [G, r, N]
    reserved_sms: int = 0  # number of SMs that a persistent kernel leaves unused
    assumed_rows: int | None = None  # number of rows per group for which the kernel is chosen; None: the actual one

    @property
    def product(self) -> Tensor:  # [R, N]
        if self.epilogue is None:
            return self.out
        assert self.preactivation is not None
        return self.preactivation

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out] if self.preactivation is None else [self.out, self.preactivation]

    def selection_key(self) -> tuple[Any, ...]:
        bias, product, extra = self.bias, self.preactivation, None
        if self.extra_a is not None and self.extra_b is not None:
            extra = self.extra_a.shape[1], layout_of(self.extra_a), layout_of(self.extra_b)
        return (
            *self._row_key(),
            None if bias is None else (bias.dtype, bias.stride(-1) == 1),
            self.row_scale is None,
            self.scale_a is None,
            self.scale_b is None,
            None if product is None else layout_of(product),
            extra,
        )

    def table_key(self) -> str:
        return self._row_table_key("grouped_gemm", f" epilogue={self.epilogue or 'none'}")

    def shape_error(self) -> str | None:
        if error := self._row_error():
            return error
        num_groups, _, num_columns = self.B.shape
        num_rows, gated = self.out.shape[0], is_gated(self.epilogue)
        if gated and num_columns % 2:
            return f"Operand `B`: expected an even number of columns with {self.epilogue}, got {list(self.B.shape)}"
        return (
            self._expect("out", num_rows, num_columns // 2 if gated else num_columns)
            or self._expect("preactivation", num_rows, num_columns, dtype=self.out.dtype)
            or self._expect("bias", num_groups, num_columns)
            or self._expect("row_scale", num_rows, dtype=torch.float32)
            or self._expect("scale_a", self.A.shape[0], dtype=torch.float32)
            or self._expect("scale_b", num_groups, num_columns, dtype=torch.float32)
            or self._extra_error(num_rows, num_groups, num_columns)
        )

    def _extra_error(self, num_rows: int, num_groups: int, num_columns: int) -> str | None:
        if (self.extra_a is None) != (self.extra_b is None):
            return "Operand `extra_a`: expected together with extra_b, got one of them"
        if self.extra_a is None:
            return None
        rank, dtype = self.extra_a.shape[-1], self.A.dtype
        return self._expect("extra_a", num_rows, rank, dtype=dtype) or self._expect(
            "extra_b", num_groups, rank, num_columns, dtype=dtype
        )


@dataclass(eq=False)
class WgradArguments(Arguments):
    """out[g] = A[start:end].T @ dout[start:end] for every group g. An empty group gives zeros. With `accumulate`, the
    products are added to `out`.

    Shapes: A [R, K] or [T, K], dout [R, N] or [T, N], out [G, K, N], offsets [G] int32, a_row_to_token [R] int32,
    dout_row_to_token [R] int32.
    """

    tensors = ("A", "dout", "out", "offsets", "a_row_to_token", "dout_row_to_token")
    operand_names = ("A", "dout", "out")

    A: Tensor  # [R, K]; [T, K] with a_row_to_token
    dout: Tensor  # [R, N]; [T, N] with dout_row_to_token
    out: Tensor  # [G, K, N]
    accumulator_type: torch.dtype = torch.float32
    offsets: Tensor | None = None  # [G] int32; not read when tile_table is given
    a_row_to_token: Tensor | None = None  # [R] int32
    dout_row_to_token: Tensor | None = None  # [R] int32
    tile_table: TileTable | None = None
    epilogue: str | None = None  # always None: no kernel applies an epilogue to a gradient
    reserved_sms: int = 0  # number of SMs that a persistent kernel leaves unused
    accumulate: bool = False  # whether to add to `out` instead of overwriting it

    @property
    def num_rows(self) -> int:
        return (self.A if self.a_row_to_token is None else self.a_row_to_token).shape[0]

    def _num_table_groups(self) -> int:
        return len(self.out)

    def selection_key(self) -> tuple[Any, ...]:
        sizes, num_rows = self.out.shape, self.num_rows
        return (
            sizes,
            rows_bucket(num_rows, sizes[0]),
            index_form(self.a_row_to_token),
            index_form(self.dout_row_to_token),
            self.epilogue,
            num_rows == 0,
            self.accumulate,
            self._layouts(),
        )

    def table_key(self) -> str:
        gathers = (("A", self.a_row_to_token), ("dout", self.dout_row_to_token))
        form = f"wgrad gather={'+'.join(name for name, index in gathers if index is not None) or 'none'}"
        return sized_key(form, self.A.dtype, *self.out.shape, num_rows=self.num_rows)

    def shape_error(self) -> str | None:
        if error := self._expect_rank("A", 2) or self._expect_rank("dout", 2) or self._expect_rank("out", 3):
            return error
        num_rows, num_groups, size_k, size_n = self.num_rows, len(self.out), self.A.shape[1], self.dout.shape[1]
        return (
            (self.dout_row_to_token is None and self._expect("dout", num_rows, size_n))
            or self._expect("out", num_groups, size_k, size_n)
            or self._expect("offsets", num_groups, dtype=torch.int32)
            or self._expect("a_row_to_token", num_rows, dtype=torch.int32)
            or self._expect("dout_row_to_token", num_rows, dtype=torch.int32)
            or self._expect_contiguous("a_row_to_token", "dout_row_to_token")
            or self._expect_one_of("offsets", "tile_table")
        )
