"""Independent square products in one launch against a loop of cuBLAS calls.

    python -m benchmarks.grouped_gemm_list --commit $(git rev-parse --short HEAD) --output results.json

Every result is checked before timing. Each round times every implementation once. Implementations:

    mm_loop     one torch.mm (cuBLAS) per problem, which allocates its output
    op          grouped_gemm_list, which makes the outputs and the table on each call
    prepared    GroupedProblem.run with the selected kernel
    pointer     GroupedProblem.run with the pointer kernel that is fastest here, by kernel time
    tma         the same for the TMA kernels

If the GPU waits for the host, times with `host` "eager" include the host time of a call. "graph" replays a CUDA graph,
so its times are GPU times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moe_kernels import GroupedProblem, get_kernels, grouped_gemm_list, reference
from moe_kernels.testing import assert_accurate

from .common.command import Command
from .common.results_file import Row, Task
from .common.timing import in_a_graph, time_interleaved, timed

# (number of problems, their M = N = K)
PROBLEMS = ((4, 128), (4, 256), (4, 512), (4, 1024), (64, 128))
COLUMNS = ("problem", "host", "implementation", "kernel", "ms", "ms_p20", "ms_p80", "tflops", "speedup_over_mm_loop")


def make_lists(num_problems: int, size: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    shape = num_problems, size, size
    a, b = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2))
    return list(a.unbind()), list(b.unbind())


def check(outs: list[Tensor], a_list: list[Tensor], b_list: list[Tensor]) -> None:
    """Apply the tests' error budget."""
    baseline = reference.grouped_gemm_list(a_list, b_list)
    exact = reference.grouped_gemm_list([a.double() for a in a_list], [b.double() for b in b_list])
    assert_accurate(*(torch.stack(matrices) for matrices in (outs, baseline, exact)))


def prepared_problems(a_list: list[Tensor], b_list: list[Tensor]) -> dict[str, list[GroupedProblem]]:
    """Return problems by name: "prepared" with the selected kernel, "pointer" and "tma" with each supported kernel."""
    selected = GroupedProblem.from_lists(a_list, b_list)
    found: dict[str, list[GroupedProblem]] = {"prepared": [selected], "pointer": [], "tma": []}
    for kernel in get_kernels(selected.args) if selected.kernel is not None else ():
        problem = GroupedProblem.from_lists(a_list, b_list, kernel=kernel)
        found["tma" if kernel.metadata.design.tma else "pointer"].append(problem)
    return {name: problems for name, problems in found.items() if problems}


def fastest(problems: list[GroupedProblem], device: str) -> GroupedProblem:
    if device == "cpu" or len(problems) == 1:
        return problems[0]
    functions = {str(i): in_a_graph(problem.run) for i, problem in enumerate(problems)}
    timings = time_interleaved(functions, device, rounds=2, round_ms=20.0)
    return problems[int(min(timings, key=lambda name: timings[name].ms))]


def bench(num_problems: int, size: int, options: argparse.Namespace) -> list[Row]:
    device, dtype = options.device, options.dtype
    a_list, b_list = make_lists(num_problems, size, device, dtype)
    problems = {}
    for name, candidates in prepared_problems(a_list, b_list).items():
        for problem in candidates:
            check(problem.run(), a_list, b_list)
        problems[name] = fastest(candidates, device)
    check(grouped_gemm_list(a_list, b_list), a_list, b_list)

    def loop() -> list[Tensor]:
        return [torch.mm(a, b) for a, b in zip(a_list, b_list, strict=True)]

    functions = {"eager/mm_loop": loop, "eager/op": partial(grouped_gemm_list, a_list, b_list)}
    functions |= {f"eager/{name}": problem.run for name, problem in problems.items()}
    if device == "cuda":
        functions["graph/mm_loop"] = in_a_graph(loop)
        functions |= {f"graph/{name}": in_a_graph(problem.run) for name, problem in problems.items()}
    timings = timed(functions, options)
    kernels = {name: problem.kernel for name, problem in problems.items()}
    sizes = {"G": num_problems, "N": size, "dtype": str(dtype)[6:]}
    rows = []
    for name, timing in timings.items():
        host, implementation = name.split("/")
        kernel = kernels.get(implementation)
        row = {**sizes, "host": host, "implementation": implementation}
        row |= {"kernel": kernel.metadata.kernel_name if kernel else None, **timing._asdict()}
        row["tflops"] = 2e-9 * num_problems * size**3 / timing.ms
        rows.append({**row, "speedup_over_mm_loop": timings[f"{host}/mm_loop"].ms / timing.ms})
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", metavar="GxN", default=[f"{g}x{n}" for g, n in PROBLEMS])


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    for problem in options.problems:
        yield {"problem": problem}, partial(bench, *map(int, problem.split("x")), options)


main = Command(__doc__, add_options, tasks, COLUMNS)


if __name__ == "__main__":
    main()
