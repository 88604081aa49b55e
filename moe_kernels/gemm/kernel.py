"""The kernel catalog: one object per GEMM kernel and configuration, with its properties and the arguments it supports.

    args = GroupedGemmArguments(A, B, out, offsets=offsets)
    kernels = get_kernels(args)     # kernels that support these arguments, best first; all kernels if args is None
    kernel = kernels[0]
    artifact = kernel.compile(args)
    kernel.run(args, artifact)

The ops of this package choose among the same objects (`selection.select`). Listing and querying kernels need no GPU.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runtime.dispatch import FLOAT8, KERNEL_DTYPES, kernel_obstacle
from ..runtime.launch import CompiledArtifact, Launch, compile_launch, observing_launches, run_launch, static_properties
from ..runtime.registered_ops import on_device_of
from .arguments.base import Arguments


@dataclass(frozen=True)
class Status:
    """The result of a check: true, or false with the reason in `error`."""

    error: str | None = None

    def __bool__(self) -> bool:
        return self.error is None


SUPPORTED = Status()


@dataclass(frozen=True)
class Operand:
    """A kernel's requirements for one operand.

    Attributes:
        layout: "row": the last axis is contiguous; "column": the axis before the last is contiguous; None: any strides.
        alignment_bytes: alignment of the address and of every stride except the stride of the contiguous axis.
    """

    dtype: torch.dtype
    layout: str | None = None
    alignment_bytes: int = 1
    other_dtypes: tuple[torch.dtype, ...] = ()  # supported dtypes in addition to `dtype`

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtype, *self.other_dtypes


@dataclass(frozen=True)
class GemmOperands:
    """Requirements on the operands of out = A @ B, for a single product or each product of a group, batch or list."""

    A: Operand
    B: Operand
    out: Operand


@dataclass(frozen=True)
class WgradOperands:
    """Requirements on the operands of out[g] = A[start:end].T @ dout[start:end] for every group g of rows start:end."""

    A: Operand
    dout: Operand
    out: Operand


@dataclass(frozen=True)
class Design:
    """A kernel's algorithm and tile sizes. `tile_shape` is (rows of out, columns of out, reduction length)."""

    tile_shape: tuple[int, int, int]
    num_warps: int
    num_stages: int
    gather: bool = False  # whether the kernel gathers the rows of an operand by an index
    persistent: bool = False
    tma: bool = False
    group_tiles: int = 8  # number of row tiles in a band, whose tiles are computed column by column to reuse data in L2
    programs_per_sm: int = 1  # maximum number of programs per SM, in kernels for lists of products

    def blocks(self, axes: str) -> dict[str, int]:
        """Return the tile's sizes as options, in the order of `axes`: "MNK" gives BLOCK_M, BLOCK_N and BLOCK_K."""
        return {f"BLOCK_{axis}": size for axis, size in zip(axes, self.tile_shape, strict=False)}

    def tile_options(self, axes: str = "MNK", *, grouped: bool = True) -> dict[str, int]:
        """Return the compile-time options: tile sizes, num_warps, num_stages and, if `grouped`, GROUP_TILES."""
        options = {"GROUP_TILES": self.group_tiles} if grouped else {}
        return {**options, **self.blocks(axes), "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class PointerDesign(Design):
    """Loads operands through pointers. Supports any size and stride, and CUDA GPUs from compute capability 8.0."""


@dataclass(frozen=True)
class TmaDesign(Design):
    """Loads contiguous operands by TMA and gathered operands by asynchronous copies, both in a software pipeline."""

    flatten: bool = False  # True: a program starts loading its next tile before the current tile's epilogue


@dataclass(frozen=True)
class WarpSpecializedDesign(Design):
    """One warpgroup loads operands into `num_stages` buffers. Two warpgroups multiply and store the result."""


@dataclass(frozen=True)
class StreamingDesign(Design):
    """Streams the weights of groups with few rows. `num_stages` is the number of weight blocks in shared memory."""


@dataclass(frozen=True)
class KernelMetadata:
    kernel_name: str
    kernel_class: type[Kernel]
    min_cc: int  # lowest supported compute capability, such as 90 for 9.0
    operands: Any  # requirements on the operands: GemmOperands, WgradOperands, ...
    design: Design
    epilogue: str | None = None  # the activation applied to the product; None: no activation
    max_cc: int | None = None  # highest supported compute capability; None: no limit
    optional_operands: tuple[str, ...] = ()  # names of supported optional operands, such as "bias"


class Kernel(abc.ABC):
    """One kernel in one configuration."""

    arguments_class: type  # a class with `A`, `accumulator_type` and `operands`, usually a subclass of `Arguments`
    obstacle: str | None = None  # reason why the installed software cannot run the kernel, or None
    epilogues: Collection[str] = ()  # activations that `with_epilogue` may put in place of `metadata.epilogue`

    def __init__(self, metadata: KernelMetadata):
        self.metadata = metadata

    def __repr__(self) -> str:
        return f"<{self.metadata.kernel_name}>"

    def supports(self, args: Arguments) -> Status:
        """Check whether this kernel supports these arguments. The check does not read the values of tensors."""
        if not (status := self.takes(args)):
            return status
        if obstacle := self.obstacle or kernel_obstacle(args.A, (*KERNEL_DTYPES, FLOAT8)):
            return Status(obstacle)
        return self.supports_cc(device_cc(args.A.device)) if args.A.is_cuda else SUPPORTED

    def would_support(self, args: Arguments) -> bool:
        """Return whether the kernel and the installed software support these arguments. Ignores the tensors' device."""
        return self.obstacle is None and bool(self.takes(args))

    def takes(self, args: Arguments) -> Status:
        """Check whether this kernel supports these arguments. Ignore the installed software and the tensors' device."""
        if not isinstance(args, self.arguments_class):
            return Status(f"expected {self.arguments_class.__name__}, got {type(args).__name__}")
        if args.accumulator_type != torch.float32:
            return Status(f"accumulates in torch.float32, requested {args.accumulator_type}")
        if args.epilogue != (epilogue := self.metadata.epilogue):
            return Status(f"applies {epilogue or 'no'} epilogue, requested {args.epilogue}")
        for name, tensor in args.operands.items():
            if error := operand_error(getattr(self.metadata.operands, name), tensor):
                return Status(f"Operand `{name}`: {error}")
        # Check the shapes before `supports_design`, which relies on valid shapes.
        if isinstance(args, Arguments) and (error := args.error()):
            return Status(error)
        return self.supports_design(args)

    def supports_cc(self, cc: int) -> Status:
        """Check whether this kernel was written for GPUs of this compute capability."""
        if self.metadata.min_cc <= cc <= (self.metadata.max_cc or cc):
            return SUPPORTED
        wanted = f"{self.metadata.min_cc} to {self.metadata.max_cc or 'any'}"
        return Status(f"needs compute capability {wanted}, the device has {cc}")

    @functools.cache  # noqa: B019  # no leak, because the catalog never frees a kernel
    def with_epilogue(self, activation: str) -> Kernel:
        """Return a copy of this kernel with another of its `epilogues`. This kernel must have an epilogue.

        The catalog lists one activation per kernel, because the fastest kernel does not depend on the activation.
        """
        assert self.metadata.epilogue is not None
        name = self.metadata.kernel_name.replace(self.metadata.epilogue, activation)
        return type(self)(dataclasses.replace(self.metadata, kernel_name=name, epilogue=activation))

    def run(
        self,
        args: Arguments,
        compiled_artifact: CompiledArtifact | None = None,
        stream: torch.cuda.Stream | None = None,
        workspace: Tensor | None = None,
        assume_supported_args: bool = False,
    ) -> None:
        """Launch the kernel.

        Args:
            compiled_artifact: result of `compile` for arguments with the same static properties. With an artifact,
                `run` skips Triton's inspection of the arguments. Default: None.
            stream: the stream to launch on. None, the default, uses the current stream.
            workspace: at least `get_workspace_size(args)` bytes, contiguous and aligned to 128 bytes. Tensors that
                PyTorch allocates on a GPU have this alignment. Keep the workspace until the kernel has run. None, the
                default, allocates a workspace.
            assume_supported_args: whether to skip the checks of the arguments, artifact and workspace. Default: False.

        Raises:
            ValueError: the arguments are not supported (the message says why), or the artifact or workspace does not
                fit the arguments.
        """
        if not assume_supported_args:
            self._require(args)
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            on_device_of(args.A, self._run, args, compiled_artifact, workspace, assume_supported_args)

    def compile(self, args: Arguments, *, assume_supported_args: bool = False) -> CompiledArtifact:
        """Return the kernel compiled for all arguments with the same static properties. Launch nothing.

        The target is the device of `args`, or Triton's current target if the tensors are not on a GPU. For a list
        of problems without a table, this call makes the table.

        Raises:
            ValueError: the arguments are not supported, or are empty and need no launch.
            NotImplementedError: a list of problems has no table, and a CUDA graph is being captured.
        """
        if not assume_supported_args:
            self._require(args)
        with observing_launches(lambda launch, run: None):  # do not launch the kernels that write tables
            launch = self.launch(args)
        if launch is None:
            raise ValueError(f"{self.metadata.kernel_name}: nothing to compile for empty operands")
        return on_device_of(args.A, compile_launch, launch, self.metadata.kernel_name)

    def get_workspace_size(self, args: Arguments) -> int:
        """Return the number of bytes of device memory that `run` needs in addition to the operands."""
        return self.scratch_bytes(args) + self.metadata_bytes(args)

    def scratch_bytes(self, args: Arguments) -> int:
        """Return the number of bytes, a multiple of 128, for TMA descriptors that the kernel makes on the device."""
        return 0

    def metadata_bytes(self, args: Arguments) -> int:
        """Return the number of bytes of metadata made before the launch, such as a tile table if `args` has none."""
        return 0

    def with_metadata(self, args: Arguments, memory: Tensor | None) -> Arguments:
        """Return the arguments with the device metadata that is made before the launch, such as a tile table. The
        metadata is stored in `memory` [metadata_bytes] uint8, or in new memory if `memory` is None."""
        return args

    @abc.abstractmethod
    def supports_design(self, args: Any) -> Status:
        """Check the requirements that `metadata.operands` does not state."""

    @abc.abstractmethod
    def estimate(self, args: Any) -> float:
        """Return an estimated cost, to compare kernels that support the same arguments. The unit depends on the class
        of the arguments. Most kernels count the multiplications of padded tiles. Some also count reads of weights,
        decoding or start-up. `rule.best_first` divides the cost by the speed of the design."""

    def launch(self, args: Arguments) -> Launch | None:
        """Return the launch for these arguments, or None if there is nothing to write."""
        return self._launch(args) if args.out.numel() else None

    @abc.abstractmethod
    def _launch(self, args: Any) -> Launch:
        """Return the launch for arguments with at least one output that is not empty."""

    def _run(
        self, args: Arguments, artifact: CompiledArtifact | None, workspace: Tensor | None, assume_fits: bool
    ) -> None:
        scratch = None
        if workspace is not None:
            args, scratch = self._into_workspace(args, workspace, assume_fits)
        if launch := self.launch(args):
            if artifact is not None and not assume_fits and artifact.static_properties != static_properties(launch):
                raise ValueError(
                    f"{self.metadata.kernel_name}: compiled_artifact must be compiled for arguments with the same "
                    f"static properties, got one of {artifact.kernel_name} for others"
                )
            run_launch(launch, args.A, artifact=artifact, scratch=scratch)
            torch.autograd.graph.increment_version(args.outputs)

    def _require(self, args: Arguments) -> None:
        if error := self.supports(args).error or args.table_error():
            raise ValueError(f"{self.metadata.kernel_name}: {error}")

    def _into_workspace(self, args: Arguments, workspace: Tensor, assume_fits: bool) -> tuple[Arguments, Tensor]:
        """Return the arguments with their metadata in the workspace, and the part of the workspace for descriptors."""
        scratch_bytes, num_bytes = self.scratch_bytes(args), self.get_workspace_size(args)
        if not assume_fits:
            alignment = 128 if scratch_bytes else 4
            fits = workspace.is_contiguous() and workspace.nbytes >= num_bytes and workspace.device == args.A.device
            if not fits or workspace.data_ptr() % alignment:
                raise ValueError(
                    f"{self.metadata.kernel_name}: workspace must be contiguous, on {args.A.device}, aligned to "
                    f"{alignment} bytes and hold {num_bytes} bytes, got {workspace.nbytes} bytes on {workspace.device} "
                    f"at {workspace.data_ptr():#x}"
                )
        memory = workspace.view(-1).view(torch.uint8)
        return self.with_metadata(args, memory[scratch_bytes:num_bytes]), memory[:scratch_bytes].view(torch.int8)


@functools.cache
def device_cc(device: torch.device) -> int:
    """Return the compute capability as one number, such as 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_device_cc_supported(ccs: Collection[int]) -> Status:
    """Check whether the current GPU has one of these compute capabilities, such as {90, 100}."""
    wanted = ", ".join(map(str, sorted(ccs)))
    if not torch.cuda.is_available():
        return Status(f"needs a GPU of compute capability {wanted}, there is no CUDA device")
    if (cc := device_cc(torch.device("cuda", torch.cuda.current_device()))) not in ccs:
        return Status(f"needs a GPU of compute capability {wanted}, the current one has {cc}")
    return SUPPORTED


def operand_error(operand: Operand, tensor: Tensor) -> str | None:
    """Return the error in the tensor's dtype, layout or alignment, or None if the tensor fits."""
    if tensor.dtype not in operand.dtypes:
        return f"expected {' or '.join(map(str, operand.dtypes))}, got {tensor.dtype}"
    if tensor.dim() < 2:
        return f"expected a matrix or a batch of them, got shape {list(tensor.shape)}"
    by_columns = operand.layout == "column" or (operand.layout is None and tensor.stride(-1) != 1)
    axis = -2 if by_columns else -1
    if operand.layout is not None and tensor.stride(axis) != 1:
        return f"expected axis {axis} contiguous, got strides {tensor.stride()}"
    if not _is_aligned(tensor, axis, operand.alignment_bytes):
        return (
            f"expected pointer and strides aligned to {operand.alignment_bytes} bytes, got address "
            f"{tensor.data_ptr():#x} and strides {tensor.stride()} of {tensor.dtype}"
        )
    return None


def _is_aligned(tensor: Tensor, contiguous_axis: int, num_bytes: int) -> bool:
    """Return whether the address and the strides of all axes but the contiguous one are multiples of `num_bytes`."""
    strides = list(tensor.stride())
    del strides[contiguous_axis]
    distances = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in strides)]
    return num_bytes == 1 or not any(distance % num_bytes for distance in distances)
