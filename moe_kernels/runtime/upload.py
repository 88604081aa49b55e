"""Asynchronous upload of small integers from the CPU to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(op: str, values: Tensor, out: Tensor) -> Tensor:
    """Copy the CPU tensor `values` to `out` on any device, with one asynchronous copy from pinned memory. Return `out`.

    Raises:
        NotImplementedError: a CUDA graph is being captured. A replay would copy pinned memory that has been reused.
    """
    if not out.is_cuda:
        return out.copy_(values)
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(f"{op}: copies integers to the GPU, which a CUDA graph cannot: call it before")
    return out.copy_(values.pin_memory(), non_blocking=True)
