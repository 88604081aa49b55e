"""Base of the catalog's argument classes, and helpers that build their selection and table keys.

Any object with `__dlpack__` may be passed as a tensor. The object's memory is used without a copy. `error` reports
shapes, dtypes and devices that no kernel supports. A single kernel's requirements are in its metadata.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ...runtime.row_layout import LINE_BYTES
from ...types import TileTable


def rows_bucket(num_rows: int, num_groups: int) -> int:
    """Return the average number of rows per group, rounded up to a power of two."""
    rows = -(-num_rows // (num_groups or 1))
    return 1 << (rows - 1).bit_length() if rows else 1


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return (dtype, contiguity of each axis, is_aligned, has_lines). `is_aligned`: the address and strides other than
    1 are multiples of 16 bytes, as TMA needs. `has_lines`: strides longer than a cache line are multiples of a cache
    line."""
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
    """Return None if there is no index, else whether the index is contiguous. Kernels need a contiguous index."""
    return None if index is None else index.is_contiguous()


def epilogue_key(epilogue: str | None) -> str:
    return "" if epilogue is None else f" epilogue={epilogue}"


_PLAIN_TENSORS = frozenset((Tensor, Parameter, type(None)))


class Arguments(abc.ABC):
    """Base of the argument classes, with the checks that all kernels share."""

    A: Tensor
    out: Tensor
    accumulator_type: torch.dtype
    epilogue: str | None  # name of the activation that the kernel applies to the product, or None
    tensors: ClassVar[tuple[str, ...]]  # names of the tensor fields; an optional field may hold None
    operand_names: ClassVar[tuple[str, ...]] = ("A", "B", "out")  # fields that KernelMetadata.operands describes
    tile_table: TileTable | None = None  # tiles of the rows; always None in classes whose kernels need no table
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
        """Return why no kernel supports these arguments, or None if they are valid. The text names the operand."""
        for name in self.tensors:
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.A.device:
                return f"Operand `{name}`: expected device {self.A.device} as A, got {tensor.device}"
        return self.shape_error()

    def table_error(self) -> str | None:
        """Return why the tile table does not fit, or None if it fits or is absent. `error` does not check the table,
        because selection calls `error` once per `selection_key`, and arguments with equal keys may differ in tables."""
        if (table := self.tile_table) is None:
            return None
        num_groups = self._num_table_groups()
        shapes = {"bounds": (num_groups + 2,), "tiles": (*table.tiles.shape[:1], 2), "num_tiles": (4,)}
        for name, shape in {**shapes, "order": (num_groups,)}.items():
            tensor = getattr(table, name)
            if tensor.shape != shape:
                return f"Operand `tile_table.{name}`: expected shape {list(shape)}, got {list(tensor.shape)}"
            if tensor.dtype != torch.int32 or tensor.device != self.A.device or not tensor.is_contiguous():
                form = f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
                return f"Operand `tile_table.{name}`: expected contiguous int32 on {self.A.device}, got {form}"
        return None

    def _num_table_groups(self) -> int:
        """Return the number of groups of the tile table."""
        return 1

    @abc.abstractmethod
    def shape_error(self) -> str | None:
        """Return the error in shapes and dtypes, or None if they are valid. The text names the operand."""

    @abc.abstractmethod
    def selection_key(self) -> tuple[Any, ...]:
        """Return all properties that decide which kernels can run and which is fastest, except class and
        `accumulator_type`. Most classes round the number of rows up to a power of two. Zero rows have their own key."""

    @abc.abstractmethod
    def table_key(self) -> str:
        """Return the key for tables of measured kernels: the layouts and sizes that decide which kernel is fastest."""

    def _layouts(self) -> tuple[Any, ...]:
        return self.A.device, *[layout_of(getattr(self, name)) for name in self.operand_names]

    def _expect(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> str | None:
        """Return the error in the shape or dtype of an optional tensor, or None if the tensor fits or is absent."""
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


class RowArguments(Arguments):
    """Base of the arguments of out[start:end] = A[start:end] @ B[g] for every group g.

    Group g has the rows start:end, with start = offsets[g - 1], or 0 for the first group, and end = offsets[g].
    """

    B: Tensor  # [G, K, N]
    offsets: Tensor | None  # [G] int32; not read when tile_table is given
    row_to_token: Tensor | None  # [R] int32: row r reads A[row_to_token[r]]
    assumed_rows: int | None = None  # number of rows per group to choose the kernel for; None: the actual number

    @property
    def num_rows(self) -> int:
        """Return the number of rows for which the kernel is chosen."""
        return self.out.shape[0] if self.assumed_rows is None else self.assumed_rows * self.B.shape[0]

    def _num_table_groups(self) -> int:
        return len(self.B)

    def _row_key(self) -> tuple[Any, ...]:
        """Return the part of `selection_key` that all subclasses share."""
        sizes = self.B.shape
        return (
            sizes,
            rows_bucket(self.num_rows, sizes[0]),
            index_form(self.row_to_token),
            self.epilogue,
            self.assumed_rows,
            self.out.shape[0] == 0,
            self._layouts(),
        )

    def _row_table_key(self, op: str, suffix: str = "") -> str:
        layout = "row" if self.B.stride(2) == 1 else "column"
        gather = "A" if self.row_to_token is not None else "none"
        form = f"{op} B={layout} gather={gather}{suffix}"
        return sized_key(form, self.A.dtype, *self.B.shape, num_rows=self.num_rows)

    def _row_error(self) -> str | None:
        """Return the error in A, B, offsets, row_to_token or the number of axes of out, or None if there is none."""
        if error := self._expect_rank("A", 2) or self._expect_rank("B", 3) or self._expect_rank("out", 2):
            return error
        (num_a_rows, depth), (num_groups, _, num_columns), num_rows = self.A.shape, self.B.shape, self.out.shape[0]
        return (
            self._expect("B", num_groups, depth, num_columns)
            or (num_a_rows != num_rows and self.row_to_token is None and self._expect("A", num_rows, depth))
            or self._expect("offsets", num_groups, dtype=torch.int32)
            or self._expect("row_to_token", num_rows, dtype=torch.int32)
            or self._expect_contiguous("row_to_token")
            or self._expect_one_of("offsets", "tile_table")
        )
