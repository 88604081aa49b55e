"""One kernel launch as a value: run it through Triton's JIT, compile it, or run it with what was compiled before.

Before each launch the JIT inspects every argument, to find the compiled kernel that fits. A `CompiledArtifact` holds
that kernel, so a launch with one only passes the arguments on.
"""

from __future__ import annotations

import contextvars
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._dispatch import on_device_of
from ._triton import INTERPRET, triton

DESCRIPTOR_BYTES = 128  # of device memory that a TMA descriptor made on the device takes, per program


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run or to compile."""

    function: Any  # a Triton JIT function
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # the parameters that are not constexpr, in the function's order
    options: dict[str, Any]  # the constexpr parameters, num_warps and num_stages


@dataclass(frozen=True)
class CompiledArtifact:
    """A compiled kernel, for every launch with the same static properties.

    Those are the device and what Triton compiles for: dtypes; which optional operands are there; constexpr values, and
    with them the kernel itself; whether pointers, sizes and strides are multiples of 16, and sizes and strides equal 1
    or beyond 32 bits. Numbers of rows may differ.
    """

    kernel_name: str
    static_properties: tuple[Any, ...]
    constants: tuple[Any, ...]  # values of the constexpr parameters, in the function's order
    compiled: Any  # Triton's compiled kernel; None in the interpreter, which has none


def compile_launch(launch: Launch, kernel_name: str) -> CompiledArtifact:
    """Compile for the active device or compilation target."""
    compiled = launch.function.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    names = launch.function.arg_names[len(launch.arguments) :]
    constants = tuple(launch.options[name] for name in names)
    return CompiledArtifact(kernel_name, static_properties(launch), constants, compiled)


def run_launch(launch: Launch, artifact: CompiledArtifact | None, operand: Tensor, scratch: Tensor | None) -> None:
    """Launch on the current stream of the device of an operand.

    Args:
        scratch: memory for descriptors; allocated if it is None or too small.
    """
    # The allocator of the descriptors' scratch memory belongs to a context, and threads, such as autograd's, start
    # with none. In a copy of the context, ours never replaces one of the caller's.
    contextvars.copy_context().run(on_device_of, operand, _run, launch, artifact, operand.device, scratch)


_thread = threading.local()


def _need_context(device: torch.device) -> None:
    """Let this thread have the device's context. Encoding a descriptor wants one, launches or not, and a thread that
    has launched nothing yet, as autograd's at first, has none."""
    if device.type == "cuda" and device.index not in _thread.__dict__.setdefault("devices", set()):
        torch.empty(1, device=device).zero_()
        _thread.devices.add(device.index)


def _run(launch: Launch, artifact: CompiledArtifact | None, device: torch.device, scratch: Tensor | None) -> None:
    def allocate(size: int, alignment: int, stream: int) -> Tensor:
        if scratch is None or len(scratch) < size:
            return torch.empty(size, dtype=torch.int8, device=device)
        return scratch

    _need_context(device)
    triton.set_allocator(allocate)
    if artifact is None or artifact.compiled is None:
        launch.function[launch.grid](*launch.arguments, **launch.options)
    else:
        # Triton 3.6 to 3.9 take all parameters here, constexpr ones too, which they skip.
        grid = (*launch.grid, 1, 1)[:3]
        artifact.compiled[grid](*launch.arguments, *artifact.constants)


def static_properties(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles a launch for."""
    names = launch.function.arg_names
    if INTERPRET:
        unspecialized = launch.function.kwargs["do_not_specialize"] or ()
    else:
        unspecialized = [parameter.name for parameter in launch.function.params if parameter.do_not_specialize]
    arguments = [
        _static(value, specialize=name not in unspecialized)
        for name, value in zip(names, launch.arguments, strict=False)
    ]
    return launch.function, tuple(arguments), tuple(launch.options.items())


def _static(value: Any, *, specialize: bool = True) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        is_wide = not -(2**31) <= value < 2**31
        return (is_wide, value == 1, value % 16 == 0) if specialize else (is_wide,)
    if isinstance(value, tuple):
        return tuple(_static(item, specialize=specialize) for item in value)
    # A TMA descriptor made on the host.
    return type(value), value.base.dtype, value.base.device, tuple(value.block_shape), value.layout
