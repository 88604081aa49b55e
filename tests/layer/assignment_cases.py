"""Helpers of tests of options and assignments: a layer, and its output computed from the slots by a dense formula.

All values are drawn on the CPU, so every device gets the same ones.
"""

import torch
from torch.nn import functional

from moe_kernels.experts.row_products import Rows

from ..layers import moe_layer

# Experts and top_k: not a power of two, K = 1, K = E, one expert.
SIZES = [(6, 2), (5, 1), (3, 3), (1, 1)]


def make_layer(device, num_experts=6, top_k=2, dtype=torch.float64, d_model=32, **options):
    torch.manual_seed(0)
    layer = moe_layer(d_model, 24, num_experts, top_k, init_std=0.3, dtype=dtype, **options)
    for bias in (layer.experts.b_up, layer.experts.b_down, layer.router.selection_bias):
        if bias is not None:
            torch.nn.init.normal_(bias, std=0.3)
    return layer.to(device)


def make_x(device, shape=(3, 7, 32), dtype=torch.float64, seed=1):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).to(device)


def count_rows(monkeypatch):
    """Return a list that will receive the number of rows of each GEMM of the experts."""
    rows, gemm = [], Rows.gemm

    def count(self, *args, **options):
        rows.append(len(self.row_to_token))
        return gemm(self, *args, **options)

    monkeypatch.setattr(Rows, "gemm", count)
    return rows


def activate(activation, h):
    if activation.name == "gpt_oss":
        gate, up = h.chunk(2)
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    if activation.name == "relu_squared":
        return functional.relu(h) ** 2
    gate, up = h.chunk(2)
    return {"swiglu": functional.silu, "geglu": functional.gelu}[activation.name](gate) * up


def dense(layer, x, routing):
    """Compute the layer from its choice of experts, with loops over tokens and dense linear maps."""
    out = []
    for t, token in enumerate(x.reshape(-1, x.shape[-1])):
        inner = token if layer.w_latent_in is None else layer.w_latent_in @ token
        total = torch.zeros_like(inner)
        for weight, e in zip(routing.topk_weights[t], routing.topk_experts[t].tolist(), strict=True):
            if e >= layer.experts.num_experts:
                total = total + weight * inner
            elif e >= 0:
                experts = layer.experts
                h = experts.w_up[e] @ (weight * inner if experts.weight_on_input else inner)
                h = h if experts.b_up is None else h + experts.b_up[e]
                y = experts.w_down[e] @ activate(experts.activation, h)
                y = y if experts.b_down is None else y + experts.b_down[e]
                total = total + (y if experts.weight_on_input else weight * y)
        total = total if layer.w_latent_out is None else layer.w_latent_out @ total
        if layer.shared_expert is not None:
            shared = layer.shared_expert
            y = shared.w_down @ activate(shared.activation, shared.w_up @ token)
            total = total + (y if shared.w_gate is None else y * torch.sigmoid(shared.w_gate @ token))
        out.append(total)
    return torch.stack(out).view(x.shape)


def check_equals_dense(device, **options):
    """Compare output and all gradients of the layer with the dense formula in float64. Return the exact routing.

    Float64 must agree to its own precision, float32 to the precision that rounded logits allow.
    """

    def run(dtype, implementation, by_formula=False):
        layer = make_layer(device, implementation=implementation, **options).to(dtype)
        # These tokens get fewer experts than top_k, and more, under every router of the tests.
        x = make_x(device, seed=4).to(dtype).requires_grad_()
        y, routing = layer(x, return_routing=True)
        y = dense(layer, x, routing) if by_formula else y
        names, parameters = zip(*layer.named_parameters(), strict=True)
        gradients = torch.autograd.grad(y.square().sum(), [x, *parameters])
        return routing, dict(zip(("y", "x", *names), (y.detach(), *gradients), strict=True))

    routing, exact = run(torch.float64, "reference", by_formula=True)
    for dtype, implementation, tolerance in (
        (torch.float64, "reference", 1e-12),
        (torch.float32, "reference", 1e-5),
        (torch.float32, "triton", 1e-5),
    ):
        other, actual = run(dtype, implementation)
        assert torch.equal(other.topk_experts, routing.topk_experts)
        assert torch.equal(other.tokens_per_expert, routing.tokens_per_expert)
        for name, value in exact.items():
            error, largest = (actual[name] - value).abs().max(), value.abs().max()
            assert largest > 0 and error <= tolerance * largest, (implementation, dtype, name)
    return routing
