"""Expert parallelism: bandwidth of the collectives, and the layer at several numbers of processes.

    torchrun --nproc-per-node 8 -m benchmarks.expert_parallel --commit $(git rev-parse --short HEAD) \
        --output benchmarks/results/expert_parallel.json

Every process has as many tokens, whatever the number of processes. For each shape, number of processes that share the
experts (EP) and routing, in the same run and taking turns: both dispatchers, whole, in two chunks, and so with SMs
reserved for communication; `grouped_mm` with a plain all-to-all; the layer on one GPU with as many rows and E / EP
experts (`local_ms`); and the collectives of the tokens alone, of the same sizes (`comm_ms`; with backward twice). The
model without overlap is the sum of the last two, and `share_of_model` its part of the measured time: above 1 is what
overlap gains. Of each call the slowest process counts. Outputs and gradients of all implementations are compared before
anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from moe_layers import ExpertParallel, MoEFeedForward
from moe_layers.collectives import Ranks, wait

from .grouped_mm_parallel import TorchAllToAll
from .layer import environment, make_tokens, passes, print_rows
from .parallel_timing import bench_bandwidth, time_together
from .shapes import TINY, Shape

# Tokens of each process.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-235b", 8192, 4096, 1536, 128, 8),
        Shape("deepseek-v3", 8192, 7168, 2048, 256, 8),
        Shape("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
        TINY,
    )
}
STYLES = {
    f"{dispatcher}{form}": ExpertParallel(dispatcher, mean_grads=False, **options)
    for dispatcher in ("alltoall", "allgather")
    for form, options in {
        "": {},
        "/2 chunks": {"chunks": 2},
        "/2 chunks, 16 SMs reserved": {"chunks": 2, "reserved_sms": 16},
    }.items()
}
COLUMNS = ("shape", "ep", "routing", "pass", "implementation", "ms", "comm_ms", "local_ms", "model_ms")
COLUMNS += ("share_of_model", "times_baseline", "tokens_per_s")
BASELINE = "torch_grouped_mm"


def implementation_for(device_type: str) -> str:
    return "triton" if device_type == "cuda" else "reference"


def make_layer(shape: Shape, mesh: DeviceMesh, style: ExpertParallel, dtype: torch.dtype) -> MoEFeedForward:
    """With the same router everywhere, and experts that were never whole."""
    sizes = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    layer = MoEFeedForward(*sizes, device="meta", dtype=dtype, implementation=implementation_for(mesh.device_type))
    parallelize_module(layer, mesh, style, src_data_rank=None)
    layer.to_empty(device=mesh.device_type)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        nn.init.normal_(local.data, std=0.02)
    return layer


def with_dispatcher(layer: MoEFeedForward, style: ExpertParallel, mesh: DeviceMesh) -> MoEFeedForward:
    """Another layer of the same parameters."""
    other = MoEFeedForward(layer.d_model, 1, layer.num_experts, layer.router.top_k, device="meta")
    parallelize_module(other, mesh, style, src_data_rank=None)
    experts = other.experts
    other.router, other.experts = layer.router, copy.copy(layer.experts)
    other.experts.reserved_sms = experts.reserved_sms
    return other


def local_layer(shape: Shape, num_ranks: int, device: torch.device, dtype: torch.dtype) -> tuple[MoEFeedForward, int]:
    """(a layer of one process with as many rows and experts as each has, its tokens)."""
    num_experts = shape.num_experts // num_ranks
    top_k = min(shape.top_k, num_experts)
    torch.manual_seed(0)
    factory = {"device": device, "dtype": dtype, "implementation": implementation_for(device.type)}
    layer = MoEFeedForward(shape.d_model, shape.d_ff, num_experts, top_k, **factory)
    return layer, shape.num_rows // top_k


def check(modules: dict[str, nn.Module], tokens: Tensor) -> None:
    """Raises AssertionError unless outputs and gradients, of a few experts, agree by the norm of their differences."""
    dout = torch.randn_like(tokens)
    results = {}
    for name, module in modules.items():
        module.zero_grad()
        leaf = tokens.detach().requires_grad_()
        out = module(leaf)
        out.backward(dout)
        layer = module.layer if isinstance(module, TorchAllToAll) else module
        gradients = [_local(parameter.grad)[:4].clone() for parameter in layer.parameters()]
        results[name] = [out.detach(), leaf.grad, *gradients]
        module.zero_grad()
    expected = results.pop("alltoall")
    for name, actual in results.items():
        tolerance = 1e-4
        if tokens.dtype == torch.bfloat16:
            tolerance = 0.15 if name == BASELINE else 0.02  # the baseline's logits are rounded, too
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            error = (a.float() - b.float()).norm() / b.float().norm()
            assert error < tolerance, f"{name}: result {number} differs from that of alltoall by {error:.2g}"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def token_collectives(layer: MoEFeedForward, tokens: Tensor, ranks: Ranks) -> dict[str, Callable[[], object]]:
    """By dispatcher, the collectives that move tokens in a forward, of the sizes that this routing makes."""
    with torch.no_grad():
        choices = layer.router(tokens).topk_experts
    sent = torch.bincount(choices.flatten().long(), minlength=layer.num_experts).view(ranks.size, -1).sum(1)
    ones = [1] * ranks.size
    received = wait(ranks.all_to_all(sent, ones, ones)).tolist()
    sent = sent.tolist()
    leaving, arriving = (tokens.new_zeros(sum(rows), tokens.shape[1]) for rows in (sent, received))
    everyones = tokens.new_zeros(ranks.size * len(tokens), tokens.shape[1])

    def alltoall() -> None:
        wait(ranks.all_to_all(leaving, received, sent))
        wait(ranks.all_to_all(arriving, sent, received))

    def allgather() -> None:
        wait(ranks.all_gather(tokens))
        wait(ranks.reduce_scatter(everyones))

    return {"alltoall": alltoall, "allgather": allgather}


def bench_layer(
    shape: Shape, mesh: DeviceMesh, routing: str, device: torch.device, rounds: int, round_ms: float
) -> list[dict]:
    """Rows of results for one shape, number of processes and routing."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ranks = Ranks.of(mesh.get_group())
    layer = make_layer(shape, mesh, STYLES["alltoall"], dtype)
    tokens = make_tokens(layer, shape, routing, dtype).roll(distributed.get_rank(), 0)
    modules: dict[str, nn.Module] = {
        name: with_dispatcher(layer, style, mesh) if name != "alltoall" else layer for name, style in STYLES.items()
    }
    modules[BASELINE] = TorchAllToAll(layer, ranks)
    check(modules, tokens)
    local, num_local = local_layer(shape, ranks.size, device, dtype)
    functions = {f"{name}/{which}": run for name, m in modules.items() for which, run in passes(m, tokens).items()}
    local_tokens = make_tokens(
        local, replace(shape, num_tokens=num_local, num_experts=local.num_experts), "even", dtype
    )
    functions |= {f"local/{which}": run for which, run in passes(local, local_tokens).items()}
    functions |= {f"comm/{name}": run for name, run in token_collectives(layer, tokens, ranks).items()}
    timings = time_together(functions, device, rounds=rounds, round_ms=round_ms)
    rows = []
    for which, trips in (("forward", 1), ("forward+backward", 2)):
        for name in modules:
            timing = timings[f"{name}/{which}"]
            comm_ms = trips * timings[f"comm/{'allgather' if name.startswith('allgather') else 'alltoall'}"].ms
            local_ms = timings[f"local/{which}"].ms
            rows.append(
                {
                    "shape": shape.name,
                    "ep": ranks.size,
                    "tokens_per_process": shape.num_tokens,
                    "routing": routing,
                    "pass": which,
                    "implementation": name,
                    **timing._asdict(),
                    "comm_ms": comm_ms,
                    "local_ms": local_ms,
                    "model_ms": comm_ms + local_ms,
                    "share_of_model": (comm_ms + local_ms) / timing.ms,
                    "times_baseline": timings[f"{BASELINE}/{which}"].ms / timing.ms,
                    "tokens_per_s": 1e3 * shape.num_tokens * distributed.get_world_size() / timing.ms,
                }
            )
    return rows


def start_processes() -> torch.device:
    # NVLink multicast is not available on every machine whose GPUs say it is.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != TINY.name])
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], default=["even", "zipf"])
    parser.add_argument("--ep", nargs="+", type=int, help="processes that share experts; default: 1, 2, 4, ... all")
    parser.add_argument("--megabytes", nargs="*", type=int, default=[16, 64, 256, 1024], help="sizes of collectives")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=200.0, help="least milliseconds per timing and round")
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    device = start_processes()
    run(options, device, [])
    distributed.destroy_process_group()


def run(options: argparse.Namespace, device: torch.device, rows: list[dict]) -> None:
    """Add what is measured to `rows`."""
    num_processes, is_first = distributed.get_world_size(), distributed.get_rank() == 0
    about = environment(device.type, options.commit) | {"processes": num_processes}

    def report(measured: list[dict], columns: list[str]) -> None:
        rows.extend({**row, **about} for row in measured)
        if is_first:
            print_rows(measured, columns)
            if options.output:  # after every step, so that a stopped run keeps what it measured
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(rows, indent=1) + "\n")

    sizes = options.ep or [2**power for power in range(num_processes.bit_length()) if num_processes % 2**power == 0]
    everyone = Ranks.of(distributed.group.WORLD)
    for megabytes in options.megabytes if num_processes > 1 else ():
        measured = bench_bandwidth(everyone, megabytes, device, options.rounds, options.round_ms)
        report(measured, ["collective", "processes", "mb", "ms", "gb_per_s"])
    for ep in sizes:
        mesh = init_device_mesh(device.type, (num_processes // ep, ep), mesh_dim_names=("efsdp", "ep"))["ep"]
        for name in options.shapes:
            for routing in options.routing:
                measured = bench_layer(SHAPES[name], mesh, routing, device, options.rounds, options.round_ms)
                report(measured, list(COLUMNS))
                if device.type == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
