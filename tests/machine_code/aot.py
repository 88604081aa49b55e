"""Compile every kernel ahead of time, without a GPU: `python -m tests.machine_code.aot` prints a JSON line per kernel.

The ops' own launch code runs on CPU tensors under a driver that names the target and compiles instead of launching. The
compiled code is therefore the same as on a GPU of that target. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import moe_kernels as mk
from moe_kernels.gemm.arguments.activation_gradient import COLUMNS, ActivationGradientArguments
from moe_kernels.gemm.arguments.block_scaled import BlockScaledGemmArguments
from moe_kernels.gemm.arguments.decoding import DecodingGemmArguments, QuantizedMatrices
from moe_kernels.gemm.kernel import Kernel
from moe_kernels.gemm.kernels import float32_products
from moe_kernels.gemm.kernels.hopper.streaming_decoding import StreamingDecodingGemm
from moe_kernels.gemm.kernels.problem_table import make_problem_table
from moe_kernels.quantization.formats import FORMATS
from moe_kernels.quantization.quantize import quantize
from moe_kernels.runtime.launch import CompiledArtifact, Launch, run_launch
from moe_kernels.specs import is_gated

from .compiled import disassemble, inspect
from .racecheck import warp_specialize_lines
from .sass import (
    functions_between_multiplications,
    multiply_adds_between_copies,
    spills_in_reductions,
    unordered_accesses,
)
from .small_launches import SMALL_LAUNCHES
from .targets import TARGETS

# Triton's cache knows a function by its text and not by its file, and line information names the file.
knobs.compilation.always_compile = True

# Code other than GEMMs differs little between targets: the oldest and newest, and the middle one for all other cases.
SMALL_TARGETS = {"large": (80,), "jagged": (80,), "odd": (100,), "fp8 float16": (80, 100), "router": TARGETS}


class TargetDriver:
    """Names a compilation target without a device."""

    def __init__(self, cc: int):
        self.cc = cc

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.cc, 32)

    def get_current_device(self) -> int:
        return self.cc

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def kernels_take_cpu_tensors(cc: int) -> Iterator[None]:
    """Let CPU tensors stand for tensors of a GPU with this compute capability; nothing is computed inside."""
    is_fast = cc in float32_products._FAST_FLOAT64
    with (
        mock.patch("moe_kernels.runtime.dispatch.kernel_obstacle", return_value=None),
        mock.patch.object(float32_products, "has_fast_float64", return_value=is_fast),
    ):
        yield


def list_arguments(kernel: Kernel, form: str) -> mk.GroupedGemmListArguments:
    """Return arguments with two problems. "other": A by columns; odd sizes, or multiples of 8 if alignment is
    needed."""
    operands, is_open = kernel.metadata.operands, kernel.metadata.operands.A.alignment_bytes == 1
    size_k, size_n = (256, 512) if form == "plain" else (137, 511) if is_open else (136, 504)
    a_list = [torch.empty(256, size_k, dtype=operands.A.dtype) for _ in range(2)]
    b_list = [torch.empty(size_k, size_n, dtype=operands.B.dtype) for _ in range(2)]
    if operands.B.layout == "column":
        b_list = [b.t().contiguous().t() for b in b_list]
    if form == "other":
        # If any layout is supported: one of each.
        a_list = [a if is_open and g else a.t().contiguous().t() for g, a in enumerate(a_list)]
    out_list = [torch.empty(256, size_n, dtype=operands.out.dtype) for _ in range(2)]
    args = mk.GroupedGemmListArguments(a_list, b_list, out_list, epilogue=kernel.metadata.epilogue)
    return dataclasses.replace(args, table=make_problem_table(args, *kernel.metadata.design.tile_shape[:2]))


def gemm_arguments(kernel: Kernel, form: str) -> object:
    """Return arguments for a catalog kernel.

    Forms: "plain" has ordinary sizes. "other" stores B as [G, N, K] or gathers the other operand, if the kernel allows
    it. "eights" has sizes that are multiples of 8 only, without telling the compiler. "full" has every optional operand
    and a float32 result. "bias" and "float32_bias" have only a bias. "offsets" is "float32_bias" with offsets instead
    of a tile table. "extra" has only the second pair of operands. "accumulate" adds to a float32 result.
    """
    if kernel.arguments_class is mk.GroupedGemmListArguments:
        return list_arguments(kernel, form)
    if kernel.arguments_class is DecodingGemmArguments:
        return decoding_arguments(kernel, form)
    if kernel.arguments_class is BlockScaledGemmArguments:
        return block_scaled_arguments(kernel)
    if kernel.arguments_class is ActivationGradientArguments:
        return activation_gradient_arguments(kernel, form)
    transposed = form == "other"
    operands, design, epilogue = kernel.metadata.operands, kernel.metadata.design, kernel.metadata.epilogue
    num_rows, num_groups = 256, (31 if form == "offsets" else 4)
    size_k, size_n = (136, 400) if form == "eights" else (256, 512)
    if epilogue is not None:
        size_k += 512  # epilogues in several parts need that many reduction steps
    index = torch.zeros(num_rows, dtype=torch.int32)
    a = torch.empty(num_rows, size_k, dtype=operands.A.dtype)
    offsets = torch.zeros(num_groups, dtype=torch.int32)
    if kernel.arguments_class is mk.GemmArguments:
        b = torch.empty(size_k, size_n, dtype=operands.B.dtype)
        return mk.GemmArguments(a, b, torch.empty(num_rows, size_n, dtype=operands.out.dtype), epilogue=epilogue)
    if kernel.arguments_class is mk.GroupedGemmArguments:
        b = torch.empty(num_groups, size_k, size_n, dtype=operands.B.dtype)
        if operands.B.layout == "column" or (operands.B.layout is None and transposed):
            b = b.new_empty(num_groups, size_n, size_k).transpose(1, 2)
        table = mk.reference.tile_table(offsets, num_rows, design.tile_shape[0])
        product = torch.empty(num_rows, size_n, dtype=operands.out.dtypes[-1 if form == "full" else 0])
        per_group, per_row = (num_groups, size_n), (num_rows,)
        shapes = {"bias": per_group, "row_scale": per_row, "scale_a": per_row, "scale_b": per_group}
        has_bias = "bias" in form or form == "offsets"
        named = kernel.metadata.optional_operands if form == "full" else ("bias",) if has_bias else ()
        dtype = operands.A.dtype if form == "bias" else torch.float32
        optional = {name: torch.empty(shapes[name], dtype=dtype) for name in named if name in shapes}
        if form == "extra" or "extra_a" in named:
            extra_b = b.new_empty(num_groups, size_n, 16).transpose(1, 2)
            extra_b = extra_b if b.stride(1) == 1 else extra_b.contiguous()
            optional |= {"extra_a": a.new_empty(num_rows, 16), "extra_b": extra_b}
        out = product
        if epilogue is not None:
            out = torch.empty(num_rows, size_n // (1 + is_gated(epilogue)), dtype=operands.out.dtype)
        return mk.GroupedGemmArguments(
            a,
            b,
            out,
            row_to_token=index if design.gather else None,
            **({"offsets": offsets} if form == "offsets" else {"tile_table": table}),
            epilogue=epilogue,
            preactivation=None if epilogue is None else product,
            **optional,
        )
    dout = torch.empty(num_rows, size_n, dtype=operands.dout.dtype)
    accumulate = form == "accumulate"
    out = torch.empty(num_groups, size_k, size_n, dtype=torch.float32 if accumulate else operands.out.dtype)
    table = mk.reference.tile_table(offsets, num_rows, 128)
    # The form decides if the design does not; warp-specialised kernels gather the narrow side of their tile.
    gathers_dout = transposed or design.tile_shape[0] > design.tile_shape[1]
    gathers = {"dout_row_to_token" if gathers_dout else "a_row_to_token": index} if design.gather else {}
    return mk.WgradArguments(a, dout, out, tile_table=table, accumulate=accumulate, **gathers)


def compile_gemm(name: str, form: str, cc: int, epilogue: str | None = None) -> dict[str, object]:
    (kernel,) = mk.get_kernels(metadata_filter=lambda metadata: metadata.kernel_name == name)
    kernel = kernel if epilogue in (None, kernel.metadata.epilogue) else kernel.with_epilogue(epilogue)
    driver.set_active(TargetDriver(cc))
    args = gemm_arguments(kernel, form)
    with kernels_take_cpu_tensors(cc):
        artifact = kernel.compile(args, assume_supported_args=True)
        launch = kernel.launch(args)
    lines = warp_specialize_lines().get(launch.function.__name__)
    code = "" if lines is None else disassemble(artifact.compiled)
    return {
        "kernel": kernel.metadata.kernel_name,
        "case": form,
        "cc": cc,
        "gemm": True,
        "said_scratch_bytes": kernel.scratch_bytes(args) // launch.grid[0],
        "artifact_launches_alike": artifact_launches_alike(artifact, launch),
        "described_twice": described_twice(launch),
        "unordered": None if lines is None else unordered_accesses(code, lines),
        "functions_between_multiplications": functions_between_multiplications(code),
        "multiply_adds_between_copies": multiply_adds_between_copies(code),
        "spills_in_reductions": 0 if lines is None else spills_in_reductions(code),
        **inspect(artifact.compiled),
    }


def described_twice(launch: Launch) -> bool:
    """Return whether two descriptors describe one tensor: each is encoded and passed in every launch."""
    described = [id(value.base) for value in launch.arguments if hasattr(value, "block_shape")]
    return len(set(described)) < len(described)


def artifact_launches_alike(artifact: CompiledArtifact, launch: Launch) -> bool:
    """Return whether an artifact passes the driver the same arguments as Triton's JIT does."""
    first, second = (handed_to_driver(artifact.compiled, used, launch) for used in (artifact, None))
    return len(first) == len(second) and all(
        x is y if isinstance(x, torch.Tensor) else x == y for x, y in zip(first, second, strict=True)
    )


def handed_to_driver(compiled: object, artifact: CompiledArtifact | None, launch: Launch) -> list[object]:
    """Return what a launch of this compiled kernel passes to Triton's launcher."""
    handed = []
    compiled.module, compiled.function, compiled._run = True, 0, lambda *args: handed.append(args)
    try:
        run_launch(launch, torch.empty(0), artifact=artifact)
    finally:
        compiled.module = compiled.function = compiled._run = None
    (args,) = handed
    return [*args[:6], *args[9:]]  # without the arguments for profilers' hooks, which are not set


def compile_small(case: str, cc: int) -> list[dict[str, object]]:
    """Compile each kernel that a case of `SMALL_LAUNCHES` would launch, once each."""
    compiled, original = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[kernel.hash] = (self.fn.__name__, kernel)
        return kernel

    driver.set_active(TargetDriver(cc))
    with mock.patch.object(JITFunction, "run", compile_only), kernels_take_cpu_tensors(cc):
        SMALL_LAUNCHES[case]()
    about = {"case": case, "cc": cc, "gemm": False}
    return [{"kernel": name, **about, **inspect(kernel)} for name, kernel in compiled.values()]


def jobs() -> Iterator[tuple[Callable, tuple]]:
    for case in SMALL_LAUNCHES:
        for cc in {*SMALL_TARGETS.get(case, (90,))} & {*TARGETS}:
            yield compile_small, (case, cc)
    yield from epilogue_jobs()
    for cc in TARGETS:
        for kernel in mk.get_kernels(cc=cc):
            # Some kernels run another kernel's code, which is compiled under that name.
            if kernel.obstacle is None and getattr(kernel, "compiled_as", kernel) is kernel:
                for form in forms(kernel)[: 1 if only_first_form(kernel, cc) else None]:
                    yield compile_gemm, (kernel.metadata.kernel_name, form, cc)


def only_first_form(kernel: Kernel, cc: int) -> bool:
    """Return whether other targets compile the further forms: the oldest and the newest one for kernels of all
    targets, compute capability 9.0 for those that decode weights or use TMA."""
    if kernel.arguments_class is DecodingGemmArguments or kernel.metadata.design.tma:
        return cc != 90
    return cc == 90 and bool(kernel.supports_cc(80) and kernel.supports_cc(100))


def epilogue_jobs() -> Iterator[tuple[Callable, tuple]]:
    """Yield epilogues other than the listed one, in the kernels with the fewest spare registers."""
    for kernel in mk.get_kernels(cc=90):
        metadata = kernel.metadata
        if metadata.epilogue is None or metadata.operands.A.dtype != torch.bfloat16 or kernel.obstacle is not None:
            continue
        is_tight = isinstance(metadata.design, mk.WarpSpecializedDesign) and metadata.design.tile_shape[1] == 256
        # The layout of B and a gather change only the code of the products.
        is_gradient = (
            kernel.arguments_class is ActivationGradientArguments
            and metadata.operands.B.layout == "row"
            and not metadata.design.gather
        )
        differ = is_tight or is_gradient or kernel.arguments_class is mk.GemmArguments
        for name in kernel.epilogues if differ else ():
            if name in ("reglu", "clamped_swiglu"):  # the other epilogues cover the same code and more
                continue
            # With a bias they cover the same code and more.
            takes_bias = is_tight and "bias" in metadata.optional_operands
            form = "plain" if not takes_bias else "bias" if is_gated(name) else "float32_bias"
            if name != metadata.epilogue or form != "plain":
                yield compile_gemm, (metadata.kernel_name, form, 90, name)


def decoding_forms(kernel: Kernel) -> tuple[str, ...]:
    """Return formats of weights, stored as [G, N, K] if "by column"."""
    if isinstance(kernel, StreamingDecodingGemm):
        return (f"{kernel.form} by column",)
    tile, dtype = kernel.metadata.design.tile_shape, kernel.metadata.operands.A.dtype
    if dtype != torch.bfloat16:
        return ("mxfp4 by column",) if dtype == torch.float16 else ("int8 by column",)
    by_column, by_row = tuple(f"{name} by column" for name in reversed(FORMATS)), tuple(reversed(FORMATS))
    # Each of the smallest tiles is chosen for one layout. The largest tiles have the fewest spare registers.
    return {(16, 64, 64): by_row, (128, 128, 64): by_column + by_row}.get(tile, by_column)


def decoding_arguments(kernel: Kernel, form: str) -> DecodingGemmArguments:
    """Return arguments with every optional operand, and enough steps that the compiler keeps the loop."""
    format, *by_column = form.split(" ", 1)
    num_groups, size, num_rows, dtype = 2, 1024, 256, kernel.metadata.operands.A.dtype
    extra_b = torch.empty(num_groups, size, 16, dtype=dtype).transpose(1, 2)
    extra = {"extra_a": torch.empty(num_rows, 16, dtype=dtype), "extra_b": extra_b}
    return DecodingGemmArguments.of(
        torch.empty(num_rows, size, dtype=dtype),
        QuantizedMatrices(quantize(torch.zeros(num_groups, size, size), format), bool(by_column)),
        torch.empty(num_rows, size, dtype=dtype),
        tile_table=mk.reference.tile_table(torch.zeros(num_groups, dtype=torch.int32), num_rows, 128),
        row_to_token=torch.zeros(num_rows, dtype=torch.int32),
        bias=torch.empty(num_groups, size, dtype=dtype),
        **(extra if "extra_a" in kernel.metadata.optional_operands else {}),
    )


def block_scaled_arguments(kernel: Kernel) -> BlockScaledGemmArguments:
    """Return arguments whose sizes are multiples of 16 only, without telling the compiler."""
    num_rows, size_k, size_n, num_groups, float8 = 256, 2064, 1552, 4, kernel.metadata.operands.A.dtype
    a, b = torch.empty(num_rows, size_k, dtype=float8), torch.empty(num_groups, size_n, size_k, dtype=float8)
    scale_a, scale_b = torch.empty(17, num_rows), torch.empty(num_groups, 13, 17)
    offsets, design = torch.zeros(num_groups, dtype=torch.int32), kernel.metadata.design
    return BlockScaledGemmArguments(
        a,
        b.mT,
        torch.empty(num_rows, size_n, dtype=torch.bfloat16),
        scale_a.t(),
        scale_b.mT,
        tile_table=mk.reference.tile_table(offsets, num_rows, design.tile_shape[0]),
        row_to_token=torch.zeros(num_rows, dtype=torch.int32) if design.gather else None,
    )


def activation_gradient_arguments(kernel: Kernel, form: str) -> ActivationGradientArguments:
    num_rows, depth, d_ff, num_groups, operands = 256, 1024, 512, 4, kernel.metadata.operands
    depth, d_ff = (depth + 8, d_ff + 8) if form == "eights" else (depth, d_ff)
    hidden = torch.empty(num_rows, 2 * d_ff, dtype=operands.out.dtype)
    b = torch.empty(num_groups, d_ff, depth, dtype=operands.B.dtype).mT
    return ActivationGradientArguments(
        torch.empty(num_rows, depth, dtype=operands.A.dtype),
        b if operands.B.layout == "column" else b.contiguous(),
        torch.empty_like(hidden),
        hidden,
        hidden.new_empty(num_rows, d_ff),
        torch.empty(num_rows),
        torch.empty(num_rows, -(-d_ff // COLUMNS)),
        kernel.metadata.epilogue,
        row_to_token=torch.zeros(num_rows, dtype=torch.int32) if kernel.metadata.design.gather else None,
        tile_table=mk.reference.tile_table(torch.zeros(num_groups, dtype=torch.int32), num_rows, 128),
    )


def forms(kernel: Kernel) -> tuple[str, ...]:
    """Return the forms of `gemm_arguments` that compile to different code; some use bfloat16 for all dtypes."""
    if kernel.arguments_class is DecodingGemmArguments:
        return decoding_forms(kernel)
    if kernel.arguments_class is BlockScaledGemmArguments:
        return ("sixteens",)
    design, operands = kernel.metadata.design, kernel.metadata.operands
    is_bfloat16, no_epilogue = operands.A.dtype == torch.bfloat16, kernel.metadata.epilogue is None
    if kernel.arguments_class is mk.GroupedGemmListArguments:
        # Kernels for any alignment compile the other layouts and uneven sizes; TMA handles both separately.
        if operands.A.alignment_bytes == 1:
            return ("other",)
        return ("plain", "other") if is_bfloat16 and design.tma and design.tile_shape[1] == 256 else ("plain",)
    if design.tma:
        # Where a bias does not change the rest of the code, float16 represents kernels without a bias.
        alike = no_epilogue or not isinstance(design, mk.WarpSpecializedDesign)
        takes_bias = is_bfloat16 and alike and "bias" in kernel.metadata.optional_operands
        first = "float32_bias" if takes_bias else "plain"
        wide = isinstance(design, mk.WarpSpecializedDesign) and design.tile_shape[1] == 256
        extra = ("extra",) if wide and is_bfloat16 and "extra_a" in kernel.metadata.optional_operands else ()
        if design.gather:
            return (first, "eights", *extra) if is_bfloat16 else (first,)
        # A tile's position depends neither on its width nor on the layout of B.
        walks = wide and takes_bias and operands.B.layout == "column"
        return ("offsets" if walks else first, *extra)
    if operands.A.dtype == torch.float8_e4m3fn:
        return ("full",)
    # Layouts and optional operands change the code of all tiles and of both 16-bit dtypes in the same way.
    is_typical = design.tile_shape in ((128, 128, 64), (64, 64, 16)) and operands.A.dtype != torch.float16
    if not is_typical or kernel.arguments_class is mk.GemmArguments:
        return ("plain",)
    if kernel.arguments_class is mk.WgradArguments:
        return ("plain", "other" if design.gather else "accumulate") if is_bfloat16 else ("plain",)
    if design.gather:
        return ("plain",)
    return ("plain", "other", "full") if is_bfloat16 else ("plain", "full")


def run_job(job: tuple[Callable, tuple]) -> list[dict[str, object]]:
    function, args = job
    result = function(*args)
    return result if isinstance(result, list) else [result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    processes = parser.parse_args().processes
    with Pool(processes) as pool:
        for records in pool.imap_unordered(run_job, list(jobs())):
            for record in records:
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
