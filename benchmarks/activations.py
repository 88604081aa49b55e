"""Speed of every activation and option of the experts besides SwiGLU, as a share of its own dense bound.

    python -m benchmarks.activations --commit $(git rev-parse --short HEAD) --output benchmarks/results/activations.json

The dense bound of a pass is the sum of the cuBLAS medians of its GEMMs with all T * K rows in one matrix. A plain
activation has an up-projection of half the width. `points` is SwiGLU's share of the same shape minus this share, in
percentage points. The tests check the results; this benchmark only checks that they are finite.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from .common import shapes
from .common.baselines import FORWARD_GEMMS, dense_gemms
from .common.command import Command
from .common.layers import VARIANTS, make_layer, make_tokens, passes
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import timed

COLUMNS = ("shape", "pass", "variant", "ms", "dense_bound_ms", "share_of_dense_bound", "points")


def bench_shape(shape: Shape, options: argparse.Namespace) -> list[Row]:
    """Return result rows for one shape, with even routing."""
    variants = list(dict.fromkeys(["swiglu", *options.variants]))
    functions, gated = {}, {}
    for variant in variants:
        layer = make_layer(shape, options.device, options.dtype, **VARIANTS[variant])
        gated[variant] = layer.experts.activation.gated
        run = passes(layer, make_tokens(layer, shape, "even"))
        assert run["forward"]().isfinite().all(), variant
        functions |= {f"{variant}/{name}": run[name] for name in run}
    dense = dense_gemms(shape, options.device, options.dtype)
    functions |= {f"dense/{name}": gemm for name, gemm in dense.items()}
    timings = timed(functions, options)
    rows = []
    for name, gemms in (("forward", FORWARD_GEMMS), ("forward+backward", tuple(dense))):
        # A plain activation halves the up-projection's width, and so the time of these compute-bound GEMMs.
        ms = {gemm: timings[f"dense/{gemm}"].ms for gemm in gemms}
        bounds = {True: sum(ms.values()), False: sum(t / 2 if "up" in gemm else t for gemm, t in ms.items())}
        base = bounds[True] / timings[f"swiglu/{name}"].ms
        for variant in variants:
            timing, bound = timings[f"{variant}/{name}"], bounds[gated[variant]]
            rows.append(
                {
                    "pass": name,
                    "variant": variant,
                    **timing._asdict(),
                    "dense_bound_ms": bound,
                    "share_of_dense_bound": bound / timing.ms,
                    "points": 100 * (base - bound / timing.ms),
                }
            )
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "qwen3-30b-a3b", "gpt-oss-20b")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="beside swiglu")
    parser.set_defaults(round_ms=100.0)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    for shape in shapes.shapes_named(options.shapes):
        yield {"shape": shape.name}, partial(bench_shape, shape, options)


main = Command(__doc__, add_options, tasks, COLUMNS)


if __name__ == "__main__":
    main()
