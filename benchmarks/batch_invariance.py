"""Cost of batch invariance: the layer with `batch_invariant=True` against the same layer without.

    python -m benchmarks.batch_invariance --commit $(git rev-parse --short HEAD) --output benchmarks/results/inv.json

Before timing, the first token's output in every batch is compared bitwise with its output alone. Timings take turns in
rounds. On a GPU, the forward of few tokens is also timed in a CUDA graph, without host time.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor

from moe_layers import MoEFeedForward

from .common.shapes import SHAPES, TINY, Shape
from .common.timing import in_a_graph, time_interleaved
from .layer import environment, make_layer, make_tokens, passes, print_rows

NUM_TOKENS = (1, 16, 128, 1024, 16384)
_IN_A_GRAPH = 1024  # up to this many tokens


def check_invariance(layer: MoEFeedForward, tokens: Tensor) -> None:
    with torch.no_grad():
        alone = layer(tokens[:1])
        if not torch.equal(layer(tokens)[:1], alone):
            raise AssertionError(f"among {len(tokens)} tokens the first one's output is another than alone")


def bench_tokens(shape: Shape, device: str, dtype: torch.dtype, rounds: int, round_ms: float) -> list[dict]:
    """Return result rows for one shape, with its number of tokens."""
    layer = make_layer(shape, device, dtype)
    invariant = copy.deepcopy(layer)
    invariant.batch_invariant = True
    tokens = make_tokens(layer, shape, "random", dtype)
    check_invariance(invariant, tokens)
    runs = {"ordinary": passes(layer, tokens), "batch_invariant": passes(invariant, tokens)}
    if device == "cuda" and shape.num_tokens <= _IN_A_GRAPH:
        for run in runs.values():
            run["forward in a graph"] = in_a_graph(torch.no_grad()(run["forward"]))
    functions = {f"{name}/{which}": call for name, run in runs.items() for which, call in run.items()}
    timings = time_interleaved(functions, device, rounds=rounds, round_ms=round_ms)
    return [
        {
            "shape": shape.name,
            "T": shape.num_tokens,
            "D": shape.d_model,
            "F": shape.d_ff,
            "E": shape.num_experts,
            "K": shape.top_k,
            "pass": which,
            "implementation": name,
            **timings[f"{name}/{which}"]._asdict(),
            "times_the_ordinary": timings[f"{name}/{which}"].ms / timings[f"ordinary/{which}"].ms,
        }
        for which in runs["ordinary"]
        for name in runs
    ]


COLUMNS = ("shape", "T", "pass", "implementation", "ms", "ms_p20", "ms_p80", "times_the_ordinary")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, TINY.name], default=["qwen3-30b-a3b", "olmoe"])
    parser.add_argument("--num-tokens", nargs="+", type=int, default=list(NUM_TOKENS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=200.0, help="least milliseconds per timing and round")
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    rows = []
    for name in options.shapes:
        shape = TINY if name == TINY.name else SHAPES[name]
        for num_tokens in options.num_tokens:
            sized = dataclasses.replace(shape, num_tokens=num_tokens)
            measured = bench_tokens(sized, options.device, dtype, options.rounds, options.round_ms)
            rows += [{**row, **environment(options.device, options.commit)} for row in measured]
            print_rows(measured, COLUMNS)
            if options.output:  # after every size, so that a stopped run keeps its results
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
