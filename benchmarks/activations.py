"""Every activation and option of the experts besides SwiGLU, as a share of its own dense bound.

    python -m benchmarks.activations --commit $(git rev-parse --short HEAD) --output benchmarks/results/activations.json

The dense bound of a pass is the sum of the cuBLAS medians of its GEMMs with all T * K rows in one matrix. A plain
activation has an up-projection of half the width. `points` is the difference to SwiGLU's share of the same shape, in
percentage points. The tests check the results; this benchmark only checks that they are finite.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from moe_kernels import RouterSpec
from moe_kernels.specs import ACTIVATION_KINDS
from moe_layers import MoEFeedForward

from .common.baselines import FORWARD_GEMMS, dense_gemms
from .common.shapes import SHAPES, TINY, Shape
from .common.timing import time_interleaved
from .layer import environment, make_tokens, passes, print_rows

VARIANTS = {
    **{name: {"activation": name} for name in ACTIVATION_KINDS},
    "swiglu with biases": {"bias": True},
    "gpt_oss with biases": {"activation": "gpt_oss", "bias": True},
    "swiglu, weight on input": {"router": RouterSpec.llama4()},
    "swiglu, grouped sigmoid router": {"router": RouterSpec.deepseek_v3(4, 2)},
}
COLUMNS = ("shape", "pass", "variant", "ms", "dense_bound_ms", "share_of_dense_bound", "points")


def make_variant(shape: Shape, variant: str, device: str, dtype: torch.dtype) -> MoEFeedForward:
    torch.manual_seed(0)
    sizes = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    return MoEFeedForward(*sizes, device=device, dtype=dtype, **VARIANTS[variant])


def bench_shape(shape: Shape, variants: list[str], device: str, rounds: int, round_ms: float) -> list[dict]:
    """Return result rows for one shape, with even routing in bfloat16. The variants must include "swiglu"."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    functions, gated = {}, {}
    for variant in variants:
        layer = make_variant(shape, variant, device, dtype)
        gated[variant] = layer.experts.activation.gated
        run = passes(layer, make_tokens(layer, shape, "even", dtype))
        assert run["forward"]().isfinite().all(), variant
        functions |= {f"{variant}/{name}": run[name] for name in run}
    dense = dense_gemms(shape, device, dtype)
    functions |= {f"dense/{name}": gemm for name, gemm in dense.items()}
    timings = time_interleaved(functions, device, rounds=rounds, round_ms=round_ms)
    rows = []
    for name, gemms in (("forward", FORWARD_GEMMS), ("forward+backward", tuple(dense))):
        # Half the width takes half the time, because these GEMMs are compute-bound.
        ms = {gemm: timings[f"dense/{gemm}"].ms for gemm in gemms}
        bounds = {True: sum(ms.values()), False: sum(t / 2 if "up" in gemm else t for gemm, t in ms.items())}
        base = bounds[True] / timings[f"swiglu/{name}"].ms
        for variant in variants:
            timing, bound = timings[f"{variant}/{name}"], bounds[gated[variant]]
            rows.append(
                {
                    "shape": shape.name,
                    "pass": name,
                    "variant": variant,
                    **timing._asdict(),
                    "dense_bound_ms": bound,
                    "share_of_dense_bound": bound / timing.ms,
                    "points": 100 * (base - bound / timing.ms),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*SHAPES, TINY.name]
    parser.add_argument("--shapes", nargs="+", choices=choices, default=["qwen3-30b-a3b", "gpt-oss-20b"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="beside swiglu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=100.0, help="least milliseconds per timing and round")
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rows, variants = [], list(dict.fromkeys(["swiglu", *options.variants]))
    said = environment(options.device, options.commit)
    for name in options.shapes:
        shape = TINY if name == TINY.name else SHAPES[name]
        measured = bench_shape(shape, variants, options.device, options.rounds, options.round_ms)
        print_rows(measured, COLUMNS)
        rows += [{**row, **said} for row in measured]
        if options.output:  # after every shape, so that a stopped run keeps its results
            options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
