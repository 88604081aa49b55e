"""The layer with few tokens: launches, host time per call, and a forward replayed as a CUDA graph.

    python -m benchmarks.small_batches --commit $(git rev-parse --short HEAD) --output benchmarks/results/small.json
    python -m benchmarks.small_batches --host --commit COMMIT --output benchmarks/results/host.json

Host time is the CPU time of the calling thread between the first and the last call of a batch, without waiting for the
GPU. Autograd runs in the calling thread. The bound of a replayed forward is the time to read the router and the chosen
experts once, at the speed of a large copy.

`--host` times only calls. The layer and a dense MLP run both eagerly and compiled, `grouped_mm` only compiled.
The MLP has two `nn.Linear`, a SiLU and the same d_model and d_ff. All forms take turns in one run.
`host_us` is the wall-clock time per call, with the GPU idle at the start of 20 calls; `over_dense` is its ratio to
the dense MLP's. A form that fails has an `error` instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from .common.baselines import TorchGroupedMM
from .common.command import Command
from .common.layers import PASSES, chosen_bytes, make_layer, make_tokens, passes
from .common.results_file import Task, attempt
from .common.shapes import PUBLISHED, SHAPES, TINY, Shape, by_name
from .common.timing import copy_bytes_per_ms, host_us, in_a_graph, time_interleaved

NUM_TOKENS = (1, 8, 64, 256, 512, 1024, 4096)
HOST_SHAPES = by_name(
    Shape("small", 64, 512, 256, 16, 4),
    dataclasses.replace(SHAPES["qwen3-30b-a3b"], num_tokens=512),
    dataclasses.replace(PUBLISHED["granite-3.0-3b-a800m"], num_tokens=4096),
)
KNOWN = {**SHAPES, TINY.name: TINY, **HOST_SHAPES}
DENSE = "dense_mlp"


def count_launches(function: Callable[[], object]) -> int:
    """Return the number of GPU kernels, copies and fills of one call."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def warm_up(functions: dict[str, Callable[[], object]]) -> None:
    for function in functions.values():
        for _ in range(3):  # the first call compiles
            function()


def bench_small(shape: Shape, bytes_per_ms: float, options: argparse.Namespace) -> list[dict]:
    """Return one row. Launches and graphs exist on a GPU only; elsewhere their fields are None."""
    torch.cuda.empty_cache()  # does nothing without a GPU
    device = options.device
    layer = make_layer(shape, device, options.dtype)
    tokens = make_tokens(layer, shape, "even")
    run = passes(layer, tokens)
    warm_up(run)
    with torch.autograd.set_multithreading_enabled(False):
        host = host_us(run, time.thread_time, device)
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
            **{f"{name}_cpu_us": microseconds for name, microseconds in host.items()},
            **{f"{name}_launches": number for name, number in launches.items()},
            "forward_ms": timings["eager"].ms,
            "graph_forward_ms": graph_ms,
            "weights_bound_ms": bound_ms,
            "graph_over_bound": None if graph_ms is None else graph_ms / bound_ms,
        }
    ]


def bench_host(shape: Shape, options: argparse.Namespace) -> list[dict]:
    """Return one row per form and pass. Compiled forms run eagerly without a GPU."""
    torch._dynamo.reset()  # free the layer of the last shape
    torch.cuda.empty_cache()  # does nothing without a GPU
    device, dtype = options.device, options.dtype
    layer = make_layer(shape, device, dtype)
    tokens = make_tokens(layer, shape, "even")
    sizes = {"device": device, "dtype": dtype}
    dense = nn.Sequential(
        nn.Linear(shape.d_model, shape.d_ff, **sizes), nn.SiLU(), nn.Linear(shape.d_ff, shape.d_model, **sizes)
    )
    modules = {DENSE: dense, "moe_layers": layer}
    compiled = {f"{DENSE}_compiled": dense, "moe_layers_compiled": layer, "grouped_mm_compiled": TorchGroupedMM(layer)}
    for name, module in compiled.items():
        modules[name] = torch.compile(module, disable=device == "cpu")
    run, errors = {}, {}
    for name, module in modules.items():
        functions = passes(module, tokens)
        functions = {"inference": torch.no_grad()(functions["forward"]), **functions}
        _, errors[name] = attempt(partial(warm_up, functions))
        if errors[name] is None:
            run |= {f"{name}/{which}": function for which, function in functions.items()}
    found = host_us(run, time.perf_counter, device, rounds=options.rounds)
    rows = []
    for name in modules:
        for which in ("inference", *PASSES):
            us, dense_us = found.get(f"{name}/{which}"), found[f"{DENSE}/{which}"]
            row = {**shape.sizes, "pass": which, "implementation": name, "host_us": us}
            rows.append({**row, "over_dense": None if us is None else us / dense_us, "error": errors[name]})
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", action="store_true", help="time the calls of layers next to a dense MLP's only")
    parser.add_argument("--shapes", nargs="+", choices=list(KNOWN), help="default: two layers; with --host three")
    parser.add_argument("--tokens", nargs="+", type=int, default=NUM_TOKENS, help="not with --host")
    parser.set_defaults(rounds=15)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    if options.host:
        for name in options.shapes or HOST_SHAPES:
            yield {"shape": name}, partial(bench_host, KNOWN[name], options)
        return
    bytes_per_ms = copy_bytes_per_ms(options.device)
    for name in options.shapes or ("qwen3-30b-a3b", "mixtral-8x7b"):
        for num_tokens in options.tokens:
            shape = dataclasses.replace(KNOWN[name], num_tokens=num_tokens)
            yield {"shape": name, "T": num_tokens}, partial(bench_small, shape, bytes_per_ms, options)


main = Command(__doc__, add_options, tasks)


if __name__ == "__main__":
    main()
