"""Compare this tree's layer with another checkout's, taking turns in one run.

    git worktree add ../before COMMIT
    python -m benchmarks.compare_commits --before ../before --commits $(git rev-parse --short HEAD) COMMIT --output FILE

The clocks of two separate runs differ by several per cent, so losses of 1 or 2 % show only in one run. `--shapes` takes
names of shapes and of groups, as `benchmarks.layer` does. Peaks of memory are those of forward and backward.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from .common.shapes import Shape, shapes_named
from .common.timing import time_interleaved
from .layer import PASSES, environment, make_layer, make_tokens, measure_memory, passes, print_rows

_PACKAGES = ("moe_kernels", "moe_layers")


def load_before(tree: Path, directory: Path) -> type[torch.nn.Module]:
    """Return `MoEFeedForward` of another tree, in a copy whose packages and ops are renamed."""
    for package in _PACKAGES:
        shutil.copytree(tree / package, directory / f"before_{package}", ignore=shutil.ignore_patterns("__pycache__"))
    for file in directory.rglob("*.py"):
        file.write_text(re.sub(rf"\b({'|'.join(_PACKAGES)})\b", r"before_\1", file.read_text()))
    sys.path.insert(0, str(directory))
    return importlib.import_module("before_moe_layers").MoEFeedForward


def bench_versions(
    before: type[torch.nn.Module], shape: Shape, routing: str, device: str, rounds: int, round_ms: float
) -> list[dict]:
    """Return a row per pass: ms now and before, and their ratio."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    now = make_layer(shape, device, dtype)
    tokens = make_tokens(now, shape, routing, dtype)
    sizes = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    earlier = before(*sizes, device=device, dtype=dtype)
    earlier.load_state_dict(now.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(earlier(tokens), now(tokens), rtol=0.05, atol=0.05 * float(now(tokens).std()))
    modules = {"now": now, "before": earlier}
    runs = {name: passes(module, tokens) for name, module in modules.items()}
    functions = {f"{name}/{which}": run[which] for name, run in runs.items() for which in run}
    timings = time_interleaved(functions, device, rounds=rounds, round_ms=round_ms)
    peaks = {
        f"{name}_peak_mib": measure_memory(module, tokens)[1] for name, module in modules.items() if tokens.is_cuda
    }
    rows = []
    for which in PASSES:
        row = {"shape": shape.name, "routing": routing, "pass": which}
        for name in runs:
            row |= {f"{name}_{column}": value for column, value in timings[f"{name}/{which}"]._asdict().items()}
        rows.append({**row, "now_over_before": row["now_ms"] / row["before_ms"], **peaks})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="TREE", help="the other checkout")
    parser.add_argument("--commits", nargs=2, default=("unknown", "unknown"), metavar=("NOW", "BEFORE"))
    parser.add_argument("--shapes", nargs="+", metavar="NAME", default=["tuned"], help="shapes or groups of them")
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], default=["even", "zipf"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=200.0, help="least milliseconds per timing and round")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="before_") as directory:
        compare(load_before(options.before, Path(directory)), options)


def compare(before: type[torch.nn.Module], options: argparse.Namespace) -> None:
    """Measure all requested shapes, print the results and write them."""
    rows = []
    for shape in shapes_named(options.shapes):
        for routing in options.routing:
            measured = bench_versions(before, shape, routing, options.device, options.rounds, options.round_ms)
            commits = {**environment(options.device, options.commits[0]), "before_commit": options.commits[1]}
            rows += [{**row, **commits} for row in measured]
            print_rows(measured, list(measured[0]))
            if options.device == "cuda":
                torch.cuda.empty_cache()
            if options.output:  # after every shape, so that a stopped run keeps its results
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
