"""Small integers that are known on the CPU, brought to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(op: str, values: Tensor, out: Tensor) -> Tensor:
    """Copy `values`, a CPU tensor, to `out`, on any device: one asynchronous copy from pinned memory. Returns `out`.

    Raises:
        NotImplementedError: a CUDA graph is being captured, which would copy again from memory that is then reused.
    """
    if not out.is_cuda:
        return out.copy_(values)
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(f"{op}: copies integers to the GPU, which a CUDA graph cannot: call it before")
    return out.copy_(values.pin_memory(), non_blocking=True)
