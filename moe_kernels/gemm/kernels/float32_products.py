"""Multiplication and summation of float32 operands."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.pytorch import fp32_precision
from ...runtime.triton import tl, triton
from ..kernel import device_cc

# Compute capabilities whose tensor cores multiply float64 as fast as CUDA cores multiply float32. Most other GPUs
# multiply float64 at 1/32 or 1/64 of that rate. Triton 3.6 cannot compile float64 dots for 10.0, so 10.0 is left out.
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions
_FAST_FLOAT64 = frozenset({80, 90})


def has_fast_float64(device: torch.device) -> bool:
    """Return whether float64 products are as fast as float32 products. Outside CUDA (the interpreter), return True."""
    return device.type != "cuda" or device_cc(device) in _FAST_FLOAT64


def dot_precision(operand: Tensor) -> str | None:
    """Return how a kernel multiplies float32 operands: "tf32", "float64" or "float32". For operands of other dtypes,
    return None, because products of those dtypes are exact in float32.

    - "tf32" if TF32 is enabled in PyTorch.
    - Else "float64" if float64 products are fast on the operand's device. Float64 products are exact, and only the
      final sum is rounded to float32.
    - Else "float32". Each reduction step's products are summed before the sum is added to the total, because the error
      of a sum grows with its number of terms.
    """
    if operand.dtype != torch.float32:
        return None
    if fp32_precision("cuda", "matmul") == "tf32":  # TF32 is enabled, by PyTorch's old or new API
        return "tf32"
    return "float64" if has_fast_float64(operand.device) else "float32"


@triton.jit
def zero_total(ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the initial value of a sum of products."""
    if PRECISION == "float64":
        return tl.zeros((ROWS, COLUMNS), tl.float64)  # [ROWS, COLUMNS]
    else:
        return tl.zeros((ROWS, COLUMNS), tl.float32)  # [ROWS, COLUMNS]


@triton.jit
def add_product(a, b, total, positive, PRECISION: tl.constexpr):
    """Return total + a @ b. `positive` is any positive number whose value the compiler does not know. If the compiler
    knew the value, it would add each float32 term of a @ b to `total`. Summing the terms first makes the error smaller
    (`dot_precision`)."""
    # Tensor cores sum float8 products with about 14 bits (section 3.3.2 of https://arxiv.org/abs/2412.19437). With
    # IMPRECISE set to the step's length, each step's sum is added to a float32 total.
    IMPRECISE: tl.constexpr = a.shape[1] if a.dtype.is_fp8() else None
    if PRECISION is None:
        return tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)
    elif PRECISION == "float64":
        return tl.dot(a.to(tl.float64), b.to(tl.float64), total, out_dtype=tl.float64)
    else:
        zero = tl.where(positive <= 0, total, 0.0)
        return total + tl.dot(a, b, zero, input_precision="tf32" if PRECISION == "tf32" else "ieee")
