"""The whole layer, compared with another implementation (the peer) on the same tensors, and with the dense bound.

    python -m benchmarks.peer --adapter MODULE:FUNCTION --peer NAME --peer-version VERSION --commit COMMIT --output FILE
    python -m benchmarks.layer --compare FILE

Install the peer, and write its adapter in a file of the current folder:

    def layer(x, router, w_up, w_down, top_k):  # [T, D], [E, D], [E, 2F, D], [E, D, F]
        return ...  # [T, D]; differentiable in the four tensors

The layer has a softmax over the `top_k` largest logits of `x @ router.T` and the activation swiglu: `silu(gate) * up`.
The first F rows of `w_up[e]` compute the gate, the others compute up. An adapter of a peer with another layout returns
gradients in this layout. Transpose and reorder with care: all that the adapter does is timed.

Before timing, the peer's output and gradients are compared with the layer's: the norm of the difference over the norm
of the layer's tensor. The results keep these numbers, and one above 0.25 ends the run. A peer that rounds its logits
chooses other experts near ties, so some numbers may exceed the error of rounding. Times, memory and the dense bound are
measured as in `benchmarks.layer`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from moe_layers import MoEFeedForward

from .common import shapes
from .common.command import Command
from .common.layers import bench_modules, checked_layer
from .common.results_file import Row, Task
from .common.shapes import Shape

Adapter = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]

LARGEST_DIFFERENCE = 0.25
COMPARED = ("out", "x", "router", "w_up", "w_down")


class Peer(nn.Module):
    """Runs the peer with the parameters of a layer."""

    def __init__(self, layer: MoEFeedForward, adapter: Adapter):
        super().__init__()
        self.w_router = layer.router.weight
        self.w_up = layer.experts.w_up
        self.w_down = layer.experts.w_down
        self.top_k = layer.router.top_k
        self.adapter = adapter

    def forward(
        self,
        tokens: Tensor,  # [T, D]
    ) -> Tensor:  # [T, D]
        return self.adapter(tokens, self.w_router, self.w_up, self.w_down, self.top_k)


def differences(
    layer: MoEFeedForward,
    peer: Peer,
    tokens: Tensor,  # [T, D]
) -> dict[str, float]:
    """Return the relative differences of the peer's output and gradients from the layer's, by name as in `COMPARED`."""
    dout = torch.randn_like(tokens)

    def run(module: nn.Module) -> list[Tensor | None]:
        leaf = tokens.detach().requires_grad_()
        out = module(leaf)
        if out.shape != leaf.shape:
            raise SystemExit(f"peer: must return the shape of x, {list(leaf.shape)}, got {list(out.shape)}")
        return [out.detach(), *torch.autograd.grad(out, [leaf, *peer.parameters()], dout, allow_unused=True)]

    ours, theirs = run(layer), run(peer)
    if absent := [name for name, tensor in zip(COMPARED, theirs, strict=True) if tensor is None]:
        raise SystemExit(f"peer: must be differentiable in x, router, w_up and w_down, got no gradient of {absent}")
    found = {
        name: ((b.float() - a.float()).norm() / a.float().norm()).item()
        for name, a, b in zip(COMPARED, ours, theirs, strict=True)
        if a is not None and b is not None
    }
    if not all(difference <= LARGEST_DIFFERENCE for difference in found.values()):
        numbers = ", ".join(f"{name} {difference:.3f}" for name, difference in found.items())
        raise SystemExit(f"peer: must differ from the layer by at most {LARGEST_DIFFERENCE}, got {numbers}")
    return found


def bench_peer(shape: Shape, routing: str, adapter: Adapter, options: argparse.Namespace) -> list[Row]:
    layer, tokens = checked_layer(shape, routing, options)
    peer = Peer(layer, adapter)
    found = differences(layer, peer, tokens)
    rows = bench_modules({"triton": layer, options.peer: peer}, tokens, shape, options)
    return [{**row, "differences": None if row["implementation"] == "triton" else found} for row in rows]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", required=True, metavar="MODULE:FUNCTION")
    parser.add_argument("--peer", required=True, metavar="NAME", help="kept in the results")
    parser.add_argument("--peer-version", required=True, metavar="VERSION", help="of all parts; kept in the results")
    shapes.add_option(parser, "tuned")
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf"], default=["even"])


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    module, _, function = options.adapter.partition(":")
    adapter = getattr(importlib.import_module(module), function, None)
    if not callable(adapter):
        raise SystemExit(f"--adapter: must name a function as module:function, got {options.adapter}")
    chosen = shapes.shapes_named(options.shapes)
    if plain := [shape.name for shape in chosen if shape.activation != "swiglu"]:
        raise SystemExit(f"--shapes: an adapter computes swiglu, got {', '.join(plain[:3])}, {len(plain)} in all")
    for shape in chosen:
        for routing in options.routing:
            yield {"shape": shape.name, "routing": routing}, partial(bench_peer, shape, routing, adapter, options)


COLUMNS = ("shape", "routing", "pass", "implementation", "ms", "share_of_dense_bound", "saved_mib", "peak_mib")
main = Command(
    __doc__,
    add_options,
    tasks,
    COLUMNS,
    constants=lambda options: {"peer": options.peer, "peer_version": options.peer_version},
)


if __name__ == "__main__":
    main()
