"""The layer with few tokens: launches, host time per call, and a forward replayed as a CUDA graph.

    python -m benchmarks.small_batches --commit $(git rev-parse --short HEAD) --output benchmarks/results/small.json

Host time is the CPU time of the calling thread between the first and the last call of a batch, without waiting for the
GPU. Autograd runs in the calling thread. `*_wall_us` is the time on the clock of the same calls with autograd's own
thread. The bound of a replayed forward is the time to read the weights of every chosen expert once at the speed of a
large copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from moe_layers import MoEFeedForward

from . import results_file
from .layer import PASSES, environment, make_layer, make_tokens, passes, print_rows
from .shapes import SHAPES, TINY, Shape
from .timing import copy_bytes_per_ms, in_a_graph, time_interleaved

NUM_TOKENS = (1, 8, 64, 256, 512, 1024, 4096)


def count_launches(function: Callable[[], object]) -> int:
    """Return the number of GPU kernels, copies and fills of one call."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def host_us(
    function: Callable[[], object], clock: Callable[[], float], device: str, *, batch: int = 20, rounds: int = 15
) -> float:
    """Return median microseconds of `clock` per call, while the GPU's queue never fills up."""
    samples = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        for _ in range(batch):
            function()
        samples.append((clock() - begin) / batch)
    return 1e6 * statistics.median(samples)


def chosen_bytes(
    layer: MoEFeedForward,
    topk_experts: torch.Tensor,  # [T, K]
) -> int:
    """Return the bytes of the experts that at least one token chose."""
    experts = layer.experts
    return topk_experts.unique().numel() * (experts.w_up[0].nbytes + experts.w_down[0].nbytes)


def bench_small(shape: Shape, device: str, bytes_per_ms: float) -> list[dict]:
    """Return one row. Launches and graphs exist on a GPU only; elsewhere their fields are None."""
    torch.cuda.empty_cache()  # does nothing without a GPU
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = make_layer(shape, device, dtype)
    tokens = make_tokens(layer, shape, "even", dtype)
    run = passes(layer, tokens)
    for function in run.values():
        for _ in range(3):  # compile and warm up
            function()
    row = {"shape": shape.name, "T": shape.num_tokens}
    with torch.autograd.set_multithreading_enabled(False):
        row |= {f"{name}_cpu_us": host_us(run[name], time.thread_time, device) for name in PASSES}
    row |= {f"{name}_wall_us": host_us(run[name], time.perf_counter, device) for name in PASSES}
    launches, replay = dict.fromkeys(PASSES), {}
    with torch.no_grad():
        num_bytes = chosen_bytes(layer, layer.router(tokens).topk_experts) + layer.router.weight.nbytes
        bound_ms = num_bytes / bytes_per_ms
    if device == "cuda":
        launches = {name: count_launches(function) for name, function in run.items()}
        with torch.no_grad():
            replay = {"graph": in_a_graph(lambda: layer(tokens))}
    timings = time_interleaved({"eager": run["forward"], **replay}, device)
    graph_ms = timings["graph"].ms if replay else None
    return [
        {
            **row,
            **{f"{name}_launches": number for name, number in launches.items()},
            "forward_ms": timings["eager"].ms,
            "graph_forward_ms": graph_ms,
            "weights_bound_ms": bound_ms,
            "graph_over_bound": None if graph_ms is None else graph_ms / bound_ms,
        }
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, TINY.name], default=["qwen3-30b-a3b", "mixtral-8x7b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=NUM_TOKENS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    results_file.add_options(parser)
    options = parser.parse_args(arguments)
    bytes_per_ms = copy_bytes_per_ms(options.device)
    tasks = []
    for name in options.shapes:
        for num_tokens in options.tokens:
            shape = dataclasses.replace(TINY if name == TINY.name else SHAPES[name], num_tokens=num_tokens)
            measure = partial(bench_small, shape, options.device, bytes_per_ms)
            tasks.append(({"shape": name, "T": num_tokens}, measure))
    for rows in results_file.ResultsFile.of(options, environment(options.device, options.commit)).measure(tasks):
        print_rows(rows, list(rows[0]))


if __name__ == "__main__":
    main()
