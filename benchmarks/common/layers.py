"""Layers to be timed: their passes, memory and checks, and their times next to those of the dense GEMMs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels import Activation, RouterSpec, fused_experts, reference
from moe_kernels.specs import ACTIVATION_KINDS
from moe_kernels.testing import assert_accurate, make_logits, run_with_grads
from moe_layers import MoEFeedForward

from .baselines import FORWARD_GEMMS, dense_gemms
from .results_file import Row
from .shapes import Shape
from .timing import timed

MIB = 2**20
CHECKED_BYTES = 80e9  # largest memory of a check
PASSES = ("forward", "forward+backward")
VARIANTS = {  # name -> options of a layer
    **{name: {"activation": name} for name in ACTIVATION_KINDS},
    "swiglu with biases": {"bias": True},
    "gpt_oss with biases": {"activation": "gpt_oss", "bias": True},
    "swiglu, weight on input": {"router": RouterSpec.llama4()},
    "swiglu, grouped sigmoid router": {"router": RouterSpec.deepseek_v3(4, 2)},
}


def make_layer(shape: Shape, device: str, dtype: torch.dtype, **options: Any) -> MoEFeedForward:
    torch.manual_seed(0)
    sizes = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    return MoEFeedForward(*sizes, device=device, dtype=dtype, **{"activation": shape.activation, **options})


def make_tokens(layer: MoEFeedForward, shape: Shape, routing: str) -> Tensor:  # [T, D]
    """Return random tokens in the router's dtype, shifted along its weight's rows so that it chooses by `routing`."""
    w_router = layer.router.weight.detach().float()
    generator = torch.Generator(w_router.device).manual_seed(0)
    tokens = torch.randn(shape.num_tokens, shape.d_model, device=w_router.device, generator=generator)
    wanted = 8 * make_logits(shape.num_tokens, shape.num_experts, routing, w_router.device, generator)
    tokens += torch.linalg.lstsq(w_router, (wanted - tokens @ w_router.t()).t()).solution.t()
    return tokens.to(layer.router.weight.dtype)


def fitting(shapes: Iterable[Shape], device: str) -> Iterator[Shape]:
    """Yield the shapes that fit into the GPU's memory by estimate, and print the names of the others.

    The estimate counts the layer, its gradients, and the rows of the layer and its baseline.
    """
    for shape in shapes:
        num_bytes = 6 * shape.num_weights + 20 * shape.num_rows * (shape.d_model + shape.d_ff)
        if device == "cpu" or num_bytes < torch.cuda.get_device_properties(0).total_memory:
            yield shape
        else:
            print(f"{shape.name}: left out, because the GPU's memory cannot hold it")


def num_checked(shape: Shape) -> int:
    """Return the number of experts whose check needs at most `CHECKED_BYTES` by estimate, at least 1."""
    float32_pass = 16 * shape.num_weights + 32 * shape.num_rows * (shape.d_model + shape.d_ff)
    comparison = 40 * shape.num_weights  # bytes of three results, and of float64 copies of the largest result
    return max(int(shape.num_experts / max(max(float32_pass, comparison) / CHECKED_BYTES, 1.0)), 1)


def check_layer(layer: MoEFeedForward, tokens: Tensor, num_experts: int | None = None) -> None:
    """Check the expert op's output and gradients by the tests' error budget, with the same routing for all dtypes.

    Args:
        num_experts: check only the first `num_experts` experts, with fewer tokens, to save memory. Default: all.
    """
    num_all, (w_up, w_down) = layer.num_experts, (layer.experts.w_up, layer.experts.w_down)
    num_experts = num_experts or num_all
    tokens = tokens[: len(tokens) * num_experts // num_all]
    with torch.no_grad():
        routed = layer.router(tokens)
    operands = tokens, routed.topk_weights, w_up[:num_experts], w_down[:num_experts]
    run = partial(run_experts, operands, routed.topk_experts % num_experts, layer.experts.activation)
    # float32 without TF32 is exact in comparison with 16-bit results.
    exact = run(reference.fused_experts, torch.float32)
    baseline = run(reference.fused_experts, tokens.dtype)
    actual = run(fused_experts, tokens.dtype)
    for name, a, b, e in zip(("out", "dtokens", "dweights", "dw_up", "dw_down"), actual, baseline, exact, strict=True):
        assert_accurate(a, b, e, name)


def run_experts(
    operands: tuple[Tensor, Tensor, Tensor, Tensor],  # tokens, topk_weights, w_up, w_down
    topk_experts: Tensor,  # [T, K] int32
    activation: Activation,
    op: Callable[..., Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return the output and the gradients of an expert op, computed in `dtype` from the same values."""
    permutation = reference.sort_by_expert(topk_experts, len(operands[2]))

    def run(tokens: Tensor, topk_weights: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return op(tokens, topk_weights, permutation, w_up, w_down, activation=activation)

    inputs = (t.to(dtype if t.dtype == operands[0].dtype else t.dtype) for t in operands)
    return run_with_grads(run, tuple(inputs), seed=1)


def passes(layer: torch.nn.Module, tokens: Tensor) -> dict[str, Callable[[], object]]:
    leaf = tokens.detach().requires_grad_()
    dout = torch.randn_like(tokens)
    parameters = list(layer.parameters())

    def forward() -> Tensor:
        return layer(leaf)

    def forward_backward() -> None:
        for tensor in (leaf, *parameters):
            tensor.grad = None
        forward().backward(dout)

    return {"forward": forward, "forward+backward": forward_backward}


def measure_memory(layer: torch.nn.Module, tokens: Tensor) -> tuple[float, float] | tuple[None, None]:
    """Return MiB (held after the forward, peak of forward and backward), or (None, None) without a GPU.

    Memory allocated earlier is not counted. The peak includes gradients. The layer must have run before.
    """
    if not tokens.is_cuda:
        return None, None
    layer.zero_grad()
    run = passes(layer, tokens)  # with a new leaf, because freeing an old leaf's gradient would lower the peak
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = run["forward"]()
    saved = torch.cuda.memory_allocated() - before
    del out
    torch.cuda.reset_peak_memory_stats()
    run["forward+backward"]()
    return saved / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def chosen_bytes(layer: MoEFeedForward, topk_experts: Tensor) -> int:
    """Return the number of bytes in the weights of the experts that at least one token chose."""
    experts = layer.experts
    return topk_experts.unique().numel() * (experts.w_up[0].nbytes + experts.w_down[0].nbytes)


def checked_layer(shape: Shape, routing: str, options: argparse.Namespace) -> tuple[MoEFeedForward, Tensor]:
    """Return the layer and its tokens [T, D], after a check of the layer."""
    torch._dynamo.reset()  # free the layer of the last shape
    torch.cuda.empty_cache()  # does nothing without a GPU
    layer = make_layer(shape, options.device, options.dtype)
    tokens = make_tokens(layer, shape, routing)
    check_layer(layer, tokens, num_checked(shape))
    torch.cuda.empty_cache()
    return layer, tokens


def bench_modules(
    modules: dict[str, nn.Module],
    tokens: Tensor,  # [T, D]
    shape: Shape,
    options: argparse.Namespace,
) -> list[Row]:
    """Return result rows of these modules and their shares of the dense bound."""
    runs = {name: passes(module, tokens) for name, module in modules.items()}
    for run in runs.values():
        for function in run.values():
            function()  # compile and warm up
    memory = {name: measure_memory(module, tokens) for name, module in modules.items()}
    functions = {f"{name}/{which}": run[which] for name, run in runs.items() for which in run}
    functions |= {f"dense/{name}": gemm for name, gemm in dense_gemms(shape, options.device, options.dtype).items()}
    timings = timed(functions, options)
    bounds = {
        "forward": sum(timings[f"dense/{name}"].ms for name in FORWARD_GEMMS),
        "forward+backward": sum(t.ms for name, t in timings.items() if name.startswith("dense/")),
    }
    rows: list[Row] = []
    for which, bound_ms in bounds.items():
        for name, (saved, peak) in memory.items():
            timing = timings[f"{name}/{which}"]
            row = {**shape.sizes, "pass": which, "implementation": name}
            row |= {**timing._asdict(), "tokens_per_s": 1e3 * shape.num_tokens / timing.ms}
            row |= {"dense_bound_ms": bound_ms, "share_of_dense_bound": bound_ms / timing.ms}
            rows.append({**row, "saved_mib": saved, "peak_mib": peak})
    return rows
