"""Checks modules that compute one layer, and times them in turns with the dense GEMMs."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from moe_layers import MoEFeedForward

from .baselines import FORWARD_GEMMS, dense_gemms
from .layers import check_layer, make_layer, make_tokens, measure_memory, num_checked, passes
from .results_file import Row
from .shapes import Shape
from .timing import timed


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
    routing: str,
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
            row = {"shape": shape.name, **shape.sizes, "routing": routing, "pass": which, "implementation": name}
            row |= {**timing._asdict(), "tokens_per_s": 1e3 * shape.num_tokens / timing.ms}
            row |= {"dense_bound_ms": bound_ms, "share_of_dense_bound": bound_ms / timing.ms}
            rows.append({**row, "saved_mib": saved, "peak_mib": peak})
    return rows
