"""What only tests on a GPU need."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error():
    """Inside, whatever makes the host wait for the GPU raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
