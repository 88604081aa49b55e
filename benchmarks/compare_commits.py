"""Compare this tree's layer with another checkout's, taking turns in one run.

    git worktree add ../before COMMIT
    python -m benchmarks.compare_commits --before ../before --commit $(git rev-parse --short HEAD) \\
        --before-commit COMMIT --output FILE

The clocks of two separate runs differ by several per cent, so slowdowns of 1 or 2 % show only in one run. `--shapes`
takes names of shapes and of groups, as `benchmarks.layer` does. Peak memory is the highest during forward and backward.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from .common import shapes
from .common.command import Command
from .common.layers import PASSES, make_layer, make_tokens, measure_memory, passes
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import timed

_PACKAGES = ("moe_kernels", "moe_layers")


def load_before(tree: Path, directory: Path) -> type[torch.nn.Module]:
    """Return `MoEFeedForward` of another tree, in a copy whose packages and ops are renamed."""
    for package in _PACKAGES:
        shutil.copytree(tree / package, directory / f"before_{package}", ignore=shutil.ignore_patterns("__pycache__"))
    for file in directory.rglob("*.py"):
        file.write_text(re.sub(rf"\b({'|'.join(_PACKAGES)})\b", r"before_\1", file.read_text()))
    sys.path.insert(0, str(directory))
    return importlib.import_module("before_moe_layers").MoEFeedForward


def bench_versions(before: type[torch.nn.Module], shape: Shape, routing: str, options: argparse.Namespace) -> list[Row]:
    device, dtype = options.device, options.dtype
    now = make_layer(shape, device, dtype)
    tokens = make_tokens(now, shape, routing)
    sizes = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    earlier = before(*sizes, activation=shape.activation, device=device, dtype=dtype)
    earlier.load_state_dict(now.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(earlier(tokens), now(tokens), rtol=0.05, atol=0.05 * float(now(tokens).std()))
    modules = {"now": now, "before": earlier}
    runs = {name: passes(module, tokens) for name, module in modules.items()}
    timings = timed({(name, which): run[which] for name, run in runs.items() for which in run}, options)
    peaks = {
        f"{name}_peak_mib": measure_memory(module, tokens)[1] for name, module in modules.items() if tokens.is_cuda
    }
    rows = []
    for which in PASSES:
        row = {"pass": which}
        for name in runs:
            row |= {f"{name}_{column}": value for column, value in timings[name, which]._asdict().items()}
        rows.append({**row, "now_over_before": row["now_ms"] / row["before_ms"], **peaks})
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "tuned")
    parser.add_argument("--before", type=Path, required=True, metavar="TREE", help="the other checkout")
    parser.add_argument("--before-commit", default="unknown", help="its commit, kept in the results")
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], default=["even", "zipf"])


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    with tempfile.TemporaryDirectory(prefix="before_") as directory:
        before = load_before(options.before, Path(directory))
        for shape in shapes.shapes_named(options.shapes):
            for routing in options.routing:
                measure = partial(bench_versions, before, shape, routing, options)
                yield {"shape": shape.name, "routing": routing}, measure


main = Command(__doc__, add_options, tasks, constants=lambda options: {"before_commit": options.before_commit})


if __name__ == "__main__":
    main()
