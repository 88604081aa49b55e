"""Profile of one forward and backward: every kernel on the timeline, and the gaps between kernels.

    python -m benchmarks.profile_step --commit $(git rev-parse --short HEAD) --output benchmarks/results/account.json
    python -m benchmarks.profile_step --activations swiglu relu "gpt_oss with biases" --output FILE
    python -m benchmarks.profile_step --explain benchmarks/results/account.json

The bound of a GEMM is the cuBLAS time of one dense product of equal size. The bound of any other kernel is the time to
move its bytes once at the speed of a large copy. Both are measured in the same run. `idle` is the step's time minus the
sum of its kernels. The profiler times the kernels in other calls, so `idle` is negative if they took longer there. The
activations are the variants of `benchmarks.activations`. `--explain` measures nothing: from results, it explains the
step's time beyond its dense bound.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from moe_kernels.gemm import selection
from moe_kernels.gemm.arguments.base import Arguments
from moe_kernels.gemm.arguments.grouped import GroupedGemmArguments
from moe_kernels.gemm.kernel import Kernel
from moe_kernels.runtime import launch

from .common import plots, shapes
from .common.command import Command, each, print_rows
from .common.layers import VARIANTS, make_layer, make_tokens, passes
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import time_interleaved, timed

STEADY_MS = 400.0  # least time to profile, because a GPU that has just started work has other clocks than in training
SUM = "CUDAFunctor_add<c10::BFloat16>"  # part of the name of PyTorch's kernel that adds two gradients of the tokens
STAGES = {
    SUM: "sum of gradients",
    "permute": "tokens to rows",
    "combine_dweights": "gradient of the weights",
    "combine": "rows to tokens",
    "activation_backward": "activation gradient",
    "activation": "activation",
    "bias_and_scale": "bias",
    "segment_sum": "bias gradients",
    "topk": "router choice",
    "scored_routing": "router choice",
    **dict.fromkeys(("_count_kernel", "_scan_kernel", "_place_kernel", "_rank_kernel", "_tile_table_kernel"), "sort"),
    "elementwise": "PyTorch elementwise",
}  # stages of kernels with these names; the first match counts
# Operands that a kernel reads and overwrites.
IN_PLACE = {"_bias_and_scale_kernel": "rows_ptr", "_scan_kernel": "counts_ptr"}


class Gemm(NamedTuple):
    """A product over all rows, and the GPU function that computes it."""

    function: str
    stage: str
    rows: int
    reduction: int
    columns: int


def gemm_of(kernel: Kernel, args: Arguments) -> Gemm:
    function = kernel.launch(args).function.fn.__name__
    if isinstance(args, GroupedGemmArguments):
        _, size_k, size_n = args.B.shape
        parts = {"activation": args.epilogue, "bias": args.bias, "gather": args.row_to_token}
        extras = "".join(f" + {name}" for name, part in parts.items() if part is not None)
        return Gemm(function, f"gemm{extras} K={size_k} N={size_n}", len(args.out), size_k, size_n)
    _, size_k, size_n = args.out.shape
    gathers = args.a_row_to_token is not None or args.dout_row_to_token is not None
    stage = f"wgrad{' + gather' if gathers else ''} M={size_k} N={size_n}"
    return Gemm(function, stage, args.num_rows, size_k, size_n)


def record_gemms(step: Callable[[], object]) -> list[Gemm]:
    """Return the GEMMs of a step, in the order of their launches."""
    gemms = []
    launch_as_before = selection._launch

    def recording(args: Arguments) -> Kernel | None:
        kernel = launch_as_before(args)
        if kernel is not None:
            gemms.append(gemm_of(kernel, args))
        return kernel

    with mock.patch.object(selection, "_launch", recording):
        step()
    return gemms


def record_bytes(step: Callable[[], object]) -> dict[str, list[int]]:
    """Return the minimum number of bytes that each launch of our kernels reads and writes, by kernel name.

    Operands in `IN_PLACE` count twice, others once. GEMMs are excluded, because their operands are descriptors.
    """
    moved = defaultdict(list)
    launch_as_before = launch._launch

    def recording(launch: launch.Launch, ready: launch.Ready | None) -> launch.Ready | None:
        name = launch.function.fn.__name__
        num_bytes = 0
        for parameter, value in zip(launch.function.arg_names, launch.arguments, strict=False):
            if isinstance(value, torch.Tensor):
                num_bytes += value.nbytes * (2 if parameter == IN_PLACE.get(name) else 1)
        moved[name].append(num_bytes)
        return launch_as_before(launch, ready)

    with mock.patch.object(launch, "_launch", recording):
        step()
    return dict(moved)


def profile_steps(step: Callable[[], object]) -> list[tuple[str, float]]:
    """Return (kernel, median milliseconds) per kernel of a step, in order, from the later half of many steps."""
    (step_ms,) = (timing.ms for timing in time_interleaved({"step": step}, "cuda", rounds=1).values())
    num_steps = max(10, int(STEADY_MS / step_ms))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    assert len(events) % num_steps == 0, Counter(event.name for event in events)
    per_step = len(events) // num_steps
    steps = [events[i * per_step : (i + 1) * per_step] for i in range(num_steps // 2, num_steps)]
    launches = []
    for same in zip(*steps, strict=True):
        assert len({event.name for event in same}) == 1, [event.name for event in same]
        launches.append((same[0].name, statistics.median(event.time_range.elapsed_us() for event in same) / 1e3))
    return launches


def account(shape: Shape, activation: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each kernel of the step, a row for the gaps between kernels and a row for the whole step."""
    dtype = options.dtype
    layer = make_layer(shape, options.device, dtype, **VARIANTS[activation])
    tokens = make_tokens(layer, shape, "even")
    step = passes(layer, tokens)["forward+backward"]
    for _ in range(3):
        step()
    gemms, moved = record_gemms(step), record_bytes(step)
    launches = profile_steps(step)
    kernels = label(launches, gemms, moved, 3 * tokens.nbytes)
    dense = {gemm.stage: dense_product(gemm, dtype) for gemm in gemms}
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    functions = {"step": step, "copy": lambda: target.copy_(source), **dense}
    timings = timed(functions, options)
    bytes_per_ms = 2 * source.numel() / timings["copy"].ms
    rows = []
    for (stage, gemm, bytes_moved), (name, ms) in zip(kernels, launches, strict=True):
        bound = timings[gemm.stage].ms if gemm else bytes_moved / bytes_per_ms if bytes_moved else None
        rows.append(
            {
                "kernel": name[:80],
                "stage": stage,
                "ms": ms,
                "tflops_per_s": 2e-9 * gemm.rows * gemm.reduction * gemm.columns / ms if gemm else None,
                "gb_per_s": 1e-6 * bytes_moved / ms if bytes_moved else None,
                "bound_ms": bound,
                "share_of_bound": bound / ms if bound else None,
            }
        )
    whole = timings["step"].ms
    empty = dict.fromkeys(("tflops_per_s", "gb_per_s", "bound_ms", "share_of_bound"))
    rows.append({"kernel": "idle", "stage": "between kernels", "ms": whole - sum(ms for _, ms in launches), **empty})
    rows.append({"kernel": "step", "stage": "forward+backward", "ms": whole, **empty})
    return [{"routing": "even", "copy_gb_per_s": bytes_per_ms / 1e6, **row} for row in rows]


def dense_product(gemm: Gemm, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    _, _, rows, reduction, columns = gemm
    if gemm.stage.startswith("wgrad"):  # the sum runs over the rows
        a = torch.randn(rows, reduction, device="cuda", dtype=dtype).t()
        b = torch.randn(rows, columns, device="cuda", dtype=dtype)
    else:
        a = torch.randn(rows, reduction, device="cuda", dtype=dtype)
        b = torch.randn(columns, reduction, device="cuda", dtype=dtype).t()
    return lambda: a @ b


def label(
    launches: list[tuple[str, float]], gemms: list[Gemm], moved: dict[str, list[int]], sum_bytes: int
) -> list[tuple[str, Gemm | None, int | None]]:
    """Label each launch with (stage, GEMM or None, bytes or None). `gemms` and `moved` list our launches in order."""
    functions = {gemm.function for gemm in gemms}
    remaining = iter(gemms)
    remaining_bytes = {name: iter(sizes) for name, sizes in moved.items() if name not in functions}
    labels = []
    for name, _ in launches:
        if name in functions:
            gemm = next(remaining)
            assert name == gemm.function, (name, gemm)
            labels.append((gemm.stage, gemm, None))
        elif name in remaining_bytes:
            labels.append((stage_of(name), None, next(remaining_bytes[name])))
        else:
            labels.append((stage_of(name), None, sum_bytes if SUM in name else None))
    assert next(remaining, None) is None, "a GEMM was launched that the profile does not show"
    missed = [name for name, sizes in remaining_bytes.items() if next(sizes, None) is not None]
    assert not missed, f"launches of {missed} that the profile does not show"
    return labels


def stage_of(name: str) -> str:
    return next((stage for part, stage in STAGES.items() if part in name), "router GEMM, other")


EXPLAINED = ("shape", "kernel", "stage", "ms", "tflops_per_s", "bound_ms")


def explain(rows: list[dict]) -> list[dict]:
    """Explain each step's time beyond its dense bound; one entry per shape and activation.

    A stage's `points` are percentages of the step's time: for a GEMM, the time beyond its dense product; for other
    kernels, all of their time. The points and the share of the dense bound add up to 100. `bytes_points` is the part
    that a copy of the same bytes would take, at most the measured time. `lost_points` is the rest. Both are None for
    GEMMs and for unknown bytes.
    """
    steps = defaultdict(list)
    for row in rows:
        if missing := [name for name in EXPLAINED if name not in row]:
            raise ValueError(f"explain: rows must have {', '.join(EXPLAINED)}, got one without {', '.join(missing)}")
        # Older results have no field "activation", because they have only SwiGLU.
        steps[row["shape"], row.get("activation", "swiglu")].append(row)
    return [{"shape": shape, "activation": name, **explain_step(step)} for (shape, name), step in steps.items()]


def explain_step(rows: list[dict]) -> dict:
    named = {name: [row for row in rows if row["kernel"] == name] for name in ("step", "idle")}
    for name, found in named.items():
        if len(found) != 1:
            raise ValueError(f"explain: {rows[0]['shape']} must have one row of kernel {name!r}, got {len(found)}")
    gemms = [row for row in rows if row["tflops_per_s"] is not None]
    if not gemms or any(row["bound_ms"] is None for row in gemms):
        raise ValueError(f"explain: {rows[0]['shape']} must have GEMMs, each with its bound_ms, got {len(gemms)} GEMMs")
    step_ms, dense_ms = named["step"][0]["ms"], sum(row["bound_ms"] for row in gemms)
    stages = defaultdict(list)
    for row in rows:
        if row["kernel"] != "step":
            stages["idle" if row["kernel"] == "idle" else row["stage"]].append(row)
    lines = [{"stage": stage, **explain_stage(kernels, step_ms)} for stage, kernels in stages.items()]
    return {
        "step_ms": step_ms,
        "dense_bound_ms": dense_ms,
        "share_of_dense_bound": dense_ms / step_ms,
        "stages": sorted(lines, key=lambda line: -line["points"]),
    }


def explain_stage(kernels: list[dict], step_ms: float) -> dict[str, float | None]:
    ms, is_gemm = sum(row["ms"] for row in kernels), kernels[0]["tflops_per_s"] is not None
    dense_ms = sum(row["bound_ms"] for row in kernels) if is_gemm else None
    points = 100 * (ms - (dense_ms or 0.0)) / step_ms
    bytes_points = lost_points = None
    if not is_gemm and all(row["bound_ms"] is not None for row in kernels):
        bytes_points = 100 * sum(min(row["bound_ms"], row["ms"]) for row in kernels) / step_ms
        lost_points = points - bytes_points
    split = {"bytes_points": bytes_points, "lost_points": lost_points}
    return {"ms": ms, "dense_ms": dense_ms, "points": points, **split}


def print_explained(path: Path) -> None:
    try:
        steps = explain(plots.read(path))
    except ValueError as error:
        raise SystemExit(f"{path}: {error}") from error
    print(path)
    for step in steps:
        share = f"share {100 * step['share_of_dense_bound']:.1f} %"
        times = f"step {step['step_ms']:.3f} ms, dense bound {step['dense_bound_ms']:.3f} ms"
        print(f"\n{step['shape']}, {step['activation']}: {times}, {share}")
        print_rows(step["stages"], list(step["stages"][0]))


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "tuned")
    parser.add_argument("--activations", nargs="+", choices=list(VARIANTS), default=["swiglu"])
    parser.set_defaults(round_ms=100.0)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    if options.device != "cuda":
        raise SystemExit(f"profile_step: the profiled kernels run on a GPU, got --device {options.device}")
    for shape in shapes.shapes_named(options.shapes):
        for activation in options.activations:
            yield {"shape": shape.name, "activation": activation}, partial(account, shape, activation, options)


COLUMNS = ("shape", "activation", "ms", "share_of_bound", "tflops_per_s", "gb_per_s", "stage", "kernel")
main = Command(__doc__, add_options, tasks, COLUMNS, {"--explain": each(print_explained)})


if __name__ == "__main__":
    main()
