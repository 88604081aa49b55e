"""Selects a kernel for arguments and launches it. Selection measures no times and never waits for the GPU. `planning`
lists the GEMMs of an op and the kernels that the op selects on this GPU or on another GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..activation.functions import listed_epilogue
from ..runtime.gluon import warn_if_slower
from ..runtime.launch import launching, observing_launches, run_launch
from ..runtime.replay import clear_records, require_single_launches
from ..runtime.triton import HAS_TRITON
from .arguments.base import Arguments, rows_bucket
from .arguments.grouped import GroupedGemmArguments
from .kernel import Kernel, KernelMetadata, PointerDesign, WarpSpecializedDesign, device_cc
from .kernels import ALL_KERNELS
from .kernels.families import GroupedGemmKernel
from .measurements import Table, table_of
from .passes import launch_bias_and_scale
from .rule import best_first
from .verify import verified, verify_interval

_selected: dict[tuple[Any, ...], Kernel | None] = {}


class Copies(NamedTuple):
    """One flag per gather of the expert op: True if a separate copy gathers the rows, False if the GEMM does."""

    tokens_forward: bool  # gather of tokens for the GEMM with w_up
    dout: bool  # gather of dout; one copy serves both GEMMs that read dout, for the gradients of w_down and its input
    tokens_backward: bool  # gather of tokens for the GEMM that computes the gradient of w_up


_copies: dict[tuple[Any, ...], Copies] = {}


class Target(NamedTuple):
    """A GPU that kernels are selected for. This machine need not have the GPU."""

    cc: int  # compute capability, such as 90 for 9.0
    gpu: str | None  # name of the GPU model, as in the name of its table file; None if unknown
    table: Table


class Choice(NamedTuple):
    args: Arguments
    kernel: Kernel | None  # None: no kernel supports the arguments


@dataclass
class _Plan:
    target: Target | None
    copies: Copies | None
    fuses: bool
    choices: list[Choice] = field(default_factory=list)


class _Planner(threading.local):
    plan: _Plan | None = None


_planner = _Planner()


@contextlib.contextmanager
def planning(
    target: Target | None = None, *, copies: Copies | None = None, fuses: bool = True
) -> Iterator[list[Choice]]:
    """Yield a list to which each GEMM of this thread appends its `Choice`.

    Inside the context, ops bypass autograd and do not replay recorded launches.

    Args:
        target: a GPU to select kernels for. With a target, nothing is launched, so operands may be meta tensors. None,
            the default, selects for the operands' GPU and launches.
        copies: result that `choose_copies` returns inside the context. None, the default, returns its usual result.
        fuses: whether a GEMM may have an activation in its epilogue. Default: True.
    """
    plan = _planner.plan = _Plan(target, copies, fuses)
    outer, launching.is_in_function = launching.is_in_function, True
    try:
        with contextlib.nullcontext() if target is None else observing_launches(lambda launch, run: None):
            yield plan.choices
    finally:
        _planner.plan, launching.is_in_function = None, outer


def target_cc(device: torch.device) -> int:
    """Return the compute capability, such as 90 for 9.0, of the GPU to select kernels for. This GPU is the target in
    `planning`, or `device` without a target. Return 0 if there is no target and `device` is no GPU."""
    if _planner.plan is not None and _planner.plan.target is not None:
        return _planner.plan.target.cc
    return device_cc(device) if device.type == "cuda" else 0


def select(args: Arguments) -> Kernel:
    """Return the kernel to run for these arguments. Arguments with equal `_key` get the same kernel.

    Raises:
        NotImplementedError: no kernel supports the arguments; the message holds each kernel's reason.
    """
    kernel = find(args)
    if kernel is not None:
        return kernel
    reasons = sorted({str(kernel.supports(args).error) for kernel in get_kernels()})
    shapes = {name: (list(tensor.shape), tensor.dtype) for name, tensor in args.operands.items()}
    raise NotImplementedError(f"no kernel supports {type(args).__name__} {shapes}: {'; '.join(reasons)}")


def find(args: Arguments) -> Kernel | None:
    """Return the kernel that `select` chooses, or None if no kernel supports the arguments."""
    if (plan := _planner.plan) is not None:
        if args.epilogue is not None and not plan.fuses:
            return None
        if plan.target is not None:
            return find_for(args, plan.target)
    key = _key(args)
    kernel = _selected.get(key)
    if kernel is None and key not in _selected:
        if args.A.is_cuda:
            warn_if_slower(device_cc(args.A.device))
        kernel = _selected[key] = _by_epilogue(args) or next(iter(get_kernels(args)), None)
    return kernel


def find_for(args: Arguments, target: Target) -> Kernel | None:
    """Return the kernel for the target GPU, or None if no kernel supports `args`. This machine may lack this GPU."""
    like = listed(args)
    kernels = [kernel for kernel in get_kernels(cc=target.cc) if kernel.would_support(like)]
    kernel = next(iter(best_first(kernels, like, target.table.kernels.get(like.table_key()))), None)
    if kernel is None or args.epilogue == like.epilogue:
        return kernel
    return _with_epilogue(kernel, args)


def run(args: Arguments) -> None:
    """Launch the kernel that `select` chooses. The caller must make the arguments' device the current device first."""
    if _run(args) is None and _planner.plan is None:
        select(args)  # raises NotImplementedError, because no kernel was found


def run_if_supported(args: Arguments) -> bool:
    """Launch the kernel that `select` chooses and return True. If no kernel supports the arguments, return False."""
    return _run(args) is not None


def run_product(args: GroupedGemmArguments) -> None:
    """Run a product without an epilogue. Apply bias and row scale in a second launch if two launches are faster.

    The fastest kernels support no row scale and not every bias. With an unsupported bias or row scale, a second,
    memory-bound launch applies bias and row scale to the rounded product and rounds again.
    """
    if args.row_scale is None and (args.bias is None or _is_fast(find(args))):
        return run(args)
    plain = dataclasses.replace(args, bias=None, row_scale=None)
    kernel = find(plain)
    # Float16 takes one launch. With two launches, the first launch's result may overflow, even if row scale or bias
    # would make the final result small.
    if args.out.dtype == torch.float16 or not _is_fast(kernel):
        return run(args)
    table = kernel.tile_table(plain)
    run(dataclasses.replace(plain, tile_table=table))  # selects `kernel` again, because selection ignores tile tables
    launch_bias_and_scale(args.out, args.bias, args.row_scale, table)


def _is_fast(kernel: Kernel | None) -> TypeGuard[GroupedGemmKernel]:
    return kernel is not None and not isinstance(kernel.metadata.design, PointerDesign)


def _run(args: Arguments) -> Kernel | None:
    if (plan := _planner.plan) is None:
        return _launch(args)
    kernel = find(args) if plan.target is not None else _launch(args)
    plan.choices.append(Choice(args, kernel))
    return kernel


def _launch_selected(args: Arguments) -> Kernel | None:
    """Launch the selected kernel and return it, or return None if selection finds no kernel for the arguments."""
    kernel = find(args)
    if kernel is not None and (launch := kernel.launch(args)) is not None:  # None: nothing to write
        run_launch(launch, args.A)
    return kernel


# MOE_VERIFY=n checks the result of every n-th launch. Kernels are selected as usual, but recorded launches are not
# replayed (see `runtime/replay.py`).
VERIFY = verify_interval(os.environ.get("MOE_VERIFY"))
if VERIFY is not None:
    require_single_launches("MOE_VERIFY")
_launch = _launch_selected if VERIFY is None else verified(_launch_selected, VERIFY)


def pin(args: Arguments, kernel: Kernel) -> None:
    """Make `select` return this kernel, in this process, for all arguments with the `_key` of `args`."""
    _selected[_key(args)] = kernel
    clear_records()


def _by_epilogue(args: Arguments) -> Kernel | None:
    """Return the kernel for an epilogue that the catalog does not list, or None to search the whole catalog.

    The catalog lists one plain activation, relu, and one gated activation, swiglu. For any other activation, return the
    kernel that would run with relu or swiglu, changed to apply `args.epilogue`. If the table has a measurement with
    `args.epilogue`, return None, so that the measurement decides.
    """
    if not isinstance(args, GroupedGemmArguments) or args.epilogue is None:
        return None
    like = listed(args)
    if args.epilogue == like.epilogue or measured_best(args) is not None:
        return None
    kernel = find(like)
    return None if kernel is None else _with_epilogue(kernel, args)


def listed(args: Arguments) -> Arguments:
    """Return `args` with the activation that the kernel catalog lists: "relu" for a plain, "swiglu" for a gated one."""
    return args if args.epilogue is None else dataclasses.replace(args, epilogue=listed_epilogue(args.epilogue))


def _with_epilogue(listed: Kernel, args: Arguments) -> Kernel | None:
    kernel = _taking(args.epilogue, listed)
    return kernel if kernel.takes(args) else None


def _taking(epilogue: str | None, kernel: Kernel) -> Kernel:
    """Return a kernel that applies this epilogue, or `kernel` itself if it has no epilogue or cannot apply this one."""
    if epilogue is None or epilogue not in kernel.epilogues or kernel.metadata.epilogue in (None, epilogue):
        return kernel
    return kernel.with_epilogue(epilogue)


def get_kernels(
    args: Arguments | None = None,
    *,
    cc: int | None = None,
    metadata_filter: Callable[[KernelMetadata], bool] | None = None,
) -> list[Kernel]:
    """Return the kernels that support `args`, run on compute capability `cc` (90 for 9.0) and satisfy the filter.

    Each argument may be None, the default, for no restriction. With `args`, kernels are sorted, best first: the kernel
    in the table of measurements, then the others by a rule of thumb. The result includes kernels with the epilogue of
    `args` even if the catalog does not list that epilogue.

    With `cc`, the device of `args` and the measurements of this device are ignored, so the tensors may be on any
    device. Without `cc`, only kernels that run on the device of `args` are returned.
    """
    epilogue = None if args is None else args.epilogue
    kernels = [_taking(epilogue, listed) for listed in ALL_KERNELS]
    if cc is not None:
        kernels = [kernel for kernel in kernels if kernel.supports_cc(cc)]
    if metadata_filter is not None:
        kernels = [kernel for kernel in kernels if metadata_filter(kernel.metadata)]
    if args is None:
        return kernels
    runs = Kernel.supports if cc is None else Kernel.would_support
    kernels = [kernel for kernel in kernels if runs(kernel, args)]
    return best_first(kernels, args, measured_best(args) if cc is None and kernels else None)


def measured_best(args: Arguments) -> str | None:
    """Return the name of the fastest kernel measured for these arguments, or None without a measurement."""
    return table_for(args.A.device).kernels.get(args.table_key())


def choose_copies(tokens: Tensor, w_up: Tensor, d_ff: int, num_rows: int, assumed_rows: int | None = None) -> Copies:
    """Return which gathers of the expert op run as separate copies. The table of measurements decides. If the table has
    no entry, or if w_up's GEMM is not warp-specialised, a rule decides.

    The time of a copy does not depend on d_ff, but the time that a GEMM loses by gathering grows with d_ff. The rule
    therefore copies if d_ff >= 1280 and w_up's GEMM is warp-specialised. Other kernels lose little by gathering.

    The copy of tokens in the backward pass raises peak memory, because the copy exists together with the largest
    gradient. The rule therefore makes this copy only if the result of w_up's GEMM also has at least 2560 columns. The
    result has 2 * d_ff columns with a gated activation, or d_ff with a plain one.

    The copy of tokens in the forward pass has a second use: only a GEMM that reads copied rows can apply a plain
    activation in its epilogue.

    Args:
        w_up: the weight, or a meta tensor with its shape, strides and dtype.
        assumed_rows: choose as if each expert had this many rows; None, the default, uses `num_rows`.
    """
    if (plan := _planner.plan) is not None and plan.copies is not None:
        return plan.copies
    num_rows = num_rows if assumed_rows is None else assumed_rows * w_up.shape[0]
    if plan is not None and plan.target is not None:
        entry = plan.target.table.copies.get(copies_key(tokens, w_up, d_ff, num_rows))
        return copies_for(entry, tokens, w_up, d_ff, num_rows, assumed_rows)
    key = (*_copies_key(tokens, w_up, d_ff, num_rows), assumed_rows)
    copies = _copies.get(key)
    if copies is None:
        entry = table_for(tokens.device).copies.get(copies_key(tokens, w_up, d_ff, num_rows))
        copies = _copies[key] = copies_for(entry, tokens, w_up, d_ff, num_rows, assumed_rows)
    return copies


def copies_for(
    entry: list[bool] | None, tokens: Tensor, w_up: Tensor, d_ff: int, num_rows: int, assumed_rows: int | None = None
) -> Copies:
    """Return the result of `decide_copies` for the kernel that w_up's GEMM would use on copied rows."""
    num_experts, num_columns, d_model = w_up.shape
    # Expanded tensors have the shape of the rows without allocating their memory.
    rows, out = (tokens.new_empty(1, columns).expand(num_rows, columns) for columns in (d_model, num_columns))
    offsets = torch.empty(num_experts, dtype=torch.int32, device=tokens.device)
    if w_up.is_meta:
        w_up = torch.empty_strided(w_up.shape, w_up.stride(), dtype=w_up.dtype, device=tokens.device)
    b = w_up.transpose(1, 2)
    kernel = find(GroupedGemmArguments(rows, b, out, offsets=offsets, assumed_rows=assumed_rows))
    return decide_copies(kernel, d_ff, num_columns, entry)


def decide_copies(up: Kernel | None, d_ff: int, num_columns: int, entry: list[bool] | None) -> Copies:
    """Return which gathers run as separate copies, as `choose_copies` describes.

    Args:
        up: the kernel of w_up's GEMM for copied rows.
        num_columns: number of columns of the result of w_up's GEMM.
        entry: the choice in the GPU's table of measurements, or None.
    """
    fast = up is not None and isinstance(up.metadata.design, WarpSpecializedDesign)
    if entry and fast:
        return Copies(*entry)
    is_large = fast and d_ff >= 1280
    return Copies(is_large, is_large, is_large and num_columns >= 2560)


def pin_copies(tokens: Tensor, w_up: Tensor, d_ff: int, num_rows: int, copies: Copies) -> None:
    """Make `choose_copies` return `copies` in this process for calls with this `_copies_key` and no `assumed_rows`."""
    _copies[(*_copies_key(tokens, w_up, d_ff, num_rows), None)] = copies
    clear_records()


def _copies_key(tokens: Tensor, w_up: Tensor, d_ff: int, num_rows: int) -> tuple[Any, ...]:
    # The key holds all that `copies_for` reads except `assumed_rows`. `copies_for` reads no strides of `tokens`.
    sizes, is_aligned = w_up.shape, w_up.data_ptr() % 16 == 0
    rows = rows_bucket(num_rows, sizes[0])
    return tokens.device, tokens.dtype, w_up.dtype, w_up.stride(), is_aligned, sizes, d_ff, rows


@functools.cache
def table_for(device: torch.device) -> Table:
    """Return the user's table for this GPU model. The table is empty if `device` is no GPU, if Triton is missing, or
    if the GPU model has no table file."""
    if device.type != "cuda" or not HAS_TRITON:
        return Table({}, {})
    return table_of(torch.cuda.get_device_name(device))


def copies_key(tokens: Tensor, w_up: Tensor, d_ff: int, num_rows: int) -> str:
    num_experts, num_columns, d_model = w_up.shape
    kind = "" if num_columns == 2 * d_ff else " plain"
    rows = rows_bucket(num_rows, num_experts)
    return f"experts {str(tokens.dtype)[6:]} E={num_experts} D={d_model} F={d_ff}{kind} rows={rows}"


def _key(args: Arguments) -> tuple[Any, ...]:
    return type(args), args.accumulator_type, args.selection_key()
