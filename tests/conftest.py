"""Tests run on the GPU if there is one; otherwise the interpreter runs the Triton kernels."""

import importlib.util
import os
import sys
from glob import glob

# With several GPUs, each worker of pytest-xdist uses one. Multi-GPU tests run without workers. One thread per worker:
# threads of several workers on one core would wait for each other in every small operation.
if "PYTEST_XDIST_WORKER" in os.environ:
    if (gpus := len(glob("/dev/nvidia[0-9]*"))) > 1:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(os.environ["PYTEST_XDIST_WORKER"][2:]) % gpus))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = cores // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

# cuBLAS repeats its results only with a fixed workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so it is set before any import of the packages.
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        from .interpreter import quicken

        quicken()

import pytest


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the slow tests, too")
    number = "random cases in tests/fuzz; default: 200; with --all 2,000, or 10,000 with a GPU"
    parser.addoption("--fuzz-cases", type=int, default=None, metavar="N", help=number)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Make torch.empty return NaN, so that an output element which no kernel wrote fails its test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # an example switches it off
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Reset the compiler, so that tests of one function with many settings stay below PyTorch's recompilation limit."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
