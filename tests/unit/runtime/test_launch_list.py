"""The module in C that launches recorded kernels, with no kernels, or with a driver that launches none."""

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_kernels.runtime import launch_list
from moe_kernels.runtime.triton import HAS_TRITON, triton

pytestmark = pytest.mark.skipif(not HAS_TRITON or sys.platform != "linux", reason="needs Triton's build of C modules")


@pytest.fixture
def library(monkeypatch):
    """Return the module without a CUDA driver, which launches lists without kernels."""
    launch_list._library.cache_clear()
    monkeypatch.setattr(launch_list, "DRIVER", None)
    yield launch_list._library()
    launch_list._library.cache_clear()


def make_list(library, *bases):
    return library.make_list(b"", b"", struct.pack(f"={len(bases)}I", *bases), b"", b"", b"")


def test_a_freed_operand_is_an_error(library):
    tensors = [torch.ones(3), torch.empty(0)]
    launches = make_list(library, 0 | launch_list.REQUIRED, 1)
    assert library.run(launches, tensors, 0) is None
    tensors[0].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="an operand of a recorded kernel has no memory, its storage was freed"):
        library.run(launches, tensors, 0)


def test_wrong_arguments_are_errors(library):
    launches = make_list(library, 1)
    with pytest.raises(IndexError):
        library.run(launches, [torch.ones(1)], 0)
    with pytest.raises(AttributeError, match="data_ptr"):
        library.run(launches, [None, None], 0)
    with pytest.raises(TypeError, match="a list of launches, a list of tensors and a stream"):
        library.run(launches, [])
    with pytest.raises(OSError, match="cannot load the CUDA driver"):
        library.use_driver("no_such_library.so")


@pytest.fixture
def driver(library, tmp_path):
    """Return the library of `recording_driver.c`, whose functions the module calls from now on in this process."""
    path = str(tmp_path / "driver.so")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).with_name("recording_driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{include}", str(source), "-o", path], check=True)
    library.use_driver(path)
    driver = ctypes.CDLL(path)
    driver.take_events.restype = ctypes.c_char_p
    return driver


def make_kernels(library):
    """Return a list of two kernels that read the address of the first tensor, the second kernel 4 bytes further."""
    pointers = struct.pack("=IIQIIQ", 0, 0, 0, 8, 0, 4)
    kernels = struct.pack("=14Q", 11, 1, 1, 1, 4, 5, 0, 22, 3, 1, 1, 8, 6, 1)
    return library.make_list(bytes(16), struct.pack("=2I", 0, 8), struct.pack("=I", 0), pointers, b"", kernels)


@pytest.mark.skipif(torch.cuda.is_available(), reason="other tests of this process launch by the same functions")
def test_kernels_run_as_one_graph_per_stream(library, driver):
    tensors, every = [torch.ones(4), torch.ones(4)], [make_kernels(library)]

    def events(tensor, stream):
        library.run(every[0], [tensor], stream)
        return driver.take_events().decode()

    def kernels(what, tensor):
        first = tensor.data_ptr()
        return f"{what} 11, 1, 128, 5, {first}; {what} 22, 3, 256, 6, {first + 4}; "

    graph = "node 11 after 0; node 22 after 11; "
    assert events(tensors[0], 3) == graph + kernels("set", tensors[0]) + "run 1 on 3; "
    assert events(tensors[1], 3) == kernels("set", tensors[1]) + "run 1 on 3; "
    assert events(tensors[0], 4) == kernels("set", tensors[0]) + "run 2 on 4; "
    assert events(tensors[1], 7) == kernels("launch", tensors[1])  # this stream captures
    with pytest.raises(RuntimeError, match="launching recorded kernels failed: INVALID_HANDLE"):
        library.run(every[0], [tensors[0]], 9)
    every.clear()
    assert (driver.graphs(), driver.executable_graphs()) == (0, 0)
    every += [make_kernels(library) for _ in range(300)]
    for i in range(600):
        library.run(every[i % 300], tensors, 0)
    assert (driver.graphs(), driver.executable_graphs()) == (300, 256)
    every.clear()
    assert (driver.graphs(), driver.executable_graphs()) == (0, 0)
