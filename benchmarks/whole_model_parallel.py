"""A whole model of transformers on several ranks that share its experts, against other ways to use these ranks.

    torchrun --nproc-per-node 2 -m benchmarks.whole_model_parallel --commit COMMIT --output FILE
    torchrun --nproc-per-node 8 -m benchmarks.whole_model_parallel --models gpt-oss-20b --layers 8
    torchrun --nproc-per-node 2 -m benchmarks.whole_model_parallel --device cpu --models tiny --layers 2 --tokens 2x16
    python -m benchmarks.whole_model_parallel --plan [--measured FILE]

The model has the width of the published one, few layers, a vocabulary of 32,000 and random weights. Each rank has its
own tokens. A call is a forward and backward, with the communication that averages the gradients. Ways:

* `one_gpu`: every rank has the whole model with our experts, and averages nothing; omitted if two copies of the
  parameters take most of a GPU's memory
* `shard_experts/DISPATCHER`: all ranks share the experts, FSDP2 shards the rest
* `fsdp2`: FSDP2 shards everything and gathers whole layers, with our experts
* `transformers/IMPLEMENTATION`: transformers' own expert parallelism and FSDP2, with `ep_implementation`

Before a way is timed, its losses and the norm of its averaged gradient must agree with those of transformers' own
experts on one rank. Without `one_gpu` the norm must be that of the first way. A way that fails has an `error` instead
of times. Ways run one after another, because memory may not hold two; `one_gpu` runs first and last, to show drift. The
slowest rank of each call counts. `comm_ms` is the time of collectives on the first rank, hidden or not. `peak_gib`
includes parameters and gradients.

With balanced routing, token t gets the experts t * K to t * K + K - 1 modulo E, and the router's weights.

`--plan` predicts whole models on 8 and 64 GPUs, see `benchmarks.parallel.plan`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
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
from .common.model_variants import MODELS, compile_layers, draw_tokens, free_memory, make_model, size
from .common.results_file import Row, Task, attempt
from .parallel import plan
from .parallel.processes import process_group
from .parallel.rank_timing import time_together

ONE = "one_gpu"
SHARDED = ("shard_experts/auto", "shard_experts/alltoall", "shard_experts/allgather", "shard_experts/overlapped")
BY_TRANSFORMERS = ("transformers/all_to_all", "transformers/moe_layers")
WAYS = (ONE, *SHARDED, "fsdp2", *BY_TRANSFORMERS)
COLUMNS = ("model", "layers", "batch", "length", "routing", "checkpointing", "compiled", "processes", "way")
MEASURED = ("ms", "tokens_per_s_per_gpu", "times_one_gpu", "comm_ms", "comm_share", "peak_gib", "error")
COLUMNS += MEASURED
EMPTY = dict.fromkeys(MEASURED)


@dataclass
class Expected:
    loss: float  # loss of this rank's tokens
    norm: float | None  # norm of the ranks' mean gradient; None until a way has computed it


def build(shared: Row, options: argparse.Namespace, device: torch.device) -> Any:
    """Return the model with transformers' own experts."""
    model: Any = make_model(shared["model"], shared["layers"], str(device), options.dtype).train()
    if shared["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if shared["routing"] == "balanced":
        routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
        assert len(routers) == shared["layers"], "no layer's router may be missed"
        for router in routers:
            router.register_forward_hook(choose_in_turns)
    return model


def choose_in_turns(router: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Replace a router's choice [T, K], its last output, such that all experts get equally many tokens."""
    choice = outputs[-1]
    num_experts = router.weight.shape[0]
    turns = torch.arange(choice.numel(), device=choice.device, dtype=choice.dtype) % num_experts
    return *outputs[:-1], turns.view(choice.shape)


def make(name: str, shared: Row, options: argparse.Namespace, device: torch.device) -> Any:
    """Return the model in one of the ways. All ranks draw the same weights."""
    model = build(shared, options, device)
    kind, _, choice = name.partition("/")
    everyone = init_device_mesh(device.type, (distributed.get_world_size(),))
    ignored: set[nn.Parameter] = set()
    if kind == "transformers":
        model = by_transformers(model, choice)
    else:
        enable(model)
    if kind == "shard_experts":
        report = shard_experts(model, everyone, dispatcher=choice)
        ignored = {parameter for experts in report.experts.values() for parameter in experts.parameters()}
    if shared["compiled"]:
        compile_layers(model)
    if kind in (ONE, "transformers"):
        return model
    for layer in model.model.layers:
        fully_shard(layer, mesh=everyone, ignored_params=ignored)
    return fully_shard(model, mesh=everyone, ignored_params=ignored)


def by_transformers(model: Any, implementation: str) -> nn.Module:
    """Distribute a model as `from_pretrained` does with a `DistributedConfig`, but without reading files."""
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


def expected(shared: Row, options: argparse.Namespace, tokens: Tensor) -> Expected:
    """Return loss and gradient norm with transformers' experts. The norm is None if gradients need too much memory."""
    model = build(shared, options, tokens.device)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if tokens.is_cuda and 2 * num_bytes > 0.7 * torch.cuda.get_device_properties(tokens.device).total_memory:
        with torch.no_grad():
            return Expected(model(input_ids=tokens, labels=tokens).loss.item(), None)
    loss = run(model, tokens)
    for parameter in model.parameters():
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad)
            parameter.grad /= distributed.get_world_size()
    return Expected(loss.item(), clip_grad_norm_(model.parameters(), float("inf")).item())


def check(name: str, model: nn.Module, tokens: Tensor, wanted: Expected) -> None:
    """Assert on all ranks that every rank's loss and gradient norm are right. Check only the loss of `one_gpu`."""
    loss, norm = run(model, tokens).item(), wanted.norm
    if name != ONE:
        norm = clip_grad_norm_(model.parameters(), float("inf")).item()
    wanted.norm = norm if wanted.norm is None else wanted.norm
    assert norm is not None and wanted.norm is not None
    unit = 1e-2 if tokens.is_cuda else 1e-4
    errors = torch.tensor([abs(loss / wanted.loss - 1) / unit, abs(norm / wanted.norm - 1) / (5 * unit)])
    errors = errors.to(tokens.device)
    distributed.all_reduce(errors, distributed.ReduceOp.MAX)
    assert errors.max() <= 1, f"loss {loss} and norm {norm} must be {wanted}"


def measure(name: str, shared: Row, options: argparse.Namespace, tokens: Tensor, wanted: Expected) -> Row:
    model = make(name, shared, options, tokens.device)
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
    timing = time_together({name: call}, tokens.device, options)[name]
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
    rank = distributed.get_rank()
    tokens = draw_tokens(shared["batch"] * distributed.get_world_size(), shared["length"], str(device))
    tokens = tokens.chunk(distributed.get_world_size())[rank]
    wanted = expected(shared, options, tokens)
    free_memory()
    rows = []
    ways = [name for name in options.ways if name != ONE]
    for name in ways if wanted.norm is None else (ONE, *ways, ONE):
        found, error = attempt(partial(measure, name, shared, options, tokens, wanted))
        rows.append({**shared, "way": name, **EMPTY, **(found or {}), "error": error})
        free_memory()
    one_ms = rows[0]["ms"] if rows[0]["way"] == ONE else None
    for row in rows:
        row["times_one_gpu"] = one_ms / row["ms"] if row["ms"] and one_ms else None
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["qwen3-30b-a3b", "gpt-oss-20b"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", nargs="+", type=size, metavar="BxS", default=[(4, 4096)], help="batch of each rank")
    parser.add_argument("--routing", nargs="+", choices=("learned", "balanced"), default=["learned"])
    parser.add_argument("--checkpointing", action="store_true", help="checkpoint every layer")
    parser.add_argument("--compiled", action="store_true", help="compile every layer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
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
        for model, (batch, length), routing in product(options.models, options.tokens, options.routing):
            shared: Row = {"model": model, "layers": options.layers, "batch": batch, "length": length}
            shared |= {"routing": routing, "checkpointing": options.checkpointing, "compiled": options.compiled}
            shared["processes"] = distributed.get_world_size()
            yield shared, partial(bench, shared, options, device)


main = Command(
    __doc__, add_options, tasks, COLUMNS, constants=lambda options: {"transformers": transformers.__version__}
)


if __name__ == "__main__":
    main()
