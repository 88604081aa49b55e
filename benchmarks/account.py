"""Where the time of one forward and backward goes: every kernel on the timeline, and the gaps between them.

    python -m benchmarks.account --commit $(git rev-parse --short HEAD) --output benchmarks/results/account.json

A GEMM's bound is the cuBLAS time of one dense product of equal size, any other kernel's the time to move its bytes once
at the speed of a large copy; both are measured in the same run. `idle` is the step less the sum of its kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from moe_kernels import tuning
from moe_kernels.catalog import Arguments, GroupedGemmArguments, Kernel

from .layer import environment, make_layer, make_tokens, passes
from .shapes import SHAPES, Shape
from .timing import time_interleaved

STEADY_MS = 400.0  # a GPU that has just begun to work runs at clocks that training never sees


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
        extras = (" + activation" if args.epilogue else "") + (" + gather" if args.row_to_token is not None else "")
        return Gemm(function, f"gemm{extras} K={size_k} N={size_n}", len(args.out), size_k, size_n)
    _, size_k, size_n = args.out.shape
    gathers = args.a_row_to_token is not None or args.dout_row_to_token is not None
    stage = f"wgrad{' + gather' if gathers else ''} M={size_k} N={size_n}"
    return Gemm(function, stage, args.num_rows, size_k, size_n)


def record_gemms(step: Callable[[], object]) -> list[Gemm]:
    """The GEMMs of a step, in the order of their launches."""
    gemms = []

    def recording(run: Callable[[Arguments], bool | None], args: Arguments) -> bool | None:
        ran = run(args)
        if ran is not False:
            gemms.append(gemm_of(tuning.select(args), args))
        return ran

    names = ("run", "run_if_supported")
    with mock.patch.multiple(tuning, **{name: partial(recording, getattr(tuning, name)) for name in names}):
        step()
    return gemms


def profile_steps(step: Callable[[], object]) -> list[tuple[str, float]]:
    """(kernel, median milliseconds) for every kernel of a step, in order, from the later half of many steps."""
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


def bytes_by_kernel(shape: Shape, itemsize: int) -> dict[str, int]:
    """What each kernel that is not a GEMM has to read and write at least."""
    tokens, rows = shape.num_tokens * shape.d_model * itemsize, shape.num_rows * shape.d_model * itemsize
    activated, integers = shape.num_rows * shape.d_ff * itemsize, 4 * shape.num_rows
    logits = 4 * shape.num_tokens * shape.num_experts
    return {
        "_spread_kernel": tokens + rows + integers,
        "_combine_kernel": rows + tokens + integers,
        "_combine_with_router_kernel": rows + tokens + 4 * integers,  # the router comes from caches
        "_weighted_activation_backward_kernel": 6 * activated + 3 * integers,  # reads H, dA', writes dH, A_w
        "_topk_kernel": logits + 2 * integers,
        "_topk_backward_kernel": logits + 3 * integers,
        "elementwise": 3 * tokens,
    }


def account(shape: Shape, rounds: int) -> list[dict]:
    """One row per kernel of the step, one for the gaps and one for the whole."""
    dtype = torch.bfloat16
    layer = make_layer(shape, "cuda", dtype)
    tokens = make_tokens(layer, shape, "even", dtype)
    step = passes(layer, tokens)["forward+backward"]
    for _ in range(3):
        step()
    gemms = record_gemms(step)
    launches = profile_steps(step)
    kernels = label(launches, gemms, bytes_by_kernel(shape, dtype.itemsize))
    dense = {gemm.stage: dense_product(gemm, dtype) for gemm in gemms}
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    functions = {"step": step, "copy": lambda: target.copy_(source), **dense}
    timings = time_interleaved(functions, "cuda", rounds=rounds, round_ms=100.0)
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
    return [{"shape": shape.name, "routing": "even", "copy_gb_per_s": bytes_per_ms / 1e6, **row} for row in rows]


def dense_product(gemm: Gemm, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    _, _, rows, reduction, columns = gemm
    if gemm.stage.startswith("wgrad"):  # the rows are the reduction
        a = torch.randn(rows, reduction, device="cuda", dtype=dtype).t()
        b = torch.randn(rows, columns, device="cuda", dtype=dtype)
    else:
        a = torch.randn(rows, reduction, device="cuda", dtype=dtype)
        b = torch.randn(columns, reduction, device="cuda", dtype=dtype).t()
    return lambda: a @ b


def label(
    launches: list[tuple[str, float]], gemms: list[Gemm], bytes_of: dict[str, int]
) -> list[tuple[str, Gemm | None, int | None]]:
    """(stage, GEMM or None, bytes or None) of each launch; the launches of our GEMMs come in the order of `gemms`."""
    remaining = iter(gemms)
    functions = {gemm.function for gemm in gemms}
    labels = []
    for name, _ in launches:
        if name in functions:
            gemm = next(remaining)
            assert name == gemm.function, (name, gemm)
            labels.append((gemm.stage, gemm, None))
        else:
            kind = "elementwise" if "elementwise" in name else name
            labels.append((stage_of(name), None, bytes_of.get(kind)))
    assert next(remaining, None) is None, "a GEMM was launched that the profile does not show"
    return labels


def stage_of(name: str) -> str:
    stages = {
        "spread": "tokens to rows",
        "combine": "rows to tokens",
        "activation": "activation gradient",
        "topk": "router choice",
        "elementwise": "PyTorch elementwise",
    }
    return next((stage for part, stage in stages.items() if part in name), "router GEMM, sort")


def print_account(rows: list[dict]) -> None:
    print(f"\n{rows[0]['shape']}: copy bandwidth {rows[0]['copy_gb_per_s']:.0f} GB/s")
    for row in rows:
        speed = f"{row['tflops_per_s']:.0f} TFLOP/s" if row["tflops_per_s"] else ""
        speed = speed or (f"{row['gb_per_s']:.0f} GB/s" if row["gb_per_s"] else "")
        share = f"{row['share_of_bound']:.3f}" if row["share_of_bound"] else ""
        print(f"{row['ms']:9.4f} ms  {share:>6}  {speed:>12}  {row['stage']:<40} {row['kernel'][:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rows = []
    for name in options.shapes:
        rows += [{**row, **environment("cuda", options.commit)} for row in account(SHAPES[name], options.rounds)]
        print_account([row for row in rows if row["shape"] == name])
        torch.cuda.empty_cache()
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
