"""The process group of a command that torchrun starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed


@contextmanager
def process_group(device_type: str) -> Iterator[torch.device]:
    """Make this process a rank inside the context, with a GPU of its own or on the CPU."""
    # Disable NVLink multicast, because some machines report it although it does not work.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device, os.environ["CUDA_VISIBLE_DEVICES"] = torch.device("cpu"), ""  # hide GPUs from transformers
    distributed.init_process_group("nccl" if device_type == "cuda" else "gloo")
    try:
        yield device
    finally:
        distributed.destroy_process_group()
