"""A kernel launch as a value that can be run or compiled, and the launch cache.

Before each launch, Triton's JIT inspects every argument to find the compiled kernel. The inspection takes longer than
the launch. The launch cache stores the compiled kernel by the launch's `static_properties`, which are faster to
compute. A `CompiledArtifact` holds a compiled kernel. A caller that passes an artifact guarantees that the launch has
the static properties of the artifact.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .triton import HAS_TRITON, INTERPRET, triton

# Ask for fused multiply-adds. Triton fuses by default up to 3.9, but not from 3.10 on. Triton 3.9 warns unless the
# option is set.
FUSION = {} if INTERPRET or "TRITON_DEFAULT_FPFUSION" in os.environ else {"enable_fp_fusion": True}

_hooks = triton.knobs.runtime

DESCRIPTOR_BYTES = 128  # bytes of memory for one TMA descriptor that a program makes


class Launch(NamedTuple):
    """One kernel launch, ready to run or to compile."""

    function: Any  # a Triton JIT function
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # the parameters that are not constexpr, in the function's order
    options: dict[str, Any]  # the constexpr parameters, num_warps and num_stages


@dataclass(frozen=True)
class CompiledArtifact:
    """A compiled kernel for all launches that have the artifact's static properties.

    Static properties are the device and the properties that Triton compiles for: the kernel, dtypes, constexpr values,
    and which optional operands exist. Static properties also say whether pointers, sizes and strides are multiples of
    16, and whether sizes and strides are 1 or exceed 32 bits. The number of rows may differ between launches.
    """

    kernel_name: str
    static_properties: tuple[Any, ...]
    compiled: Any  # Triton's compiled kernel; None in the interpreter, which does not compile


def compile_launch(launch: Launch, kernel_name: str) -> CompiledArtifact:
    """Compile the kernel of a launch for the active device or compilation target."""
    compiled = launch.function.warmup(*launch.arguments, grid=launch.grid, **launch.options, **FUSION)
    return CompiledArtifact(kernel_name, static_properties(launch), compiled)


def launch_kernel(function: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `function[grid](*arguments, **options)` on the current device. Arguments must not be TMA descriptors."""
    launch = Launch(function, grid, arguments, options)
    _launch(launch, None if INTERPRET else _ready.get(static_properties(launch)))


def with_strides(tensor: Tensor | None) -> tuple[Tensor | None, tuple[int, ...] | None]:
    """Return an optional tensor and its strides, the two arguments by which kernels take the tensor."""
    return tensor, None if tensor is None else tensor.stride()


class Ready(NamedTuple):
    """A compiled kernel, prepared for all launches that have the static properties for which it was compiled."""

    compiled: Any  # Triton's compiled kernel
    run: Any  # the kernel's launcher
    kernel: tuple[Any, ...]  # the launcher's arguments between the stream and the kernel's arguments
    constants: tuple[Any, ...]  # the constexpr parameters, which launchers of Triton 3.6 to 3.9 take and ignore
    needs_scratch: bool  # whether the kernel needs memory for descriptors
    device: int  # device of the tensors, on which the kernel is loaded


_ready: dict[tuple[Any, ...], Ready] = {}  # the launch cache: static properties -> prepared kernel


def run_launch(
    launch: Launch, operand: Tensor, artifact: CompiledArtifact | None = None, scratch: Tensor | None = None
) -> None:
    """Launch on the current stream. The current device must be the device of `operand`.

    Args:
        artifact: a kernel compiled for the static properties of this launch. None, the default, uses the launch cache.
        scratch: memory for descriptors; allocated if `scratch` is None or too small.
    """
    if operand.is_cuda:
        ensure_context(operand.get_device())  # a context is needed to load an artifact's kernel and to launch
    if artifact is None or artifact.compiled is None:
        ready = None if INTERPRET else _ready.get(static_properties(launch))
    else:
        _from_artifacts[id(artifact.compiled)] = artifact.compiled
        ready = _make_ready(launch, artifact.compiled)
    if ready is not None and not ready.needs_scratch:
        _launch(launch, ready)
        return
    # Triton stores the allocator of scratch memory in a context variable, which is unset in new threads, such as
    # autograd's. Set the variable in a copy of the context, so that the caller's allocator is never replaced.
    contextvars.copy_context().run(_launch_with_scratch, launch, ready, operand.device, scratch)


# An observer gets each launch of a thread, and a function that makes the launch. The function returns Triton's compiled
# kernel, or None in the interpreter.
LaunchObserver = Callable[[Launch, Callable[[], Any]], None]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()  # devices that have a CUDA context in this thread
        self.observer: LaunchObserver | None = None
        self.is_in_function = False  # True in `Replayed.run` and `selection.planning`, where ops replay no records


launching = _Thread()  # state of the current thread


@contextlib.contextmanager
def observing_launches(observer: LaunchObserver) -> Iterator[None]:
    """Pass each launch of this thread to the observer, which makes or omits the launch."""
    outer, launching.observer = launching.observer, observer
    try:
        yield
    finally:
        launching.observer = outer


def launch_hooks() -> list[Any]:
    """Return the hooks of Triton, such as a profiler's, that must see each launch."""
    return [*_hooks.launch_enter_hook.calls, *_hooks.launch_exit_hook.calls] if HAS_TRITON else []


def ensure_context(device: int) -> None:
    """Give this thread the CUDA context of a GPU. Encoding a descriptor and the driver's launches need a context. A new
    thread, such as autograd's, has no context before its first launch."""
    if device not in launching.devices:
        torch.empty(1, device=f"cuda:{device}").zero_()
        launching.devices.add(device)


# id -> compiled kernel of each artifact that ran. No kernel here is ever freed. Since Triton 3.8, freeing a compiled
# kernel unloads its code from the GPU, even if CUDA graphs or pending launches still need the code.
_from_artifacts: dict[int, Any] = {}


def _launch_with_scratch(launch: Launch, ready: Ready | None, device: torch.device, scratch: Tensor | None) -> None:
    def allocate(size: int, alignment: int, stream: int) -> Tensor:
        if scratch is None or len(scratch) < size:
            return torch.empty(size, dtype=torch.int8, device=device)
        return scratch

    triton.set_allocator(allocate)
    _launch(launch, ready)


def _launch(launch: Launch, ready: Ready | None) -> None:
    if launching.observer is None:
        _launch_unobserved(launch, ready)
    else:
        launching.observer(launch, functools.partial(_launch_unobserved, launch, ready))


def _launch_unobserved(launch: Launch, ready: Ready | None) -> Any:
    """Launch like `function[grid](*arguments, **options)`, but without the preparation of hooks if there are none.
    Return Triton's compiled kernel."""
    function, grid, arguments, options = launch
    if ready is None:
        compiled = function[grid](*arguments, **options, **FUSION)
        if compiled is not None and _is_on_gpu(launch):  # cache only kernels for this machine's GPU
            _ready[static_properties(launch)] = _make_ready(launch, compiled)
        return compiled
    compiled, run, kernel, constants, _, device = ready
    if launch_hooks():
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
    else:
        stream = triton.runtime.driver.active.get_current_stream(device)
        run(*(*grid, 1, 1)[:3], stream, *kernel, *arguments, *constants)
    return compiled


def _is_on_gpu(launch: Launch) -> bool:
    return next(value.is_cuda for value in launch.arguments if isinstance(value, Tensor))


def _make_ready(launch: Launch, compiled: Any) -> Ready:
    """Prepare `compiled`, the kernel of this launch, for all launches that have this launch's static properties."""
    function, _, arguments, options = launch
    constants = tuple(options[name] for name in function.arg_names[len(arguments) :])
    device = next(value.get_device() for value in arguments if isinstance(value, Tensor))
    run = compiled.run  # the first access to `run` loads the kernel onto the GPU
    kernel = compiled.function, compiled.packed_metadata, None, None, None  # no launch metadata, no hooks
    return Ready(compiled, run, kernel, constants, compiled.metadata.global_scratch_size > 0, device)


def static_properties(launch: Launch) -> tuple[Any, ...]:
    """Return the properties that decide the compiled code, as a key of the launch cache."""
    properties = [launch.function, *launch.options.items()]
    for value, kind in zip(launch.arguments, _parameter_kinds(launch.function), strict=False):
        if kind == _CONSTANT:
            properties.append(value)
        elif isinstance(value, Tensor):
            properties += value.device, value.dtype, value.data_ptr() % 16 == 0
        elif type(value) is int:
            properties.append(_of_int(value, kind))
        elif isinstance(value, tuple):
            properties.append(tuple([_of_int(part, _SPECIALIZED) for part in value]))
        elif value is None or isinstance(value, (bool, float)):
            properties.append(type(value))
        else:  # a TMA descriptor made on the host
            properties += value.base.device, value.base.dtype, tuple(value.block_shape), value.layout
    return tuple(properties)


def _of_int(value: int, kind: int) -> int:
    """Encode whether `value` exceeds 32 bits and, for kind _SPECIALIZED, whether it is 1 or a multiple of 16."""
    size = 0 if -(2**31) <= value < 2**31 else 100
    return size if kind == _PLAIN else size + (1 if value == 1 else 16 if value % 16 == 0 else 2)


# Kinds of parameters. Triton compiles a kernel for each value of a _CONSTANT, for each type of a _PLAIN, and for each
# type and divisibility of a _SPECIALIZED parameter.
_CONSTANT, _PLAIN, _SPECIALIZED = range(3)


@functools.cache
def _parameter_kinds(function: Any) -> tuple[int, ...]:
    if INTERPRET:
        plain = function.kwargs["do_not_specialize"] or ()
        constant = [name for name, note in function.fn.__annotations__.items() if "constexpr" in str(note)]
    else:
        plain = [parameter.name for parameter in function.params if parameter.do_not_specialize]
        constant = [parameter.name for parameter in function.params if parameter.is_constexpr]
    names = function.arg_names
    return tuple(_CONSTANT if name in constant else _PLAIN if name in plain else _SPECIALIZED for name in names)
