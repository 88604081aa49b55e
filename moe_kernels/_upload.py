"""Small integers that are known on the CPU, brought to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(op: str, values: Tensor, device: torch.device) -> Tensor:
    """`values`, a CPU tensor, on `device`: one asynchronous copy from pinned memory.

    Raises:
        NotImplementedError: a CUDA graph is being captured, which would copy again from memory that is then reused.
    """
    if device.type != "cuda":
        return values.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(f"{op}: copies integers to the GPU, which a CUDA graph cannot: call it before")
    return values.pin_memory().to(device, non_blocking=True)
