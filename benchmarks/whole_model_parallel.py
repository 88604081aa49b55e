"""A whole model of transformers on several ranks that share its experts, against other ways to use them.

    torchrun --nproc-per-node 2 -m benchmarks.whole_model_parallel --commit COMMIT --output FILE
    torchrun --nproc-per-node 8 -m benchmarks.whole_model_parallel --models gpt-oss-20b --layers 8
    torchrun --nproc-per-node 2 -m benchmarks.whole_model_parallel --device cpu --models tiny --layers 2 --tokens 2x16
    python -m benchmarks.whole_model_parallel --plan [--measured FILE]

The model has the width of the published one, few layers, a vocabulary of 32,000 and random weights. Each rank has its
own tokens. A call is a forward and backward, with the communication that averages the gradients. Ways:

* `one_gpu`: every rank has the whole model and averages nothing, with these experts
* `shard_experts/DISPATCHER`: the ranks share the experts, FSDP2 shards the rest
* `fsdp2`: FSDP2 shards everything and gathers whole layers, with these experts
* `transformers/IMPLEMENTATION`: transformers' own expert parallelism and FSDP2, with `ep_implementation`

Before its times, the losses of a way and the norm of the averaged gradient must agree with those of transformers' own
experts on one rank. A way that fails has an `error` instead of times. Ways run one after another, because memory may
not hold two; `one_gpu` runs first and last, to show drift. The slowest rank of each call counts. `comm_ms` is the time
of collectives on the first rank, hidden or not. `peak_gib` includes parameters and gradients.

`--plan` predicts whole models on 8 and 64 GPUs, see `benchmarks.parallel.plan`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from moe_layers import clip_grad_norm_
from moe_layers.integrations.transformers import enable, shard_experts

from .common import plots
from .common.command import Command, print_rows
from .common.model_variants import MODELS, draw_tokens, free_memory, make_model, size
from .common.results_file import Row, Task, attempt
from .parallel import plan
from .parallel.processes import process_group
from .parallel.rank_timing import time_together

ONE = "one_gpu"
SHARDED = ("shard_experts/auto", "shard_experts/alltoall", "shard_experts/allgather", "shard_experts/overlapped")
BY_TRANSFORMERS = ("transformers/all_to_all", "transformers/moe_layers")
WAYS = (ONE, *SHARDED, "fsdp2", *BY_TRANSFORMERS)
COLUMNS = ("model", "layers", "batch", "length", "processes", "way", "ms", "tokens_per_s_per_gpu", "times_one_gpu")
COLUMNS += ("comm_ms", "comm_share", "peak_gib", "error")
EMPTY = dict.fromkeys(COLUMNS[6:])


def make(name: str, options: argparse.Namespace, model_name: str, device: torch.device) -> Any:
    """Return the model in one of the ways. All ranks draw the same weights."""
    model: Any = make_model(model_name, options.layers, str(device), options.dtype).train()
    kind, _, choice = name.partition("/")
    if kind == "transformers":
        return by_transformers(model, choice)
    enable(model, implementation=options.implementation)
    if kind == ONE:
        return model
    num_ranks = distributed.get_world_size()
    everyone = init_device_mesh(device.type, (num_ranks,))
    if kind == "shard_experts":
        mesh = init_device_mesh(device.type, (1, num_ranks), mesh_dim_names=("efsdp", "ep"))
        report = shard_experts(model, mesh["ep"], dispatcher=choice)
        for experts in report.experts.values():
            fully_shard(experts, mesh=mesh["efsdp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def by_transformers(model: Any, implementation: str) -> nn.Module:
    """Distribute a model as `from_pretrained` does with a `DistributedConfig`, without its files."""
    from transformers.distributed.utils import initialize_distributed_mesh

    num_ranks = distributed.get_world_size()
    sizes = {"fsdp_size": num_ranks, "ep_size": num_ranks}
    config = transformers.distributed.DistributedConfig(**sizes, ep_implementation=implementation)
    _, mesh_manager = initialize_distributed_mesh(config)
    return type(model).maybe_distribute_model(model, config, mesh_manager)


def run(model: nn.Module, tokens: Tensor) -> Tensor:  # scalar
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def expected(options: argparse.Namespace, model_name: str, tokens: Tensor) -> tuple[float, float]:
    """Return this rank's loss, and the norm of the ranks' mean gradient, with transformers' own experts."""
    model = make_model(model_name, options.layers, str(tokens.device), options.dtype).train()
    loss = run(model, tokens)
    for parameter in model.parameters():
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad)
            parameter.grad /= distributed.get_world_size()
    return loss.item(), clip_grad_norm_(model.parameters(), float("inf")).item()


def check(name: str, model: nn.Module, tokens: Tensor, wanted: tuple[float, float]) -> None:
    """Raise AssertionError, on all ranks, unless a call has the wanted loss and, where it is averaged, gradient."""
    loss = run(model, tokens).item()
    norm = wanted[1] if name == ONE else clip_grad_norm_(model.parameters(), float("inf")).item()
    unit = 1e-2 if tokens.is_cuda else 1e-4
    errors = torch.tensor([abs(loss / wanted[0] - 1) / unit, abs(norm / wanted[1] - 1) / (5 * unit)])
    errors = errors.to(tokens.device)
    distributed.all_reduce(errors, distributed.ReduceOp.MAX)
    assert errors.max() <= 1, f"loss {loss} and norm {norm} must be {wanted}"


def measure(
    name: str, options: argparse.Namespace, model_name: str, tokens: Tensor, wanted: tuple[float, float]
) -> Row:
    model = make(name, options, model_name, tokens.device)
    free_memory()
    check(name, model, tokens, wanted)
    call = partial(run, model, tokens)
    for _ in range(options.warm_up):
        call()
    row: Row = {}
    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        call()
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    timing = time_together({name: call}, tokens.device, rounds=options.rounds, round_ms=options.round_ms)[name]
    comm_ms = communication_ms(call, tokens.device)
    rate = 1e3 * tokens.numel() / timing.ms
    shares = {"comm_ms": comm_ms, "comm_share": comm_ms / timing.ms}
    return {**row, **timing._asdict(), "tokens_per_s_per_gpu": rate, **shares}


def communication_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds in which collectives of one call run, hidden or not."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if device.type == "cuda":
        events = [event for event in profiler.events() if "nccl" in event.name.lower() and event.device_time_total]
        return sum(event.device_time_total for event in events if not event.cpu_children) / 1e3
    return sum(event.cpu_time_total for event in profiler.events() if event.name.startswith("gloo:")) / 1e3


def bench(shared: Row, options: argparse.Namespace, device: torch.device) -> list[Row]:
    model_name, rank = shared["model"], distributed.get_rank()
    tokens = draw_tokens(shared["batch"] * distributed.get_world_size(), shared["length"], str(device))
    tokens = tokens.chunk(distributed.get_world_size())[rank]
    wanted = expected(options, model_name, tokens)
    free_memory()
    rows = []
    ways = [ONE, *(name for name in options.ways if name != ONE), ONE]
    for name in ways:
        found, error = attempt(partial(measure, name, options, model_name, tokens, wanted))
        rows.append({**shared, "way": name, **EMPTY, **(found or {}), "error": error})
        free_memory()
    one_ms = rows[0]["ms"]
    for row in rows:
        row["times_one_gpu"] = one_ms / row["ms"] if row["ms"] and one_ms else None
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["qwen3-30b-a3b", "gpt-oss-20b"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", nargs="+", type=size, metavar="BxS", default=[(4, 4096)], help="of each rank")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    implementations, ours = ("triton", "reference"), "of these experts; default: by device"
    parser.add_argument("--implementation", choices=implementations, help=ours)
    parser.add_argument("--warm-up", type=int, default=8, help="calls before the first timing")
    parser.add_argument("--plan", action="store_true", help="only predict whole models on 8 and 64 GPUs")
    parser.add_argument("--measured", type=Path, help="results of this benchmark, for --plan")
    parser.set_defaults(round_ms=500.0)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    if options.plan:
        rows = [] if options.measured is None else plots.read(options.measured)
        print(plan.basis(rows))
        print_rows(plan.predictions(rows), plan.COLUMNS)
        return
    with process_group(options.device) as device:
        for model in options.models:
            for batch, length in options.tokens:
                sizes = {"layers": options.layers, "batch": batch, "length": length}
                shared: Row = {"model": model, **sizes, "processes": distributed.get_world_size()}
                yield shared, partial(bench, shared, options, device)


main = Command(
    __doc__, add_options, tasks, COLUMNS, constants=lambda options: {"transformers": transformers.__version__}
)


if __name__ == "__main__":
    main()
