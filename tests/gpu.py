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


def captured(function):
    """`function` in a CUDA graph: (a call that replays it, what it returned, which every replay writes anew).

    It runs three times before, on a stream of its own: that compiles kernels and makes what is made once.
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
