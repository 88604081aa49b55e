"""`dequantize`, `quantize_rows` and the packing of quantised rows: the functions and their registered ops."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference_fp8
from ..runtime.checks import check_shapes
from ..runtime.dispatch import choose
from ..runtime.registered_ops import registered_op
from ..types import QuantizedWeight, ScaledRows
from .decode import decode_weight
from .formats import check_quantized
from .fp8_rows import empty_scaled_rows, launch_pack_rows, launch_quantize_rows, launch_unpack_rows, packed_width
from .kernels import launch_dequantize

__all__ = ["dequantize", "quantize_rows"]


def dequantize(
    weight: QuantizedWeight,
    dtype: torch.dtype,
    *,
    implementation: str | None = None,
) -> Tensor:  # [E, out, in]
    """Return the weight as floating point: code times scale in float32, rounded once to `dtype`.

    Every device and both implementations give the same bits. Not differentiable.

    Shapes: result [E, out, in].

    Args:
        dtype: float32, float16 or bfloat16. The reference also computes other floating-point dtypes.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: a tensor of the weight does not fit the format and shape, is not contiguous or requires a gradient,
            or `dtype` is not a floating-point dtype.
    """
    check_quantized("dequantize", "weight", weight)
    if not dtype.is_floating_point:
        raise ValueError(f"dequantize: dtype must be of floating point, got {dtype}")
    like = weight.values.new_empty(0, dtype=dtype)  # the device and dtype of `like` choose the implementation
    if choose("dequantize", implementation, like) == "reference":
        return decode_weight(weight, dtype)
    return _dequantize_op(weight, dtype)


_dequantize_op = registered_op("dequantize_weight")(launch_dequantize)


@_dequantize_op.register_fake
def _(weight, dtype):
    return weight.values.new_empty(weight.shape, dtype=dtype)


def quantize_rows(
    rows: Tensor,  # [R, K]
    *,
    implementation: str | None = None,
) -> ScaledRows:
    """Return e4m3 numbers with a float32 scale for each block of 128 columns of a row. The last block may be shorter.

    The scale is the largest absolute value of the block divided by 448. NaN and infinities affect no other row. Every
    device and both implementations give the same bits. Not differentiable.

    Args:
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: `rows` is not a floating-point tensor [R, K].
    """
    check_shapes("quantize_rows", rows=(rows, "R K"))
    if not rows.is_floating_point():
        raise ValueError(f"quantize_rows: rows must be of floating point, got {rows.dtype}")
    if choose("quantize_rows", implementation, rows) == "triton":
        return ScaledRows(*_quantize_rows_op(rows.detach()))
    values, scales = reference_fp8.quantize_blocks(rows.detach(), 1, reference_fp8.BLOCK)
    return ScaledRows(values, scales.t().contiguous().t())


@registered_op("quantize_rows")
def _quantize_rows_op(rows: Tensor) -> tuple[Tensor, Tensor]:
    return launch_quantize_rows(rows)


@_quantize_rows_op.register_fake
def _(rows):
    return empty_scaled_rows(rows, *rows.shape)


def pack_rows(
    rows: Tensor,  # [R, K], K a multiple of 16
    *,
    implementation: str | None = None,
) -> Tensor:  # [R, W] in the dtype of rows
    """Return the results of `quantize_rows` in one tensor for sending. A row holds its numbers, then its scales.

    The tensor has the dtype of `rows`, so that autograd accepts the tensor. The elements have no meaning as numbers of
    this dtype. The W elements of a row take `packed_width(K)` bytes, K being the number of columns of `rows`.
    """
    if choose("pack_rows", implementation, rows) == "triton":
        return _pack_rows_op(rows)
    values, scales = reference_fp8.quantize_blocks(rows, 1, reference_fp8.BLOCK)
    num_rows, num_columns = rows.shape
    packed = rows.new_empty(num_rows, packed_width(num_columns), dtype=torch.uint8)
    packed[:, :num_columns] = values.view(torch.uint8)
    packed[:, num_columns:].view(torch.float32)[:, : scales.shape[1]] = scales
    return packed.view(rows.dtype)


def unpack_rows(
    packed: Tensor,  # [R, W]
    num_columns: int,
    *,
    implementation: str | None = None,
) -> Tensor:  # [R, num_columns]
    """Dequantise the rows that `pack_rows` packed."""
    if choose("unpack_rows", implementation, packed) == "triton":
        return _unpack_rows_op(packed, num_columns)
    stored = packed.view(torch.uint8)
    values = stored[:, :num_columns].contiguous().view(torch.float8_e4m3fn)
    scales = stored[:, num_columns:].view(torch.float32)
    return reference_fp8.dequantize_blocks(values, scales, 1, reference_fp8.BLOCK, torch.float32).to(packed.dtype)


_pack_rows_op = registered_op("pack_rows")(launch_pack_rows)


@_pack_rows_op.register_fake
def _(rows):
    return rows.new_empty(rows.shape[0], packed_width(rows.shape[1]) // rows.dtype.itemsize)


_unpack_rows_op = registered_op("unpack_rows")(launch_unpack_rows)


@_unpack_rows_op.register_fake
def _(packed, num_columns):
    return packed.new_empty(packed.shape[0], num_columns)
