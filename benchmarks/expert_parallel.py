"""Expert parallelism: bandwidth of the collectives, and the layer with several numbers of ranks.

    torchrun --nproc-per-node 8 -m benchmarks.expert_parallel --commit $(git rev-parse --short HEAD) \\
        --output benchmarks/results/expert_parallel.json
    python -m benchmarks.expert_parallel --best benchmarks/results/expert_parallel.json
    python -m benchmarks.expert_parallel --plan

Every rank has equally many tokens, whatever the number of ranks. Implementations take turns in one run for each shape,
number of ranks that share the experts (EP) and routing:

* all-gather and all-to-all: whole, in two chunks, and in two chunks with SMs reserved for communication;
* the overlapped all-gather, in one chunk and in two;
* `grouped_mm` with a plain all-to-all;
* the layer on one GPU with as many rows and E / EP experts (`local_ms`);
* the tokens' collectives alone, with the same sizes (`comm_ms`; with backward twice).

The model without overlap is `local_ms + comm_ms`, and `share_of_model` is the model's time divided by the measured
time: values above 1 are gained by overlap. The model ignores skew, so `share_of_busiest` uses `local_ms` times
`busiest`, the rows of the busiest rank in even shares. The slowest rank of each call counts. Outputs and gradients of
all implementations are compared before timing. An implementation that differs is not timed, and the command fails at
its end.

All implementations of a configuration share its parameters, and none keeps gradients. A configuration that needs too
much memory, by `--plan`, or for which no time is left, has one row with the reason in `skipped`. `best` names the
simplest form within 2 % of the fastest; `--best` prints it for each shape and EP, over the routings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from moe_layers.parallel.collectives import Ranks

from .common.shapes import TINY, Shape
from .layer import environment, print_rows
from .parallel import best
from .parallel.comparison import bench_layer
from .parallel.compilation import compile_kernels
from .parallel.implementations import IMPLEMENTATIONS, dtype_for
from .parallel.memory import peak_bytes
from .parallel.rank_timing import bench_bandwidth, largest

# Tokens per rank.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-235b", 8192, 4096, 1536, 128, 8),
        Shape("deepseek-v3", 8192, 7168, 2048, 256, 8),
        Shape("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
        # For two ranks: each has the rows and experts of one rank of eight, and 4/7 of its communication.
        Shape("qwen3-235b-of-eight", 32768, 4096, 1536, 32, 2),
        Shape("deepseek-v3-of-eight", 32768, 7168, 2048, 64, 2),
        TINY,
    )
}
MODELS = ("qwen3-235b", "deepseek-v3", "mixtral-8x7b")
DEFAULT_IMPLEMENTATIONS = [name for name in IMPLEMENTATIONS if "32 SMs" not in name and "4 chunks" not in name]
COLUMNS = ("shape", "ep", "routing", "pass", "implementation", "ms", "comm_ms", "local_ms", "model_ms")
COLUMNS += ("share_of_model", "busiest", "share_of_busiest", "times_baseline", "best", "peak_gb", "planned_gb")


class Configuration(NamedTuple):
    shape: Shape
    ep: int  # ranks that share the experts
    routing: str

    @property
    def planned_gb(self) -> float:
        return peak_bytes(self.shape, self.ep, self.routing) / 1e9

    def about(self) -> dict:
        sizes = {"shape": self.shape.name, "ep": self.ep, "routing": self.routing}
        return sizes | {"tokens_per_process": self.shape.num_tokens, "planned_gb": self.planned_gb}


def configurations(options: argparse.Namespace, sizes: list[int]) -> list[Configuration]:
    return [
        Configuration(SHAPES[name], ep, routing)
        for name in options.shapes
        for ep in sizes
        for routing in options.routing
    ]


def start_processes() -> torch.device:
    # Some machines report NVLink multicast although it does not work.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=MODELS)
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], default=["even", "zipf"])
    parser.add_argument("--ep", nargs="+", type=int, help="processes that share experts; default: 1, 2, 4, ... all")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=DEFAULT_IMPLEMENTATIONS)
    parser.add_argument("--megabytes", nargs="*", type=int, default=[16, 64, 256, 1024], help="sizes of collectives")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=200.0, help="least milliseconds per timing and round")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing that may end later")
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write, whole after every configuration")
    parser.add_argument("--best", type=Path, help="only read such a file and print the best form per shape and EP")
    parser.add_argument("--plan", action="store_true", help="only print the memory that each configuration takes")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    started, options = time.monotonic(), parse(arguments)
    if options.best:
        rows = json.loads(options.best.read_text())
        print_rows(best.best_forms(rows), best.COLUMNS)
    elif options.plan:
        planned = configurations(options, options.ep or [1, 2, 4, 8])
        print_rows([each.about() for each in planned], ("shape", "ep", "routing", "planned_gb"))
    else:
        device = start_processes()
        rows: list[dict] = []
        run(options, device, rows, started)
        distributed.destroy_process_group()
        if wrong := [row for row in rows if "implementation" in row and "skipped" in row]:
            raise SystemExit(f"not timed, since results differ: {wrong}")


def run(options: argparse.Namespace, device: torch.device, rows: list[dict], started: float) -> None:
    """Add the measurements to `rows`. `started` is the start of the time budget."""
    num_processes, is_first = distributed.get_world_size(), distributed.get_rank() == 0
    about = environment(device.type, options.commit) | {"processes": num_processes}

    def report(measured: list[dict], columns: tuple[str, ...]) -> None:
        rows.extend({**row, **about} for row in measured)
        if is_first:
            skipped = [row for row in measured if "skipped" in row]
            if timed := [row for row in measured if "skipped" not in row]:
                print_rows(timed, columns)
            for row in skipped:
                print(row)
            sys.stdout.flush()
            if options.output:  # after every step, so that a stopped run keeps its results
                write_whole(options.output, json.dumps(rows, indent=1) + "\n")

    everyone = Ranks.of(distributed.group.WORLD)
    for megabytes in options.megabytes if num_processes > 1 else ():
        measured = bench_bandwidth(everyone, megabytes, device, options.rounds, options.round_ms)
        report(measured, ("collective", "processes", "mb", "ms", "gb_per_s"))
    sizes = options.ep or [2**power for power in range(num_processes.bit_length()) if num_processes % 2**power == 0]
    meshes = {ep: expert_mesh(device, ep) for ep in sizes}
    memory = memory_bytes(device)
    planned = configurations(options, sizes)
    fitting = list(dict.fromkeys((each.shape, meshes[each.ep]) for each in planned if 1e9 * each.planned_gb <= memory))
    if device.type == "cuda":
        compile_kernels(fitting, options.routing, options.implementations, dtype_for(device))
        if is_first:
            print(f"kernels are compiled after {time.monotonic() - started:.0f} s", flush=True)
    longest = 0.0
    for each in planned:
        begun = seconds_since(started, device)
        skipped = None
        if 1e9 * each.planned_gb > memory:
            skipped = f"takes {each.planned_gb:.1f} GB of memory, and there are {memory / 1e9:.1f}"
        elif begun + longest > options.seconds:
            skipped = f"may end after the {options.seconds:.0f} seconds that there are"
        if skipped:
            report([each.about() | {"skipped": skipped}], COLUMNS)
            continue
        measured = measure(each, meshes[each.ep], options, device)
        longest = max(longest, seconds_since(started, device) - begun)
        report([each.about() | row for row in measured], COLUMNS)


def measure(
    configuration: Configuration, mesh: DeviceMesh, options: argparse.Namespace, device: torch.device
) -> list[dict]:
    shape, _, routing = configuration
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    names, rounds, round_ms = options.implementations, options.rounds, options.round_ms
    rows = bench_layer(shape, mesh, routing, names, device, rounds=rounds, round_ms=round_ms)
    if device.type == "cuda":
        peak_gb = largest([torch.cuda.max_memory_allocated() / 1e9], device).item()
        rows = [row | {"peak_gb": peak_gb} for row in rows]
    return rows


def memory_bytes(device: torch.device) -> float:
    return torch.cuda.mem_get_info()[1] if device.type == "cuda" else float("inf")


def expert_mesh(device: torch.device, ep: int) -> DeviceMesh:
    sizes = distributed.get_world_size() // ep, ep
    return init_device_mesh(device.type, sizes, mesh_dim_names=("efsdp", "ep"))["ep"]


def seconds_since(started: float, device: torch.device) -> float:
    """Return the same elapsed time on every rank."""
    return largest([time.monotonic() - started], device).item()


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step, so that readers always find a complete file, even if this is interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.part")
    written.write_text(text)
    written.replace(path)


if __name__ == "__main__":
    main()
