"""Triton where it is installed, else a placeholder, so that the reference also runs on machines without Triton."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Any, TypeAlias


class _Absent:
    """Lets modules define their kernels without Triton. Launching a kernel raises an error that names the cause."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs) -> _Absent:
        return self

    def __getitem__(self, grid) -> _Absent:
        raise RuntimeError("Triton is not installed: pass implementation='reference'")


def version_numbers(version: str) -> tuple[int, ...]:
    """Return (3, 9, 0) for "3.9.0+git1234" or "3.9.0rc1"."""
    (numbers,) = re.findall(r"^\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers.split(".")))


HAS_TRITON = importlib.util.find_spec("triton") is not None

if TYPE_CHECKING:
    # `tl` is untyped, because Triton's annotations describe the compiler's objects, not the values in a kernel.
    class _Untyped(type):
        def __getattr__(cls, name: str) -> Any: ...

    triton: Any

    class tl(metaclass=_Untyped):
        constexpr: TypeAlias = Any

    sort = tl.sort
    INTERPRET = False
    TRITON_VERSION: tuple[int, ...] | None = None
elif HAS_TRITON:
    import triton
    import triton.language as tl

    # Triton reads this setting when a kernel is defined, so reading the setting once is enough.
    INTERPRET = bool(triton.knobs.runtime.interpret)
    TRITON_VERSION = version_numbers(triton.__version__)
    sort = tl.sort
else:
    triton = tl = _Absent()
    sort = tl
    INTERPRET = False
    TRITON_VERSION = None


if INTERPRET:
    import numpy
    from triton.runtime.interpreter import TensorHandle

    def sort(keys: Any) -> Any:
        """Sort with NumPy. The interpreter takes tenths of a second for `tl.sort`, because each exchange is an op."""
        return tl.tensor(TensorHandle(numpy.sort(keys.handle.data), keys.handle.dtype), keys.type)


# Triton 3.9 spills 16 bytes per thread when the sort compares 512 slots at once; 3.6 does not.
slots_compared_at_once = 512 if TRITON_VERSION is None or TRITON_VERSION < (3, 7) else 256


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up. `triton.cdiv` takes microseconds on the host, because kernels can also call it, and is
    missing without Triton."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, or 0 for n = 0, as `triton.next_power_of_2` does."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
