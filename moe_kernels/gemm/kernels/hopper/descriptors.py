"""TMA descriptors of the Hopper kernels, made on the host."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....runtime.gluon import OBSTACLE
from ..ragged import ragged_shape_and_strides

if OBSTACLE is None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@functools.cache
def _layout(rank: int, bits: int, swizzle: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def form(shape: list[int], strides: list[int], block: list[int], bits: int = 16, swizzle: int = 128) -> dict[str, Any]:
    """Return all fields of a descriptor except its tensor. `bits` is the size of the tensor's elements, `swizzle`
    counts bytes."""
    return {
        "shape": shape,
        "strides": strides,
        "block_shape": block,
        "layout": _layout(len(shape), bits, swizzle),
        "padding": "zero",
    }


def descriptor(tensor: Tensor, form: dict[str, Any]) -> TensorDescriptor:
    """Make a `TensorDescriptor` without running its slow checks, because `supports` makes the same checks."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.__dict__.update(form, base=tensor)
    return made


@functools.lru_cache(maxsize=4096)
def _plain_form(shape: torch.Size, strides: tuple[int, ...], block: tuple[int, ...], bits: int) -> dict[str, Any]:
    return form(list(shape), list(strides), list(block), bits)


@functools.lru_cache(maxsize=4096)
def _ragged_form(row_stride: int, num_columns: int, block: tuple[int, int], split: int) -> dict[str, Any]:
    shape, strides = ragged_shape_and_strides(row_stride, num_columns, split)
    middle = [1] if split > 1 else []
    return form(shape, strides, [1, 1, block[0], *middle, block[1]], swizzle=min(2 * block[1], 128))


def plain_descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    return descriptor(tensor, _plain_form(tensor.shape, tensor.stride(), block, 8 * tensor.dtype.itemsize))


def ragged_descriptor(tensor: Tensor, block: tuple[int, int], split: int = 1) -> TensorDescriptor:
    """Describe a 16-bit tensor as [R, C], or with `split` 2 as [R, 2, C / 2], so that no block crosses the halves."""
    return descriptor(tensor, _ragged_form(tensor.stride(0), tensor.shape[1], block, split))


def rows_descriptor(a: Tensor, row_to_token: Tensor | None, block: tuple[int, int]) -> tuple[Any, ...]:
    """Return a kernel's five arguments for A: a descriptor or, with `row_to_token`, the four operands of a gather."""
    if row_to_token is None:
        return plain_descriptor(a, *block), None, None, None, None
    return None, a, a.stride(0), row_to_token, a.shape[1]


@functools.lru_cache(maxsize=4096)
def matrices_form(
    shape: torch.Size, strides: tuple[int, ...], by_columns: bool, block_n: int, block_k: int, bits: int = 16
) -> dict[str, Any]:
    """Return all fields except the tensor of a descriptor of matrices [G, K, N], contiguous along K if `by_columns`,
    else along N."""
    num_groups, depth, num_columns = shape
    stride_g, stride_k, stride_n = strides
    if by_columns:
        return form([num_groups, num_columns, depth], [stride_g, stride_n, 1], [1, block_n, block_k], bits)
    return form([num_groups, depth, num_columns], [stride_g, stride_k, 1], [1, block_k, block_n], bits)
