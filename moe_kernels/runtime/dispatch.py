"""Which implementation of an op runs. One rule for every op; nothing falls back silently."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .triton import HAS_TRITON, INTERPRET

IMPLEMENTATIONS = ("triton", "reference")

# The dtypes that the Triton kernels compute in. The interpreter adds bfloat16 numbers as if they were integers.
KERNEL_DTYPES = (torch.float32, torch.float16) if INTERPRET else (torch.float32, torch.float16, torch.bfloat16)

FLOAT8 = torch.float8_e4m3fn  # of the GEMM kernels alone
FLOAT8_CC = 89  # the first GPUs that multiply it


def kernel_obstacle(tensor: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> str | None:
    """Why the Triton kernels cannot take this tensor, or None if they can. The GPU's age is not looked at: where it has
    no kernel, the selection says so.

    Args:
        dtypes: the floating-point dtypes that they compute in.
    """
    if not HAS_TRITON:
        return "Triton is not installed"
    if not (tensor.is_cuda or INTERPRET):
        return f"Triton kernels run on CUDA tensors, got a tensor on {tensor.device.type}"
    if tensor.is_floating_point() and tensor.dtype not in dtypes:
        return f"the Triton kernels {'in the interpreter ' if INTERPRET else ''}do not compute in {tensor.dtype}"
    return None


def choose(op: str, implementation: str | None, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES) -> str:
    """The implementation to run: the one that is named, or, for None, Triton wherever its kernels can run.

    Args:
        tensor: the operand whose device and dtype decide.
        dtypes: the floating-point dtypes that the op's kernels compute in.

    Raises:
        ValueError: `implementation` is not a known name.
        NotImplementedError: "triton" was asked for and its kernels cannot take this tensor.
    """
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
    """Whether the ops compute this tensor, with this `implementation`, by Triton kernels; where they raise, no."""
    return implementation in (None, "triton") and kernel_obstacle(tensor) is None


def on_device_of(tensor: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with the tensor's GPU as the current one: Triton launches on the current one."""
    if not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice():
        return function(*args, **kwargs)
    with torch.cuda.device(tensor.device):
        return function(*args, **kwargs)


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """No autocast for tensors on this one's device, which kernels do not know either: references run in this.

    Where there is none anyway, it costs nothing.
    """
    device_type = tensor.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # which raises for meta
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
