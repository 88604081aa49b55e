"""The rule that selects kernels on GPUs without a table, compared with this GPU's table, entry by entry.

    python -m benchmarks.rule_of_thumb --commit $(git rev-parse --short HEAD) --output benchmarks/results/rule.json

The bound is the table's choice, measured in the same run: the ratio is the time of the rule's kernel divided by that of
the table's. Both are checked first, and timed as replays of a CUDA graph, without host time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from moe_kernels import GroupedGemmListArguments, GroupedProblem, get_kernels
from moe_kernels.gemm import tables
from moe_kernels.gemm.arguments import Arguments
from moe_kernels.gemm.kernel import Kernel
from moe_kernels.gemm.selection import best_first
from moe_kernels.gemm.tables import Table
from moe_kernels.tools.table_keys import arguments_of
from moe_kernels.tools.tune import check

from .layer import environment, print_rows
from .timing import in_a_graph, time_interleaved

WITHIN = 1.15  # largest accepted ratio


def bench_entry(key: str, table_kernel: str, device: str, round_ms: float) -> dict:
    """Measure both kernels for the arguments of one entry.

    Raises:
        ValueError: the table names a kernel that does not support the arguments.
        AssertionError: a kernel is wrong.
    """
    args = arguments_of(key, device)
    kernels = get_kernels(args)
    named = {kernel.metadata.kernel_name: kernel for kernel in kernels}
    if table_kernel not in named:
        raise ValueError(f"rule_of_thumb: the table's kernel must support {key!r}, got {table_kernel}")
    by_rule = best_first(kernels, args, measured=None)[0]
    chosen = {"table": named[table_kernel], "rule": by_rule}
    for kernel in set(chosen.values()):
        check(kernel, args)
    # If both choose one kernel, it is timed once.
    runs = {kernel.metadata.kernel_name: run_of(kernel, args) for kernel in chosen.values()}
    if device == "cuda":
        runs = {name: in_a_graph(run) for name, run in runs.items()}
    times = time_interleaved(runs, device, round_ms=round_ms)
    row = {"op": key.split(" ")[0], "key": key}
    for name, kernel in chosen.items():
        timing = times[kernel.metadata.kernel_name]
        row |= {f"{name}_kernel": kernel.metadata.kernel_name}
        row |= {f"{name}_{field}": value for field, value in timing._asdict().items()}
    return {**row, "ratio": row["rule_ms"] / row["table_ms"]}


def run_of(kernel: Kernel, args: Arguments) -> Callable[[], object]:
    if isinstance(args, GroupedGemmListArguments):
        problem = GroupedProblem.from_lists(args.A_list, args.B_list, out_list=args.out_list, kernel=kernel)
        return problem.run
    return partial(kernel.run, args, assume_supported_args=True)


def summary(rows: list[dict]) -> list[dict]:
    """Summarise each op, and all ops together."""
    by_op = [(op, list(of_op)) for op, of_op in groupby(sorted(rows, key=lambda row: row["op"]), lambda row: row["op"])]
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
        return tables.read(options.table)
    if not torch.cuda.is_available():
        raise SystemExit("rule_of_thumb: kernels run on a CUDA GPU, got none")
    table = tables.merged_table(torch.cuda.get_device_name())
    if not table.kernels:
        raise SystemExit(f"rule_of_thumb: there is no table of {torch.cuda.get_device_name()}")
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="only this table; default: those that kernels are selected by")
    parser.add_argument("--ops", nargs="+", metavar="OP", help="only these: grouped_gemm, wgrad, ...")
    parser.add_argument("--round-ms", type=float, default=25.0, help="time of a kernel in each of three rounds")
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    entries = {
        key: name
        for key, name in tables_of(options).kernels.items()
        if options.ops is None or key.split(" ")[0] in options.ops
    }
    if not entries:
        raise SystemExit(f"rule_of_thumb: the table has no entry of {options.ops}")
    rows = []
    for key, name in tqdm(entries.items(), unit="entry"):
        rows.append({**bench_entry(key, name, device, options.round_ms), **environment(device, options.commit)})
        if device == "cuda":
            torch.cuda.empty_cache()  # the next operands have other sizes
    print_rows(rows, ["ratio", "rule_ms", "table_ms", "key", "rule_kernel", "table_kernel"])
    print_rows(summary(rows), list(summary(rows)[0]))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
