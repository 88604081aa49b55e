"""LoRA on the experts of one layer, against full fine-tuning and other ways to compute it.

    python -m benchmarks.lora --commit $(git rev-parse --short HEAD) --output benchmarks/results/lora.json

Every form computes router, experts and combine, forward and backward with a gradient for the tokens:

    lora              adapters inside `fused_experts`, base frozen
    frozen            the frozen layer without adapters
    full              full fine-tuning of the layer
    materialised      base + scale * B @ A as a new weight, which is what PEFT's wrapper of parameters computes, in
                      `fused_experts`; backward makes the gradient of the whole weight
    grouped_mm        the same weight in `torch.nn.functional.grouped_mm`, eager, as transformers computes it
    grouped_mm_split  grouped_mm(x, W) + grouped_mm(grouped_mm(x, A), B), compiled

Forms with adapters are first checked on fewer tokens: the output and the adapters' gradients. The dense bound adds two
times. One is the sum of the medians of the base's GEMMs, forward and for input gradients, with all rows in one matrix.
The other is the time to read and write the adapters' rows once, at the bandwidth of a copy in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_kernels import ExpertAdapters, fused_experts, reference, sort_by_expert
from moe_kernels.testing import assert_accurate
from moe_layers import MoEFeedForward

from .common import shapes
from .common.baselines import choose_experts, dense_gemms, sum_of_experts
from .common.command import Command
from .common.layers import make_layer, make_tokens, measure_memory, passes
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import in_a_graph, timed

FACTORS = ("up_a", "up_b", "down_a", "down_b")
_CHECKED_TOKENS = 512


class Adapted(nn.Module):
    """A layer's experts with adapters, in one of the forms above. The router is frozen in all but `full`."""

    def __init__(self, layer: MoEFeedForward, rank: int, form: str):
        super().__init__()
        self.form, self.scale = form, 2.0
        self.router, self.top_k, self.w_router = layer.router, layer.router.top_k, layer.router.weight
        self.w_up, self.w_down = layer.experts.w_up, layer.experts.w_down
        num_experts, d_up, d_model = self.w_up.shape
        sizes = (rank, d_model), (d_up, rank), (rank, self.w_down.shape[2]), (d_model, rank)
        if form not in ("frozen", "full"):
            generator = torch.Generator(self.w_up.device).manual_seed(1)
            for name, size in zip(FACTORS, sizes, strict=True):
                factor = torch.empty(num_experts, *size, device=self.w_up.device, dtype=self.w_up.dtype)
                self.register_parameter(name, nn.Parameter(factor.normal_(std=0.02, generator=generator)))

    @property
    def factors(self) -> list[Tensor]:
        return [getattr(self, name) for name in FACTORS]

    def forward(self, tokens: Tensor) -> Tensor:  # [T, D]
        if not self.form.startswith("grouped_mm"):
            routed = self.router(tokens)
            return self.experts(tokens, routed.topk_weights, routed.topk_experts)
        weights, experts = choose_experts(tokens, self.w_router, self.top_k)
        return self.experts(tokens, weights, experts.int())

    def experts(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if self.form.startswith("grouped_mm"):
            return self._grouped_mm(tokens, weights, experts)
        permutation = sort_by_expert(experts, len(self.w_up))
        w_up, w_down = self._materialised() if self.form == "materialised" else (self.w_up, self.w_down)
        adapters = ExpertAdapters(*self.factors, self.scale) if self.form == "lora" else None
        return fused_experts(tokens, weights, permutation, w_up, w_down, adapters=adapters)

    def _materialised(self) -> tuple[Tensor, Tensor]:
        up_a, up_b, down_a, down_b = self.factors
        return self.w_up + self.scale * (up_b @ up_a), self.w_down + self.scale * (down_b @ down_a)

    def _grouped_mm(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        split = self.form == "grouped_mm_split"
        w_up, w_down = (self.w_up, self.w_down) if split else self._materialised()
        up_a, up_b, down_a, down_b = self.factors

        def multiply(rows: Tensor, offsets: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
            product = functional.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)
            if not split:
                return product
            low = functional.grouped_mm(rows, a.transpose(1, 2), offs=offsets)
            return product + self.scale * functional.grouped_mm(low, b.transpose(1, 2), offs=offsets)

        def compute(rows: Tensor, offsets: Tensor) -> Tensor:
            gate, up = multiply(rows, offsets, w_up, up_a, up_b).chunk(2, dim=-1)
            return multiply(functional.silu(gate) * up, offsets, w_down, down_a, down_b)

        return sum_of_experts(compute, tokens, weights, experts, len(self.w_up))


FORMS = ("lora", "frozen", "full", "materialised", "grouped_mm", "grouped_mm_split")


def check(module: Adapted, tokens: Tensor) -> None:
    """Check the output and the gradients of tokens and adapters on a few tokens, for one choice of experts.

    `lora` must be within the tests' error budget. The other forms round the sum of weight and adapter, or each product.
    So the norm of each error may be 2 % of the result's norm.
    """
    tokens = tokens[:_CHECKED_TOKENS]
    with torch.no_grad():
        weights, experts = choose_experts(tokens, module.w_router, module.top_k)
    experts = experts.int()
    permutation = reference.sort_by_expert(experts, len(module.w_up))
    dout = torch.randn_like(tokens)

    def run_reference(dtype: torch.dtype) -> list[Tensor]:
        leaf, *factors = (t.detach().to(dtype).requires_grad_() for t in (tokens, *module.factors))
        base = module.w_up.detach().to(dtype), module.w_down.detach().to(dtype)
        adapters = ExpertAdapters(*factors, module.scale)
        out = reference.fused_experts(
            leaf, weights.to(torch.promote_types(dtype, torch.float32)), permutation, *base, adapters=adapters
        )
        return [out, *torch.autograd.grad(out, [leaf, *factors], dout.to(out.dtype))]

    leaf = tokens.detach().requires_grad_()
    out = module.experts(leaf, weights, experts)
    actual = [out, *torch.autograd.grad(out, [leaf, *module.factors], dout)]
    names = ("out", "dtokens", *(f"d{name}" for name in FACTORS))
    for name, a, b, e in zip(names, actual, run_reference(tokens.dtype), run_reference(torch.float64), strict=True):
        if module.form == "lora":
            assert_accurate(a, b, e, name)
        else:
            error = float(((a.double() - e).norm() / e.norm()).detach())
            assert error < 0.02, f"{module.form} {name}: relative error {error}"


def adapter_bytes(shape: Shape, rank: int, itemsize: int) -> int:
    """Return the number of bytes in all rows that the adapters' own products read and write, once per product."""
    wide = 4 * shape.d_model + 2 * 2 * shape.d_ff + 3 * shape.d_ff  # 2 X, 2 G, 2 dH, A, 2 A_w: see fused_op.py
    return itemsize * shape.num_rows * (wide + 12 * rank)


def bench(shape: Shape, rank: int, options: argparse.Namespace) -> list[Row]:
    device, dtype, forms = options.device, options.dtype, options.forms
    functions: dict[str, Callable[[], object]] = {}
    memory = {}
    for form in forms:
        layer = make_layer(shape, device, dtype).requires_grad_(form == "full")
        adapted = Adapted(layer, rank, form)
        tokens = make_tokens(layer, shape, "even")
        if form not in ("frozen", "full"):
            check(adapted, tokens)
        module = torch.compile(adapted, disable=device == "cpu") if form == "grouped_mm_split" else adapted
        functions[form] = passes(module, tokens)["forward+backward"]
        functions[form]()
        torch.cuda.empty_cache()  # does nothing without a GPU
        memory[form] = measure_memory(module, tokens)
        adapted.zero_grad()
    if options.graph:
        functions = {form: in_a_graph(run) for form, run in functions.items()}
    dense = dense_gemms(shape, device, dtype)
    functions |= {f"dense/{name}": dense[name] for name in ("up", "down", "down_dgrad", "up_dgrad")}
    moved = torch.empty(shape.num_rows, shape.d_model, device=device, dtype=dtype)
    target = torch.empty_like(moved)
    functions["copy"] = lambda: target.copy_(moved)
    timings = timed(functions, options)
    traffic_ms = timings["copy"].ms * adapter_bytes(shape, rank, dtype.itemsize) / (2 * moved.nbytes)
    gemms_ms = sum(timing.ms for name, timing in timings.items() if name.startswith("dense/"))
    return [
        {
            "form": form,
            **timings[form]._asdict(),
            "lora_over_form": timings["lora"].ms / timings[form].ms,
            "bound_ms": gemms_ms + traffic_ms,
            "saved_mib": memory[form][0],
            "peak_mib": memory[form][1],
        }
        for form in forms
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b")
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 32768])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16, 64])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--graph", action="store_true", help="time replays of CUDA graphs")


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    for shape in shapes.shapes_named(options.shapes):
        for num_tokens in options.tokens:
            for rank in options.ranks:
                shared = {"shape": shape.name, "num_tokens": num_tokens, "rank": rank, "graph": options.graph}
                yield shared, partial(bench, replace(shape, num_tokens=num_tokens), rank, options)


main = Command(__doc__, add_options, tasks)


if __name__ == "__main__":
    main()
