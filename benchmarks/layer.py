"""The whole layer, forward and backward, against PyTorch's grouped_mm and against the dense bound.

    python -m benchmarks.layer --commit $(git rev-parse --short HEAD) --output benchmarks/results/layer.json
    python -m benchmarks.layer --shapes unseen --time-limit-s 540 --resume --commit COMMIT --output FILE
    python -m benchmarks.layer --shapes off-grid --commit COMMIT --output FILE
    python -m benchmarks.layer --compare benchmarks/results/layer.json
    python -m benchmarks.layer --table benchmarks/results/layer.json
    python -m benchmarks.layer --plot benchmarks/results/layer.json

`--shapes` takes names of shapes and of groups of them, by default "tuned". `grouped_mm` needs rows that start at
multiples of 16 bytes; other shapes have no baseline. Shapes that exceed the GPU's memory are left out.

Every shape is checked before timing. Each round times each form once. The dense bound of a pass is the sum of the
cuBLAS medians of its GEMMs with all T * K rows in one matrix, in the same run. Saved memory is the memory allocated
after a forward minus that before it, including the output but not the input. Peak memory is the highest during forward
and backward minus that before them, including gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from .common import plots, shapes
from .common.baselines import TorchGroupedMM, grouped_mm_takes
from .common.command import Command, each, print_rows
from .common.layers import PASSES, bench_modules, checked_layer, fitting
from .common.results_file import Row, Task
from .common.shapes import Shape


def bench_layer(shape: Shape, routing: str, options: argparse.Namespace) -> list[Row]:
    layer, tokens = checked_layer(shape, routing, options)
    modules: dict[str, torch.nn.Module] = {"triton": layer}
    if grouped_mm_takes(shape, options.dtype):
        modules["torch_grouped_mm"] = torch.compile(TorchGroupedMM(layer), disable=options.device == "cpu")
    return bench_modules(modules, tokens, shape, options)


COLUMNS = ("shape", "routing", "pass", "implementation", "ms", "tokens_per_s", "dense_bound_ms")
COLUMNS += ("share_of_dense_bound", "saved_mib", "peak_mib")


def compare(rows: list[dict]) -> list[dict]:
    """Return one row per shape and routing: shares of the dense bound, and the speedup over the baseline."""
    table = {}
    for row in rows:
        line = table.setdefault((row["shape"], row["routing"]), {"shape": row["shape"], "routing": row["routing"]})
        ours = row["implementation"] == "triton"
        line[f"{'share' if ours else 'baseline_share'} {row['pass']}"] = row["share_of_dense_bound"]
        line[f"{'ms' if ours else 'baseline_ms'} {row['pass']}"] = row["ms"]
    for (shape, routing), line in table.items():
        for name in PASSES:
            if f"baseline_ms {name}" in line:
                line[f"speedup {name}"] = line[f"baseline_ms {name}"] / line[f"ms {name}"]
            if routing == "zipf" and (shape, "even") in table:
                line[f"cost of zipf {name}"] = line[f"ms {name}"] / table[shape, "even"][f"ms {name}"] - 1
    return list(table.values())


TABLE_HEAD = (
    "layer (T, D, F, E, K)",
    "ms",
    "share of the dense bound",
    "with skewed routing",
    "times as fast as compiled `grouped_mm`",
    "saved MiB (`grouped_mm`)",
    "peak MiB (`grouped_mm`)",
)


def markdown_table(rows: list[dict]) -> str:
    """Return a results file as a Markdown table. Pairs are forward / forward and backward."""
    found = {(row["shape"], row["routing"], row["pass"], row["implementation"]): row for row in rows}
    lines = [TABLE_HEAD, ("---",) * len(TABLE_HEAD)]
    for name in dict.fromkeys(row["shape"] for row in rows):
        sizes = found[name, "even", PASSES[0], "triton"]
        ours = [found[name, "even", which, "triton"] for which in PASSES]
        baseline = [found.get((name, "even", which, "torch_grouped_mm")) for which in PASSES]
        skewed = [found.get((name, "zipf", which, "triton")) for which in PASSES]
        lines.append(
            (
                f"{name} ({', '.join(str(sizes[letter]) for letter in 'TDFEK')})",
                " / ".join(f"{row['ms']:.2f}" for row in ours),
                " / ".join(f"{row['share_of_dense_bound']:.2f}" for row in ours),
                " / ".join("-" if row is None else f"{row['share_of_dense_bound']:.2f}" for row in skewed),
                " / ".join(f"{b['ms'] / row['ms']:.2f}" if b else "-" for row, b in zip(ours, baseline, strict=True)),
                *(f"{ours[1][key]:.0f} ({_mib(baseline[1], key)})" for key in ("saved_mib", "peak_mib")),
            )
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _mib(row: dict | None, key: str) -> str:
    return "-" if row is None else f"{row[key]:.0f}"


def print_comparison(path: Path) -> None:
    columns = [f"{kind} {name}" for name in PASSES for kind in ("share", "baseline_share", "speedup", "cost of zipf")]
    print_rows(compare(plots.read(path)), ["shape", "routing", *columns])


def print_table(path: Path) -> None:
    print(markdown_table(plots.read(path)), end="")


def plot(path: Path) -> None:
    """Plot a bar chart of the shares of the dense bound with even routing, next to the results file."""
    rows = [row for row in plots.read(path) if row["routing"] == "even"]
    labels = {"triton": "moe_layers", "torch_grouped_mm": "torch grouped_mm, compiled"}
    figure, axes = plots.panels(1, 2, 10, 3.6, sharey=True)
    for axis, name in zip(axes, PASSES, strict=True):
        for i, (implementation, label) in enumerate(labels.items()):
            bars = [r for r in rows if r["pass"] == name and r["implementation"] == implementation]
            positions = [x + 0.4 * i - 0.2 for x in range(len(bars))]
            axis.bar(positions, [r["share_of_dense_bound"] for r in bars], 0.4, label=label)
        axis.set_xticks(range(len(bars)), [r["shape"] for r in bars], rotation=30, ha="right")
        axis.set_title(name)
        axis.axhline(1.0, color="black", linewidth=0.8)
    axes[0].set_ylabel("share of the dense cuBLAS bound")
    first = rows[0]
    versions = f"PyTorch {first['torch'].split('+')[0]}, Triton {first['triton']}"
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    plots.save(figure, path, f"{first['gpu']}, bfloat16, even routing, {versions} ({path.name})")


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "tuned")
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], help="default: both; even with many shapes")


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    chosen = shapes.shapes_named(options.shapes)
    for shape in fitting(chosen, options.device):
        for routing in options.routing or (["even", "zipf"] if len(chosen) < 10 else ["even"]):
            yield {"shape": shape.name, "routing": routing}, partial(bench_layer, shape, routing, options)


READERS = {"--compare": each(print_comparison), "--table": each(print_table), "--plot": each(plot)}
main = Command(__doc__, add_options, tasks, COLUMNS, READERS)


if __name__ == "__main__":
    main()
