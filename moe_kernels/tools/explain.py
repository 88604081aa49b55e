"""Report which kernels run for an expert layer on this machine and why no faster kernels run. Check the results.

    python -m moe_kernels explain 16384,2048,768,128,8 --dtype bfloat16      # T, D, F, E, K
    python -m moe_kernels explain 16384,2048,768,128,8 --cc 90 --gpu "NVIDIA H200"      # as if on this GPU
    python -m moe_kernels explain 16,2048,768,128,8 --quantized fp8
    python -m moe_kernels explain 32768,4096,1024,128,8 --precision fp8

The exit status is 1 if a result exceeds the error budget.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..activation.functions import EPILOGUES
from ..experts.fused import fused_experts
from ..experts.row_products import is_worth_aligning
from ..gemm import measurements, selection
from ..gemm.arguments.activation_gradient import ActivationGradientArguments
from ..gemm.arguments.base import Arguments
from ..gemm.arguments.decoding import DecodingGemmArguments
from ..gemm.kernel import Kernel, WarpSpecializedDesign, device_cc
from ..gemm.measurements import Table
from ..gemm.selection import Target, get_kernels
from ..quantization.formats import FORMATS
from ..runtime.dispatch import choose
from ..runtime.gluon import slower_kernels
from ..runtime.replay import CALLS_BEFORE_RECORD, clear_records, states
from ..runtime.triton import HAS_TRITON, INTERPRET, triton
from ..testing import Case, check_accuracy, make_inputs, make_permutation, run_with_grads
from ..types import Permutation, TileTable
from .layers import Layer, Step, layer_of, parse_layer
from .tune import check, measure

_SMALL = Case(256, 256, 128, 4, 2)
_TINY = Case(8, 128, 64, 2, 2)
_SLOW = 1.2
_FP8_ERROR = 0.09  # largest allowed relative difference of a result with e4m3 operands
_RESULTS = ("output", "gradient of tokens", "gradient of topk_weights", "gradient of w_up", "gradient of w_down")
_OPS = {
    "down": "down",
    "down_dgrad": "down, gradient of its input",
    "down_wgrad": "down, gradient of its weight",
    "up_dgrad": "up, gradient of its input",
    "up_wgrad": "up, gradient of its weight",
}
_COPIES = {"up": "tokens_forward", "down_dgrad": "dout", "up_wgrad": "tokens_backward"}


def find_target(cc: int | None, gpu: str | None) -> tuple[Target, bool]:
    """Return the GPU to select kernels for, and whether this machine can run them. The second value is False if `cc` or
    `gpu` is given, or if this machine has no GPU or no Triton."""
    if torch.cuda.is_available() and HAS_TRITON and cc is None and gpu is None:
        device = torch.device("cuda", torch.cuda.current_device())
        return Target(device_cc(device), torch.cuda.get_device_name(device), selection.table_for(device)), True
    table = measurements.table_of(gpu) if gpu and HAS_TRITON else Table({}, {})
    return Target(cc or 90, gpu, table), False


def why_not_faster(step: Step, target: Target) -> str | None:
    """Return why the kernel is not warp-specialised (the fastest design), or None if it is."""
    _, args, kernel = step
    if kernel is not None and isinstance(kernel.metadata.design, WarpSpecializedDesign):
        return None
    listed = selection.listed(args)
    candidates = [
        k
        for k in get_kernels(metadata_filter=lambda m: isinstance(m.design, WarpSpecializedDesign))
        if k.arguments_class is type(listed) and k.metadata.epilogue == listed.epilogue
    ]
    # Sort by how well a kernel fits the operands. The reason why the best-fitting kernel cannot run is the most useful.
    candidates.sort(
        key=lambda k: (_operands_that_differ(k, listed), k.metadata.design.gather != step.gathers, not k.takes(listed))
    )
    reasons = [k.takes(listed).error or k.obstacle or k.supports_cc(target.cc).error for k in candidates]
    if None in reasons:
        by = "the table" if _is_in_table(args, kernel, target) else "the rule of thumb"
        return f"{candidates[reasons.index(None)].metadata.kernel_name} is available, {by} prefers this one"
    return f"{candidates[0].metadata.kernel_name}: {reasons[0]}" if candidates else "there is none for this op"


def _operands_that_differ(kernel: Kernel, args: Arguments) -> int:
    asked = [(getattr(kernel.metadata.operands, name), tensor) for name, tensor in args.operands.items()]
    dtypes = sum(tensor.dtype not in operand.dtypes for operand, tensor in asked)
    axes = {"row": -1, "column": -2}
    layouts = sum(operand.layout in axes and t.stride(axes[operand.layout]) != 1 for operand, t in asked)
    return dtypes + layouts


def _is_in_table(args: Arguments, kernel: Kernel | None, target: Target) -> bool:
    named = target.table.kernels.get(selection.listed(args).table_key())
    if kernel is None or named is None:
        return False
    return named == kernel.metadata.kernel_name.replace(args.epilogue or "", selection.listed(args).epilogue or "")


def print_versions(target: Target, is_here: bool) -> None:
    print(f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"Triton {triton.__version__ if HAS_TRITON else 'is not installed'}{' (interpreter)' if INTERPRET else ''}")
    if not torch.cuda.is_available():
        print("GPU: none; on the CPU an op is its reference: plain PyTorch, one product per expert")
    else:
        cc = device_cc(torch.device("cuda", torch.cuda.current_device()))
        print(f"GPU: {torch.cuda.get_device_name()}, compute capability {cc}, driver {_driver()}")
    if reason := slower_kernels(target.cc):
        print(f"Warning: {reason}")
    if not is_here:
        print(f"Kernels below: as on {target.gpu or 'a GPU'} of compute capability {target.cc}")


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown (nvidia-smi is not on the path)"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return answer.stdout.split()[0] if answer.returncode == 0 else f"unknown ({answer.stdout.strip()})"


def print_tables(target: Target) -> None:
    if target.gpu is None or not HAS_TRITON:
        print("Table: none, since a table belongs to a named GPU; a rule of thumb selects")
    elif paths := measurements.paths(target.gpu):
        for path in paths:
            print(f"Table: {path} ({len(measurements.read(path).kernels)} kernels)")
    else:
        where = f"no {measurements.table_name(target.gpu)} in {measurements.USER}"
        off = "switched off by MOE_KERNELS_TUNING"
        print(f"Table: none, {off if measurements.USER is None else where}; a rule of thumb selects")


def print_steps(layer: Layer, steps: list[Step], target: Target) -> None:
    """Print the kernel of each GEMM of a layer, and why no faster kernel runs."""
    decodes = any(isinstance(step.args, DecodingGemmArguments) for step in steps)
    if layer.format is not None and not decodes:
        print(f"Weights: {layer.format}, dequantised before each GEMM")
    weights = {"w_up": layer.w_up, "w_down": layer.w_down}
    with selection.planning(target):
        aligned = [name for name, weight in weights.items() if is_worth_aligning(weight, layer.num_rows)]
    if aligned and not decodes:
        print(f"Weights: GEMMs read aligned copies of {' and '.join(aligned)}")
    for step in steps:
        args, kernel = step.args, step.kernel
        by = "table" if _is_in_table(args, kernel, target) else "rule"
        print(f"{op_of(step)}: {f'{kernel.metadata.kernel_name} (by {by})' if kernel else 'no kernel'}")
        if reason := why_not_faster(step, target):
            print(f"    not warp-specialised: {reason}")
    copied = [_COPIES[step.name] for step in steps if step.kernel and step.name in _COPIES and not step.gathers]
    print(f"copies before a GEMM that could gather: {', '.join(copied) or 'none'}")


def op_of(step: Step) -> str:
    """Return the name of a step as the report prints it."""
    if isinstance(step.args, ActivationGradientArguments):
        return f"{_OPS[step.name]} and of the activation"
    if step.name == "up":
        return "up with activation" if step.args.epilogue is not None else "up, then activation"
    return _OPS[step.name]


def check_small_layer(dtype: torch.dtype, device: str, activation: str) -> None:
    """Raise AssertionError if a result of a small layer, forward or backward, exceeds the error budget. The message
    says which result and by how much."""

    def draw(seed: int) -> tuple[Tensor, ...]:
        inputs = make_inputs(_SMALL, dtype, device, seed)
        weights, permutation = make_permutation(inputs, _SMALL.top_k)
        *integers, table = permutation
        return inputs.tokens, weights, inputs.w_up, inputs.w_down, *integers, *table[:-1]

    def layer(op, tokens, weights, w_up, w_down, offsets, slot_to_row, row_to_token, *table: Tensor) -> Tensor:
        permutation = Permutation(offsets, slot_to_row, row_to_token, TileTable(*table, block_rows=128))
        return op(tokens, weights, permutation, w_up, w_down, activation=activation)

    check_accuracy(partial(layer, fused_experts), partial(layer, reference.fused_experts), draw, _RESULTS)


def check_small_fp8_layer(dtype: torch.dtype, device: str, activation: str) -> None:
    """Check a small layer with `precision="fp8"`, forward and backward. Raise AssertionError if a result differs from
    the reference by more than 0.09 times the reference's norm. The message names the result."""
    inputs = make_inputs(_SMALL, dtype, device)
    weights, permutation = make_permutation(inputs, _SMALL.top_k)

    def layer(op: Callable[..., Tensor], tokens: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return op(tokens, weights, permutation, w_up, w_down, activation=activation)

    operands = inputs.tokens, weights, inputs.w_up, inputs.w_down
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignores the warning that fp8 may be slow in a small layer
        actual = run_with_grads(partial(layer, partial(fused_experts, precision="fp8")), operands)
    expected = run_with_grads(partial(layer, reference.fused_experts), operands)
    for name, a, e in zip(_RESULTS, actual, expected, strict=True):
        error = ((a.double() - e.double()).norm() / e.double().norm()).item()
        if not error <= _FP8_ERROR:
            raise AssertionError(f"{name}: differs by {error:.3f} of its norm, expected at most {_FP8_ERROR}")


def check_numbers(
    steps: list[Step], dtype: torch.dtype, device: str, activation: str, precision: str | None = None
) -> bool:
    """Check a small layer and each selected kernel, and print the outcome. Return whether all checks pass."""
    implementation = choose("explain", None, torch.empty(0, dtype=dtype, device=device))
    check_layer = check_small_layer if precision is None else check_small_fp8_layer
    checks = {f"small layer ({implementation} on {device})": partial(check_layer, dtype, device, activation)}
    checks |= {op_of(step): partial(check, step.kernel, step.args) for step in steps if step.kernel is not None}
    passed = True
    for name, run in checks.items():
        try:
            run()
        except AssertionError as error:
            print(f"numbers: {name}: WRONG: {error}")
            passed = False
        else:
            print(f"numbers: {name}: within the error budget")
    return passed


def print_speed(steps: list[Step], target: Target) -> None:
    """Time the selected kernels and compare the times with those recorded in the GPU's table of measured kernels."""
    chosen = {op_of(step): (step.kernel, step.args) for step in steps if step.kernel is not None}
    runs: dict[str, Callable[[], object]] = {
        op: partial(kernel.run, args, assume_supported_args=True) for op, (kernel, args) in chosen.items()
    }
    times = measure(runs)
    for op, ms in times.items():
        kernel, args = chosen[op]
        recorded = (target.table.milliseconds or {}).get(args.table_key())
        if recorded is None or not _is_in_table(args, kernel, target):
            print(f"speed: {op}: {ms:.3f} ms, the table records none")
        else:
            verdict = "SLOW" if ms > _SLOW * recorded else "as expected"
            print(f"speed: {op}: {ms:.3f} ms, the table {recorded:.3f} ms: {verdict}")


def add_command(commands: Any) -> None:
    """Add `explain` to the subparsers of an `argparse` parser."""
    command = commands.add_parser("explain", help="say which kernels run for a layer and why, and check them")
    command.add_argument("layer", type=parse_layer, metavar="T,D,F,E,K", help="sizes of the layer")
    command.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    command.add_argument("--activation", default="swiglu", choices=sorted(EPILOGUES))
    command.add_argument("--quantized", choices=list(FORMATS), help="as with weights stored in this format")
    command.add_argument("--precision", choices=["fp8"], help="as with this precision of the layer")
    command.add_argument("--cc", type=int, help="select as on a GPU of this compute capability; 90 without a GPU")
    command.add_argument("--gpu", help="with the tables of a GPU of this name")
    command.set_defaults(run=explain_command)


def print_records(dtype: torch.dtype, device: str, activation: str, precision: str | None) -> None:
    """Print for each op of a small layer, forward and backward, whether a repeated call replays recorded launches. If
    not, print the reason."""
    inputs = make_inputs(_TINY, dtype, device)
    weights, permutation = make_permutation(inputs, _TINY.top_k)

    def layer(tokens: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        options = {"activation": activation, "precision": precision}
        return fused_experts(tokens, weights, permutation, w_up, w_down, **options)

    clear_records()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignores the warning that fp8 may be slow in a small layer
        for _ in range(CALLS_BEFORE_RECORD + 1):
            run_with_grads(layer, (inputs.tokens, weights, inputs.w_up, inputs.w_down))
    for op, found in states().items():
        print(f"records: {op}: {found[0]}")
    if not states():
        print("records: none, because no kernels run or single launches are wanted")


def explain_command(options: argparse.Namespace) -> int:
    """Print the report. Return exit status 1 if a result exceeds the error budget, 2 if the layer cannot be built."""
    case, dtype = options.layer, getattr(torch, options.dtype)
    target, is_here = find_target(options.cc, options.gpu)
    print_versions(target, is_here)
    print_tables(target)
    settings = {"activation": options.activation, "precision": options.precision, "format": options.quantized}
    layer = layer_of(case, dtype, "cuda" if is_here else "meta", **settings)
    try:
        steps = layer.plan(None if is_here else target) if HAS_TRITON else []
    except ValueError as error:  # the format or the precision does not support the layer's sizes
        print(f"moe_kernels explain: {error}", file=sys.stderr)
        return 2
    print_steps(layer, steps, target)
    runnable = steps if is_here else []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    passed = check_numbers(runnable, dtype, device, options.activation, options.precision)
    if passed:
        print_records(dtype, device, options.activation, options.precision)
    if runnable:
        print_speed(runnable, target)
    else:
        print("speed: not measured, the requested GPU is absent")
    return 0 if passed else 1
