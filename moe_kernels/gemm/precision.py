"""What the tensor cores may do to float32 operands."""

from __future__ import annotations

import torch


def input_precision(dtype: torch.dtype) -> str:
    """ "tf32" for float32 if PyTorch was asked for it (torch.set_float32_matmul_precision), else "ieee"."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"
