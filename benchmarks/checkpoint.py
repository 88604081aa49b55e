"""Loading one layer of Qwen3-30B-A3B's size from per-expert tensors, against `dd` over the same files.

    python -m benchmarks.checkpoint --commit $(git rev-parse --short HEAD) --output benchmarks/results/checkpoint.json

The files are written first, so that the page cache holds them. The loaded layer is compared with the written one before
any timing. Loads and reads by `dd of=/dev/null bs=16M` take turns. "share" is the load's bytes per second over dd's.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from moe_layers import MoEFeedForward

from .common.command import Command
from .common.results_file import Row, Task
from .common.shapes import Shape, shapes_named


def read_by_dd(directory: Path) -> None:
    for path in sorted(directory.glob("*.safetensors")):
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M"], check=True, capture_output=True)


def load(directory: Path, device: str) -> MoEFeedForward:
    layer = MoEFeedForward.from_checkpoint(directory, device=device)
    if device != "cpu":
        torch.cuda.synchronize()
    return layer


def check(actual: MoEFeedForward, written: MoEFeedForward) -> None:
    state = actual.state_dict()
    for name, tensor in written.state_dict().items():
        if not torch.equal(state[name].cpu(), tensor):
            raise AssertionError(f"{name} was not loaded bit by bit")


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(shape: Shape, device: str, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "layer"
        torch.manual_seed(0)
        written = MoEFeedForward(shape.d_model, shape.d_ff, shape.num_experts, shape.top_k, dtype=torch.bfloat16)
        written.save_checkpoint(directory, layout="per_expert", max_shard_bytes=400_000_000)
        check(load(directory, device), written)
        num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        dd, ours = [], []
        for _ in range(rounds):
            dd.append(seconds(lambda: read_by_dd(directory)))
            ours.append(seconds(lambda: load(directory, device)))
    gb = num_bytes / 1e9
    result = {"shape": shape.name, "device": device, "gb": gb, "dd_s": dd, "load_s": ours}
    result |= {"dd_gb_per_s": gb / statistics.median(dd), "load_gb_per_s": gb / statistics.median(ours)}
    return [{**result, "share": result["load_gb_per_s"] / result["dd_gb_per_s"]}]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="name of a layer")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu", rounds=7)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    (shape,) = shapes_named([options.shape])
    for device in dict.fromkeys(["cpu", options.device]):
        yield {"shape": shape.name, "device": device}, partial(measure, shape, device, options.rounds)


def machine(options: argparse.Namespace) -> Row:
    cores = len(os.sched_getaffinity(0))
    return {"benchmark": "checkpoint", "cpu_cores": cores, "machine": platform.machine()}


COLUMNS = ("shape", "device", "load_gb_per_s", "dd_gb_per_s", "share")
main = Command(__doc__, add_options, tasks, COLUMNS, constants=machine)


if __name__ == "__main__":
    main()
