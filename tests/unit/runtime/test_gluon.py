"""Triton versions that run the warp-specialised kernels, and the messages elsewhere."""

import pytest

from moe_kernels.gemm import selection
from moe_kernels.runtime import dispatch, gluon
from moe_kernels.runtime.triton import HAS_TRITON, version_numbers

from ...processes import run_python

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.mark.parametrize("version", [(3, 6, 0), (3, 7, 1), (3, 8, 0), (3, 9, 0)])
def test_versions_with_the_fast_kernels(version):
    assert gluon.version_obstacle(version) is None


@pytest.mark.parametrize("version", [(3, 5, 1), (3, 10, 0), (4, 0)])
def test_other_versions_name_those_with_the_fast_kernels(version):
    text = ".".join(map(str, version))
    assert gluon.version_obstacle(version) == f"they are written for Triton 3.6 to 3.9, this is {text}"


@pytest.mark.parametrize(
    ("text", "numbers"), [("3.9.0", (3, 9, 0)), ("3.10.0rc1", (3, 10, 0)), ("3.6.0+git12ab", (3, 6, 0)), ("4", (4,))]
)
def test_version_numbers(text, numbers):
    assert version_numbers(text) == numbers


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that CUDA tensors on a Hopper GPU reach the selection in a process that has not warned yet."""
    gluon.warn_if_slower.cache_clear()
    monkeypatch.setattr(gluon, "OBSTACLE", "they are written for Triton 3.6 to 3.9, this is 3.10.0")
    yield
    gluon.warn_if_slower.cache_clear()


def test_one_warning_names_the_cause_and_the_cure(hopper):
    with pytest.warns(
        RuntimeWarning, match=r"this is 3\.10\.0\. Slower portable kernels run; install Triton 3\.6 to 3\.9"
    ):
        gluon.warn_if_slower(90)
    gluon.warn_if_slower(90)  # another warning would be an error


@pytest.mark.parametrize("cc", [80, 89, 100])
def test_other_gpus_have_nothing_to_warn_of(hopper, cc):
    gluon.warn_if_slower(cc)  # a warning would be an error


def test_selection_warns(hopper, monkeypatch):
    class OnHopper:
        is_cuda, device = True, "cuda:0"

    class Arguments:
        A = OnHopper()

    monkeypatch.setattr(selection, "_selected", {})
    monkeypatch.setattr(selection, "_key", lambda args: ("key",))
    monkeypatch.setattr(selection, "_by_epilogue", lambda args: None)
    monkeypatch.setattr(selection, "get_kernels", lambda args: [])
    monkeypatch.setattr(selection, "device_cc", lambda device: 90)
    with pytest.warns(RuntimeWarning, match="warp-specialised Hopper kernels cannot run"):
        assert selection.find(Arguments()) is None


SCRIPT = """
import sys
import triton
{before}
import torch
from moe_kernels import WarpSpecializedDesign, get_kernels
from moe_kernels.runtime import gluon
specialized = get_kernels(cc=90, metadata_filter=lambda m: isinstance(m.design, WarpSpecializedDesign))
assert len(specialized) > 20
print(gluon.slower_kernels(90))
print({{kernel.obstacle for kernel in specialized}})
"""


@needs_triton
@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ("triton.__version__ = '3.10.0'", "they are written for Triton 3.6 to 3.9, this is 3.10.0"),
        ("sys.modules['triton.experimental.gluon'] = None", "Triton's Gluon cannot be imported: "),
    ],
    ids=["unknown version", "no Gluon"],
)
def test_the_package_imports_and_its_kernels_say_why_they_do_not_run(before, cause):
    warning, obstacles = run_python(["-c", SCRIPT.format(before=before)]).stdout.splitlines()
    assert cause in warning and "install Triton 3.6 to 3.9" in warning
    assert cause in obstacles


def test_cuda_tensors_without_triton_warn_once(monkeypatch):
    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    dispatch._warn_without_triton.cache_clear()
    with pytest.warns(RuntimeWarning, match="Triton is not installed, so CUDA tensors are computed"):
        assert dispatch.choose("op", None, OnGpu()) == "reference"
    assert dispatch.choose("op", None, OnGpu()) == "reference"  # another warning would be an error
    with pytest.raises(NotImplementedError, match="implementation='triton' cannot run: Triton is not installed"):
        dispatch.choose("op", "triton", OnGpu())
    dispatch._warn_without_triton.cache_clear()
