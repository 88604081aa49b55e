"""Argument classes of the catalog's kernels, one per form of GEMM.

Tensors may be any objects with `__dlpack__`; they are used without a copy. `error` reports shapes, dtypes and devices
that no kernel supports. The requirements of a single kernel are in its metadata.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..runtime.memory import LINE_BYTES
from ..specs import is_gated
from ..types import TileTable


def rows_bucket(num_rows: int, num_groups: int) -> int:
    """Return the rows per group, rounded up to a power of two."""
    rows = -(-num_rows // (num_groups or 1))
    return 1 << (rows - 1).bit_length() if rows else 1


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the dtype, which axes are contiguous, whether the copy engine's 16-byte alignment holds, and whether all
    rows longer than a cache line start at one."""
    return _layout(tensor.dtype, tensor.stride(), tensor.data_ptr() % 16 == 0)


@functools.lru_cache(maxsize=4096)
def _layout(dtype: torch.dtype, strides: tuple[int, ...], aligned: bool) -> tuple[Any, ...]:
    contiguous = tuple(stride == 1 for stride in strides)
    pitches = [stride * dtype.itemsize for stride in strides if stride != 1]
    has_lines = all(pitch <= LINE_BYTES or pitch % LINE_BYTES == 0 for pitch in pitches)
    return dtype, contiguous, aligned and all(pitch % 16 == 0 for pitch in pitches), has_lines


def is_one_behind_another(matrices: Tensor) -> bool:
    """Return whether the matrices of a batch [L, M, C] follow one another without a gap."""
    num_batches, num_rows, _ = matrices.shape
    return num_batches <= 1 or matrices.stride(0) == num_rows * matrices.stride(1)


def sized_key(form: str, dtype: torch.dtype, num_groups: int, size_k: int, size_n: int, num_rows: int) -> str:
    rows = rows_bucket(num_rows, num_groups)
    return f"{form} {str(dtype)[6:]} G={num_groups} K={size_k} N={size_n} rows={rows}"


def index_form(index: Tensor | None) -> bool | None:
    """Return None without an index, else whether kernels can read it."""
    return None if index is None else index.is_contiguous()


def epilogue_key(epilogue: str | None) -> str:
    return "" if epilogue is None else f" epilogue={epilogue}"


_PLAIN_TENSORS = frozenset((Tensor, Parameter, type(None)))


class Arguments(abc.ABC):
    """Base of the argument classes: A, the operands by name, and the checks that hold for all kernels."""

    A: Tensor
    out: Tensor
    accumulator_type: torch.dtype
    epilogue: str | None  # an activation that the kernel applies to the product
    tensors: ClassVar[tuple[str, ...]]  # fields that hold a tensor, or None where optional
    operand_names: ClassVar[tuple[str, ...]]  # fields that KernelMetadata.operands describes
    tile_table: TileTable | None  # always None for forms without one
    __dataclass_fields__: ClassVar[dict[str, Any]]  # subclasses are dataclasses

    def __post_init__(self) -> None:
        fields = self.__dict__
        if not _PLAIN_TENSORS.issuperset(map(type, map(fields.get, self.tensors))):
            for name in self.tensors:
                if not isinstance(fields[name], Tensor | None):
                    object.__setattr__(self, name, torch.from_dlpack(fields[name]))

    @property
    def operands(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.operand_names}

    @property
    def outputs(self) -> list[Tensor]:
        """Return the tensors that a kernel writes."""
        return [self.out]

    def error(self) -> str | None:
        """Return why no kernel supports these arguments, naming the operand; None if they are valid."""
        for name in self.tensors:
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.A.device:
                return f"Operand `{name}`: expected device {self.A.device} as A, got {tensor.device}"
        return self.shape_error()

    @abc.abstractmethod
    def shape_error(self) -> str | None:
        """Return the error in shapes and dtypes, naming the operand; None if they are valid."""

    @abc.abstractmethod
    def selection_key(self) -> tuple[Any, ...]:
        """Return all that support and speed depend on. Arguments with equal keys get the same kernel. Numbers of rows
        are rounded up to a power of two; no rows are a separate case."""

    @abc.abstractmethod
    def table_key(self) -> str:
        """Return the key in tables of measured kernels: the layouts and sizes that decide which kernel is fastest."""

    def _layouts(self) -> tuple[Any, ...]:
        return self.A.device, *[layout_of(getattr(self, name)) for name in self.operand_names]

    def _expect(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> str | None:
        """Return the error of an optional tensor's shape and dtype, or None."""
        tensor = getattr(self, name)
        if tensor is None:
            return None
        if tensor.shape != shape:
            return f"Operand `{name}`: expected shape {list(shape)}, got {list(tensor.shape)}"
        if dtype is not None and tensor.dtype != dtype:
            return f"Operand `{name}`: expected {dtype}, got {tensor.dtype}"
        return None

    def _expect_rank(self, name: str, *ranks: int) -> str | None:
        tensor = getattr(self, name)
        if tensor.dim() not in ranks:
            return f"Operand `{name}`: expected {' or '.join(map(str, ranks))} axes, got shape {list(tensor.shape)}"
        return None

    def _expect_contiguous(self, *names: str) -> str | None:
        for name in names:
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_contiguous():
                return f"Operand `{name}`: expected contiguous, got strides {tensor.stride()}"
        return None

    def _expect_one_of(self, *names: str) -> str | None:
        if all(getattr(self, name) is None for name in names):
            return f"Operand `{names[0]}`: expected it or {names[1]}, got neither"
        return None


@dataclass(eq=False)
class GroupedGemmArguments(Arguments):
    """out[start:end] = row_scale * (scale_a * scale_b[g] * (A[start:end] @ B[g]) + bias[g]) for every group g.

    `extra_a` and `extra_b` lengthen the reduction: A[start:end] @ B[g] + extra_a[start:end] @ extra_b[g] is rounded
    once.

    With an epilogue, `preactivation` is this without the bias. `out` is the activation of the stored values plus the
    bias, because sums that are rounded first cross the limits of clamps more often. N is 2F if gated, else F.

    Shapes: A [R, K] or [T, K], B [G, K, N], out [R, N] or [R, F], offsets [G] int32, row_to_token [R] int32,
    preactivation [R, N], bias [G, N], row_scale [R] float32, scale_a [R] float32 or [T], scale_b [G, N] float32,
    extra_a [R, r], extra_b [G, r, N].
    """

    operand_names = ("A", "B", "out")
    optional_operands: ClassVar[tuple[str, ...]] = ("bias", "row_scale", "scale_a", "scale_b", "extra_a", "extra_b")
    tensors = ("A", "B", "out", "offsets", "row_to_token", "preactivation", *optional_operands)

    A: Tensor  # [R, K]; [T, K] with row_to_token
    B: Tensor  # [G, K, N]
    out: Tensor  # [R, N]; [R, F] with an epilogue
    accumulator_type: torch.dtype = torch.float32
    offsets: Tensor | None = None  # [G] int32; not read when tile_table is given
    row_to_token: Tensor | None = None  # [R] int32: row r reads A[row_to_token[r]]
    tile_table: TileTable | None = None
    epilogue: str | None = None  # an activation
    preactivation: Tensor | None = None  # [R, N], with an epilogue
    zero_tail: bool = True  # write zeros to the rows past the last offset; False leaves them unwritten
    bias: Tensor | None = None  # [G, N]
    row_scale: Tensor | None = None  # [R] float32
    scale_a: Tensor | None = None  # [R] float32; [T] with row_to_token
    scale_b: Tensor | None = None  # [G, N] float32
    extra_a: Tensor | None = None  # [R, r], never gathered
    extra_b: Tensor | None = None  # [G, r, N]
    reserved_sms: int = 0  # SMs that a persistent kernel leaves unused
    assumed_rows: int | None = None  # rows per group for which the kernel is chosen; None uses the actual rows

    @property
    def num_rows(self) -> int:
        """Return the number of rows that the kernel is chosen for."""
        return self.out.shape[0] if self.assumed_rows is None else self.assumed_rows * self.B.shape[0]

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
        sizes, bias, product = self.B.shape, self.bias, self.preactivation
        extra = None
        if self.extra_a is not None and self.extra_b is not None:
            extra = self.extra_a.shape[1], layout_of(self.extra_a), layout_of(self.extra_b)
        return (
            sizes,
            rows_bucket(self.num_rows, sizes[0]),
            index_form(self.row_to_token),
            self.epilogue,
            None if bias is None else (bias.dtype, bias.stride(-1) == 1),
            self.row_scale is None,
            self.scale_a is None,
            self.scale_b is None,
            self.assumed_rows,
            self.out.shape[0] == 0,
            None if product is None else layout_of(product),
            extra,
            self._layouts(),
        )

    def table_key(self) -> str:
        num_groups, size_k, size_n = self.B.shape
        layout = "row" if self.B.stride(2) == 1 else "column"
        gather = "A" if self.row_to_token is not None else "none"
        form = f"grouped_gemm B={layout} gather={gather} epilogue={self.epilogue or 'none'}"
        return sized_key(form, self.A.dtype, num_groups, size_k, size_n, self.num_rows)

    def shape_error(self) -> str | None:
        if error := self._expect_rank("A", 2) or self._expect_rank("B", 3) or self._expect_rank("out", 2):
            return error
        (num_a_rows, depth), (num_groups, _, num_columns) = self.A.shape, self.B.shape
        num_rows, gated = self.out.shape[0], is_gated(self.epilogue)
        if gated and num_columns % 2:
            return f"Operand `B`: expected an even number of columns with {self.epilogue}, got {list(self.B.shape)}"
        return (
            self._expect("B", num_groups, depth, num_columns)
            or (num_a_rows != num_rows and self.row_to_token is None and self._expect("A", num_rows, depth))
            or self._expect("out", num_rows, num_columns // 2 if gated else num_columns)
            or self._expect("offsets", num_groups, dtype=torch.int32)
            or self._expect("row_to_token", num_rows, dtype=torch.int32)
            or self._expect_contiguous("row_to_token")
            or self._expect("preactivation", num_rows, num_columns, dtype=self.out.dtype)
            or self._expect("bias", num_groups, num_columns)
            or self._expect("row_scale", num_rows, dtype=torch.float32)
            or self._expect("scale_a", num_a_rows, dtype=torch.float32)
            or self._expect("scale_b", num_groups, num_columns, dtype=torch.float32)
            or self._extra_error(num_rows, num_groups, num_columns)
            or self._expect_one_of("offsets", "tile_table")
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
    """out[g] = A[start:end].T @ dout[start:end] for every group g; an empty group becomes zeros, or stays as it is with
    `accumulate`.

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
    reserved_sms: int = 0  # SMs that a persistent kernel leaves unused
    accumulate: bool = False  # add to out

    @property
    def num_rows(self) -> int:
        return (self.A if self.a_row_to_token is None else self.a_row_to_token).shape[0]

    def selection_key(self) -> tuple[Any, ...]:
        gathers = index_form(self.a_row_to_token), index_form(self.dout_row_to_token)
        num_rows = self.num_rows
        form = *gathers, self.epilogue, num_rows == 0, self.accumulate
        sizes = self.out.shape
        return *sizes, rows_bucket(num_rows, sizes[0]), *form, *self._layouts()

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


@dataclass(eq=False)
class GemmArguments(Arguments):
    """out = epilogue(A @ B), dense, or for each of a batch of L matrices.

    Shapes: A [M, K] or [L, M, K], B [K, N] or [L, K, N], out [M, N] or [L, M, N].
    """

    tensors = ("A", "B", "out")
    operand_names = ("A", "B", "out")

    A: Tensor  # [M, K] or [L, M, K]
    B: Tensor  # [K, N] or [L, K, N]
    out: Tensor  # [M, N]; [L, M, N] if A or B is batched
    accumulator_type: torch.dtype = torch.float32
    tile_table: TileTable | None = None  # table of the batch as groups of rows, for kernels that need one
    epilogue: str | None = None  # a plain activation, applied to the product before it is rounded
    assumed_rows: int | None = None  # rows per matrix for which the kernel is chosen; None uses the actual rows

    @property
    def num_batches(self) -> int:
        return self.out.shape[0] if self.out.dim() == 3 else 1

    @property
    def rows_per_matrix(self) -> int:
        """Return the number of rows per matrix that the kernel is chosen for."""
        return self.out.shape[-2] if self.assumed_rows is None else self.assumed_rows

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
