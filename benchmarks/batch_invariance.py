"""Cost of batch invariance: the layer with `batch_invariant=True` against the same layer without.

    python -m benchmarks.batch_invariance --commit $(git rev-parse --short HEAD) --output benchmarks/results/inv.json

Before timing, the first token's output in every batch is compared bitwise with the output of this token alone. Each
round times every form once. On a GPU, the forward of few tokens is also timed in a CUDA graph, without host time.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Iterator
from functools import partial

import torch

from .common import shapes
from .common.command import Command
from .common.layers import make_layer, make_tokens, passes
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import in_a_graph, timed

NUM_TOKENS = (1, 16, 128, 1024, 16384)
_IN_A_GRAPH = 1024  # largest number of tokens timed in a graph


def bench_tokens(shape: Shape, options: argparse.Namespace) -> list[Row]:
    layer = make_layer(shape, options.device, options.dtype)
    invariant = copy.deepcopy(layer)
    invariant.batch_invariant = True
    tokens = make_tokens(layer, shape, "random")
    with torch.no_grad():
        if not torch.equal(invariant(tokens)[:1], invariant(tokens[:1])):
            raise AssertionError(f"among {len(tokens)} tokens the first one's output is another than alone")
    runs = {"ordinary": passes(layer, tokens), "batch_invariant": passes(invariant, tokens)}
    if options.device == "cuda" and shape.num_tokens <= _IN_A_GRAPH:
        for run in runs.values():
            run["forward in a graph"] = in_a_graph(torch.no_grad()(run["forward"]))
    timings = timed({(name, which): call for name, run in runs.items() for which, call in run.items()}, options)
    return [
        {
            **shape.sizes,
            "pass": which,
            "implementation": name,
            **timings[name, which]._asdict(),
            "times_the_ordinary": timings[name, which].ms / timings["ordinary", which].ms,
        }
        for which in runs["ordinary"]
        for name in runs
    ]


COLUMNS = ("shape", "T", "pass", "implementation", "ms", "ms_p20", "ms_p80", "times_the_ordinary")


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "qwen3-30b-a3b", "olmoe")
    parser.add_argument("--num-tokens", nargs="+", type=int, default=list(NUM_TOKENS))


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    for shape in shapes.shapes_named(options.shapes):
        for num_tokens in options.num_tokens:
            sized = dataclasses.replace(shape, num_tokens=num_tokens)
            yield {"shape": shape.name, "T": num_tokens}, partial(bench_tokens, sized, options)


main = Command(__doc__, add_options, tasks, COLUMNS)


if __name__ == "__main__":
    main()
