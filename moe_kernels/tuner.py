"""Measures which kernels are fastest for a layer, and writes the table that `tuning.py` reads.

    python -m moe_kernels.tuner 16384,2048,768,128,8 8192,4096,14336,8,2      # T, D, F, E, K of each layer
    python -m moe_kernels.tuner --lists 4x512 64x128 --jagged 131072,2048,2048,16     # G x N; R, K, N, G

A kernel enters the table only after its result was checked against the reference, group by group in float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ._triton import triton
from .catalog import Arguments, GroupedGemmArguments, Kernel, PointerDesign, get_kernels
from .experts import fused_experts
from .gemm.array import GroupedGemmListArguments
from .gemm.jagged import JaggedGemmArguments
from .grouped_gemm_list import GroupedProblem
from .layer_forms import LayerForms
from .testing import Case, LayerInputs, assert_accurate, make_inputs, make_permutation
from .tuning import Copies, best_first, copies_key, pin, pin_copies
from .tuning.table_files import SHIPPED, table_name
from .verification import check_result

_ROUNDS, _ROUND_MS = 3, 25.0
_NEARLY = 1.03


def measure(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each, taking turns, so that drifting clocks meet all alike."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(_ROUNDS + 1):  # the first warms up
        for name, function in functions.items():
            times = _times(function, 3 if round_number == 0 else _calls(samples[name]))
            samples[name] = times if round_number <= 1 else samples[name] + times
    return {name: statistics.median(times) for name, times in samples.items()}


def _calls(times: list[float]) -> int:
    return max(3, int(_ROUND_MS / statistics.median(times)))


def _times(function: Callable[[], object], num_calls: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def check(kernel: Kernel, args: Arguments) -> None:
    """Run a kernel and hold the first, middle and last group of its result to the error budget.

    Raises:
        AssertionError: the kernel is wrong, and by how much.
    """
    for out in _outputs(args):
        out.fill_(torch.nan)
    kernel.run(args)
    check_result(args, kernel.metadata.kernel_name)


def _outputs(args: Arguments) -> Sequence[Tensor]:
    if isinstance(args, GroupedGemmListArguments):
        return args.out_list
    return (args.out, args.product) if isinstance(args, GroupedGemmArguments) else (args.out,)


def fastest(args: Arguments) -> Kernel:
    """The fastest kernel for these arguments, checked; of near equals the first by the rule of thumb."""
    kernels = get_kernels(args)
    rows_per_group = len(args.out) // len(args.B) if isinstance(args, GroupedGemmArguments) else 128
    if rows_per_group >= 64 and any(not isinstance(k.metadata.design, PointerDesign) for k in kernels):
        kernels = [k for k in kernels if not isinstance(k.metadata.design, PointerDesign)]
    for kernel in kernels:
        check(kernel, args)
    times = measure({k.metadata.kernel_name: partial(k.run, args, assume_supported_args=True) for k in kernels})
    print("  " + args.table_key(), *(f"\n    {ms:8.3f} ms  {name}" for name, ms in times.items()), flush=True)
    # The rule of thumb decides between near equals: it prefers large tiles, which draw less power, and in training the
    # clocks follow the power.
    close = [k for k in kernels if times[k.metadata.kernel_name] <= _NEARLY * min(times.values())]
    return best_first(close, args, measured=None)[0]


def tune_layer(case: Case, dtype: torch.dtype, activation: str) -> dict[str, dict]:
    """Table entries for the GEMMs of one layer and its choice of copies."""
    inputs = make_inputs(dataclasses.replace(case, routing="even"), dtype, "cuda")
    _, permutation = make_permutation(inputs, case.top_k)
    num_rows = len(permutation.row_to_token)
    layer = LayerForms(
        inputs.tokens, inputs.w_up, inputs.w_down, permutation.row_to_token, permutation.tile_table, activation
    )
    forms = layer.all()
    best = {name: fastest(args) for name, args in forms.items()}
    names = {forms[name].table_key(): kernel.metadata.kernel_name for name, kernel in best.items()}
    for name, kernel in best.items():
        pin(forms[name], kernel)
    del layer, forms
    return {
        "kernels": names,
        "copies": {copies_key(inputs.tokens, inputs.w_up, num_rows): fastest_copies(inputs, case.top_k, activation)},
    }


def fastest_copies(inputs: LayerInputs, top_k: int, activation: str) -> Copies:
    """The whole op, forward and backward, with each gather as a copy and as part of its GEMM."""
    topk_weights, permutation = make_permutation(inputs, top_k)
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.tokens, inputs.w_up, inputs.w_down)]
    dout = torch.randn_like(inputs.tokens)

    def step(copies: Copies) -> None:
        pin_copies(inputs.tokens, inputs.w_up, len(permutation.row_to_token), copies)
        out = fused_experts(leaves[0], topk_weights, permutation, *leaves[1:], activation=activation)
        torch.autograd.grad(out, leaves, dout)

    candidates = [Copies(*choice) for choice in itertools.product([False, True], repeat=3)]
    times = measure({str(tuple(map(int, copies))): partial(step, copies) for copies in candidates})
    print("  copies", *(f"\n    {ms:8.3f} ms  {name}" for name, ms in times.items()), flush=True)
    return candidates[min(range(len(candidates)), key=list(times.values()).__getitem__)]


def fastest_list(args: GroupedGemmListArguments) -> Kernel:
    """The fastest kernel for products in one launch, checked; without the time of the host."""
    kernels = {kernel.metadata.kernel_name: kernel for kernel in get_kernels(args)}
    exact = [a.double() @ b.double() for a, b in zip(args.A_list, args.B_list, strict=True)]
    graphs = {}
    for name, kernel in kernels.items():
        problem = GroupedProblem.from_lists(args.A_list, args.B_list, kernel=kernel)
        for out, a, b, e in zip(problem.run(), args.A_list, args.B_list, exact, strict=True):
            assert_accurate(out, a @ b, e, name)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            problem.run()
        graphs[name] = graph, problem  # whose table the graph reads
    times = measure({name: graph.replay for name, (graph, _) in graphs.items()})
    print("  " + args.table_key(), *(f"\n    {ms:8.4f} ms  {name}" for name, ms in times.items()), flush=True)
    return kernels[min(times, key=times.get)]


def tune_list(num_problems: int, size: int, dtype: torch.dtype) -> dict[str, str]:
    """Table entries for square products: A and B by rows, B by columns, and A by columns."""
    entries = {}
    for a_by_columns, b_by_columns in ((False, False), (False, True), (True, False)):
        a, b = (torch.randn(num_problems, size, size, device="cuda", dtype=dtype) for _ in range(2))
        a, b = a.mT if a_by_columns else a, b.mT if b_by_columns else b
        args = GroupedGemmListArguments(a.unbind(), b.unbind(), torch.empty_like(a).contiguous().unbind())
        entries[args.table_key()] = fastest_list(args).metadata.kernel_name
    return entries


def tune_jagged(num_rows: int, size_k: int, size_n: int, num_groups: int, dtype: torch.dtype) -> dict[str, str]:
    """Table entries for a shared matrix stored by rows and by columns."""
    offsets = torch.arange(num_groups + 1, device="cuda", dtype=torch.int32) * num_rows // num_groups
    a = torch.randn(num_rows, size_k, device="cuda", dtype=dtype)
    entries = {}
    for b in (a.new_empty(size_k, size_n).normal_(), a.new_empty(size_n, size_k).normal_().t()):
        args = JaggedGemmArguments(a, b, a.new_empty(num_rows, size_n), offsets)
        entries[args.table_key()] = fastest(args).metadata.kernel_name
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", metavar="T,D,F,E,K", help="sizes of the layers to tune for")
    parser.add_argument("--lists", nargs="+", default=[], metavar="GxN", help="square products in one launch")
    parser.add_argument("--jagged", nargs="+", default=[], metavar="R,K,N,G", help="packed rows and a shared matrix")
    parser.add_argument("--activation", default="swiglu")
    parser.add_argument("--output", type=Path, help="table to add to; default: the shipped one of this GPU")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    path = options.output or SHIPPED / table_name(gpu)
    written = json.loads(path.read_text()) if path.exists() else {"table": {"kernels": {}, "copies": {}}}
    written |= {"gpu": gpu, "triton": triton.__version__, "torch": torch.__version__}
    jobs: list[tuple[str, Callable[[], dict[str, dict]]]] = [
        (layer, partial(tune_layer, Case(*map(int, layer.split(","))), torch.bfloat16, options.activation))
        for layer in options.layers
    ]
    for problem in options.lists:
        sizes = map(int, problem.split("x"))
        jobs.append((problem, lambda sizes=sizes: {"kernels": tune_list(*sizes, torch.bfloat16)}))
    for problem in options.jagged:
        sizes = map(int, problem.split(","))
        jobs.append((problem, lambda sizes=sizes: {"kernels": tune_jagged(*sizes, torch.bfloat16)}))
    for label, tune in jobs:
        print(label, flush=True)
        for kind, values in tune().items():
            written["table"][kind] |= values
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(written, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
