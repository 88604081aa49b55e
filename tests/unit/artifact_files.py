"""Save and load artifacts compiled without a GPU: `python -m tests.unit.artifact_files` prints the results as JSON.

TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from triton.runtime import driver

import moe_kernels as mk
from moe_kernels import load_artifact, save_artifact
from moe_kernels.gemm.artifact_file import read_container, write_container
from moe_kernels.runtime.launch import CompiledArtifact, Launch

from ..machine_code.aot import TargetDriver, are_same, gemm_arguments, handed_to_driver, kernels_take_cpu_tensors

# Launches of every kind: strides and absent operands, dtypes as constants, descriptors made on the device and on the
# host, activations.
KERNELS = {
    "grouped_gemm_pointer_float16_16x128x64_w4_s3": 80,
    "grouped_gemm_list_pointer_float8_e4m3fn_128x128x128_w8_s3_p1": 90,
    "grouped_gemm_list_tma_bfloat16_64x64x64_w4_s4_p3": 90,
    "grouped_gemm_ws_bfloat16_128x128x64_w12_s5_b_column_swiglu": 90,
    "gemm_pointer_float16_128x128x64_w8_s3_relu": 100,
}


def compile_kernel(name: str) -> tuple[CompiledArtifact, Launch] | None:
    (kernel,) = mk.get_kernels(metadata_filter=lambda metadata: metadata.kernel_name == name)
    if kernel.obstacle is not None:
        return None
    if kernel.metadata.epilogue == "swiglu":
        kernel = kernel.with_epilogue("reglu")
    driver.set_active(TargetDriver(KERNELS[name]))
    args = gemm_arguments(kernel, "plain")
    with kernels_take_cpu_tensors(KERNELS[name]):
        return kernel.compile(args, assume_supported_args=True), kernel.launch(args)


def differences(saved: CompiledArtifact, loaded: CompiledArtifact, launch: Launch) -> list[str]:
    """Return the differences between the artifacts that a launch depends on."""
    before, after = saved.compiled, loaded.compiled
    same = {
        "kernel_name": loaded.kernel_name == saved.kernel_name,
        "static_properties": loaded.static_properties == saved.static_properties,
        "hash": hash(loaded.static_properties) == hash(saved.static_properties),
        "function": after.src.fn is before.src.fn,
        "signature": list(after.src.signature.items()) == list(before.src.signature.items()),
        "metadata": after.metadata == before.metadata and after.packed_metadata == before.packed_metadata,
        "binary": after.kernel == before.kernel and len(after.kernel) > 0,
        "launch": are_same(*(handed_to_driver(used.compiled, used, launch) for used in (saved, loaded))),
    }
    return [name for name, is_same in same.items() if not is_same]


def message(path: Path) -> str | None:
    """Return the message of the ValueError that loading raises, or None."""
    try:
        load_artifact(path)
    except ValueError as error:
        return str(error)
    return None


def refusals(path: Path, architecture: int) -> dict[str, str | None]:
    """Return the errors for files and targets that do not match; `path` holds an artifact."""
    header, binary = read_container(path)
    changed = path.with_suffix(".changed")

    def load_with(**changes: object) -> str | None:
        write_container(changed, {**header, **changes}, binary)
        return message(changed)

    function, *others = header["static_properties"]
    said = {
        "version": load_with(triton_version="3.5.0"),
        "kernel": load_with(kernel_name="grouped_gemm_unheard_of"),
        "source": load_with(static_properties=[{**function, "source": "0" * 64}, *others]),
        "elsewhere": load_with(static_properties=[{**function, "function": "os.path.join"}, *others]),
        "unchanged": load_with(),
    }
    driver.set_active(TargetDriver(architecture + 10))
    said["architecture"] = message(path)
    driver.set_active(TargetDriver(architecture))
    return said


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("compiled")

    with mock.patch("triton.compiler.compiler.compile", fail), mock.patch("triton.runtime.jit.JITFunction.run", fail):
        yield


def check(name: str, folder: Path) -> dict[str, object] | None:
    if (found := compile_kernel(name)) is None:
        return None
    artifact, launch = found
    path = folder / name
    save_artifact(artifact, path)
    with nothing_compiles():
        loaded = load_artifact(str(path))
        different = differences(artifact, loaded, launch)
    return {"differences": different, "refusals": refusals(path, KERNELS[name])}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({name: check(name, Path(folder)) for name in KERNELS}))


if __name__ == "__main__":
    main()
