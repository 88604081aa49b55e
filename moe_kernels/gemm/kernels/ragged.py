"""Ragged descriptors: TMA descriptors over grouped rows that make the hardware clip accesses at the end of a group.

The descriptor of a matrix [R, C] with row stride s has shape [big, big, 2**30, C] and strides [2**34 - s, s, s, 1]. No
coordinate reaches the bound `big`. Let `end` be the end row of a group, and let row `end - left` be in the group. The
coordinates [2**30, end, 2**30 - left, c] address column c of this row, because 2**30 * 2**34 = 2**64 wraps to zero:

    2**30 * (2**34 - s) + end * s + (2**30 - left) * s = (end - left) * s

The third coordinate reaches its bound, 2**30, exactly at row `end`. From row `end` on, loads return zeros and stores do
nothing. The idea is from
https://github.com/triton-lang/triton/blob/main/python/triton/tools/ragged_tma.py
"""

from __future__ import annotations

from ...runtime.triton import tl, triton

MAX_ROWS = 2**30 - 1


@triton.jit
def ragged_descriptor(ptr, row_stride, num_columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return a ragged descriptor, made on the device, with blocks of [1, 1, BLOCK_R, BLOCK_C]."""
    stride = row_stride.to(tl.int64)
    return tl.make_tensor_descriptor(
        ptr,
        [0x7FFF0000, 0x7FFF0000, 0x40000000, num_columns],
        [17179869184 - stride, stride, stride, 1],
        [1, 1, BLOCK_R, BLOCK_C],
    )


@triton.jit
def load_ragged(descriptor, row, end, column, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load the block [BLOCK_R, BLOCK_C] that starts at `row` and `column`. Rows from `end` on are zeros."""
    return descriptor.load([0x40000000, end, 0x40000000 - (end - row), column]).reshape(BLOCK_R, BLOCK_C)


@triton.jit
def store_ragged(descriptor, row, end, column, value, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Write the block [BLOCK_R, BLOCK_C] that starts at `row` and `column`. Rows from `end` on are not written."""
    descriptor.store([0x40000000, end, 0x40000000 - (end - row), column], value.reshape(1, 1, BLOCK_R, BLOCK_C))
