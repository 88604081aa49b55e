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
def carried(total, run, step):
    """(total, run) after a step of a float32 product: sums of two steps, summed. A sum's error grows with the number
    of its terms, and 16-bit results hide that of a plain one."""
    is_last = step % 2 == 1
    return tl.where(is_last, total + run, total), tl.where(is_last, 0.0, run)
