"""Helpers of the assignment tests: a layer, and its output computed from the slots by a dense formula."""

import torch

from moe_kernels.experts.row_products import Rows

from ..layers import moe_layer
from .test_layer_options import dense

# Experts and top_k: not a power of two, K = 1, K = E, one expert.
SIZES = [(6, 2), (5, 1), (3, 3), (1, 1)]


def make_layer(device, num_experts=6, top_k=2, dtype=torch.float64, d_model=32, **options):
    torch.manual_seed(0)
    return moe_layer(d_model, 24, num_experts, top_k, init_std=0.3, device=device, dtype=dtype, **options)


def make_x(device, shape=(3, 7, 32), dtype=torch.float64):
    return torch.randn(shape, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(1))


def count_rows(monkeypatch):
    """Return a list that will receive the number of rows of each GEMM of the experts."""
    rows, gemm = [], Rows.gemm

    def count(self, *args, **options):
        rows.append(len(self.row_to_token))
        return gemm(self, *args, **options)

    monkeypatch.setattr(Rows, "gemm", count)
    return rows


def check_equals_dense(device, **options):
    """Compare output and all gradients of the layer with the dense formula in float64. Return the exact routing."""

    def run(dtype, implementation, by_formula=False):
        layer = make_layer(device, implementation=implementation, **options)
        for parameter in (layer.experts.b_up, layer.experts.b_down):
            if parameter is not None:
                torch.nn.init.normal_(parameter, std=0.3)
        layer = layer.to(dtype)
        x = make_x(device).to(dtype).requires_grad_()
        y, routing = layer(x, return_routing=True)
        y = dense(layer, x, routing) if by_formula else y
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        return routing, [y.detach(), *gradients]

    routing, exact = run(torch.float64, "reference", by_formula=True)
    for dtype, implementation, tolerance in (
        (torch.float64, "reference", 1e-12),
        (torch.float32, "reference", 1e-5),
        (torch.float32, "triton", 1e-5),
    ):
        other, actual = run(dtype, implementation)
        assert torch.equal(other.topk_experts, routing.topk_experts)
        assert torch.equal(other.tokens_per_expert, routing.tokens_per_expert)
        for value, expected in zip(actual, exact, strict=True):
            assert expected.any() and (value - expected).abs().max() <= tolerance * expected.abs().max()
    return routing
