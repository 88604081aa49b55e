"""Experts with e4m3 operands (`precision="fp8"`), compared with bfloat16 ones in the same run.

    python -m benchmarks.fp8 --commit $(git rev-parse --short HEAD) --output benchmarks/results/fp8.json
    python -m benchmarks.fp8 --cases gemm --shapes olmoe --time-limit-s 480 --resume --commit COMMIT --output FILE

    gemm    the four products of a layer that FP8 changes: e4m3 with block scales, bfloat16, and the dense cuBLAS
            products of the same sizes, in bfloat16 and in e4m3 with the same blocks
    layer   forward, and forward and backward, of the layer. "fp8" caches its e4m3 weights between calls.
            "fp8 new weights" quantises the weights in every call, as one batch per optimizer step does. "fp8_saved"
            also saves the pre-activations in e4m3
    pass    quantisation, and the activation with and without quantised results, in GB/s

Each GEMM is checked against the error budget before it is timed. The layer's relative error may be 3 % against the
same FP8 recipe computed in float32, and 9 % against the float32 layer without FP8.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_kernels import fused_experts, reference, reference_fp8
from moe_kernels.activation.ops import (
    can_scale_gradient,
    launch_activation,
    launch_scaled_activation,
    launch_weighted_activation_backward,
)
from moe_kernels.gemm import selection
from moe_kernels.gemm.arguments.block_scaled import BlockScaledGemmArguments
from moe_kernels.gemm.arguments.grouped import GroupedGemmArguments
from moe_kernels.quantization.fp8_rows import empty_scaled_rows, launch_quantize_rows
from moe_kernels.quantization.fp8_weights import empty_checksums, launch_quantize_weight, launch_requantize
from moe_kernels.specs import as_activation
from moe_kernels.tools.tune import check
from moe_kernels.types import Permutation
from moe_layers import MoEFeedForward

from .common import shapes
from .common.command import Command
from .common.layers import make_layer, make_tokens, measure_memory, num_checked, passes, run_experts
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import timed, timed_against_copy

FP8_SHAPES = ("4096x1024-e128", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v3-ep8", "olmoe")
FP8_SHAPES += ("qwen3-next", "fine-grained")
OF_RECIPE, OF_PLAIN = 0.03, 0.09  # largest relative errors allowed: against the recipe, against the layer without FP8


class Operands:
    """Rows, weights and routing of a layer with an equal share of the rows for each expert."""

    def __init__(self, shape: Shape, options: argparse.Namespace):
        self.shape = shape
        layer = make_layer(shape, options.device, options.dtype)
        self.tokens = make_tokens(layer, shape, "even")
        with torch.no_grad():
            routed = layer.router(self.tokens)
        self.permutation = reference.sort_by_expert(routed.topk_experts, shape.num_experts)
        self.topk_weights = routed.topk_weights
        self.w_up, self.w_down = (weight.detach() for weight in (layer.experts.w_up, layer.experts.w_down))

    def rows(self, num_columns: int) -> Tensor:  # [R, num_columns]
        like = self.tokens
        return torch.randn(self.shape.num_rows, num_columns, device=like.device, dtype=like.dtype)


def product(operands: Operands, op: str) -> tuple[Tensor, Tensor, bool]:
    """Return (a, weight [E, N, K], whether rows of a are gathered) of one product."""
    tokens, w_up, w_down = operands.tokens, operands.w_up, operands.w_down
    return {
        "up": (tokens, w_up, True),
        "down": (operands.rows(operands.shape.d_ff), w_down, False),
        "down_dgrad": (tokens, w_down.mT.contiguous(), True),
        "up_dgrad": (operands.rows(operands.shape.up_columns), w_up.mT.contiguous(), False),
    }[op]


PRODUCTS = ("up", "down", "down_dgrad", "up_dgrad")


def fp8_arguments(a: Tensor, weight: Tensor, permutation: Permutation, index: Tensor | None) -> Any:
    scaled, form = launch_quantize_rows(a), launch_quantize_weight(weight, transposed=False)
    assert form.values is not None and form.scales is not None
    out = a.new_empty(len(permutation.row_to_token), weight.shape[1])
    scales = scaled.scales, form.scales.mT
    table = {"tile_table": permutation.tile_table, "zero_tail": False}
    return BlockScaledGemmArguments(scaled.values, form.values.mT, out, *scales, row_to_token=index, **table)


def dense_fp8(a: Any, size_k: int, size_n: int) -> Callable[[], Tensor] | None:
    """Return cuBLAS's product of all rows and one matrix with the same blocks, or None if not supported."""
    if not a.A.is_cuda or size_k % 128 or size_n % 128:
        return None
    run = partial(torch._scaled_mm, a.A, a.B[0], a.scale_a, a.scale_b[0], out_dtype=a.out.dtype, out=a.out)
    try:
        run()
    except (RuntimeError, ValueError) as error:  # this version of CUDA or PyTorch lacks this product
        print(f"no dense e4m3 product: {str(error).splitlines()[0]}")
        return None
    return run


def bench_gemm(op: str, shape: Shape, options: argparse.Namespace) -> list[Row]:
    operands = Operands(shape, options)
    a, weight, gathers = product(operands, op)
    permutation, (_, size_n, size_k) = operands.permutation, weight.shape
    rows = a[permutation.row_to_token.long()] if gathers else a
    copied = fp8_arguments(rows, weight, permutation, None)
    given = {"fp8": copied}
    if gathers:
        given = {"fp8": fp8_arguments(a, weight, permutation, permutation.row_to_token), "fp8 copied rows": copied}
    table = {"tile_table": permutation.tile_table, "zero_tail": False}
    given["bf16"] = GroupedGemmArguments(rows, weight.mT, torch.empty_like(copied.out), **table)
    kernels = {}
    for name, args in given.items():
        kernels[name] = selection.select(args)
        check(kernels[name], args)
    runs: dict[str, Callable[[], object]] = {name: partial(selection.run, args) for name, args in given.items()}
    runs["dense bf16"] = partial(torch.mm, rows, weight[0].T, out=torch.empty_like(copied.out))
    if (dense := dense_fp8(copied, size_k, size_n)) is not None:
        runs["dense fp8"] = dense
    timings = timed(runs, options)
    flops = 2.0 * len(rows) * size_k * size_n
    return [
        {
            "implementation": name,
            "kernel": kernels[name].metadata.kernel_name if name in kernels else None,
            **timing._asdict(),
            "tflops": flops / timing.ms / 1e9,
            "over_bf16": timings["bf16"].ms / timing.ms,
            "share_of_dense_fp8": timings["dense fp8"].ms / timing.ms if "dense fp8" in timings else None,
        }
        for name, timing in timings.items()
    ]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def check_layer(operands: Operands, precision: str) -> dict[str, float]:
    """Check a layer's first experts against the FP8 recipe and plain experts in float32. Return both largest errors."""
    shape, num_experts = operands.shape, max(num_checked(operands.shape) // 4, 1)
    num_tokens = max(shape.num_tokens * num_experts // shape.num_experts, 1)
    tokens, weights = operands.tokens[:num_tokens], operands.topk_weights[:num_tokens]
    slots = operands.permutation.slot_to_row[:num_tokens]
    experts = torch.searchsorted(operands.permutation.offsets, slots, right=True, out_int32=True) % num_experts
    given = tokens, weights, operands.w_up[:num_experts], operands.w_down[:num_experts]
    run = partial(run_experts, given, experts, as_activation("check", shape.activation))
    actual, errors = run(partial(fused_experts, precision=precision), tokens.dtype), {}
    recipe = partial(reference_fp8.fused_experts, saves_fp8=precision == "fp8_saved")
    for name, op, limit in (("recipe", recipe, OF_RECIPE), ("plain", reference.fused_experts, OF_PLAIN)):
        errors[name] = max(map(relative_error, actual, run(op, torch.float32)))
        assert errors[name] <= limit, (
            f"{precision} layer: relative error {errors[name]:.4f} against {name} exceeds {limit}"
        )
    return errors


def bench_layer(shape: Shape, options: argparse.Namespace) -> list[Row]:
    operands = Operands(shape, options)
    errors = {precision: check_layer(operands, precision) for precision in ("fp8", "fp8_saved")}
    del operands
    layer = make_layer(shape, options.device, options.dtype)
    tokens = make_tokens(layer, shape, "even")
    forms = {"bf16": None, "fp8": "fp8", "fp8 new weights": "fp8", "fp8_saved": "fp8_saved"}
    runs, memory = {}, {}
    for which, run in passes(layer, tokens).items():
        for form, precision in forms.items():
            runs[form, which] = partial(run_in, layer, precision, form == "fp8 new weights", run)
    for form, precision in forms.items():
        runs[form, "forward+backward"]()
        layer.experts.precision = precision
        memory[form] = measure_memory(layer, tokens)
    timings = timed(runs, options)
    return [
        {
            "implementation": form,
            "pass": which,
            **timings[form, which]._asdict(),
            "over_bf16": timings["bf16", which].ms / timings[form, which].ms,
            "saved_mib": memory[form][0],
            "peak_mib": memory[form][1],
            "error_of_recipe": errors[forms[form]]["recipe"] if forms[form] else None,
            "error_of_plain": errors[forms[form]]["plain"] if forms[form] else None,
        }
        for form, which in runs
    ]


def run_in(layer: MoEFeedForward, precision: str | None, new_weights: bool, run: Callable[[], object]) -> None:
    layer.experts.precision = precision
    if new_weights:
        layer.experts.kept_forms.drop()
    run()


def bench_passes(shape: Shape, options: argparse.Namespace) -> list[Row]:
    """Return result rows. `gb_per_s` counts each matrix once per read and once per write, without scales."""
    operands = Operands(shape, options)
    activation, tokens, w_up = as_activation("bench", shape.activation), operands.tokens, operands.w_up
    hidden, dweighted = operands.rows(shape.up_columns), operands.rows(shape.d_ff)
    slots, weights = operands.permutation.slot_to_row, operands.topk_weights.contiguous()
    checksums = empty_checksums(w_up)
    kept = launch_quantize_weight(w_up, checksums=checksums), checksums
    scaled = empty_scaled_rows(hidden, *hidden.shape) if can_scale_gradient(activation, shape.d_ff) else None
    item, num_hidden, num_activated = options.dtype.itemsize, hidden.numel(), dweighted.numel()
    backward = partial(launch_weighted_activation_backward, hidden, dweighted, weights, slots, activation)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "tokens": (partial(launch_quantize_rows, tokens), tokens.numel() * (item + 1)),
        "w_up, both orientations": (partial(launch_quantize_weight, w_up), w_up.numel() * (item + 2)),
        "w_up, one orientation": (partial(launch_quantize_weight, w_up, transposed=False), w_up.numel() * (item + 1)),
        "look for a change of w_up": (partial(launch_requantize, w_up, *kept), w_up.numel() * item),
        "activation": (partial(launch_activation, hidden, activation), (num_hidden + num_activated) * item),
        "activation to e4m3": (
            partial(launch_scaled_activation, hidden, activation),
            num_hidden * item + num_activated,
        ),
        "activation backward": (backward, 2 * (num_hidden + num_activated) * item),
        "activation backward to e4m3": (
            partial(backward, scaled=scaled),
            2 * (num_hidden + num_activated) * item + (num_hidden if scaled is not None else 0),
        ),
    }
    return [{"implementation": name, **found} for name, found in timed_against_copy(runs, options).items()]


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, *FP8_SHAPES)
    parser.add_argument("--cases", nargs="+", choices=["layer", "gemm", "pass"], default=["layer", "gemm", "pass"])


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    benches: dict[str, list[tuple[Row, Callable[..., list[Row]]]]] = {
        "layer": [({}, bench_layer)],
        "gemm": [({"op": op}, partial(bench_gemm, op)) for op in PRODUCTS],
        "pass": [({}, bench_passes)],
    }
    for shape in shapes.shapes_named(options.shapes):
        for case in options.cases:
            for more, bench in benches[case]:
                yield {"shape": shape.name, **shape.sizes, "case": case, **more}, partial(bench, shape, options)


main = Command(__doc__, add_options, tasks)


if __name__ == "__main__":
    main()
