"""Timing of several functions in turns."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from moe_kernels.tools.tune import captured, times_of_calls

Name = TypeVar("Name")  # a function's name, or a tuple of names


class Timing(NamedTuple):
    """Milliseconds per call: median, 20th and 80th percentile over all calls of all rounds."""

    ms: float
    ms_p20: float
    ms_p80: float

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


def time_interleaved(
    functions: dict[Name, Callable[[], object]], device: str, *, rounds: int = 3, round_ms: float = 200.0
) -> dict[Name, Timing]:
    """Time every function for at least `round_ms` per round, in turns, so that drifting clocks affect all equally."""
    calls = {name: _calls_for(function, device, round_ms) for name, function in functions.items()}
    samples: dict[Name, list[float]] = {name: [] for name in functions}
    for name in turns(list(functions), rounds):
        samples[name] += _time_calls(functions[name], device, calls[name])
    return {name: Timing.of(values) for name, values in samples.items()}


def timed(functions: dict[Name, Callable[[], object]], options: argparse.Namespace) -> dict[Name, Timing]:
    """Time every function in turns, by the options of a command."""
    return time_interleaved(functions, options.device, rounds=options.rounds, round_ms=options.round_ms)


def host_us(
    functions: dict[str, Callable[[], object]],
    clock: Callable[[], float],
    device: str,
    *,
    batch: int = 20,
    rounds: int = 15,
) -> dict[str, float]:
    """Return median microseconds of `clock` per call of every function, in turns, without waiting for the GPU.

    The GPU is idle when a turn begins. `batch` calls of a turn must not fill the GPU's queue.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for name in turns(list(functions), rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        for _ in range(batch):
            functions[name]()
        samples[name].append(1e6 * (clock() - begin) / batch)
    return {name: statistics.median(values) for name, values in samples.items()}


def turns(names: list[Name], rounds: int) -> Iterator[Name]:
    """Yield every name once per round, in an order that differs between rounds but is the same in every run.

    The previous function determines the GPU's temperature and clock, so in a fixed order one name would always profit.
    """
    for seed in range(rounds):
        yield from random.Random(seed).sample(names, len(names))


def _calls_for(function: Callable[[], object], device: str, round_ms: float) -> int:
    for _ in range(3):  # compile and warm up
        function()
    return max(3, int(round_ms / max(statistics.median(_time_calls(function, device, 3)), 1e-3)) + 1)


def _time_calls(function: Callable[[], object], device: str, num_calls: int) -> list[float]:
    """Return the milliseconds of each call."""
    if device == "cpu":
        times = [time.perf_counter()]
        for _ in range(num_calls):
            function()
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(times)]
    torch.cuda.synchronize()
    return times_of_calls(function, num_calls)


def in_a_graph(function: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays the launches of `function`."""
    return captured(function).replay


def copy_bytes_per_ms(device: str) -> float:
    """Return the bytes per millisecond that a large copy reads and writes."""
    source = torch.empty(2**30 if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_interleaved({"copy": lambda: target.copy_(source)}, device)["copy"].ms


def timed_against_copy(
    runs: dict[str, tuple[Callable[[], object], int]],  # name -> (function, bytes that it reads and writes)
    options: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Return the fields of a row by name: times, GB/s, and the share of a large copy's speed."""
    timings = timed({name: function for name, (function, _) in runs.items()}, options)
    speed = copy_bytes_per_ms(options.device)
    found = {}
    for name, (_, num_bytes) in runs.items():
        ms = timings[name].ms
        shares = {"gb_per_s": num_bytes / ms / 1e6, "share_of_copy": num_bytes / ms / speed}
        found[name] = {**timings[name]._asdict(), **shares}
    return found
