"""Compiled artifacts as files."""

import json
import re

import pytest
import torch

from moe_kernels import get_kernels, load_artifact, save_artifact
from moe_kernels.gemm.artifact_file import read_container, write_container
from moe_kernels.runtime.gluon import KNOWS_GLUON
from moe_kernels.runtime.launch import CompiledArtifact
from moe_kernels.runtime.triton import HAS_TRITON, INTERPRET

from ..processes import run_python
from .test_catalog_run import ARGUMENTS, expected_result

HEADER = {
    "kernel_name": get_kernels()[0].metadata.kernel_name,
    "triton_version": "0.0.0",
    "architecture": 90,
    "static_properties": [1, {"dtype": "float16"}],
    "signature": {"a": ["i32", "constexpr"]},
    "metadata": {"name": "größer"},
}
BINARY = bytes(range(256)) * 3


@pytest.fixture
def path(tmp_path):
    write_container(tmp_path / "artifact", HEADER, BINARY)
    return tmp_path / "artifact"


def test_container(path):
    assert read_container(path) == (HEADER, BINARY)
    write_container(path, HEADER, b"")
    assert read_container(str(path)) == (HEADER, b"")


def test_a_damaged_file_says_so(path):
    whole = path.read_bytes()
    for place in (*range(20), *range(20, len(whole), 23), len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="damaged" if place >= 8 else "expected a file that starts with"):
            load_artifact(path)
    for changed in (whole[:-1], whole[:9], whole + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=rf"damaged: its checksum is wrong, got {len(changed)} bytes"):
            load_artifact(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="expected a file that starts with b'MOEKERN1', got b''"):
        load_artifact(path)
    write_container(path, {"kernel_name": "x"}, BINARY)
    with pytest.raises(ValueError, match=r"expected the fields .* in the header, got .'kernel_name'"):
        load_artifact(path)


def test_what_fits_only_elsewhere_is_refused(path):
    with pytest.raises(ValueError, match=r"load_artifact: expected Triton .*, got Triton 0\.0\.0"):
        load_artifact(path)
    if INTERPRET:
        import triton

        write_container(path, {**HEADER, "triton_version": triton.__version__}, BINARY)
        with pytest.raises(ValueError, match="expected a GPU, got Triton's interpreter"):
            load_artifact(path)
        with pytest.raises(ValueError, match="the interpreter compiles nothing, got a kernel"):
            save_artifact(CompiledArtifact("a kernel", (), None), path)


@pytest.fixture(scope="module")
def results():
    """Return the results of `tests.unit.artifact_files`, run separately: kernel definitions choose the interpreter."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    # Triton 3.9 warns if this is unset.
    result = run_python(["-m", "tests.unit.artifact_files"], TRITON_DEFAULT_FP_FUSION="1")
    found = json.loads(result.stdout)
    assert len(found) == 5 and (None in found.values()) == (not KNOWS_GLUON)
    return {name: result for name, result in found.items() if result is not None}


def test_a_loaded_artifact_launches_as_the_saved_one(results):
    assert {name: result["differences"] for name, result in results.items()} == {name: [] for name in results}


def test_loading_says_what_does_not_fit(results):
    for result in results.values():
        said = result["refusals"]
        assert said.pop("unchanged") is None
        assert "expected Triton" in said["version"] and "got Triton 3.5.0" in said["version"]
        assert said["kernel"].endswith("expected a kernel of the catalog, got grouped_gemm_unheard_of")
        assert "as installed, got a kernel compiled from another" in said["source"]
        assert "expected the source of os.path.join as installed" in said["elsewhere"]
        here, there = re.search(r"expected architecture (\d+), got (\d+)$", said["architecture"]).groups()
        assert int(here) == int(there) + 10


IN_ANOTHER_PROCESS = """
import sys, torch
from moe_kernels import get_kernels, load_artifact
from tests.unit.test_catalog_run import ARGUMENTS
folder, form = sys.argv[1:]
args = ARGUMENTS[form]("cuda")
results = {}
for kernel in get_kernels(args):
    args.out.fill_(torch.nan)
    artifact = load_artifact(f"{folder}/{kernel.metadata.kernel_name}")
    kernel.run(args, artifact)
    results[kernel.metadata.kernel_name] = args.out.clone(), artifact.compiled.name
torch.save(results, f"{folder}/results")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("form", ARGUMENTS)
def test_another_process_runs_a_loaded_artifact(form, tmp_path):
    args = ARGUMENTS[form]("cuda")
    expected = {}
    for kernel in get_kernels(args):
        artifact = kernel.compile(args)
        kernel.run(args, artifact)
        torch.testing.assert_close(args.out, expected_result(args), rtol=1e-2, atol=1e-2)
        expected[kernel.metadata.kernel_name] = args.out.clone()
        save_artifact(artifact, tmp_path / kernel.metadata.kernel_name)
    cache = tmp_path / "cache"
    run_python(["-c", IN_ANOTHER_PROCESS, tmp_path, form], TRITON_CACHE_DIR=str(cache))
    compiled_there = {file.stem for file in cache.rglob("*.cubin")}
    results = torch.load(tmp_path / "results", weights_only=True)
    assert results.keys() == expected.keys()
    for name, (out, function) in results.items():
        assert torch.equal(out, expected[name]), name
        assert function not in compiled_there
