"""The rules that select kernels and copies without a table, compared with the table or with all candidates.

    python -m benchmarks.rule_of_thumb --commit $(git rev-parse --short HEAD) --output benchmarks/results/rule.json
    python -m benchmarks.rule_of_thumb --layers unseen --time-limit-s 450 --resume --commit COMMIT --output FILE

Without `--layers`, each entry of this GPU's table is measured. `ratio` is the time of the rule's kernel divided by the
time of the table's kernel, in the same run. Both kernels are checked first, and timed as replays of a CUDA graph,
without host time.

With `--layers`, each GEMM of each layer is measured. All kernels that may be fastest are checked and timed in turns.
`ratio` divides by the fastest kernel's time. The file holds every time, so that a rule can be derived from it.
`--tile-orders` adds the rule's kernel with other numbers of row tiles per group. The form "copies" times the whole op
with backward and host time, once for each choice of which gathers are separate copies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from moe_kernels import GroupedGemmListArguments, GroupedProblem, get_kernels
from moe_kernels.gemm import measurements
from moe_kernels.gemm.arguments.base import Arguments
from moe_kernels.gemm.kernel import Kernel
from moe_kernels.gemm.measurements import Table
from moe_kernels.gemm.rule import best_first
from moe_kernels.gemm.selection import copies_for, copies_key
from moe_kernels.testing import Case
from moe_kernels.tools.layers import Layer, Step, layer_of
from moe_kernels.tools.measurement_keys import arguments_of
from moe_kernels.tools.tune import candidates, check, copies_name, copies_steps

from .common.command import Command, print_rows
from .common.layers import fitting
from .common.results_file import Row, Task
from .common.shapes import Shape, shapes_named
from .common.timing import Timing, in_a_graph, timed

WITHIN = 1.15  # largest accepted ratio


def bench_entry(key: str, table_kernel: str, options: argparse.Namespace) -> list[Row]:
    """Return a row that compares the table's kernel with the rule's kernel for the arguments of a table entry."""
    args = arguments_of(key, options.device)
    kernels = get_kernels(args)
    named = {kernel.metadata.kernel_name: kernel for kernel in kernels}
    if table_kernel not in named:
        raise ValueError(f"rule_of_thumb: the table's kernel must support {key!r}, got {table_kernel}")
    by_rule = best_first(kernels, args, measured=None)[0]
    chosen = {"table": named[table_kernel], "rule": by_rule}
    # If table and rule choose the same kernel, this kernel is timed once.
    times = checked_times({kernel.metadata.kernel_name: kernel for kernel in chosen.values()}, args, options)
    row: Row = {"op": key.split(" ")[0], "key": key}
    for name, kernel in chosen.items():
        timing = times[kernel.metadata.kernel_name]
        row[f"{name}_kernel"] = kernel.metadata.kernel_name
        row |= {f"{name}_{field}": value for field, value in timing._asdict().items()}
    return [{**row, "ratio": row["rule_ms"] / row["table_ms"]}]


FORMS = ("up", "up_plain", "down", "down_dgrad", "down_wgrad", "up_dgrad", "up_wgrad")
FORMS += ("up_gather", "up_plain_gather", "down_dgrad_gather", "down_wgrad_gather", "up_wgrad_gather", "copies")
TILE_ORDERS = (4, 8, 16)  # numbers of row tiles per group


def layer_tasks(shape: Shape, options: argparse.Namespace) -> Iterator[Task]:
    """Yield the tasks of a layer. The first one that runs makes the operands of the GEMMs."""

    @functools.cache
    def forms() -> dict[str, Step]:
        return dict(layer_of_shape(shape, options).forms())

    def measure(form: str) -> list[Row]:
        if form != "copies":
            return [bench_form(forms()[form].args, options)]
        forms.cache_clear()
        return [bench_copies(shape, options)]

    for form in options.forms:
        yield {"shape": shape.name, **shape.sizes, "form": form}, partial(measure, form)


def layer_of_shape(shape: Shape, options: argparse.Namespace) -> Layer:
    case = Case(shape.num_tokens, shape.d_model, shape.d_ff, shape.num_experts, shape.top_k)
    return layer_of(case, options.dtype, options.device, activation=shape.activation)


def bench_form(args: Arguments, options: argparse.Namespace) -> Row:
    """Check and measure all kernels that may be the fastest for these arguments."""
    row: Row = {"op": args.table_key().split(" ")[0], "key": args.table_key()}
    kernels = candidates(args)
    if not kernels:
        return {**row, "rule_kernel": None, "times_ms": {}}
    rule = best_first(kernels, args, measured=None)[0]
    runs = {kernel.metadata.kernel_name: kernel for kernel in kernels}
    for group_tiles in TILE_ORDERS if options.tile_orders else ():
        design = dataclasses.replace(rule.metadata.design, group_tiles=group_tiles)
        reordered = type(rule)(dataclasses.replace(rule.metadata, design=design))
        runs[f"{rule.metadata.kernel_name} of {group_tiles}"] = reordered
    timings = checked_times(runs, args, options)
    return {**row, **compared(rule.metadata.kernel_name, {name: timing.ms for name, timing in timings.items()})}


def bench_copies(shape: Shape, options: argparse.Namespace) -> Row:
    """Time the whole op with backward, once for each choice of which gathers are separate copies."""
    torch.cuda.empty_cache()  # does nothing without a GPU
    layer = layer_of_shape(shape, options)
    rule = copies_for(None, layer.tokens, layer.w_up, shape.d_ff, shape.num_rows)
    steps = copies_steps(layer)
    functions: dict[str, Callable[[], object]] = {copies_name(copies): step for copies, step in steps.items()}
    timings = timed(functions, options)
    key = copies_key(layer.tokens, layer.w_up, shape.d_ff, shape.num_rows)
    times = {name: timing.ms for name, timing in timings.items()}
    return {"op": "copies", "key": key, **compared(copies_name(rule), times)}


def compared(rule: str, times_ms: dict[str, float]) -> Row:
    """Return the fields of a row that compare the rule's choice with the fastest choice."""
    best = min(times_ms, key=times_ms.__getitem__)
    row: Row = {"rule_kernel": rule, "rule_ms": times_ms[rule], "table_kernel": best, "table_ms": times_ms[best]}
    return {**row, "ratio": times_ms[rule] / times_ms[best], "times_ms": times_ms}


def checked_times(kernels: dict[str, Kernel], args: Arguments, options: argparse.Namespace) -> dict[str, Timing]:
    runs: dict[str, Callable[[], object]] = {}
    for name, kernel in kernels.items():
        check(kernel, args)
        run = partial(kernel.run, args, assume_supported_args=True)
        if isinstance(args, GroupedGemmListArguments):
            run = GroupedProblem.from_lists(args.A_list, args.B_list, out_list=args.out_list, kernel=kernel).run
        runs[name] = in_a_graph(run) if options.device == "cuda" else run
    return timed(runs, options)


def summary(rows: list[dict]) -> list[dict]:
    """Summarise each op or form, and all together."""

    def op_of(row: Row) -> str:
        return row.get("form", row["op"])

    by_op = [(op, list(of_op)) for op, of_op in groupby(sorted(rows, key=op_of), op_of)]
    return [
        {
            "op": op,
            "entries": len(of_op),
            "same_kernel": sum(row["rule_kernel"] == row["table_kernel"] for row in of_op),
            "geometric_mean": statistics.geometric_mean(row["ratio"] for row in of_op),
            "worst": max(row["ratio"] for row in of_op),
            "beyond": sum(row["ratio"] > WITHIN for row in of_op),
        }
        for op, of_op in [*by_op, ("all", rows)]
    ]


def tables_of(options: argparse.Namespace) -> Table:
    if options.table is not None:
        return measurements.read(options.table)
    if not torch.cuda.is_available():
        raise SystemExit("rule_of_thumb: kernels run on a CUDA GPU, got none")
    table = measurements.table_of(torch.cuda.get_device_name())
    if not table.kernels:
        raise SystemExit(f"rule_of_thumb: there is no table of {torch.cuda.get_device_name()}")
    return table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", type=Path, help="only this table; default: those that kernels are selected by")
    parser.add_argument("--ops", nargs="+", metavar="OP", help="only these: grouped_gemm, wgrad, ...")
    parser.add_argument("--layers", nargs="+", metavar="NAME", help="shapes or groups of them, instead of a table")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="with --layers, only these")
    parser.add_argument("--tile-orders", action="store_true", help="with --layers, other orders of tiles, too")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu", round_ms=25.0)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    if options.layers is None:
        entries = tables_of(options).kernels.items()
        entries = [(key, name) for key, name in entries if options.ops is None or key.split(" ")[0] in options.ops]
        if not entries:
            raise SystemExit(f"rule_of_thumb: the table has no entry of {options.ops}")
        for key, name in entries:
            yield {"key": key}, partial(bench_entry, key, name, options)
        return
    for shape in fitting(shapes_named(options.layers), options.device):
        yield from layer_tasks(shape, options)


def print_summary(options: argparse.Namespace, rows: list[Row]) -> None:
    if compared := [row for row in rows if "ratio" in row]:
        found = summary(compared)
        print_rows(found, list(found[0]))


COLUMNS = ("ratio", "rule_ms", "table_ms", "shape", "form", "key", "rule_kernel", "table_kernel")
main = Command(__doc__, add_options, tasks, COLUMNS, finish=print_summary)


if __name__ == "__main__":
    main()
