"""One kernel launch as a value: run it, compile it, or run it with what was compiled before.

Before each launch Triton's JIT inspects every argument, to find the compiled kernel that fits, which takes longer than
the launch. So what it found is kept here by the `static_properties` of the launch, and by its `signature`, which holds
numbers as they are and is read faster; and a `CompiledArtifact` holds it for a caller who vouches for the properties.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .triton import INTERPRET, triton

# Whether to fuse multiplications and additions: Triton does up to 3.9, which warns if it is not told; 3.10 will not.
_FUSION = {} if INTERPRET or "TRITON_DEFAULT_FP_FUSION" in os.environ else {"enable_fp_fusion": True}

DESCRIPTOR_BYTES = 128  # of device memory that a TMA descriptor made on the device takes, per program


class Launch(NamedTuple):
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
    compiled: Any  # Triton's compiled kernel; None in the interpreter, which has none


def compile_launch(launch: Launch, kernel_name: str) -> CompiledArtifact:
    """Compile for the active device or compilation target."""
    compiled = launch.function.warmup(*launch.arguments, grid=launch.grid, **launch.options, **_FUSION)
    return CompiledArtifact(kernel_name, static_properties(launch), compiled)


def launch_kernel(function: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`function[grid](*arguments, **options)` on the tensors' device, which is the current one, without descriptors."""
    launch = Launch(function, grid, arguments, options)
    _launch(launch, find_ready(launch))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()  # with a context


_thread = _Thread()


def _need_context(operand: Tensor) -> None:
    """Let this thread have the context of the operand's GPU. Encoding a descriptor wants one, launches or not, and a
    thread that has launched nothing yet, as autograd's at first, has none."""
    if operand.is_cuda and operand.get_device() not in _thread.devices:
        torch.empty(1, device=operand.device).zero_()
        _thread.devices.add(operand.get_device())


class Ready(NamedTuple):
    """What a launch takes that is like an earlier one."""

    compiled: Any  # Triton's compiled kernel
    run: Any  # its launcher
    kernel: tuple[Any, ...]  # what that takes between the stream and the arguments
    constants: tuple[Any, ...]  # the constexpr parameters: Triton 3.6 to 3.9 want these too, and skip them
    needs_scratch: bool  # memory for descriptors
    layouts: tuple[Any, ...]  # of descriptors, which the signature names by id, so that the ids stay theirs
    device: int  # of the tensors, for which the kernel is loaded


def make_ready(launch: Launch, compiled: Any) -> Ready:
    """For launches with the static properties of this one, which was compiled to that."""
    function, _, arguments, options = launch
    constants = tuple(options[name] for name in function.arg_names[len(arguments) :])
    layouts = tuple(value.layout for value in arguments if hasattr(value, "block_shape"))
    device = next(value.get_device() for value in arguments if isinstance(value, Tensor))
    run = compiled.run  # which loads the kernel when it is first asked for
    kernel = compiled.function, compiled.packed_metadata, None, None, None  # and no hooks
    return Ready(compiled, run, kernel, constants, compiled.metadata.global_scratch_size > 0, layouts, device)


def run_launch(launch: Launch, artifact: CompiledArtifact | None, operand: Tensor, scratch: Tensor | None) -> None:
    """Launch on the current stream of the current device, which is an operand's.

    Args:
        scratch: memory for descriptors; allocated if it is None or too small.
    """
    _need_context(operand)  # which loading an artifact's kernel wants, too
    if artifact is None or artifact.compiled is None:
        ready = find_ready(launch)
    else:
        _from_artifacts[id(artifact.compiled)] = artifact.compiled
        ready = make_ready(launch, artifact.compiled)
    run_ready(launch, ready, operand, scratch)


# Triton's compiled kernels of artifacts that ran. From Triton 3.8 on one that is freed takes its code off the GPU, from
# under CUDA graphs and launches that have yet to run.
_from_artifacts: dict[int, Any] = {}


def run_ready(launch: Launch, ready: Ready | None, operand: Tensor, scratch: Tensor | None = None) -> None:
    """As `run_launch`, with what `find_ready` finds."""
    _need_context(operand)
    if ready is not None and not ready.needs_scratch:
        _launch(launch, ready)
    else:
        # The allocator of the descriptors' scratch memory belongs to a context, and threads, such as autograd's, start
        # with none. In a copy of the context, ours never replaces one of the caller's.
        contextvars.copy_context().run(_launch_with_scratch, launch, ready, operand.device, scratch)


def _launch_with_scratch(launch: Launch, ready: Ready | None, device: torch.device, scratch: Tensor | None) -> None:
    def allocate(size: int, alignment: int, stream: int) -> Tensor:
        if scratch is None or len(scratch) < size:
            return torch.empty(size, dtype=torch.int8, device=device)
        return scratch

    triton.set_allocator(allocate)
    _launch(launch, ready)


_compiled: dict[tuple[Any, ...], Any] = {}  # Triton's compiled kernels by the static properties of their launches

# The same by the signatures of launches. There are more of these, as any other stride makes one; when they are too
# many, all are forgotten.
_by_signature: dict[tuple[Any, ...], Ready] = {}
_MOST_SIGNATURES = 4096


def find_ready(launch: Launch) -> Ready | None:
    """What an earlier launch of the same static properties left; None in the interpreter, which compiles nothing."""
    if INTERPRET:
        return None
    key = signature(launch)
    ready = _by_signature.get(key)
    if ready is None and (compiled := _compiled.get(static_properties(launch))) is not None:
        if len(_by_signature) >= _MOST_SIGNATURES:
            _by_signature.clear()
        ready = _by_signature[key] = make_ready(launch, compiled)
    return ready


def _launch(launch: Launch, ready: Ready | None) -> None:
    """`function[grid](*arguments, **options)`, which also prepares for profilers' hooks where there are none."""
    function, grid, arguments, options = launch
    hooks = triton.knobs.runtime
    if ready is None:
        compiled = function[grid](*arguments, **options, **_FUSION)
        # Without a GPU this compiles for some target, which is not part of the properties.
        if not INTERPRET and torch.cuda.is_available():
            _compiled[static_properties(launch)] = compiled
    elif hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        ready.compiled[(*grid, 1, 1)[:3]](*arguments, *ready.constants)
    else:
        stream = triton.runtime.driver.active.get_current_stream(ready.device)
        ready.run(*(*grid, 1, 1)[:3], stream, *ready.kernel, *arguments, *ready.constants)


def signature(launch: Launch) -> tuple[Any, ...]:
    """What decides the static properties: launches that differ in those differ here.

    Sizes and strides stand for themselves, so that several signatures share their properties, but it takes a fraction
    of the time. All tensors of a launch are on one device.
    """
    function, _, arguments, options = launch
    types = tuple(map(type, arguments))
    reader = _readers.get((id(function), types))
    if reader is None:
        reader = _readers[id(function), types] = _make_reader(function, arguments)
    return reader, *reader(*arguments), *options, *options.values()


_readers: dict[tuple[Any, ...], Callable[..., tuple[Any, ...]]] = {}


def _make_reader(function: Any, arguments: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    """Reads off arguments of these types what else decides the static properties; in one expression, as a loop over
    them takes twice as long."""
    facts = []
    for i, (value, kind) in enumerate(zip(arguments, _parameter_kinds(function), strict=False)):
        if isinstance(value, Tensor):
            facts += f"x{i}.dtype", f"x{i}.data_ptr() % 16 == 0"
            on_device = f"x{i}"
        elif hasattr(value, "block_shape"):
            facts += f"x{i}.base.dtype", f"*x{i}.block_shape", f"id(x{i}.layout)"
            on_device = f"x{i}.base"
        elif type(value) is int and kind == _PLAIN:
            facts.append(f"{-(2**31)} <= x{i} < {2**31}")
        elif type(value) is int or isinstance(value, tuple) or kind == _CONSTANT:
            facts.append(f"x{i}")
    facts.append(f"{on_device}.get_device()")
    names = ", ".join(f"x{i}" for i in range(len(arguments)))
    reader = eval(f"lambda {names}: ({', '.join(facts)},)")
    reader.function = function  # whose id stays its own
    return reader


def static_properties(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles a launch for."""
    properties = [launch.function, *launch.options.items()]
    has_device = False
    for value, kind in zip(launch.arguments, _parameter_kinds(launch.function), strict=False):
        if kind == _CONSTANT:
            properties.append(value)
        elif type(value) is int:
            properties.append(_of_int(value, kind))
        elif isinstance(value, Tensor):
            if not has_device:
                properties.append(value.device)
                has_device = True
            properties.append(value.dtype)
            properties.append(value.data_ptr() % 16 == 0)
        elif isinstance(value, tuple):
            properties.append(_of_ints(value, kind))
        elif value is None or isinstance(value, (bool, float)):
            properties.append(type(value))
        else:  # A TMA descriptor made on the host.
            properties += (value.base.dtype, value.base.device, tuple(value.block_shape), value.layout)
    return tuple(properties)


@functools.lru_cache(maxsize=4096)
def _of_int(value: int, kind: int) -> int:
    """Its number of bits and, unless the kernel does not ask, whether it is one or a multiple of 16."""
    size = 0 if -(2**31) <= value < 2**31 else 100
    return size if kind == _PLAIN else size + (1 if value == 1 else 16 if value % 16 == 0 else 2)


@functools.lru_cache(maxsize=4096)
def _of_ints(values: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return tuple(_of_int(value, kind) for value in values)


_CONSTANT, _PLAIN, _SPECIALIZED = range(3)  # compiled for its value; for its type; for its type and divisors

_kinds: dict[int, tuple[Any, tuple[int, ...]]] = {}


def _parameter_kinds(function: Any) -> tuple[int, ...]:
    if id(function) not in _kinds:
        if INTERPRET:
            plain = function.kwargs["do_not_specialize"] or ()
            constant = [name for name, note in function.fn.__annotations__.items() if "constexpr" in str(note)]
        else:
            plain = [parameter.name for parameter in function.params if parameter.do_not_specialize]
            constant = [parameter.name for parameter in function.params if parameter.is_constexpr]
        kinds = (
            _CONSTANT if name in constant else _PLAIN if name in plain else _SPECIALIZED for name in function.arg_names
        )
        _kinds[id(function)] = function, tuple(kinds)  # with the function, so that its id stays its own
    return _kinds[id(function)][1]
