"""The whole layer, forward and backward, against PyTorch's grouped_mm and against the dense bound.

    python -m benchmarks.layer --commit $(git rev-parse --short HEAD) --output benchmarks/results/layer.json
    python -m benchmarks.layer --shapes unseen --time-limit-s 540 --resume --commit COMMIT --output FILE
    python -m benchmarks.layer --off-grid --commit COMMIT --output FILE
    python -m benchmarks.layer --compare benchmarks/results/layer.json
    python -m benchmarks.layer --table benchmarks/results/layer.json
    python -m benchmarks.layer --plot benchmarks/results/layer.json

`--shapes` takes names of shapes and of groups: "tuned" (default), "unseen" and "off-grid". `grouped_mm` takes no rows
that start between multiples of 16 bytes; such shapes have no baseline. A shape that the GPU's memory cannot hold is
left out.

Every shape is checked before timing. Timings take turns in rounds. The dense bound of a pass is measured in the same
run: the sum of the cuBLAS medians of its GEMMs with all T * K rows in one matrix. Saved memory is the memory allocated
after a forward minus that before it, including the output but not the input. Peak memory is the highest during forward
and backward minus that before them, including gradients.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_kernels import fused_experts, reference
from moe_kernels.testing import assert_accurate, make_logits
from moe_layers import MoEFeedForward

from .common import results_file
from .common.baselines import FORWARD_GEMMS, TorchGroupedMM, dense_gemms, grouped_mm_takes
from .common.shapes import Shape, shapes_named
from .common.timing import Timing, time_interleaved

MIB = 2**20
CHECKED_BYTES = 80e9  # largest memory of a check
PASSES = ("forward", "forward+backward")


def make_layer(shape: Shape, device: str, dtype: torch.dtype) -> MoEFeedForward:
    torch.manual_seed(0)
    sizes = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    return MoEFeedForward(*sizes, activation=shape.activation, device=device, dtype=dtype)


def make_tokens(layer: MoEFeedForward, shape: Shape, routing: str, dtype: torch.dtype) -> Tensor:  # [T, D]
    """Return random tokens, shifted along the router's rows so that its choice follows `routing`."""
    w_router = layer.router.weight.detach().float()
    generator = torch.Generator(w_router.device).manual_seed(0)
    tokens = torch.randn(shape.num_tokens, shape.d_model, device=w_router.device, generator=generator)
    wanted = 8 * make_logits(shape.num_tokens, shape.num_experts, routing, w_router.device, generator)
    tokens += torch.linalg.lstsq(w_router, (wanted - tokens @ w_router.t()).t()).solution.t()
    return tokens.to(dtype)


def fits_memory(shape: Shape, device: str) -> bool:
    """Return whether the GPU can hold the layer, its gradients and the rows of both implementations, by estimate."""
    num_bytes = 6 * shape.num_weights + 20 * shape.num_rows * (shape.d_model + shape.d_ff)
    return device == "cpu" or num_bytes < torch.cuda.get_device_properties(0).total_memory


def num_checked(shape: Shape) -> int:
    """Return the number of experts whose check needs at most `CHECKED_BYTES` by estimate, at least 1."""
    float32_pass = 16 * shape.num_weights + 32 * shape.num_rows * (shape.d_model + shape.d_ff)
    comparison = 40 * shape.num_weights  # three results, and copies of the largest one in float64
    return max(int(shape.num_experts / max(max(float32_pass, comparison) / CHECKED_BYTES, 1.0)), 1)


def check_layer(layer: MoEFeedForward, tokens: Tensor, num_experts: int | None = None) -> None:
    """Apply the tests' error budget to the expert op, output and gradients, with one choice of experts for all dtypes.

    Args:
        num_experts: check the first experts, with as many rows per expert, because memory for all lacks; default: all.
    """
    num_all, (w_up, w_down) = layer.num_experts, (layer.experts.w_up, layer.experts.w_down)
    num_experts = num_experts or num_all
    tokens = tokens[: len(tokens) * num_experts // num_all]
    with torch.no_grad():
        routed = layer.router(tokens)
    topk_experts = routed.topk_experts % num_experts
    operands = (tokens, routed.topk_weights, w_up[:num_experts], w_down[:num_experts])

    def run(op: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype if t.dtype == tokens.dtype else t.dtype).requires_grad_() for t in operands]
        permutation = reference.sort_by_expert(topk_experts, num_experts)
        out = op(leaves[0], leaves[1], permutation, *leaves[2:], activation=layer.experts.activation)
        generator = torch.Generator(tokens.device).manual_seed(1)
        dout = torch.randn(out.shape, device=out.device, generator=generator).to(tokens.dtype).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    # float32 without TF32 is exact in comparison with 16-bit results.
    exact = run(reference.fused_experts, torch.float32)
    baseline = run(reference.fused_experts, tokens.dtype)
    actual = run(fused_experts, tokens.dtype)
    for name, a, b, e in zip(("out", "dtokens", "dweights", "dw_up", "dw_down"), actual, baseline, exact, strict=True):
        assert_accurate(a, b, e, name)


def passes(layer: torch.nn.Module, tokens: Tensor) -> dict[str, Callable[[], object]]:
    """Return one call of each pass."""
    leaf = tokens.detach().requires_grad_()
    dout = torch.randn_like(tokens)
    parameters = list(layer.parameters())

    def forward() -> Tensor:
        return layer(leaf)

    def forward_backward() -> None:
        for tensor in (leaf, *parameters):
            tensor.grad = None
        forward().backward(dout)

    return {"forward": forward, "forward+backward": forward_backward}


def measure_memory(layer: torch.nn.Module, tokens: Tensor) -> tuple[float, float]:
    """Return (saved, peak) MiB. The peak is measured from before the forward, gradients included; the layer has run."""
    layer.zero_grad()
    run = passes(layer, tokens)  # with a leaf of its own, which has no gradient yet that the run would free
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = run["forward"]()
    saved = torch.cuda.memory_allocated() - before
    del out
    torch.cuda.reset_peak_memory_stats()
    run["forward+backward"]()
    return saved / MIB, (torch.cuda.max_memory_allocated() - before) / MIB


def bench_layer(
    shape: Shape, routing: str, device: str, dtype: torch.dtype, rounds: int, round_ms: float
) -> list[dict]:
    """Return result rows for one shape and routing."""
    torch._dynamo.reset()  # frees the layer of the last shape
    torch.cuda.empty_cache()  # does nothing without a GPU
    layer = make_layer(shape, device, dtype)
    tokens = make_tokens(layer, shape, routing, dtype)
    check_layer(layer, tokens, num_checked(shape))
    torch.cuda.empty_cache()
    modules = {"triton": layer}
    if grouped_mm_takes(shape, dtype):
        modules["torch_grouped_mm"] = torch.compile(TorchGroupedMM(layer), disable=device == "cpu")
    runs = {name: passes(module, tokens) for name, module in modules.items()}
    memory = {
        name: measure_memory(modules[name], tokens) if device == "cuda" else (None, None) for name in _warmed_up(runs)
    }
    functions = {f"{name}/{which}": run[which] for name, run in runs.items() for which in run}
    functions |= {f"dense/{name}": gemm for name, gemm in dense_gemms(shape, device, dtype).items()}
    timings = time_interleaved(functions, device, rounds=rounds, round_ms=round_ms)
    bounds = {
        "forward": sum(timings[f"dense/{name}"].ms for name in FORWARD_GEMMS),
        "forward+backward": sum(t.ms for name, t in timings.items() if name.startswith("dense/")),
    }
    return [
        _row(shape, routing, which, name, timings[f"{name}/{which}"], bounds[which], memory[name])
        for which in bounds
        for name in modules
    ]


def _warmed_up(runs: dict[str, dict[str, Callable[[], object]]]) -> dict[str, dict[str, Callable[[], object]]]:
    for run in runs.values():
        for function in run.values():
            function()
    return runs


def _row(
    shape: Shape,
    routing: str,
    which: str,
    implementation: str,
    timing: Timing,
    bound_ms: float,
    memory: tuple[float | None, float | None],
) -> dict:
    return {
        "shape": shape.name,
        "T": shape.num_tokens,
        "D": shape.d_model,
        "F": shape.d_ff,
        "E": shape.num_experts,
        "K": shape.top_k,
        "routing": routing,
        "pass": which,
        "implementation": implementation,
        **timing._asdict(),
        "tokens_per_s": 1e3 * shape.num_tokens / timing.ms,
        "dense_bound_ms": bound_ms,
        "share_of_dense_bound": bound_ms / timing.ms,
        "saved_mib": memory[0],
        "peak_mib": memory[1],
    }


COLUMNS = ("shape", "routing", "pass", "implementation", "ms", "tokens_per_s", "dense_bound_ms")
COLUMNS += ("share_of_dense_bound", "saved_mib", "peak_mib")


def print_rows(rows: list[dict], columns: Sequence[str] = COLUMNS) -> None:
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3f}"
    return str(value)


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


def plot(path: Path) -> Path:
    """Plot a bar chart of the shares of the dense bound with even routing, next to the results file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in json.loads(path.read_text()) if row["routing"] == "even"]
    labels = {"triton": "moe_layers", "torch_grouped_mm": "torch grouped_mm, compiled"}
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
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
    figure.suptitle(f"{first['gpu']}, bfloat16, even routing, {versions} ({path.name})", fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path.with_suffix(".png"), dpi=90)
    return path.with_suffix(".png")


def environment(device: str, commit: str) -> dict[str, str | None]:
    try:
        import triton
    except ImportError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else None,
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", metavar="NAME", default=["tuned"], help="shapes or groups of them")
    parser.add_argument("--off-grid", action="store_const", dest="shapes", const=["off-grid"], help="that group")
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], help="default: both; even with many shapes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=200.0, help="least milliseconds per timing and round")
    results_file.add_options(parser)
    parser.add_argument("--compare", type=Path, metavar="RESULTS", help="print a results file as a table and stop")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="print a results file as Markdown and stop")
    parser.add_argument("--plot", type=Path, metavar="RESULTS", help="draw a results file and stop")
    options = parser.parse_args(arguments)
    if options.plot:
        print(plot(options.plot))
        return
    if options.table:
        print(markdown_table(json.loads(options.table.read_text())), end="")
        return
    if options.compare:
        columns = [
            f"{kind} {name}" for name in PASSES for kind in ("share", "baseline_share", "speedup", "cost of zipf")
        ]
        print_rows(compare(json.loads(options.compare.read_text())), ["shape", "routing", *columns])
        return
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    shapes = shapes_named(options.shapes)
    routings = options.routing or (["even", "zipf"] if len(shapes) < 10 else ["even"])
    tasks = []
    for shape in shapes:
        if not fits_memory(shape, device):
            print(f"{shape.name}: left out, because the GPU's memory cannot hold it")
            continue
        for routing in routings:
            measure = partial(bench_layer, shape, routing, device, dtype, options.rounds, options.round_ms)
            tasks.append(({"shape": shape.name, "routing": routing}, measure))
    for rows in results_file.ResultsFile.of(options, environment(device, options.commit)).measure(tasks):
        print_rows(rows)


if __name__ == "__main__":
    main()
