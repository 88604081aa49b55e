"""Compatibility with the Gluon of Triton 3.6 to 3.9: whether Gluon can run here, and names that differ by version.

The warp-specialised Hopper kernels are written in Gluon, Triton's low-level kernel language. Gluon changes with every
Triton version. This file holds all version-dependent code of these kernels, except the launch API in `launch.py`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from .triton import INTERPRET, TRITON_VERSION, triton

OLDEST, NEWEST = (3, 6), (3, 9)
REMEDY = "install Triton 3.6 to 3.9 (PyTorch 2.10 to 2.15) for the fast kernels"


def version_obstacle(version: tuple[int, ...] | None) -> str | None:
    """Return why the Hopper kernels do not support the Gluon of this Triton version, or None if they do."""
    if version is None:
        return "Triton is not installed"
    if not OLDEST <= version[:2] <= NEWEST:
        return f"they are written for Triton 3.6 to 3.9, this is {'.'.join(map(str, version))}"
    return None


OBSTACLE = version_obstacle(TRITON_VERSION)
_VERSION = TRITON_VERSION or ()
KNOWS_GLUON = OBSTACLE is None  # True also if kernels are interpreted, although the interpreter cannot run Gluon
if OBSTACLE is None and INTERPRET:
    OBSTACLE = "the interpreter does not run Gluon"
if OBSTACLE is None:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.ampere import async_copy
        from triton.experimental.gluon.language.nvidia.hopper import tma
    except ImportError as error:
        OBSTACLE = f"Triton's Gluon cannot be imported: {error}"

if OBSTACLE is None:
    # Triton 3.7 and 3.8 introduced new names. Look for these first: in Triton 3.9, some old names only raise an error.
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # pyright: ignore[reportAttributeAccessIssue]
    # Triton 3.6 and 3.7 hash the constructor of an aggregate, not its fields. If the constructor were generated, a
    # kernel with changed fields could reuse old machine code. So each aggregate defines its constructor.
    aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else triton.language.core._aggregate
    if hasattr(tma, "async_load"):
        tma_load, tma_store, copy_load = tma.async_load, tma.async_store, async_copy.async_load
    else:
        tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
        copy_load = async_copy.async_copy_global_to_shared


def slower_kernels(cc: int) -> str | None:
    """Return why a Hopper GPU (cc 90) runs without the warp-specialised kernels, or None if these kernels can run.
    Return None also for other GPUs, which have no such kernels."""
    if OBSTACLE is None or cc != 90:
        return None
    return f"the warp-specialised Hopper kernels cannot run: {OBSTACLE}. Slower portable kernels run; {REMEDY}"


@functools.cache
def warn_if_slower(cc: int) -> None:
    """Warn once per process if `slower_kernels` returns a reason."""
    if reason := slower_kernels(cc):
        warnings.warn(f"moe_kernels: {reason}", RuntimeWarning, stacklevel=2)


def registers(gather: bool, pieces: int) -> dict[str, int]:
    """Return the registers per thread of the producer and one consumer. The other consumer gets 504 minus both numbers.

    With these numbers, no register spills with Triton 3.6 and 3.7. With 3.8 and 3.9, kernels may spill once per tile,
    but never in a step of the reduction.

    Args:
        gather: whether the kernel gathers an operand's rows by an index.
        pieces: number of parts in which an activation is computed; 0 without an activation.
    """
    if not gather:
        producer, consumer = (24, 240) if pieces else (32, 240)
    elif _VERSION[:2] >= (3, 8):
        producer, consumer = (56, 224) if pieces else (72, 216)
    else:
        producer, consumer = (48, 224) if pieces else (56, 224)
    return {"PRODUCER_REGISTERS": producer, "CONSUMER_REGISTERS": consumer}


def compiler_options() -> dict[str, Any]:
    """Return the options that make Triton 3.9 schedule for few registers, or no options for earlier versions. With
    Triton 3.9 and no options, kernels with a plain activation spill ten times as much."""
    return {"sched4reg": True} if _VERSION[:2] >= (3, 9) else {}
