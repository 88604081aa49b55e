"""TMA descriptors of the Hopper kernels, made on the host."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ....runtime.gluon import OBSTACLE

if OBSTACLE is None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@functools.cache
def _layout(rank: int, bits: int, swizzle: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def form(shape: list[int], strides: list[int], block: list[int], bits: int = 16, swizzle: int = 128) -> dict[str, Any]:
    """Return a descriptor's fields except the tensor, for elements of `bits` bits and a swizzle of `swizzle` bytes."""
    return {
        "shape": shape,
        "strides": strides,
        "block_shape": block,
        "layout": _layout(len(shape), bits, swizzle),
        "padding": "zero",
    }


def descriptor(tensor: Tensor, form: dict[str, Any]) -> TensorDescriptor:
    """Return a `TensorDescriptor` without its slow constructor checks, because `supports` makes the same checks."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.__dict__.update(form, base=tensor)
    return made


def plain_descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    return descriptor(tensor, form(list(tensor.shape), list(tensor.stride()), list(block), 8 * tensor.dtype.itemsize))


def ragged_descriptor(tensor: Tensor, block: tuple[int, int], split: int = 1) -> TensorDescriptor:
    """Return a descriptor of a 16-bit tensor [R, C] that clips accesses at a group's end. With `split` 2, the shape is
    [R, 2, C / 2], so that no block holds columns of both halves. `ragged.py` explains the strides."""
    (rows, columns), stride, width = block, tensor.stride(0), tensor.shape[1] // split
    split_shape, split_stride, split_block = ([split], [width], [1]) if split > 1 else ([], [], [])
    shape = [0x7FFF0000, 0x7FFF0000, 2**30, *split_shape, width]
    strides = [2**34 - stride, stride, stride, *split_stride, 1]
    return descriptor(tensor, form(shape, strides, [1, 1, rows, *split_block, columns], swizzle=min(2 * columns, 128)))


def rows_descriptor(a: Tensor, row_to_token: Tensor | None, block: tuple[int, int]) -> tuple[Any, ...]:
    """Return a kernel's five arguments for A: a descriptor, then four operands of a gather. With `row_to_token`, the
    descriptor is None. Without `row_to_token`, the four operands are None."""
    if row_to_token is None:
        return plain_descriptor(a, *block), None, None, None, None
    return None, a, a.stride(0), row_to_token, a.shape[1]


def matrices_descriptor(b: Tensor, by_columns: bool, block_n: int, block_k: int) -> TensorDescriptor:
    """Return a descriptor of matrices [G, K, N], which are contiguous along K if `by_columns`, else along N."""
    (num_groups, depth, num_columns), (stride_g, stride_k, stride_n) = b.shape, b.stride()
    fields = [num_groups, depth, num_columns], [stride_g, stride_k, 1], [1, block_k, block_n]
    if by_columns:
        fields = [num_groups, num_columns, depth], [stride_g, stride_n, 1], [1, block_n, block_k]
    return descriptor(b, form(*fields, 8 * b.dtype.itemsize))
