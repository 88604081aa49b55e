"""Helpers of tests that need a GPU."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error():
    """Raise RuntimeError if the host waits for the GPU inside the context."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_never_waits(step):
    """Check that the second call of `step` never synchronises the host with the GPU. The first one compiles."""
    step()
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        step()


def captured(function):
    """Capture `function` in a CUDA graph. Return (a call that replays it, its result, which every replay overwrites).

    The function first runs three times on a separate stream, which compiles kernels and fills caches.
    """
    torch.use_deterministic_algorithms(False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph.replay, results
