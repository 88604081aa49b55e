"""Triton where it is installed; elsewhere a stand-in, so that the reference also runs on machines without it."""

from __future__ import annotations

import importlib.util


class _Absent:
    """Lets modules define their kernels without Triton. Launching one says what is missing."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs) -> _Absent:
        return self

    def __getitem__(self, grid) -> _Absent:
        raise RuntimeError("Triton is not installed: pass implementation='reference'")


HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl

    # Triton decides this when a kernel is defined, so it is read once, here.
    INTERPRET: bool = bool(triton.knobs.runtime.interpret)
    TRITON_VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
else:
    triton = tl = _Absent()
    INTERPRET = False
    TRITON_VERSION = None

__all__ = ["HAS_TRITON", "INTERPRET", "TRITON_VERSION", "tl", "triton"]
