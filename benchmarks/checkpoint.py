"""Loading one layer of Qwen3-30B-A3B's size from per-expert tensors, against `dd` over the same files.

    python -m benchmarks.checkpoint --commit $(git rev-parse --short HEAD) --output benchmarks/results/checkpoint.json

The files are written first, so that the page cache holds them. The loaded layer is compared with the written one before
any timing. Loads and reads by `dd of=/dev/null bs=16M` take turns. "share" is the layer's bytes per second divided by
dd's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_layers import MoEFeedForward

from .common.shapes import SHAPES, TINY, Shape


def write_layer(shape: Shape, directory: Path) -> MoEFeedForward:
    torch.manual_seed(0)
    layer = MoEFeedForward(shape.d_model, shape.d_ff, shape.num_experts, shape.top_k, dtype=torch.bfloat16)
    layer.save_checkpoint(directory, layout="per_expert", max_shard_bytes=400_000_000)
    return layer


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


def measure(shape: Shape, device: str, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "layer"
        written = write_layer(shape, directory)
        check(load(directory, device), written)
        num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        dd, ours = [], []
        for _ in range(rounds):
            dd.append(seconds(lambda: read_by_dd(directory)))
            ours.append(seconds(lambda: load(directory, device)))
    gb = num_bytes / 1e9
    result = {"shape": shape.name, "device": device, "gb": gb, "dd_s": dd, "load_s": ours}
    result |= {"dd_gb_per_s": gb / statistics.median(dd), "load_gb_per_s": gb / statistics.median(ours)}
    return {**result, "share": result["load_gb_per_s"] / result["dd_gb_per_s"]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=[*SHAPES, TINY.name])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    shape = {**SHAPES, TINY.name: TINY}[options.shape]
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    record = {
        "benchmark": "checkpoint",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": options.commit,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "results": [measure(shape, device, options.rounds) for device in devices],
    }
    for result in record["results"]:
        print(
            f"{result['shape']} to {result['device']}: {result['load_gb_per_s']:.2f} GB/s, "
            f"dd {result['dd_gb_per_s']:.2f} GB/s, share {result['share']:.2f}"
        )
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
