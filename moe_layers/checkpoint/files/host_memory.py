"""The host memory of tensors, into which files are read."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_LEAST_BYTES = 4 << 20  # two huge pages


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, which must outlive the view."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to back untouched memory with huge pages. The first touch of each small page takes longer than reading
    its bytes from the page cache. The system may ignore this hint."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or tensor.nbytes < _LEAST_BYTES:
        return
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    length = tensor.data_ptr() + tensor.nbytes - first
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
