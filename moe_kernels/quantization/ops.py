"""`dequantize` and `quantize_rows`: the public functions and their registered ops."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference_fp8
from ..runtime.checks import check_shapes
from ..runtime.dispatch import KERNEL_DTYPES, choose
from ..runtime.ops import registered_op
from ..types import QuantizedWeight, ScaledRows
from .decode import decode_weight
from .formats import check_quantized
from .kernels import launch_dequantize
from .scaling import empty_scaled_rows, launch_quantize_rows


def dequantize(
    weight: QuantizedWeight,
    dtype: torch.dtype,
    *,
    implementation: str | None = None,
) -> Tensor:  # [E, out, in]
    """Return the weight as floating point: code times scale in float32, rounded once to `dtype`.

    The same bits on every device and by both implementations. Not differentiable.

    Args:
        dtype: float32, float16 or bfloat16; the reference computes any.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: the tensors of the weight are not those of its format and shape, or one requires a gradient.
    """
    check_quantized("dequantize", "weight", weight)
    if not dtype.is_floating_point:
        raise ValueError(f"dequantize: dtype must be of floating point, got {dtype}")
    like = weight.values.new_empty(0, dtype=dtype)  # its device and dtype decide
    if choose("dequantize", implementation, like, KERNEL_DTYPES) == "reference":
        return decode_weight(weight, dtype)
    return _dequantize_op(weight, dtype)


@registered_op("dequantize_weight")
def _dequantize_op(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return launch_dequantize(weight, dtype)


@_dequantize_op.register_fake
def _(weight, dtype):
    return weight.values.new_empty(weight.shape, dtype=dtype)


def quantize_rows(
    rows: Tensor,  # [R, K]
    *,
    implementation: str | None = None,
) -> ScaledRows:
    """Return e4m3 numbers with a float32 scale for each row and each 128 columns, the last block being shorter.

    The scale is the largest size in the block divided by 448. NaN, and an infinity, stay in their row. The same bits on
    every device and by both implementations. Not differentiable.

    Args:
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: rows are not [R, K] of floating point.
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
