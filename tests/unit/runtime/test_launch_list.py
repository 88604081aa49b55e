"""The module in C that launches recorded kernels, as far as it runs without a GPU."""

import struct
import sys

import pytest
import torch

from moe_kernels.runtime import launch_list
from moe_kernels.runtime.triton import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON or sys.platform != "linux", reason="needs Triton's build of C modules")


@pytest.fixture
def library(monkeypatch):
    """The module without a CUDA driver: it launches lists without kernels."""
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
