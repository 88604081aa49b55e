"""Measures which kernels are fastest for layers and GEMMs. `python -m moe_kernels tune` writes the result as a table.

A kernel enters the table only after its result was checked against the reference in float64.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from .. import reference
from ..experts.fused import fused_experts
from ..gemm import measurements
from ..gemm.arguments.base import Arguments
from ..gemm.arguments.block_scaled import BlockScaledGemmArguments
from ..gemm.arguments.decoding import DecodingGemmArguments
from ..gemm.arguments.grouped import GroupedGemmArguments
from ..gemm.arguments.jagged import JaggedGemmArguments
from ..gemm.arguments.list import GroupedGemmListArguments
from ..gemm.kernel import Kernel, PointerDesign
from ..gemm.measurements import Table
from ..gemm.ops.grouped_gemm_list import GroupedProblem
from ..gemm.rule import best_first
from ..gemm.selection import Copies, copies_key, get_kernels, pin, pin_copies
from ..gemm.verify import check_result
from ..testing import Case, assert_accurate
from .layers import Layer, layer_of

_ROUNDS, _ROUND_MS = 3, 25.0
_NEARLY = 1.03

_Form = TypeVar("_Form", bound=Arguments)


def measure(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return each function's median milliseconds. The functions take turns, so that clock drift affects all equally."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(_ROUNDS + 1):  # round 0 warms up
        for name, function in functions.items():
            times = times_of_calls(function, 3 if round_number == 0 else _calls(samples[name]))
            samples[name] = times if round_number <= 1 else samples[name] + times
    return {name: statistics.median(times) for name, times in samples.items()}


def measure_replays(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of one replay of each function's CUDA graph. Replays exclude the host's launch
    time. In longer computations, this time overlaps with the GPU's work and does not matter."""
    graphs = {name: captured(function) for name, function in functions.items()}
    return measure({name: graph.replay for name, graph in graphs.items()})


def captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Call `function` once to warm up, and again to capture its launches. Return the CUDA graph of the second call."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.keeps = function, function()  # pyright: ignore[reportAttributeAccessIssue]  # keeps the graph's tensors alive
    return graph


def _calls(times: list[float]) -> int:
    return max(3, int(_ROUND_MS / statistics.median(times)))


def times_of_calls(function: Callable[[], object], num_calls: int) -> list[float]:
    """Return the GPU time of each call in milliseconds."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def check(kernel: Kernel, args: Arguments) -> None:
    """Run a kernel. Raise AssertionError if the first, middle or last group of its result exceeds the error budget."""
    for out in args.outputs:
        out.fill_(torch.nan)
    kernel.run(args)
    check_result(args, kernel.metadata.kernel_name)


class Measured(NamedTuple):
    kernel: Kernel
    milliseconds: float


class Entry(NamedTuple):
    """One entry that `tune` can add to a table."""

    key: str
    is_known: Callable[[Table], bool]  # whether the table has the entry; its kernel, if any, is then pinned (see `pin`)
    measure: Callable[[], Table]  # returns a table with only this entry, or an empty table if no kernel fits


class Job(NamedTuple):
    """Table entries to measure for a layer, a list of products, or a jagged GEMM. `entries()` makes the operands."""

    label: str
    entries: Callable[[], Iterator[Entry]]


def kernel_entry(args: _Form, fastest: Callable[[_Form], Measured | None]) -> Entry:
    key = args.table_key()

    def is_known(table: Table) -> bool:
        named = get_kernels(args, metadata_filter=lambda metadata: metadata.kernel_name == table.kernels.get(key))
        for kernel in named:
            pin(args, kernel)
        return bool(named)

    def measure() -> Table:
        measured = fastest(args)
        if measured is None:
            return Table({}, {})
        pin(args, measured.kernel)
        return Table({key: measured.kernel.metadata.kernel_name}, {}, {key: measured.milliseconds})

    return Entry(key, is_known, measure)


def candidates(args: Arguments) -> list[Kernel]:
    """Return the kernels that may be fastest. If other kernels exist, omit kernels that load through pointers. Grouped
    GEMMs with fewer than 64 rows per group keep all kernels."""
    kernels = get_kernels(args)
    rows_per_group = len(args.out) // len(args.B) if isinstance(args, GroupedGemmArguments) else 128
    if rows_per_group >= 64 and any(not isinstance(k.metadata.design, PointerDesign) for k in kernels):
        kernels = [k for k in kernels if not isinstance(k.metadata.design, PointerDesign)]
    return kernels


def fastest(args: Arguments) -> Measured | None:
    """Check the results of all candidates, and return the fastest kernel. If several kernels exceed the shortest time
    by at most 3 %, the rule of thumb (`best_first`) decides between these kernels."""
    kernels = candidates(args)
    if not kernels:
        return None
    for kernel in kernels:
        check(kernel, args)
    return _fastest_run(args, {kernel: partial(kernel.run, args, assume_supported_args=True) for kernel in kernels})


def _fastest_run(args: Arguments, runs: dict[Kernel, Callable[[], object]]) -> Measured:
    times = measure_replays({kernel.metadata.kernel_name: run for kernel, run in runs.items()})
    _print(args.table_key(), times)
    # Among nearly equal times, the rule of thumb decides, because it prefers large tiles. Large tiles draw less power,
    # and in training, a GPU that draws less power keeps higher clocks.
    close = [k for k in runs if times[k.metadata.kernel_name] <= _NEARLY * min(times.values())]
    kernel = best_first(close, args, measured=None)[0]
    return Measured(kernel, times[kernel.metadata.kernel_name])


def _print(key: str, times: dict[str, float]) -> None:
    tqdm.write("\n    ".join([f"  {key}", *(f"{ms:8.4f} ms  {name}" for name, ms in times.items())]))


def layer_job(case: Case, dtype: torch.dtype, device: str, activation: str) -> Job:
    """Return a job that measures the kernels of a layer's GEMMs. The job then times the layer to choose which gathers
    run as separate copies."""

    def entries() -> Iterator[Entry]:
        layer = layer_of(case, dtype, device, activation=activation)
        for _, step in layer.forms():
            yield kernel_entry(step.args, fastest)
        del step
        key = copies_key(layer.tokens, layer.w_up, case.d_ff, layer.num_rows)
        yield Entry(key, lambda table: key in table.copies, lambda: Table({}, {key: list(fastest_copies(layer))}))

    return Job(_label(case), entries)


def product_job(case: Case, dtype: torch.dtype, device: str, **settings: Any) -> Job:
    """Return a job that measures a layer's GEMMs with quantised or e4m3 operands. `settings` go to `layer_of`."""
    label = f"{settings.get('format') or settings.get('precision')} {_label(case)}"

    def entries() -> Iterator[Entry]:
        steps = layer_of(case, dtype, device, **settings).plan()
        products = [s.args for s in steps if isinstance(s.args, DecodingGemmArguments | BlockScaledGemmArguments)]
        if not products:
            tqdm.write(f"{label}: nothing to measure, because weights are dequantised for so many rows")
        for args in products:
            yield kernel_entry(args, fastest)

    return Job(label, entries)


def _label(case: Case) -> str:
    return ",".join(map(str, dataclasses.astuple(case)[:5]))


def copies_steps(layer: Layer) -> dict[Copies, Callable[[], None]]:
    """Return, for each possible `Copies`, a function that selects it and runs `fused_experts` and its backward."""
    permutation = reference.sort_by_expert(layer.topk_experts, layer.w_up.shape[0])
    leaves = [tensor.detach().requires_grad_() for tensor in (layer.tokens, layer.w_up, layer.w_down)]
    dout = torch.randn_like(layer.tokens)

    def step(copies: Copies) -> None:
        pin_copies(layer.tokens, layer.w_up, layer.w_down.shape[2], layer.num_rows, copies)
        out = fused_experts(leaves[0], layer.topk_weights, permutation, *leaves[1:], activation=layer.activation)
        torch.autograd.grad(out, leaves, dout)

    return {copies: partial(step, copies) for copies in map(Copies._make, itertools.product([False, True], repeat=3))}


def fastest_copies(layer: Layer) -> Copies:
    """Return which gathers to run as separate copies, so that `fused_experts` and its backward are fastest."""
    steps = copies_steps(layer)
    times = measure({copies_name(copies): step for copies, step in steps.items()})
    _print("copies", times)
    return min(steps, key=lambda copies: times[copies_name(copies)])


def copies_name(copies: Copies) -> str:
    return str(tuple(map(int, copies)))


def fastest_list(args: GroupedGemmListArguments) -> Measured:
    """Check the results of all kernels that compute a list of products in one launch. Return the fastest kernel."""
    exact = [a.double() @ b.double() for a, b in zip(args.A_list, args.B_list, strict=True)]
    problems = {}  # kept alive, because the CUDA graphs in `_fastest_run` read the problems' tables
    for kernel in get_kernels(args):
        problems[kernel] = GroupedProblem.from_lists(args.A_list, args.B_list, kernel=kernel)
        for out, a, b, e in zip(problems[kernel].run(), args.A_list, args.B_list, exact, strict=True):
            assert_accurate(out, a @ b, e, kernel.metadata.kernel_name)
    return _fastest_run(args, {kernel: problem.run for kernel, problem in problems.items()})


def list_job(num_problems: int, size: int, dtype: torch.dtype, device: str) -> Job:
    """Return a job that tunes a list of square products A @ B. The job has an entry for each of three layouts: A and B
    stored by rows, only B stored by columns, and only A stored by columns."""
    layouts = ((False, False), (False, True), (True, False))

    def entries() -> Iterator[Entry]:
        for a_by_columns, b_by_columns in layouts:
            a, b = (torch.randn(num_problems, size, size, device=device, dtype=dtype) for _ in range(2))
            a, b = a.mT if a_by_columns else a, b.mT if b_by_columns else b
            args = GroupedGemmListArguments(a.unbind(), b.unbind(), torch.empty_like(a).contiguous().unbind())
            yield kernel_entry(args, fastest_list)

    return Job(f"{num_problems}x{size}", entries)


def jagged_job(num_rows: int, size_k: int, size_n: int, num_groups: int, dtype: torch.dtype, device: str) -> Job:
    """Return a job that tunes the product of packed rows and one shared matrix. The matrix is stored by rows in the
    first entry and by columns in the second."""

    def entries() -> Iterator[Entry]:
        offsets = torch.arange(num_groups + 1, device=device, dtype=torch.int32) * num_rows // num_groups
        a = torch.randn(num_rows, size_k, device=device, dtype=dtype)
        for b in (a.new_empty(size_k, size_n).normal_(), a.new_empty(size_n, size_k).normal_().t()):
            yield kernel_entry(JaggedGemmArguments(a, b, a.new_empty(num_rows, size_n), offsets), fastest)

    return Job(f"{num_rows},{size_k},{size_n},{num_groups}", entries)


def tune(jobs: list[Job], path: Path, *, seconds: float, again: bool, **fields: str) -> bool:
    """Measure entries missing from the table at `path`. Write the table after each entry. Return whether time sufficed.

    Args:
        seconds: number of seconds after which no further measurement starts.
        again: also measure entries that the table already has.
        fields: further fields of the file, such as versions.
    """
    table = measurements.read(path) if path.exists() else Table({}, {})
    end = time.monotonic() + seconds
    with tqdm(jobs, unit="job") as progress:
        for job in progress:
            for entry in job.entries():
                progress.set_postfix_str(f"{job.label}: {entry.key}")
                if again or not entry.is_known(table):
                    if time.monotonic() >= end:
                        return False
                    table = table.merged(entry.measure())
                    measurements.write(path, table, **fields)
            torch.cuda.empty_cache()  # the next operands need memory blocks of other sizes
    return True
