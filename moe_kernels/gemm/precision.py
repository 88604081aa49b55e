"""How float32 operands are multiplied and summed."""

from __future__ import annotations

import torch

from .._triton import tl, triton


def input_precision(dtype: torch.dtype) -> str:
    """ "tf32" for float32 if PyTorch was asked for it (torch.set_float32_matmul_precision), else "ieee"."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"


@triton.jit
def float32_dot(a, b, total, positive, INPUT_PRECISION: tl.constexpr):
    """total + a @ b, the product summed by itself: a sum's error grows with the number of its terms, and 16-bit results
    hide that of a long one.

    `positive` is any number above zero that the compiler does not know, lest it adds every term to `total`.
    """
    zero = tl.where(positive <= 0, total, 0.0)
    return total + tl.dot(a, b, zero, input_precision=INPUT_PRECISION)
