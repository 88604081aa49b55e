"""The memory layout of rows, and the alignment that kernels may assume."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LINE_BYTES = 128  # size of a cache line in bytes; TMA reads a row in pieces of this size
_LEAST_BYTES = 1024  # minimum size of padded rows, in bytes; padding could add more than an eighth to shorter rows
_COPIED_BYTES = 16  # TMA reads only rows that start at multiples of this number of bytes
_MOST_ALIGNED = 16  # maximum result of `alignment`, in elements; Triton checks for no larger divisor


def empty_rows(like: Tensor, num_rows: int, num_columns: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised rows on the device of `like`. Rows of at least 1024 bytes start at multiples of 128 bytes.
    A GEMM reads pieces of 128 bytes of each row. If rows start elsewhere, each piece lies in two cache lines, and the
    GEMM takes up to 1.3 times as long."""
    unit = LINE_BYTES // (dtype or like.dtype).itemsize
    if num_columns % unit == 0 or num_columns * LINE_BYTES < _LEAST_BYTES * unit:
        return like.new_empty(num_rows, num_columns, dtype=dtype)
    return like.new_empty(num_rows, -(-num_columns // unit) * unit, dtype=dtype)[:, :num_columns]


def has_aligned_rows(matrices: Tensor) -> bool:  # [E, M, N]
    """Return whether all rows start at multiples of 16 bytes, or all columns if columns are contiguous."""
    strides = [stride for stride in matrices.stride() if stride != 1]
    distances = [matrices.data_ptr(), *(stride * matrices.element_size() for stride in strides)]
    return not any(distance % _COPIED_BYTES for distance in distances)


def empty_aligned(matrices: Tensor, device: torch.device) -> Tensor:  # [E, M, N]
    """Return uninitialised matrices with the shape and the contiguous axis of `matrices`. Contiguous rows or columns
    start at multiples of 128 bytes."""
    if matrices.stride(2) != 1 and matrices.stride(1) == 1:
        return empty_aligned(matrices.transpose(1, 2), device).transpose(1, 2)
    num_matrices, num_rows, num_columns = matrices.shape
    unit = LINE_BYTES // matrices.element_size()
    pitch = -(-num_columns // unit) * unit
    return torch.empty(num_matrices, num_rows, pitch, dtype=matrices.dtype, device=device)[..., :num_columns]


def alignment(*sizes: int) -> int:
    """Return the largest power of two up to 16 that divides all sizes and strides. Triton itself sees only whether 16
    divides a number. Kernels therefore round each number down to a multiple of the returned divisor. This changes no
    value, but shows Triton the divisor, so that loads and stores take several elements at once."""
    return math.gcd(_MOST_ALIGNED, *sizes)
