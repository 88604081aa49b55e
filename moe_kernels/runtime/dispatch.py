"""Decides before each op runs whether its operands are checked, and which implementation computes the op.

If the requested implementation, "triton" or "reference", cannot run, the op raises instead of running the other one.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import Parameter

from ..types import QuantizedWeight
from .pytorch import jit_tracing_state
from .triton import HAS_TRITON, INTERPRET

IMPLEMENTATIONS = ("triton", "reference")

# Dtypes that the Triton kernels compute in. bfloat16 is left out in the interpreter, which adds bfloat16 as integers.
KERNEL_DTYPES = (torch.float32, torch.float16) if INTERPRET else (torch.float32, torch.float16, torch.bfloat16)

FLOAT8 = torch.float8_e4m3fn  # only GEMM kernels support float8
FLOAT8_CC = 89  # compute capability of the first GPUs that multiply float8

Result = TypeVar("Result")

_MOST_FORMS = 4096  # number of stored forms at which a check's cache is cleared
_NEW: Any = object()


def once_per_form(check: Callable[..., Result]) -> Callable[..., Result]:
    """Cache the results of `check` by the operands' form: dtypes, shapes, devices and plain values. Errors are not
    cached. `check` may read only dtype, shape and device of its tensors, and must return an immutable result."""
    passed: dict[tuple[Any, ...], Result] = {}

    @functools.wraps(check)
    def check_new_forms(*operands: Any) -> Result:
        form = None if torch.compiler.is_compiling() else _form(operands)
        if form is None:
            return check(*operands)
        result: Any = passed.get(form, _NEW)
        if result is _NEW:
            result = check(*operands)
            if len(passed) >= _MOST_FORMS:
                passed.clear()
            passed[form] = result
        return result

    return check_new_forms


_VALUES = {type(None), bool, int, float, str, torch.dtype}


def _form(operands: Collection[Any]) -> tuple[Any, ...] | None:
    """Return all properties of the operands that a check may read. Return None if an operand has an unknown type, such
    as a subclass of Tensor."""
    form = []
    for operand in operands:
        kind = type(operand)
        if kind is Tensor or kind is Parameter:
            form += (operand.dtype, operand.shape, operand.device)
        elif kind in _VALUES:
            form.append(operand)
        elif kind is QuantizedWeight:
            if (parts := _form(operand.tensors.values())) is None:
                return None
            form += (operand.format, operand.shape, *operand.tensors, *parts)
        else:
            return None
    return tuple(form)


def kernel_obstacle(tensor: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> str | None:
    """Return why the Triton kernels cannot take this tensor, or None if they can. Kernel selection, not this check,
    reports a GPU whose compute capability has no kernels.

    Args:
        dtypes: the floating-point dtypes that the kernels compute in.
    """
    if not HAS_TRITON:
        return "Triton is not installed"
    if not (tensor.is_cuda or INTERPRET):
        return f"Triton kernels run on CUDA tensors, got a tensor on {tensor.device.type}"
    if tensor.is_floating_point() and tensor.dtype not in dtypes:
        return f"the Triton kernels {'in the interpreter ' if INTERPRET else ''}do not compute in {tensor.dtype}"
    return None


def choose(op: str, implementation: str | None, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> str:
    """Return `implementation`. For None, return "triton" if the Triton kernels can take the tensor, else "reference".

    Args:
        tensor: the operand whose device and dtype decide.
        dtypes: the floating-point dtypes that the op's kernels compute in.

    Raises:
        ValueError: `implementation` is not a known name.
        NotImplementedError: "triton" was requested, but its kernels cannot take this tensor; or `torch.jit.trace` runs.
    """
    if jit_tracing_state() is not None:
        raise NotImplementedError(
            f"{op}: torch.jit.trace loses kernels and makes constants of group sizes; use torch.compile or torch.export"
        )
    if implementation is None:
        if tensor.is_cuda and not HAS_TRITON:
            _warn_without_triton()
        return "reference" if kernel_obstacle(tensor, dtypes) else "triton"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}")
    if implementation == "triton" and (obstacle := kernel_obstacle(tensor, dtypes)):
        raise NotImplementedError(f"{op}: implementation='triton' cannot run: {obstacle}")
    return implementation


@functools.cache
def _warn_without_triton() -> None:
    message = "moe_kernels: Triton is not installed, so CUDA tensors are computed by the slow reference; install triton"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def runs_kernels(implementation: str | None, tensor: Tensor) -> bool:
    """Return whether `implementation` runs Triton kernels on this tensor. Return False where `choose` would raise."""
    return implementation in (None, "triton") and kernel_obstacle(tensor) is None


def is_traced(tensor: Tensor) -> bool:
    """Return whether a tracer (torch.compile, torch.export, make_fx) is active, or the tensor has no data."""
    return torch.compiler.is_compiling() or tensor.is_meta or is_fake(tensor) or get_proxy_mode() is not None


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables autocast on this tensor's device, or an empty context if autocast is off.
    Reference implementations run in this context, because kernels ignore autocast."""
    device_type = tensor.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # is_autocast_enabled raises for meta
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
