"""TMA descriptors over grouped rows. The hardware reads and writes nothing past the end of a group.

A matrix [R, C] with row stride s is described with rank 4: shape [big, big, 2**30, C] and strides [2**34 - s, s, s, 1].
The coordinates [2**30, end, 2**30 - left, c] address row `end - left`, since 2**30 * 2**34 = 2**64 wraps to zero:

    2**30 * (2**34 - s) + end * s + (2**30 - left) * s = (end - left) * s

and the third coordinate reaches its bound exactly at row `end`, so the hardware clips there: loads return zeros and
stores do nothing. The idea is from https://github.com/triton-lang/triton/blob/main/python/triton/tools/ragged_tma.py
"""

from __future__ import annotations

from ...runtime.triton import tl, triton

MAX_ROWS = 2**30 - 1


@triton.jit
def ragged_descriptor(ptr, row_stride, num_columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return a descriptor made on the device. Its blocks are [1, 1, BLOCK_R, BLOCK_C]."""
    stride = row_stride.to(tl.int64)
    return tl.make_tensor_descriptor(
        ptr,
        [0x7FFF0000, 0x7FFF0000, 0x40000000, num_columns],
        [17179869184 - stride, stride, stride, 1],
        [1, 1, BLOCK_R, BLOCK_C],
    )


@triton.jit
def load_ragged(descriptor, row, end, column, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load [BLOCK_R, BLOCK_C] from `row`, with zeros from row `end` on."""
    return descriptor.load([0x40000000, end, 0x40000000 - (end - row), column]).reshape(BLOCK_R, BLOCK_C)


@triton.jit
def store_ragged(descriptor, row, end, column, value, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Write [BLOCK_R, BLOCK_C] from `row`, and nothing from row `end` on."""
    descriptor.store([0x40000000, end, 0x40000000 - (end - row), column], value.reshape(1, 1, BLOCK_R, BLOCK_C))
