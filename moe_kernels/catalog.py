"""The kernel catalog: every GEMM kernel and configuration is one object that says what it is and what it takes.

    args = GroupedGemmArguments(A, B, out, offsets=offsets)
    kernels = get_kernels(args)      # those that support these arguments; all of them when args is None
    kernels[0].run(args)

The ops of this package choose among the same objects (`tuning.select`). Listing and asking need no GPU.
"""

from __future__ import annotations

import abc
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._dispatch import kernel_obstacle, on_device_of
from ._triton import triton
from .reference import TileTable


@dataclass(frozen=True)
class Status:
    """Yes, or a reason why not: false exactly when `error` is set."""

    error: str | None = None

    def __bool__(self) -> bool:
        return self.error is None


@dataclass(frozen=True)
class Operand:
    """What a kernel asks of one operand. `layout` "row": the last axis is contiguous, "column": the one before it,
    None: any strides. `alignment_bytes`: of the address and of every stride but the contiguous axis's."""

    dtype: torch.dtype
    layout: str | None = None
    alignment_bytes: int = 1


@dataclass(frozen=True)
class GroupedGemmOperands:
    """out[start:end] = A[start:end] @ B[g]."""

    A: Operand
    B: Operand
    out: Operand


@dataclass(frozen=True)
class WgradOperands:
    """out[g] = A[start:end].T @ dout[start:end]."""

    A: Operand
    dout: Operand
    out: Operand


@dataclass(frozen=True)
class Design:
    """How a kernel works. `tile_shape` is (rows of out, columns of out, reduction)."""

    tile_shape: tuple[int, int, int]
    num_warps: int
    num_stages: int
    gather: bool = False  # rows of an operand are read through an index
    persistent: bool = False
    tma: bool = False
    group_tiles: int = 8  # row tiles that walk the columns together, so that they share operands in the L2 cache


@dataclass(frozen=True)
class PointerDesign(Design):
    """Loads through pointers: any size, any stride, any CUDA GPU."""


@dataclass(frozen=True)
class TmaDesign(Design):
    """Contiguous operands through TMA, gathered ones through asynchronous copies; software pipelining."""

    flatten: bool = False  # one pipeline over all tiles of a program: the next one's loads start before the epilogue


@dataclass(frozen=True)
class WarpSpecializedDesign(Design):
    """One warpgroup loads through TMA, two multiply and store. `num_stages` counts the buffers between them."""


@dataclass(frozen=True)
class KernelMetadata:
    kernel_name: str
    kernel_class: type[Kernel]
    min_cc: int
    operands: GroupedGemmOperands | WgradOperands
    design: Design
    epilogue: str | None = None  # the activation applied to the product
    max_cc: int | None = None  # the last compute capability it was written for


@dataclass(frozen=True, eq=False)
class GroupedGemmArguments:
    """out[start:end] = A[start:end] @ B[g] for every group g.

    With an epilogue, `preactivation` holds this product, N is 2F, and `out` is its activation.
    """

    A: Tensor  # [R, K]; [T, K] with row_to_token
    B: Tensor  # [G, K, N]
    out: Tensor  # [R, N]; [R, F] with an epilogue
    accumulator_type: torch.dtype = torch.float32
    offsets: Tensor | None = None  # [G] int32; not read when tile_table is given
    row_to_token: Tensor | None = None  # [R] int32: row r reads A[row_to_token[r]]
    tile_table: TileTable | None = None
    epilogue: str | None = None  # an activation
    preactivation: Tensor | None = None  # [R, 2F], with an epilogue
    zero_tail: bool = True  # write zeros to the rows past the last offset; otherwise they are left alone

    @property
    def operands(self) -> dict[str, Tensor]:
        return {"A": self.A, "B": self.B, "out": self.out}


@dataclass(frozen=True, eq=False)
class WgradArguments:
    """out[g] = A[start:end].T @ dout[start:end] for every group g; an empty group becomes zeros."""

    A: Tensor  # [R, K]; [T, K] with a_row_to_token
    dout: Tensor  # [R, N]; [T, N] with dout_row_to_token
    out: Tensor  # [G, K, N]
    accumulator_type: torch.dtype = torch.float32
    offsets: Tensor | None = None  # [G] int32; not read when bounds is given
    a_row_to_token: Tensor | None = None  # [R] int32
    dout_row_to_token: Tensor | None = None  # [R] int32
    bounds: Tensor | None = None  # [G + 2] int32, as in TileTable

    @property
    def num_rows(self) -> int:
        return len(self.A if self.a_row_to_token is None else self.a_row_to_token)

    @property
    def operands(self) -> dict[str, Tensor]:
        return {"A": self.A, "dout": self.dout, "out": self.out}


Arguments = GroupedGemmArguments | WgradArguments


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run or to compile."""

    function: Any  # a Triton JIT function
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def _run(launch: Launch, device: torch.device) -> None:
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    launch.function[launch.grid](*launch.arguments, **launch.options)


class Kernel(abc.ABC):
    """One kernel in one configuration."""

    arguments_class: type
    obstacle: str | None = None  # why it cannot run with the installed software

    def __init__(self, metadata: KernelMetadata):
        self.metadata = metadata

    def __repr__(self) -> str:
        return f"<{self.metadata.kernel_name}>"

    def supports(self, args: Arguments) -> Status:
        """Whether this kernel computes these arguments. Reads shapes, dtypes, strides and the device, no values."""
        if not isinstance(args, self.arguments_class):
            return Status(f"expected {self.arguments_class.__name__}, got {type(args).__name__}")
        if args.accumulator_type != torch.float32:
            return Status(f"accumulates in torch.float32, asked for {args.accumulator_type}")
        for name, tensor in args.operands.items():
            if error := _operand_error(getattr(self.metadata.operands, name), tensor):
                return Status(f"Operand `{name}`: {error}")
        if not (status := self.supports_design(args)):
            return status
        if obstacle := self.obstacle or kernel_obstacle(args.A):
            return Status(obstacle)
        if args.A.is_cuda and not self.runs_on(cc := device_cc(args.A.device)):
            wanted = f"{self.metadata.min_cc} to {self.metadata.max_cc or 'any'}"
            return Status(f"needs compute capability {wanted}, the device has {cc}")
        return Status()

    def runs_on(self, cc: int) -> bool:
        """Whether it was written for GPUs of this compute capability."""
        return self.metadata.min_cc <= cc and (self.metadata.max_cc is None or cc <= self.metadata.max_cc)

    @abc.abstractmethod
    def supports_design(self, args: Arguments) -> Status:
        """What the design asks beyond the operands' metadata."""

    @abc.abstractmethod
    def launch(self, args: Arguments) -> Launch | None:
        """The launch for these arguments, or None when there is nothing to write."""

    def run(self, args: Arguments) -> None:
        """Launch on the current stream. The arguments must be supported."""
        if launch := self.launch(args):
            # The allocator of the descriptors' scratch memory belongs to a context, and threads, such as autograd's,
            # start with none. In a copy of the context, ours never replaces one of the caller's.
            contextvars.copy_context().run(on_device_of, args.A, _run, launch, args.A.device)

    def compile(self, args: Arguments) -> Any:
        """The compiled kernel for arguments like these, on the active device or compilation target."""
        launch = self.launch(args)
        return launch.function.warmup(*launch.arguments, grid=launch.grid, **launch.options)


def device_cc(device: torch.device) -> int:
    """Compute capability as two digits, such as 90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _operand_error(operand: Operand, tensor: Tensor) -> str | None:
    if tensor.dtype != operand.dtype:
        return f"expected {operand.dtype}, got {tensor.dtype}"
    by_columns = operand.layout == "column" or (operand.layout is None and tensor.stride(-1) != 1)
    axis = -2 if by_columns else -1
    if operand.layout is not None and tensor.stride(axis) != 1:
        return f"expected axis {axis} contiguous, got strides {tensor.stride()}"
    if operand.alignment_bytes > 1:
        strides = list(tensor.stride())
        del strides[axis]
        bytes_apart = [stride * tensor.element_size() for stride in strides]
        if any(distance % operand.alignment_bytes for distance in (tensor.data_ptr(), *bytes_apart)):
            return (
                f"expected pointer and strides aligned to {operand.alignment_bytes} bytes, got address "
                f"{tensor.data_ptr():#x} and strides {tensor.stride()} of {tensor.dtype}"
            )
    return None


def get_kernels(
    args: Arguments | None = None,
    *,
    cc: int | None = None,
    metadata_filter: Callable[[KernelMetadata], bool] | None = None,
) -> list[Kernel]:
    """The kernels that support `args`, run on compute capability `cc` and pass the filter. None asks nothing."""
    from .gemm import ALL_KERNELS  # the kernels are built from the classes above

    return [
        kernel
        for kernel in ALL_KERNELS
        if (args is None or kernel.supports(args))
        and (cc is None or kernel.runs_on(cc))
        and (metadata_filter is None or metadata_filter(kernel.metadata))
    ]
