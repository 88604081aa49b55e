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
* the tokens' collectives alone, with the same sizes (`comm_ms`; for forward with backward, doubled).

`model_ms` is `local_ms + comm_ms`, the time expected without overlap. `share_of_model` is `model_ms` divided by the
measured time, so overlap can raise it above 1. `share_of_busiest` also accounts for skew: it multiplies `local_ms` by
`busiest`, the busiest rank's rows over the mean. Each call counts with the time of its slowest rank. Outputs and
gradients are compared before timing. An implementation that differs is not timed, and the command fails at its end.

All implementations of a configuration share its parameters, and none keeps gradients. A configuration that needs too
much memory, by `--plan`, has one row with the reason in `skipped`. `best` names the simplest form within 2 % of the
fastest; `--best` prints it for each shape and EP, over the routings.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from moe_layers.parallel.collectives import Ranks

from .common import plots
from .common.command import Command, each, print_rows
from .common.results_file import Row, Task
from .common.shapes import TINY, Shape, by_name
from .parallel.comparison import BEST_COLUMNS, bench_layer, best_forms
from .parallel.compilation import compile_kernels
from .parallel.implementations import IMPLEMENTATIONS
from .parallel.processes import process_group
from .parallel.rank_timing import bench_bandwidth, largest

# `num_tokens` is per rank.
SHAPES = by_name(
    Shape("qwen3-235b", 8192, 4096, 1536, 128, 8),
    Shape("deepseek-v3", 8192, 7168, 2048, 256, 8),
    Shape("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
    # For two ranks: each has the rows and experts of one rank of eight, and 4/7 of its communication.
    Shape("qwen3-235b-of-eight", 32768, 4096, 1536, 32, 2),
    Shape("deepseek-v3-of-eight", 32768, 7168, 2048, 64, 2),
    TINY,
)
MODELS = ("qwen3-235b", "deepseek-v3", "mixtral-8x7b")
DEFAULT_IMPLEMENTATIONS = [name for name in IMPLEMENTATIONS if "32 SMs" not in name and "4 chunks" not in name]
COLUMNS = ("shape", "ep", "routing", "pass", "implementation", "ms", "comm_ms", "local_ms", "model_ms")
COLUMNS += ("share_of_model", "busiest", "share_of_busiest", "times_baseline", "best", "peak_gb", "planned_gb")
COLUMNS += ("collective", "mb", "gb_per_s", "skipped")


def peak_bytes(shape: Shape, num_ranks: int, routing: str) -> int:
    """Return an upper bound on one rank's bytes, for `grouped_mm`, which needs the most of all implementations.

    The weights exist once. The bound adds one implementation's gradients and a copy of them, the inputs of the
    collectives alone, and the tensors of one forward with backward. A received row has 10 tensors as wide as a token
    and 8 as wide as an expert. A sent row has one float32 tensor, its gradient and two others. With skewed routing, one
    rank may get all rows. Memory of copies between GPUs also counts, because it is never freed.
    """
    itemsize, rows_sent = 2, shape.num_rows
    rows = rows_sent * (1 if routing == "even" else num_ranks)
    w_down = shape.num_experts // num_ranks * shape.d_model * shape.d_ff * itemsize
    weights = gradients = copied = 3 * w_down
    made = rows * (10 * shape.d_model + 8 * shape.d_ff) * itemsize
    made += rows_sent * shape.d_model * (2 * 4 + 2 * itemsize)
    collectives = (rows + rows_sent + (num_ranks + 1) * shape.num_tokens) * shape.d_model * itemsize
    tokens = shape.num_tokens * shape.d_model * (3 * 4 + 4 * itemsize)  # float32 while they are drawn
    mapped = ((num_ranks + 1) * shape.d_model * itemsize + num_ranks * shape.top_k * 4) * shape.num_tokens
    mapped = mapped if num_ranks > 1 else 0
    return weights + gradients + copied + made + collectives + tokens + mapped


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
    products = itertools.product(options.shapes, sizes, options.routing)
    return [Configuration(SHAPES[name], ep, routing) for name, ep, routing in products]


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    if options.plan:
        planned = configurations(options, options.ep or [1, 2, 4, 8])
        print_rows([configuration.about() for configuration in planned], ("shape", "ep", "routing", "planned_gb"))
        return
    with process_group(options.device) as device:
        yield from measurements(options, device)


def measurements(options: argparse.Namespace, device: torch.device) -> Iterator[Task]:
    """Yield the measurements of the ranks of a process group."""
    num_ranks = distributed.get_world_size()
    about = {"processes": num_ranks}
    everyone = Ranks.of(distributed.group.WORLD)
    for megabytes in options.megabytes if num_ranks > 1 else ():
        yield {"mb": megabytes, **about}, partial(bench_bandwidth, everyone, megabytes, device, options)
    sizes = options.ep or [2**power for power in range(num_ranks.bit_length()) if num_ranks % 2**power == 0]
    meshes = {ep: expert_mesh(device, ep) for ep in sizes}
    memory = torch.cuda.mem_get_info()[1] if device.type == "cuda" else float("inf")
    planned = configurations(options, sizes)
    fitting = [configuration for configuration in planned if 1e9 * configuration.planned_gb <= memory]
    if device.type == "cuda":
        compiled = dict.fromkeys((configuration.shape, meshes[configuration.ep]) for configuration in fitting)
        compile_kernels(list(compiled), options.routing, options.implementations, options.dtype)
    for configuration in planned:
        shared = {**configuration.about(), **about}
        if configuration in fitting:
            yield shared, partial(measure, configuration, meshes[configuration.ep], options, device)
        else:
            skipped = f"takes {configuration.planned_gb:.1f} GB of memory, and there are {memory / 1e9:.1f}"
            yield {**shared, "skipped": skipped}, lambda: [{}]


def measure(
    configuration: Configuration, mesh: DeviceMesh, options: argparse.Namespace, device: torch.device
) -> list[dict]:
    shape, _, routing = configuration
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows = bench_layer(shape, mesh, routing, options, device)
    if device.type == "cuda":
        peak_gb = largest([torch.cuda.max_memory_allocated() / 1e9], device).item()
        rows = [row | {"peak_gb": peak_gb} for row in rows]
    return rows


def expert_mesh(device: torch.device, ep: int) -> DeviceMesh:
    sizes = distributed.get_world_size() // ep, ep
    return init_device_mesh(device.type, sizes, mesh_dim_names=("efsdp", "ep"))["ep"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=MODELS)
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], default=["even", "zipf"])
    parser.add_argument("--ep", nargs="+", type=int, help="processes that share experts; default: 1, 2, 4, ... all")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=DEFAULT_IMPLEMENTATIONS)
    parser.add_argument("--megabytes", nargs="*", type=int, default=[16, 64, 256, 1024], help="sizes of collectives")
    parser.add_argument("--plan", action="store_true", help="only print the memory that each configuration takes")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")


def fail_if_wrong(options: argparse.Namespace, rows: list[Row]) -> None:
    if wrong := [row for row in rows if "implementation" in row and "skipped" in row]:
        raise SystemExit(f"not timed, since results differ: {wrong}")


READERS = {"--best": each(lambda path: print_rows(best_forms(plots.read(path)), BEST_COLUMNS))}
main = Command(__doc__, add_options, tasks, COLUMNS, READERS, finish=fail_if_wrong)


if __name__ == "__main__":
    main()
