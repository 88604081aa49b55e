"""Packed groups of rows times one shared matrix against one dense product of all rows.

    python -m benchmarks.jagged_gemm --commit $(git rev-parse --short HEAD) --output results.json

Every result is checked before timing. Each round times every implementation once. The bound is cuBLAS on
`a_packed @ b`, or its two gradients, in the same run. "op" is jagged_gemm with the selected kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moe_kernels import JaggedGemmArguments, jagged_gemm, reference
from moe_kernels.gemm.selection import find
from moe_kernels.testing import assert_accurate

from .common.command import Command
from .common.results_file import Row, Task
from .common.timing import timed

# (R, K, N, G)
PROBLEMS = ((131072, 2048, 2048, 16), (131072, 2048, 2048, 128), (32768, 4096, 1024, 64), (8192, 1024, 2048, 12))
SKEWS = ("even", "uneven", "one")
COLUMNS = ("problem", "skew", "pass", "implementation", "kernel", "ms", "ms_p20", "ms_p80", "tflops", "share_of_dense")


def make_offsets(num_rows: int, num_groups: int, skew: str) -> Tensor:  # [G + 1]
    """Return offsets. "even"; "uneven": shares are proportional to 1 / (g + 1); "one": all rows in the middle group."""
    weights = torch.ones(num_groups, dtype=torch.float64)
    if skew == "uneven":
        weights = 1 / torch.arange(1, num_groups + 1, dtype=torch.float64)
    if skew == "one":
        weights = (torch.arange(num_groups) == num_groups // 2).double()
    ends = (num_rows * weights.cumsum(0) / weights.sum()).round().int()
    return torch.nn.functional.pad(ends, (1, 0))


def gradients(op: Callable[..., Tensor], a: Tensor, b: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Return the output and both gradients."""
    leaves = [a.detach().requires_grad_(), b.detach().requires_grad_()]
    out = op(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def check(a: Tensor, b: Tensor, dout: Tensor, offsets: Tensor) -> None:
    """Apply the tests' error budget to the output and both gradients. float32 counts as exact for 16-bit results."""
    wide = torch.float64 if a.dtype == torch.float32 else torch.float32
    actual = gradients(lambda a, b: jagged_gemm(a, b, offsets), a, b, dout)
    baseline = gradients(lambda a, b: reference.jagged_gemm(a, b, offsets), a, b, dout)
    exact = gradients(lambda a, b: reference.jagged_gemm(a, b, offsets), *(t.to(wide) for t in (a, b, dout)))
    for name, *results in zip(("out", "da", "db"), actual, baseline, exact, strict=True):
        assert_accurate(*results, name)


def bench(
    num_rows: int, size_k: int, size_n: int, num_groups: int, skew: str, options: argparse.Namespace
) -> list[Row]:
    device, dtype = options.device, options.dtype
    generator = torch.Generator(device).manual_seed(0)
    a, b, dout = (
        torch.randn(shape, device=device, generator=generator).to(dtype)
        for shape in ((num_rows, size_k), (size_k, size_n), (num_rows, size_n))
    )
    offsets = make_offsets(num_rows, num_groups, skew).to(device)
    check(a, b, dout, offsets)
    args = JaggedGemmArguments(a, b, torch.empty_like(dout), offsets)
    selected = find(args)
    kernels = {"forward/op": selected.metadata.kernel_name if selected else None}
    op = partial(jagged_gemm, group_offsets=offsets)
    functions: dict[str, Callable[[], object]] = {
        "forward/dense": partial(torch.mm, a, b),
        "forward/op": partial(op, a, b),
        "forward+backward/dense": partial(gradients, torch.mm, a, b, dout),
        "forward+backward/op": partial(gradients, op, a, b, dout),
    }
    timings = timed(functions, options)
    sizes = {"R": num_rows, "K": size_k, "N": size_n, "G": num_groups, "dtype": str(dtype)[6:]}
    rows = []
    for name, timing in sorted(timings.items()):
        which, implementation = name.split("/")
        row = {**sizes, "pass": which, "implementation": implementation, "kernel": kernels.get(name)}
        flops = 2 * num_rows * size_k * size_n * (1 if which == "forward" else 3)
        row |= {**timing._asdict(), "tflops": 1e-9 * flops / timing.ms}
        rows.append({**row, "share_of_dense": timings[f"{which}/dense"].ms / timing.ms})
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", metavar="R,K,N,G", default=[",".join(map(str, p)) for p in PROBLEMS])
    parser.add_argument("--skews", nargs="+", choices=SKEWS, default=SKEWS)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    for problem in options.problems:
        sizes = problem.split(",")
        for skew in options.skews:
            shared = {"problem": "{}x{}x{}-g{}".format(*sizes), "skew": skew}
            yield shared, partial(bench, *map(int, sizes), skew, options)


main = Command(__doc__, add_options, tasks, COLUMNS)


if __name__ == "__main__":
    main()
