"""Timing of operations of several ranks, and the bandwidth of their collectives."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, distributed

from moe_layers.parallel.collectives import Ranks, wait

from ..common.timing import Timing, _time_calls, turns


def time_together(
    functions: dict[str, Callable[[], object]], device: torch.device, options: argparse.Namespace
) -> dict[str, Timing]:
    """Time like `timed`, with equally many calls on all ranks; the slowest rank of each call counts."""
    calls = {}
    for name, function in functions.items():
        function()  # compile and warm up
        fastest = largest(_time_calls(function, device.type, 2), device).min().item()
        calls[name] = max(3, int(options.round_ms / max(fastest, 1e-3)) + 1)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for name in turns(list(functions), options.rounds):
        distributed.barrier()
        samples[name] += largest(_time_calls(functions[name], device.type, calls[name]), device).tolist()
    return {name: Timing.of(values) for name, values in samples.items()}


def largest(values: list[float], device: torch.device) -> Tensor:
    """Return the elementwise largest values of all ranks."""
    found = torch.tensor(values, device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return found


def zipf_splits(num_rows: int, num_ranks: int) -> list[int]:
    """Return the number of rows for each rank p, in proportion to 1 / (p + 1)."""
    weights = [1 / (rank + 1) for rank in range(num_ranks)]
    ends = [round(num_rows * sum(weights[: rank + 1]) / sum(weights)) for rank in range(num_ranks)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def bench_bandwidth(ranks: Ranks, megabytes: int, device: torch.device, options: argparse.Namespace) -> list[dict]:
    """Return GB/s per direction of the busiest rank, which exchanges a tensor of this many MB with the others."""
    peers, width = ranks.size - 1, 4096  # a row has `width` bfloat16 values
    row_bytes = 2 * width
    num_rows = megabytes * 10**6 // row_bytes

    def rows(count: int) -> Tensor:
        return torch.zeros(count, width, dtype=torch.bfloat16, device=device)

    per_rank = num_rows // max(peers, 1)
    skewed = zipf_splits(num_rows, ranks.size)
    # All ranks send most rows to the first rank, which is therefore the busiest.
    skewed_in = [skewed[ranks.rank]] * ranks.size
    even = [per_rank] * ranks.size
    mine, everyones, sent = rows(per_rank), rows(per_rank * ranks.size), rows(num_rows)
    functions = {
        "all_gather": lambda: wait(ranks.all_gather(mine)),
        "reduce_scatter": lambda: wait(ranks.reduce_scatter(everyones)),
        "all_to_all/even": lambda: wait(ranks.all_to_all(everyones, even, even)),
        "all_to_all/zipf": lambda: wait(ranks.all_to_all(sent, skewed_in, skewed)),
    }
    timings = time_together(functions, device, options)
    moved = dict.fromkeys(functions, per_rank * peers * row_bytes) | {"all_to_all/zipf": skewed[0] * peers * row_bytes}
    return [
        {"collective": name, **timing._asdict(), "gb_per_s": moved[name] / timing.ms / 1e6}
        for name, timing in timings.items()
    ]
