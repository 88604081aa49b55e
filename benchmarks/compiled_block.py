"""A transformer block with the layer, compiled by torch.compile(fullgraph=True), against the same block uncompiled.

    python -m benchmarks.compiled_block --commit $(git rev-parse --short HEAD) --output benchmarks/results/block.json

The block is checked before timing. Each round times every pass of both blocks, in another order.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_kernels.testing import assert_accurate
from moe_layers import LayerRouting, MoEConfig, MoEFeedForward

from .common import shapes
from .common.command import Command
from .common.layers import PASSES, passes
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import timed

SEQUENCE_LENGTH = 4096


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)).

    Args:
        moe: further arguments of `MoEFeedForward.from_config`.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        head_dim: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **moe,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.head_dim = head_dim
        self.attention_norm, self.experts_norm = (nn.RMSNorm(config.d_model, eps=1e-6, **factory) for _ in range(2))
        self.w_qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False, **factory)
        self.w_out = nn.Linear(config.d_model, config.d_model, bias=False, **factory)
        self.experts = MoEFeedForward.from_config(config, **moe, **factory)

    def forward(
        self,
        x: Tensor,  # [B, S, D]
    ) -> Tensor:  # [B, S, D]
        x = self._attend(x)
        return x + self.experts(self.experts_norm(x))

    def with_routing(
        self,
        x: Tensor,  # [B, S, D]
        topk_experts: Tensor | None = None,  # [T, K]
    ) -> tuple[Tensor, LayerRouting]:
        x = self._attend(x)
        out, routing = self.experts(self.experts_norm(x), topk_experts=topk_experts, return_routing=True)
        return x + out, routing

    def _attend(self, x: Tensor) -> Tensor:
        qkv = self.w_qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head_dim))  # [B, S, 3, heads, D / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, S, D / heads]
        return x + self.w_out(attended.transpose(1, 2).flatten(2))


def compiled(function, device: str):
    """Compile without graph breaks: with Inductor on a GPU, without code generation on a CPU."""
    return torch.compile(function, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")


@torch.no_grad()
def check_block(block: TransformerBlock, x: Tensor, device: str) -> None:
    """Check the chosen experts' logits, and the output where both blocks route alike, by the tests' error budget."""
    actual, compiled_routing = compiled(block.with_routing, device)(x)
    baseline, routing = block.with_routing(x)
    # float32 without TF32 is exact in comparison with 16-bit results.
    exact_block = copy.deepcopy(block).float()
    _, best = exact_block.with_routing(x.float())
    chosen = [best.logits.gather(1, r.topk_experts.long()).sum(1) for r in (compiled_routing, routing, best)]
    assert_accurate(*chosen, "logits of the chosen experts")
    same = (compiled_routing.topk_experts == routing.topk_experts).all(1).view(x.shape[:-1])
    exact, _ = exact_block.with_routing(x.float(), routing.topk_experts)
    assert_accurate(actual[same], baseline[same], exact[same], "out")


def bench_block(shape: Shape, options: argparse.Namespace) -> list[Row]:
    device, dtype = options.device, options.dtype
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = MoEConfig(shape.d_model, shape.d_ff, shape.num_experts, shape.top_k)
    block = TransformerBlock(config, device=device, dtype=dtype)
    length = min(SEQUENCE_LENGTH, shape.num_tokens // 2)
    x = torch.randn(shape.num_tokens // length, length, shape.d_model, device=device, dtype=dtype)
    check_block(block, x, device)
    runs = {"eager": passes(block, x), "compiled": passes(compiled(block, device), x)}
    timings = timed({(name, which): run[which] for name, run in runs.items() for which in PASSES}, options)
    return [
        {
            "shape": shape.name,
            **shape.sizes,
            "sequence_length": length,
            "pass": which,
            "implementation": name,
            **timings[name, which]._asdict(),
            "times_as_fast_as_eager": timings["eager", which].ms / timings[name, which].ms,
        }
        for which in PASSES
        for name in runs
    ]


COLUMNS = ("shape", "pass", "implementation", "ms", "ms_p20", "ms_p80", "times_as_fast_as_eager")


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "tuned")


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    for shape in shapes.shapes_named(options.shapes):
        yield {"shape": shape.name}, partial(bench_block, shape, options)


main = Command(__doc__, add_options, tasks, COLUMNS)


if __name__ == "__main__":
    main()
