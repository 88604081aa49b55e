"""Speed of experts that stay quantised: training of adapters, decoding and dequantisation.

    python -m benchmarks.quantized --commit $(git rev-parse --short HEAD) --output benchmarks/results/quantized.json

Each shape and format is compared with plain bfloat16 weights in the same run:

    train    forward and backward of the layer with LoRA of rank 16, base frozen, with T 4096 and 16384 tokens
    decode   forward of T 1, 16, 64 and 256 tokens, replayed as a CUDA graph. The bound is the time to read the stored
             bytes of the experts that a token chose, at the speed of a large copy
    dequantize   one layer's w_up to bfloat16, in GB/s of bytes read and written, and as a share of a copy's speed

The output of each form is first checked on a few tokens against the float64 reference of its dequantised weights.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from moe_kernels.testing import assert_accurate
from moe_layers import LoRA, MoEFeedForward
from moe_layers.experts.quantization import dequantize_experts_, quantize_experts_
from moe_layers.experts.stored import QuantizedExperts

from .common import shapes
from .common.command import Command
from .common.layers import make_layer, make_tokens, measure_memory, passes
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import copy_bytes_per_ms, in_a_graph, timed, timed_against_copy

PLAIN = "plain"
FORMS = (PLAIN, "fp8", "mxfp4", "nf4", "int8")
_CHECKED_TOKENS = 64


def make_form(shape: Shape, form: str, options: argparse.Namespace) -> MoEFeedForward:
    layer = make_layer(shape, options.device, options.dtype).requires_grad_(False)
    if form != PLAIN:
        quantize_experts_(layer, form)
    return layer


def checked_form(shape: Shape, form: str, options: argparse.Namespace) -> tuple[MoEFeedForward, torch.Tensor]:
    """Return a checked layer, and its tokens [T, D]."""
    layer = make_form(shape, form, options)
    tokens = make_tokens(layer, shape, "even")
    check(layer, tokens)
    return layer, tokens


@torch.no_grad()
def check(layer: MoEFeedForward, tokens: torch.Tensor) -> None:
    """Compare outputs with those of the dequantised layer in float64, within the error budget of the tests."""
    tokens = tokens[:_CHECKED_TOKENS]
    routing = layer.router(tokens)
    plain = copy.deepcopy(layer)
    if isinstance(layer.experts.w_up, QuantizedExperts):
        dequantize_experts_(plain)
    plain.experts.implementation = plain.router.implementation = "reference"
    experts = routing.topk_experts
    baseline = plain(tokens, topk_experts=experts)
    exact = plain.double()(tokens.double(), topk_experts=experts)
    assert_accurate(layer(tokens, topk_experts=experts), baseline, exact, "output")


def stored_bytes(layer: MoEFeedForward, num_experts: int) -> int:
    """Return the number of bytes in the stored weights of this many experts."""
    weights = (layer.experts.w_up, layer.experts.w_down)
    tensors = [t for w in weights for t in (w.parameters() if isinstance(w, QuantizedExperts) else [w])]
    return sum(t.nbytes for t in tensors) * num_experts // layer.num_experts


def bench_training(shape: Shape, options: argparse.Namespace) -> list[Row]:
    runs, memory = {}, {}
    for form in options.forms:
        layer, tokens = checked_form(shape, form, options)
        layer.add_lora(LoRA(16, 32))
        runs[form] = passes(layer, tokens)["forward+backward"]
        runs[form]()
        memory[form] = measure_memory(layer, tokens)
    rows = compared_with_plain(runs, options)
    return [row | dict(zip(("saved_mib", "peak_mib"), memory[row["form"]], strict=True)) for row in rows]


def compared_with_plain(runs: dict[str, Callable[[], object]], options: argparse.Namespace) -> list[Row]:
    timings = timed(runs, options)
    plain_ms = timings[PLAIN].ms if PLAIN in timings else None
    return [
        {"form": form, **timing._asdict(), "over_plain": plain_ms and timing.ms / plain_ms}
        for form, timing in timings.items()
    ]


@torch.no_grad()
def bench_decoding(shape: Shape, options: argparse.Namespace) -> list[Row]:
    runs, read = {}, {}
    for form in options.forms:
        layer, tokens = checked_form(shape, form, options)
        read[form] = stored_bytes(layer, layer.router(tokens).topk_experts.unique().numel())
        run = partial(layer, tokens)
        runs[form] = in_a_graph(run) if options.device == "cuda" else run
    rows, speed = compared_with_plain(runs, options), copy_bytes_per_ms(options.device)
    for row in rows:
        num_bytes = read[row["form"]]
        row |= {"read_mb": num_bytes / 1e6, "share_of_bound": num_bytes / speed / row["ms"]}
    return rows


@torch.no_grad()
def bench_dequantization(shape: Shape, options: argparse.Namespace) -> list[Row]:
    runs = {}
    for form in (form for form in options.forms if form != PLAIN):
        weight = make_form(shape, form, options).experts.w_up
        assert isinstance(weight, QuantizedExperts)
        runs[form] = weight.dequantize, weight.weight().num_bytes + weight.dequantize().nbytes
    found = timed_against_copy(runs, options) if runs else {}
    return [{"form": form, **values} for form, values in found.items()]


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3-ep8")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--train-tokens", nargs="*", type=int, default=[4096, 16384])
    parser.add_argument("--decode-tokens", nargs="*", type=int, default=[1, 16, 64, 256])


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    cases = [("train", bench_training, tokens) for tokens in options.train_tokens]
    cases += [("decode", bench_decoding, tokens) for tokens in options.decode_tokens]
    cases.append(("dequantize", bench_dequantization, 1))
    for shape in shapes.shapes_named(options.shapes):
        for case, bench, num_tokens in cases:
            shared = {"shape": shape.name, "num_tokens": num_tokens, "case": case}
            yield shared, partial(bench, replace(shape, num_tokens=num_tokens), options)


main = Command(__doc__, add_options, tasks)


if __name__ == "__main__":
    main()
