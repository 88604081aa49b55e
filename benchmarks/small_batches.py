"""The layer with few tokens: launches, CPU time per call, and a forward replayed as a CUDA graph.

    python -m benchmarks.small_batches --commit $(git rev-parse --short HEAD) --output benchmarks/results/small.json

The bound of a replayed forward is the time to read the weights of every chosen expert once at the speed of a large
copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_layers import MoEFeedForward

from .layer import environment, make_layer, make_tokens, passes, print_rows
from .shapes import SHAPES, Shape
from .timing import copy_bytes_per_ms, in_a_graph, time_interleaved

NUM_TOKENS = (64, 256, 1024, 4096)


def count_launches(function: Callable[[], object]) -> int:
    """Return the number of GPU kernels, copies and fills of one call."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def cpu_us(function: Callable[[], object], *, batch: int = 20, rounds: int = 15) -> float:
    """Return median microseconds until a call returns, while the GPU's queue never fills up."""
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(batch):
            function()
        samples.append((time.perf_counter() - begin) / batch)
    return 1e6 * statistics.median(samples)


def touched_bytes(layer: MoEFeedForward, tokens: torch.Tensor) -> int:
    """Return the bytes of the experts that at least one token chose, and of the router."""
    num_experts = layer.router(tokens).topk_experts.unique().numel()
    experts = layer.experts
    per_expert = experts.w_up[0].numel() + experts.w_down[0].numel()
    return (num_experts * per_expert + layer.router.weight.numel()) * tokens.element_size()


def bench_small(shape: Shape, bytes_per_ms: float) -> dict:
    layer = make_layer(shape, "cuda", torch.bfloat16)
    tokens = make_tokens(layer, shape, "even", torch.bfloat16)
    run = passes(layer, tokens)
    launches = {name: count_launches(function) for name, function in run.items()}
    cpu = {name: cpu_us(function) for name, function in run.items()}
    with torch.no_grad():
        bound_ms = touched_bytes(layer, tokens) / bytes_per_ms
        replay = in_a_graph(lambda: layer(tokens))
    timings = time_interleaved({"eager": run["forward"], "graph": replay}, "cuda")
    return {
        "shape": shape.name,
        "T": shape.num_tokens,
        "forward_launches": launches["forward"],
        "backward_launches": launches["forward+backward"] - launches["forward"],
        "forward_cpu_us": cpu["forward"],
        "forward+backward_cpu_us": cpu["forward+backward"],
        "forward_ms": timings["eager"].ms,
        "graph_forward_ms": timings["graph"].ms,
        "weights_bound_ms": bound_ms,
        "graph_over_bound": timings["graph"].ms / bound_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-30b-a3b", "mixtral-8x7b"])
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    bytes_per_ms = copy_bytes_per_ms("cuda")
    rows = []
    for name in options.shapes:
        for num_tokens in NUM_TOKENS:
            shape = dataclasses.replace(SHAPES[name], num_tokens=num_tokens)
            rows.append({**bench_small(shape, bytes_per_ms), **environment("cuda", options.commit)})
            torch.cuda.empty_cache()
    print_rows(rows, [column for column in rows[0] if column not in environment("cuda", "")])
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
