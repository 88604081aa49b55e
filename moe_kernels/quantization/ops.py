"""`dequantize`: the public function and its registered op."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.dispatch import KERNEL_DTYPES, choose
from ..runtime.ops import registered_op
from ..types import QuantizedWeight
from .decode import decode_weight
from .formats import check_quantized
from .kernels import launch_dequantize


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
