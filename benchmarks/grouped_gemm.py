"""Grouped GEMMs alone: those of a layer, forward and backward, and one plain problem, against PyTorch and cuBLAS.

    python -m benchmarks.grouped_gemm --commit $(git rev-parse --short HEAD) --output results.json
    python -m benchmarks.grouped_gemm --rows-per-expert 96 160 320 --gemms up up_dgrad

Results of this package are checked before timing. Each round times every implementation once. Implementations:

    op                 grouped_gemm or grouped_gemm_wgrad, which makes the tile table and the output on each call
    kernel             the kernel that the op selects, with table and output made before, as in the layer
    torch_grouped_mm   torch.nn.functional.grouped_mm
    mm_loop            one torch.mm (cuBLAS) per group, whose sizes the host knows
    dense              one torch.mm of all rows with one matrix: the bound, with equal work but another result

The plain problem is so small that a call may take the CPU longer than the GPU. `host` "graph" replays a CUDA graph of
one call with all its launches; "eager" is the call itself. `--rows-per-expert` omits the plain problem, and gives the
layers as many tokens as each expert needs for this average number of rows.

`cpu_us` is the time until a call returns to Python, measured on a problem so small that the GPU never delays it. It is
measured for the ops and for the best kernel of each design. "run" checks whether the kernel supports its arguments.
"run assumed" does not. "run compiled" also passes the compiled kernel, so that the arguments are not inspected.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from moe_kernels import GroupedGemmArguments, WgradArguments, get_kernels, grouped_gemm, grouped_gemm_wgrad, reference
from moe_kernels.gemm.selection import select
from moe_kernels.testing import assert_accurate, make_logits

from .common import shapes
from .common.command import Command
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import host_us, in_a_graph, timed

GEMMS = ("up", "down", "up_dgrad", "down_dgrad", "up_wgrad", "down_wgrad")
COLUMNS = ("shape", "R", "gemm", "routing", "host", "implementation", "kernel", "ms", "tflops", "share_of_dense")
COLUMNS += ("cpu_us",)


@dataclass(frozen=True)
class Problem:
    """One grouped GEMM. `wgrad` reduces over rows: out[g] = a[start:end].T @ b[start:end], else out = a @ b[g]."""

    shape: str
    gemm: str
    routing: str
    offsets: Tensor  # [G] int32
    num_rows: int
    size_k: int
    size_n: int
    transposed: bool = False  # b is stored as [G, N, K]
    wgrad: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.num_rows * self.size_k * self.size_n

    def described(self) -> Row:
        """Return the fields that every row of the problem has."""
        sizes = {"R": self.num_rows, "G": len(self.offsets), "K": self.size_k, "N": self.size_n}
        return {"shape": self.shape, "gemm": self.gemm, "routing": self.routing, **sizes}

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:  # a, b, offsets
        generator = torch.Generator(self.offsets.device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, device=self.offsets.device, dtype=dtype, generator=generator)

        a = normal(self.num_rows, self.size_k)
        if self.wgrad:
            return a, normal(self.num_rows, self.size_n), self.offsets
        if self.transposed:
            return a, normal(len(self.offsets), self.size_n, self.size_k).transpose(1, 2), self.offsets
        return a, normal(len(self.offsets), self.size_k, self.size_n), self.offsets


def layer_problems(shape: Shape, routing: str, device: str) -> Iterator[Problem]:
    """Yield the six GEMMs of a layer, with weights stored as w_up [E, 2F, D] and w_down [E, D, F]."""
    generator = torch.Generator(device).manual_seed(0)
    logits = make_logits(shape.num_tokens, shape.num_experts, routing, device, generator)
    experts = reference.topk_routing(logits, shape.top_k).topk_experts
    offsets = reference.sort_by_expert(experts, shape.num_experts).offsets
    problem = partial(Problem, shape.name, routing=routing, offsets=offsets, num_rows=shape.num_rows)
    d_model, d_ff = shape.d_model, shape.d_ff
    yield problem("up", size_k=d_model, size_n=2 * d_ff, transposed=True)
    yield problem("down", size_k=d_ff, size_n=d_model, transposed=True)
    yield problem("up_dgrad", size_k=2 * d_ff, size_n=d_model)
    yield problem("down_dgrad", size_k=d_model, size_n=d_ff)
    yield problem("up_wgrad", size_k=2 * d_ff, size_n=d_model, wgrad=True)
    yield problem("down_wgrad", size_k=d_model, size_n=d_ff, wgrad=True)


def plain_problem(num_rows: int, num_groups: int, size_k: int, size_n: int, device: str) -> Problem:
    """Return a problem with equal groups and matrices stored as [G, K, N]."""
    offsets = (torch.arange(1, num_groups + 1, device=device) * num_rows // num_groups).int()
    name = f"{num_rows}x{size_n}x{size_k}-g{num_groups}"
    return Problem(name, "plain", "even", offsets, num_rows, size_k, size_n)


def implementations(problem: Problem, a: Tensor, b: Tensor, offsets: Tensor) -> dict[str, Callable[[], Tensor]]:
    ends = offsets.tolist()
    pieces = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if problem.wgrad:
        out = a.new_empty(len(ends), problem.size_k, problem.size_n)

        def mm_loop() -> Tensor:
            for g, rows in enumerate(pieces):
                torch.mm(a[rows].t(), b[rows], out=out[g])
            return out

        op, left, right = grouped_gemm_wgrad, a.t(), b
    else:
        out = a.new_empty(problem.num_rows, problem.size_n)

        def mm_loop() -> Tensor:
            for matrix, rows in zip(b, pieces, strict=True):
                torch.mm(a[rows], matrix, out=out[rows])
            return out

        op, left, right = grouped_gemm, a, b[0]
    args = kernel_arguments(problem, a, b, offsets)
    kernel = select(args)

    def run_kernel() -> Tensor:
        kernel.run(args, assume_supported_args=True)
        return args.out

    return {
        "op": partial(op, a, b, offsets),
        "kernel": run_kernel,
        "torch_grouped_mm": partial(functional.grouped_mm, left, b, offs=offsets),
        "mm_loop": mm_loop,
        "dense": partial(torch.mm, left, right),
    }


def kernel_arguments(problem: Problem, a: Tensor, b: Tensor, offsets: Tensor) -> GroupedGemmArguments | WgradArguments:
    """Return arguments with the output, and with a tile table for the selected kernel's tile height."""
    if problem.wgrad:
        out = a.new_empty(len(offsets), problem.size_k, problem.size_n)
        return WgradArguments(a, b, out, tile_table=reference.tile_table(offsets, len(a), 128))
    out = a.new_empty(problem.num_rows, problem.size_n)
    height = select(GroupedGemmArguments(a, b, out, offsets=offsets)).metadata.design.tile_shape[0]
    return GroupedGemmArguments(a, b, out, tile_table=reference.tile_table(offsets, len(a), height))


def check(problem: Problem, functions: dict[str, Callable[[], Tensor]], operands: tuple[Tensor, ...]) -> None:
    """Apply the tests' error budget to our results; float32 without TF32 is exact in comparison with 16-bit ones."""
    op = reference.grouped_gemm_wgrad if problem.wgrad else reference.grouped_gemm
    a, b, offsets = operands
    wider = torch.float64 if a.dtype == torch.float32 else torch.float32
    baseline, exact = op(a, b, offsets), op(a.to(wider), b.to(wider), offsets)
    for name in ("op", "kernel"):
        assert_accurate(functions[name](), baseline, exact, f"{problem.shape} {problem.gemm} {name}")


def bench_problem(problem: Problem, options: argparse.Namespace) -> list[Row]:
    operands = problem.operands(options.dtype)
    functions = implementations(problem, *operands)
    check(problem, functions, operands)
    torch.cuda.empty_cache()  # does nothing without a GPU
    calls = {("eager", name): function for name, function in functions.items()}
    if options.device == "cuda" and problem.gemm == "plain":
        calls |= {("graph", name): in_a_graph(function) for name, function in functions.items()}
    timings = timed(calls, options)
    selected = select(kernel_arguments(problem, *operands)).metadata.kernel_name
    rows = []
    for (host, name), timing in timings.items():
        kernel = selected if name in ("op", "kernel") else None
        row = {**problem.described(), "implementation": name, "kernel": kernel, **timing._asdict()}
        row |= {"tflops": problem.flops / timing.ms / 1e9, "share_of_dense": timings[host, "dense"].ms / timing.ms}
        rows.append({**row, "host": host})
    return rows


def bench_cpu(options: argparse.Namespace) -> list[Row]:
    """Return rows with the CPU time of a call, on a problem that takes the GPU less time than the CPU."""
    problem = plain_problem(512, 4, 128, 256, options.device)
    operands = problem.operands(options.dtype)
    functions = implementations(problem, *operands)
    check(problem, functions, operands)
    args = kernel_arguments(problem, *operands)
    del functions["kernel"]
    best_of_each_design = {type(kernel): kernel for kernel in reversed(get_kernels(args))}
    for kernel in best_of_each_design.values():
        artifact, name = kernel.compile(args), kernel.metadata.kernel_name
        made = kernel.with_metadata(args, None)  # with a tile table if the kernel reads one, for its tile height
        functions[f"run {name}"] = partial(kernel.run, made)
        functions[f"run assumed {name}"] = partial(kernel.run, made, assume_supported_args=True)
        functions[f"run compiled {name}"] = partial(kernel.run, made, artifact, assume_supported_args=True)
    num_calls, rounds = (20, 25) if options.device == "cuda" else (1, 3)  # fewer if the CPU also runs the kernels
    found = host_us(functions, time.perf_counter, options.device, batch=num_calls, rounds=rounds)
    return [
        {**problem.described(), "gemm": "cpu", "implementation": name, "cpu_us": microseconds}
        for name, microseconds in found.items()
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "tuned")
    parser.add_argument("--gemms", nargs="+", choices=GEMMS, default=GEMMS)
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], default=["even", "zipf"])
    parser.add_argument("--rows-per-expert", nargs="+", type=int, default=[], metavar="ROWS")
    parser.set_defaults(round_ms=100.0)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    chosen = shapes.shapes_named(options.shapes)
    if options.rows_per_expert:
        sizes = product(chosen, options.rows_per_expert)
        chosen = [replace(shape, num_tokens=rows * shape.num_experts // shape.top_k) for shape, rows in sizes]
    else:
        yield {"gemm": "cpu"}, partial(bench_cpu, options)
        plain = (8192, 12, 1024, 2048) if options.device == "cuda" else (64, 3, 32, 16)
        yield {"gemm": "plain"}, partial(bench_problem, plain_problem(*plain, options.device), options)
    for shape in chosen:
        for routing in options.routing:
            for problem in layer_problems(shape, routing, options.device):
                if problem.gemm in options.gemms:
                    shared = {"shape": shape.name, "gemm": problem.gemm, "routing": routing, "R": shape.num_rows}
                    yield shared, partial(bench_problem, problem, options)


main = Command(__doc__, add_options, tasks, COLUMNS)


if __name__ == "__main__":
    main()
