"""Time from router logits to the permutation of the rows, in a CUDA graph, against moving the bytes once.

    python -m benchmarks.routing --commit $(git rev-parse --short HEAD) --output benchmarks/results/routing.json

`bound_us` is the time to read the logits and write the outputs of routing and sort at the speed of a large copy.
`limit_us` is 1.25 times `bound_us` plus 40 us. Every choice is checked against the reference before timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch

from moe_kernels import RouterSpec, Routing, reference, sort_by_expert, topk_routing

from .common.command import Command
from .common.results_file import Row, Task
from .common.timing import copy_bytes_per_ms, in_a_graph, timed

# Name -> (E, K, router).
ROUTERS = {
    "softmax E=64": (64, 8, RouterSpec()),
    "softmax E=128": (128, 8, RouterSpec()),
    "softmax E=256": (256, 8, RouterSpec()),
    "softmax E=512": (512, 10, RouterSpec()),
    "deepseek-v3": (256, 8, RouterSpec.deepseek_v3(8, 4, scale=2.5)),
}
COLUMNS = ("router", "T", "E", "K", "routing_us", "sort_us", "both_us", "bound_us", "limit_us")


def bench(name: str, bytes_per_ms: float, options: argparse.Namespace) -> list[Row]:
    num_experts, top_k, spec = ROUTERS[name]
    num_tokens, device = options.num_tokens, options.device
    logits = torch.randn(num_tokens, num_experts, device=device, generator=torch.Generator(device).manual_seed(0))
    bias = None if spec.selection_bias is None else torch.zeros(num_experts, device=device)
    route = partial(topk_routing, logits, top_k, spec, selection_bias=bias)
    routed: Routing = route()
    expected_experts = route(implementation="reference").topk_experts
    assert torch.equal(routed.topk_experts, expected_experts), f"{name}: other experts than the reference"
    sort = partial(sort_by_expert, routed.topk_experts, num_experts)
    permutation = sort()
    expected = reference.sort_by_expert(routed.topk_experts, num_experts)
    assert torch.equal(permutation.slot_to_row, expected.slot_to_row), f"{name}: other rows than the reference"
    functions = {"routing": route, "sort": sort, "both": lambda: sort_by_expert(route().topk_experts, num_experts)}
    if device == "cuda":
        functions = {key: in_a_graph(function) for key, function in functions.items()}
    timings = timed(functions, options)
    outputs = (*routed[:2], *permutation[:3], *permutation.tile_table[:4])
    bound_us = 1e3 * sum(tensor.nbytes for tensor in (logits, *outputs)) / bytes_per_ms
    row = {"E": num_experts, "K": top_k, **{f"{key}_us": 1e3 * timing.ms for key, timing in timings.items()}}
    return [{**row, "bound_us": bound_us, "limit_us": 1.25 * bound_us + 40.0}]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--num-tokens", type=int, default=32768)
    parser.set_defaults(round_ms=50.0)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    bytes_per_ms = copy_bytes_per_ms(options.device)
    for name in options.routers:
        yield {"router": name, "T": options.num_tokens}, partial(bench, name, bytes_per_ms, options)


main = Command(__doc__, add_options, tasks, COLUMNS)


if __name__ == "__main__":
    main()
